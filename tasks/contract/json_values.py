"""Check JSON values in untrusted input, and encode cellama's own output as JSON.

The depth and the size of input are checked before any code recurses into the input. Output is always valid UTF-8, and
parts of it may be encoded beforehand.
"""

from __future__ import annotations

import json
import math
import reprlib
import uuid
from typing import Any

from cellama.config import limits

_SEPARATORS = (",", ":")
_plain = json.JSONEncoder(ensure_ascii=False, separators=_SEPARATORS)
_SHOWN_CHARS = 80
_MAX_DIGITS = 300  # digits of a whole number: about as many as a double can have; Python can't print thousands


class _Short(reprlib.Repr):
    """Builds a truncated `repr` of any value without traversing the whole value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, _SHOWN_CHARS, _SHOWN_CHARS, _SHOWN_CHARS

    def repr_int(self, x: int, level: int) -> str:
        return f"<whole number of {x.bit_length()} bits>" if x.bit_length() > 4 * _MAX_DIGITS else repr(x)


_short = _Short()


def shorten(value: object) -> str:
    """Return a short `repr` of a value for an error message."""
    text = _short.repr(value)
    text = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
    return text.encode(errors="backslashreplace").decode()


def valid_text(text: str) -> str:
    """Replace each lone surrogate with U+FFFD.

    A lone surrogate can't be encoded in UTF-8, but JSON allows lone surrogates, and models generate them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def check_text(text: str) -> str:
    """Return the text unchanged if it can be stored and sent. Otherwise, raise ValueError."""
    if "\0" in text:
        raise ValueError("the text contains a NUL character; remove the character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise ValueError(
            f"the text is not valid UTF-8 at character {at} ({text[at]!r}); decode the text with the right encoding"
        ) from None
    return text


def check_escapes(text: str) -> str:
    """Return a JSON text unchanged if its escapes are valid.

    Malformed JSON is also returned, and is rejected elsewhere.
    """
    if "\\u" in text:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        check_json(value)
    return text


def json_text(value: Any, max_chars: int) -> str:
    """Return a value as JSON. Raises ValueError if JSON can't represent it, or if it exceeds the limits."""
    check_json(value)
    text = json.dumps(value, allow_nan=False)
    if len(text) > max_chars:
        raise ValueError(f"the JSON has {len(text)} characters, and the limit is {max_chars}; shorten it")
    return text


def check_json(value: Any, around: int = 0) -> None:
    """Raise ValueError if JSON can't represent a value, or if it is nested too deeply. This function does not recurse.

    `around` is the number of outer levels that don't count towards the limit.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > limits.MAX_JSON_DEPTH + around:
            raise ValueError(f"the value is nested more than {limits.MAX_JSON_DEPTH} levels deep; reduce the nesting")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                for name in each:
                    _check_name(name)
                inner += each.values()
            elif isinstance(each, list | tuple):
                inner += each
            else:
                _check_scalar(each)
        level = inner


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"{shorten(name)} is not a valid name; names in JSON are strings")
    check_text(name)


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"JSON can't represent {value}; use a finite number")
    elif isinstance(value, int) and value.bit_length() > 4 * _MAX_DIGITS:
        raise ValueError(f"{shorten(value)} is too large for a number in JSON; send it as a string")
    elif not isinstance(value, int | float | None):
        raise ValueError(f"{shorten(value)} has a type that JSON can't represent")


class Encoded:
    """A value that is already encoded as JSON.

    Large values are encoded in pieces, because a single `json` call blocks all threads.
    """

    __slots__ = ("json",)

    def __init__(self, value: bytes) -> None:
        self.json = value

    def __json__(self) -> Any:
        """Return the decoded value. Kombu calls this when Celery passes a result to the next task in a chain."""
        return json.loads(self.json)

    def __repr__(self) -> str:
        return f"<{len(self.json)} bytes of JSON>"


def encode(value: Any) -> bytes:
    """Return a value as JSON. A lone surrogate becomes a question mark.

    Raises TypeError, ValueError or RecursionError if JSON can't represent the value.
    """
    try:
        return _plain.encode(value).encode("utf-8", "replace")
    except TypeError:  # there are encoded parts, or the value is not valid
        return _with_parts(value)


def _with_parts(value: Any) -> bytes:
    parts: list[Encoded] = []
    mark = uuid.uuid4().hex

    def take(part: Any) -> str:
        if not isinstance(part, Encoded):
            raise TypeError(f"JSON can't represent the type {type(part).__name__}")
        parts.append(part)
        return mark

    text = json.dumps(value, ensure_ascii=False, separators=_SEPARATORS, default=take).encode("utf-8", "replace")
    between = text.split(f'"{mark}"'.encode())
    pieces = [piece for before, part in zip(between, parts, strict=False) for piece in (before, part.json)]
    return b"".join([*pieces, between[-1]])
