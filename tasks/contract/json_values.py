"""Values from other people's JSON: bounded in depth and size before anything recurses into them."""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

from cellama.config import limits

_SHOWN_CHARS = 80
_MAX_DIGITS = 300  # of a whole number: what a double can hold; Python refuses to print some thousands


class _Short(reprlib.Repr):
    """Shows the beginning of anything, without walking through all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, _SHOWN_CHARS, _SHOWN_CHARS, _SHOWN_CHARS

    def repr_int(self, x: int, level: int) -> str:
        return f"<whole number of {x.bit_length()} bits>" if x.bit_length() > 4 * _MAX_DIGITS else repr(x)


_short = _Short()


def shorten(value: object) -> str:
    """A value for an error message: short, whatever it is, and always valid text."""
    text = _short.repr(value)
    text = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
    return text.encode(errors="backslashreplace").decode()


def valid_text(text: str) -> str:
    """Return the text with U+FFFD for each lone half of a surrogate pair.

    Such a half has no UTF-8, but JSON allows it, and models write it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def check_text(text: str) -> str:
    """The text, if it may be stored and sent everywhere. Raises ValueError."""
    if "\0" in text:
        raise ValueError("it holds a NUL character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise ValueError(f"it is not valid UTF-8 at character {at} ({text[at]!r}); decode it properly") from None
    return text


def check_escapes(text: str) -> str:
    """JSON as text, if its escapes stand for text that may be sent everywhere. Whether it is JSON, others check."""
    if "\\u" in text:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        check_json(value)
    return text


def json_text(value: Any, max_chars: int) -> str:
    """The value as JSON. Raises ValueError for what JSON can't hold, and for what is beyond the limits."""
    check_json(value)
    text = json.dumps(value, allow_nan=False)
    if len(text) > max_chars:
        raise ValueError(f"as JSON it has {len(text)} characters, and the limit is {max_chars}; make it shorter")
    return text


def check_json(value: Any, around: int = 0) -> None:
    """Raises ValueError for what JSON can't hold, and for what is nested too deeply, but for so many levels around it.
    Does not recurse."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > limits.MAX_JSON_DEPTH + around:
            raise ValueError(f"it is nested more than {limits.MAX_JSON_DEPTH} levels deep; make it flatter")
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
        raise ValueError(f"{shorten(name)} is no name in JSON; names are text")
    check_text(name)


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"JSON has no {value}; give a number")
    elif isinstance(value, int) and value.bit_length() > 4 * _MAX_DIGITS:
        raise ValueError(f"{shorten(value)} is too large for a number in JSON; send it as text")
    elif not isinstance(value, int | float | None):
        raise ValueError(f"{shorten(value)} is of no type that JSON has")
