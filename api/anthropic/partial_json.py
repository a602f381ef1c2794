"""The beginning of a JSON object → the object as far as it is known. Pure."""

from __future__ import annotations

import json

_CLOSING = {"{": "}", "[": "]"}
_MOST = 8  # places to try: the last ones may be behind a name without a value


def completed(text: str) -> str:
    """The text with what is open closed, after the last member that is known: `{"a": [1, {"b": "c` is `{"a": [1, {}]}`.

    A text value is only known once it ends. Returns `{}` if nothing is known.
    """
    places: list[tuple[int, str]] = []  # after which it may be closed, and how
    open_, in_text, at = "", False, 0
    while at < len(text):
        char = text[at]
        if in_text:
            at += char == "\\"
            in_text = char != '"'
        elif char == '"':
            in_text = True
        elif char in _CLOSING:
            open_ += _CLOSING[char]
        elif open_ and char == open_[-1]:
            open_ = open_[:-1]
        at += 1
        if not in_text and (char in '{["]}' or text[at : at + 1] in (",", "]", "}")):
            places.append((at, open_[::-1]))
    tried = (text[:at] + closing for at, closing in reversed(places[-_MOST:]))
    return next((closed for closed in tried if _is_object(closed)), "{}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
