"""Test the pages of input items."""

from __future__ import annotations

import pytest

from cellama.api.http.errors import ApiError
from cellama.api.http.responses.endpoints import page_of

ITEMS = [{"id": f"i{number}"} for number in range(5)]


def ids(**query: str) -> list[str]:
    return [item["id"] for item in page_of(ITEMS, query)["data"]]


def test_newest_items_come_first_by_default() -> None:
    assert ids() == ["i4", "i3", "i2", "i1", "i0"]
    assert ids(order="asc", limit="2") == ["i0", "i1"]
    assert ids(order="asc", after="i2") == ["i3", "i4"]
    assert ids(after="i2", limit="1") == ["i1"]


def test_page_reports_whether_more_items_follow() -> None:
    page = page_of(ITEMS, {"order": "asc", "limit": "2"})
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("i0", "i1", True)
    last = page_of(ITEMS, {"order": "asc", "after": "i4"})
    assert (last["data"], last["first_id"], last["has_more"]) == ([], None, False)


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "101"}, {"limit": "²"}, {"order": "up"}, {"after": "x"}])
def test_invalid_page_queries_are_rejected(query: dict[str, str]) -> None:
    with pytest.raises(ApiError) as raised:
        page_of(ITEMS, query)
    assert raised.value.status == 400
