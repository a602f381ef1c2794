"""When files expire, as a request says it."""

from __future__ import annotations

from typing import Any

from cellama.api.http.errors import ApiError
from cellama.tasks.contract.json_values import shorten

DEFAULT_LIFE_S = 30 * 86_400
MIN_LIFE_S = 3600
MAX_LIFE_S = 30 * 86_400


def life_of(anchor: Any, seconds: Any, param: str, anchors: tuple[str, ...] = ("created_at",)) -> int:
    """Seconds. Raises ApiError."""
    if anchor not in anchors:
        raise ApiError(400, f"{param}.anchor is {shorten(anchor)}; it must be {' or '.join(anchors)}", param=param)
    if type(seconds) is not int or not MIN_LIFE_S <= seconds <= MAX_LIFE_S:
        raise ApiError(
            400,
            f"{param}.seconds is {shorten(seconds)}; it must be a number from {MIN_LIFE_S} to {MAX_LIFE_S}",
            param=param,
        )
    return seconds


def life_of_object(value: Any, param: str) -> int:
    """Of `{"anchor": "created_at", "seconds": 3600}`, or of nothing. Raises ApiError."""
    if value is None:
        return DEFAULT_LIFE_S
    if not isinstance(value, dict) or value.keys() - {"anchor", "seconds"}:
        raise ApiError(400, f"{param} is {shorten(value)}; it has anchor and seconds", param=param)
    return life_of(value.get("anchor"), value.get("seconds"), param)
