"""Test the validation of webhook endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cellama.api.webhooks.endpoints import Endpoint, new_id, new_secret


def endpoint(**fields: Any) -> Endpoint:
    return Endpoint.model_validate({"id": new_id(), "url": "https://example.org/h", "secret": new_secret(), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "ftp://example.org"},
        {"url": "https://"},
        {"url": "https://me:pw@example.org"},
        {"url": "https://example.org/\r\nx: y"},
        {"url": "https://exämple.org"},
        {"url": "https://example.org:99999"},
        {"url": "https://example.org/" + "x" * 2000},
        {"events": ["batch.begun"]},
        {"secret": "whsec_"},
    ],
)
def test_invalid_endpoint_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        endpoint(**fields)


def test_endpoint_subscribes_only_to_events_of_its_tenant() -> None:
    one = endpoint(tenant="acme", events=["batch.completed"])
    assert one.subscribes_to("batch.completed", "acme")
    assert not one.subscribes_to("batch.completed", "other")
    assert not one.subscribes_to("batch.failed", "acme")
    assert not one.model_copy(update={"state": "off"}).subscribes_to("batch.completed", "acme")
    assert endpoint().subscribes_to("response.failed", "")


def test_repr_of_endpoint_hides_its_secret() -> None:
    one = endpoint()
    assert one.secret not in repr(one)
