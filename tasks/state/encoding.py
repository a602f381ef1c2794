"""JSON of events and results, as bytes: always valid UTF-8, and what is JSON already is put in as it is."""

from __future__ import annotations

import json
import uuid
from typing import Any

_SEPARATORS = (",", ":")
_plain = json.JSONEncoder(ensure_ascii=False, separators=_SEPARATORS)


class Encoded:
    """A value that stands here as JSON. Large ones are made in pieces: one call of `json` keeps all threads waiting."""

    __slots__ = ("json",)

    def __init__(self, value: bytes) -> None:
        self.json = value

    def __json__(self) -> Any:
        """What kombu asks for, when Celery passes a result on to the next task of a chain."""
        return json.loads(self.json)

    def __repr__(self) -> str:
        return f"<{len(self.json)} bytes of JSON>"


def encode(value: Any) -> bytes:
    """The value as JSON. Raises TypeError, ValueError, RecursionError for what JSON can't hold.

    Half of a surrogate pair has no UTF-8; it becomes a question mark.
    """
    try:
        return _plain.encode(value).encode("utf-8", "replace")
    except TypeError:  # there are encoded parts, or it is no JSON at all
        return _with_parts(value)


def _with_parts(value: Any) -> bytes:
    parts: list[Encoded] = []
    mark = uuid.uuid4().hex

    def take(part: Any) -> str:
        if not isinstance(part, Encoded):
            raise TypeError(f"{type(part).__name__} is no type of JSON")
        parts.append(part)
        return mark

    text = json.dumps(value, ensure_ascii=False, separators=_SEPARATORS, default=take).encode("utf-8", "replace")
    between = text.split(f'"{mark}"'.encode())
    pieces = [piece for before, part in zip(between, parts, strict=False) for piece in (before, part.json)]
    return b"".join([*pieces, between[-1]])
