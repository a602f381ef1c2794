"""A page of the items that a record has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cellama.api.http.asking import PageAsked
from cellama.api.http.errors import ApiError

MOST, USUAL = 100, 20


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """As `PageAsked` says. Raises ApiError (400)."""
    asked = PageAsked.of(query, USUAL, MOST)
    listed = list(items) if asked.order == "asc" else list(items)[::-1]
    if (after := asked.after) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after is {after[:64]!r}, and no item has this id", param="after")
        listed = listed[places[0] + 1 :]
    return asked.shown(listed)
