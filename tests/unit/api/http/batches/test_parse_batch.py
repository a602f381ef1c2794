"""Test the parsing of requests that create batches."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.api.http.batches.service import parse_batch
from cellama.api.http.errors import ApiError

BODY: dict[str, Any] = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}


def test_parse_batch_returns_all_fields_of_the_body() -> None:
    after = {"anchor": "created_at", "seconds": 3600}
    order = parse_batch({**BODY, "metadata": {"a": "b"}, "output_expires_after": after})
    assert (order.window_s, order.metadata, order.output_life_s) == (86_400, {"a": "b"}, 3600)
    assert parse_batch({**BODY, "completion_window": "90m"}).window_s == 5400


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"input_file_id": 3}, "input_file_id"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"endpoint": ["/v1/embeddings"]}, "endpoint"),
        ({"completion_window": None}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
        ({"webhook": 1}, "webhook"),
    ],
)
def test_parse_batch_error_names_the_invalid_field(changed: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_batch({**BODY, **changed})
    assert (raised.value.status, raised.value.param) == (400, param)
