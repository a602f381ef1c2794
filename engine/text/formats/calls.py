"""Define the tool calls that are parsed from replies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A function call by the model.

    `arguments` is a JSON object as text, or the start of this text if the call is partial.
    """

    name: str
    arguments: str
    is_partial: bool = False  # generation stopped within the arguments


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The next piece of a call that the model is writing.

    The first piece of a call contains the name. Joined together, the `arguments` of all pieces are the arguments of the
    finished call.
    """

    number: int  # of the call in the reply, from 0
    name: str = ""
    arguments: str = ""


class NoCalls(ValueError):
    """Raised if the text does not contain a well-formed tool call."""


def call_of(name: Any, arguments: Any) -> ParsedToolCall:
    """Return a call with this name and these arguments.

    Raises NoCalls if `name` is not a string or `arguments` is not a JSON object.
    """
    if isinstance(arguments, str):  # some models write the object as a string
        arguments, _ = value_at(arguments, 0)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise NoCalls
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN, or 1e999
        raise NoCalls from None
    return ParsedToolCall(encodable(name), encodable(written))


def encodable(text: str) -> str:
    """Replace unpaired surrogates with U+FFFD. A model may write `\\ud83d` alone, which UTF-8 can't encode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def value_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at this position, or after whitespace, and its end position.

    Raises NoCalls if the text at this position is not valid JSON.
    """
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        return _DECODER.raw_decode(text, at)
    except ValueError:
        raise NoCalls from None
