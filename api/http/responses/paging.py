"""A page of a list, as OpenAI's clients ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cellama.api.http.errors import ApiError

MOST, USUAL = 100, 20


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The last items first, unless `order` is "asc"; those after the one with the id `after`. Raises ApiError (400)."""
    order, limit = query.get("order", "desc"), query.get("limit", str(USUAL))
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order[:40]!r}; it must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MOST):
        raise ApiError(400, f"limit is {limit[:40]!r}; it must be a number from 1 to {MOST}", param="limit")
    listed = list(items) if order == "asc" else list(items)[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after is {after[:64]!r}, and no item has this id", param="after")
        listed = listed[places[0] + 1 :]
    data = listed[: int(limit)]
    ids = [item["id"] for item in data] or [None]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": len(listed) > len(data),
    }
