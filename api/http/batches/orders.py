"""A body that asks for a batch → what it asks for. Raises ApiError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cellama.api.http.errors import ApiError
from cellama.api.http.files.expiry import life_of_object
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.valid_text import valid_text

from .input_check import ENDPOINTS

MAX_PAIRS = 16  # of metadata
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 512
MIN_WINDOW_S = 60
MAX_WINDOW_S = 30 * 86_400
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_KNOWN = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What is asked for."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None
    output_life_s: int


def order_of(body: Mapping[str, Any]) -> BatchOrder:
    """Raises ApiError."""
    for name in body:
        if name not in _KNOWN:
            raise ApiError(400, f"unknown parameter {shorten(name)}; known: {', '.join(_KNOWN)}", param=name)
    file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
    if not isinstance(file_id, str) or not file_id:
        raise ApiError(400, f"input_file_id is {shorten(file_id)}; it must be the id of a file", param="input_file_id")
    if endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise ApiError(400, f"endpoint is {shorten(endpoint)}; it must be one of {known}", param="endpoint")
    window = body.get("completion_window")
    metadata = _metadata(body.get("metadata"))
    life_s = life_of_object(body.get("output_expires_after"), "output_expires_after")
    return BatchOrder(file_id, str(endpoint), str(window), _window_s(window), metadata, life_s)


def _window_s(window: Any) -> int:
    found = re.fullmatch(r"([0-9]{1,5})([mhd])", window) if isinstance(window, str) else None
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        told = f"completion_window is {shorten(window)}; it must be like '24h', from '1m' to '30d'"
        raise ApiError(400, told, param="completion_window")
    return seconds


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_PAIRS:
        raise ApiError(400, f"metadata must be an object of at most {MAX_PAIRS} members", param="metadata")
    for name, text in value.items():
        if not _is_text(name, MAX_NAME_CHARS) or not _is_text(text, MAX_VALUE_CHARS):
            told = f"metadata.{name[:MAX_NAME_CHARS]} is wrong: names have at most {MAX_NAME_CHARS} characters, values "
            raise ApiError(400, f"{told}are texts of at most {MAX_VALUE_CHARS}, in valid Unicode", param="metadata")
    return dict(value)


def _is_text(value: Any, most_chars: int) -> bool:
    """False also for half a surrogate pair, which JSON can have and no answer can."""
    return isinstance(value, str) and len(value) <= most_chars and valid_text(value) == value
