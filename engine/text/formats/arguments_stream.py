"""Read the arguments of one tool call while the model writes them, and rewrite them as JSON.

Only text that further output can't change is returned. Joined together, the pieces equal the output of `json.dumps` for
the arguments, except that duplicate keys are kept.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cellama.engine.text.detokenizer import partial_marker_length

from .argument_values import CDATA, ArgumentValues
from .call_format import ArgumentTags
from .calls import encodable
from .literals import KEY

_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a surrogate pair
_COMPLETE = re.compile(
    rf'(?:[^"\\]+|{_HALF}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\[^u])*'
)
_FIRST_HALF = re.compile(_HALF)
_MAY_BE_SECOND_HALF = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z")
_TOKEN = re.compile(r'\s+|[{}\[\],:"]|[^\s{}\[\],:"]+')
_SEPARATORS = {",": ", ", ":": ": "}


def written(text: str) -> str:
    """Return the text escaped for use within a JSON string, without quotes."""
    return encodable(json.dumps(text, ensure_ascii=False)[1:-1])


class ArgumentsReader(ABC):
    """Reads the arguments of one tool call."""

    is_complete = False  # whether the arguments have ended
    is_closed = False  # whether the markup of the call that belongs to the arguments has also ended

    @abstractmethod
    def read(self, text: str) -> tuple[str, int]:
        """Return the JSON that can no longer change, and the number of characters read.

        Pass the unread characters again in the next call.
        """

    @abstractmethod
    def cut(self, text: str) -> str:
        """Return the JSON for the remaining text after generation has stopped early."""


class JsonRewriter:
    """Rewrites JSON piece by piece. `out` contains the new pieces, and `depth` is the number of open brackets."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.depth = 0
        self.in_string = False

    def write(self, text: str, at: int = 0, floor: int = 0) -> int:
        """Rewrite the text from position `at` until a bracket closes at depth `floor`, and return the end position.

        A number, a word or an escape at the end of the text may be incomplete, so it is not rewritten yet.
        """
        while at < len(text):
            before = at
            if self.in_string:
                at = self._rewrite_string(text, at)
            else:
                token = _TOKEN.match(text, at)
                assert token is not None
                word = token.group()
                if token.end() == len(text) and not word.isspace() and word not in '{}[],:"':
                    break
                at = token.end()
                self._rewrite_token(word)
                if word in "}]" and self.depth == floor:
                    break
            if at == before:
                break
        return at

    def take(self) -> str:
        """Return the new pieces as one string, and clear the list."""
        text = "".join(self.out)
        self.out.clear()
        return text

    def _rewrite_token(self, word: str) -> None:
        if word.isspace():
            return
        if word == '"':
            self.in_string = True
        elif word in "{[":
            self.depth += 1
        elif word in "}]":
            self.depth -= 1
        elif word not in _SEPARATORS:
            word = _number_or_word(word)
        self.out.append(_SEPARATORS.get(word, word))

    def _rewrite_string(self, text: str, at: int) -> int:
        complete = _COMPLETE.match(text, at)
        assert complete is not None
        end = complete.end()
        self.out.append(_rewritten(text[at:end]))
        if text.startswith('"', end):
            self.in_string = False
            self.out.append('"')
            return end + 1
        half = _FIRST_HALF.match(text, end)
        if half is not None and _MAY_BE_SECOND_HALF.match(text, half.end()) is None:
            self.out.append("\ufffd")
            return half.end()
        return end


def _number_or_word(word: str) -> str:
    """Return a number or a word as `json.dumps` writes it. A value that JSON can't express is returned unchanged."""
    try:
        return json.dumps(json.loads(word), allow_nan=False)
    except ValueError:
        return word


def _rewritten(escaped: str) -> str:
    """Return a JSON string's content as `json.dumps` would write it."""
    if "\\" not in escaped:
        return written(escaped)
    try:
        return written(json.loads(f'"{escaped}"', strict=False))
    except ValueError:  # an escape that JSON does not have
        return written(escaped)


class JsonArguments(ArgumentsReader):
    """Reads arguments that are a JSON object, either alone or as a member of an outer object."""

    def __init__(self, head: str = "") -> None:
        """Create a reader that starts after `head`, which is the start of the outer object."""
        self._writer = JsonRewriter()
        self._writer.write(head)
        self._writer.take()
        self._floor = self._writer.depth

    def read(self, text: str) -> tuple[str, int]:
        """Return the JSON that can no longer change, and the number of characters read (see ArgumentsReader.read)."""
        at, new = 0, ""
        if not self.is_complete:
            at = self._writer.write(text, 0, self._floor)
            new = self._writer.take()
            self.is_complete = new.endswith(("}", "]")) and self._writer.depth == self._floor
        if self.is_complete and self._writer.depth:
            at = self._writer.write(text, at)
            self._writer.take()
        self.is_closed = self.is_complete and self._writer.depth == 0
        return new, at

    def cut(self, text: str) -> str:
        """Return the number or word at the end of the text, which may be incomplete."""
        return "" if self._writer.in_string else text.strip()


@dataclass(slots=True)
class _Value:
    """The argument currently being read."""

    key: str
    close: str
    is_json: bool | None  # whether the markup says that it is JSON; None if it does not show that
    is_text: bool  # whether the value is text, whatever it looks like
    is_open: bool = False  # whether its opening quote was written


class TaggedArguments(ArgumentsReader):
    """Reads arguments in tags.

    A string's text is returned while the model is writing it. Any other value is returned once it is complete, because
    the schema may allow several types.
    """

    def __init__(
        self,
        tags: ArgumentTags,
        parameters: Mapping[str, Any],
        argument: re.Pattern[str],
        separator: re.Pattern[str],
        closing: re.Pattern[str],
    ) -> None:
        """Create a reader.

        `argument` matches the text before a name, `separator` the text between a name and a value, and `closing` the
        text after the last argument.

        `closing` must not match at the end of the text.
        """
        self._tags = tags
        self._values = ArgumentValues(parameters)
        self._argument, self._separator, self._closing = argument, separator, closing
        self._value: _Value | None = None
        self._num_started = 0
        self._out: list[str] = []

    def read(self, text: str) -> tuple[str, int]:
        """Return the JSON that can no longer change, and the number of characters read (see ArgumentsReader.read)."""
        self._out.clear()
        at = 0
        while not self.is_complete:
            end = self._read_next(text, at)
            if end is None:
                break
            at = end
        return "".join(self._out), at

    def cut(self, text: str) -> str:
        """Return the start of an incomplete value that is not streamed.

        The start is returned as a string unless the schema excludes strings.
        """
        value = self._value
        if value is None or value.is_open:
            return ""
        start = self._tags.trimmed(text[: len(text) - partial_marker_length(text, (value.close,))])
        types = self._values.types_of(value.key) or {"string"}
        is_text = value.is_json is False or (value.is_json is None and "string" in types)
        return '"' + written(start) if is_text else encodable(start)

    def _read_next(self, text: str, at: int) -> int | None:
        """Read the next part, and return its end position, or None if the part is incomplete."""
        if self._value is None:
            return self._read_name(text, at)
        return self._read_text(self._value, text, at) if self._value.is_text else self._read_value(text, at)

    def _read_name(self, text: str, at: int) -> int | None:
        opened = self._argument.match(text, at)
        if opened is None:
            if self._closing.match(text, at) is None:
                return None
            self._out.append("}" if self._num_started else "{}")
            self.is_complete = self.is_closed = True
            return at
        separator = self._separator.search(text, opened.end())
        if separator is None:
            return None
        key = text[opened.end() : separator.start()].strip()
        is_json = None if self._tags.sep == self._tags.sep_of_json else separator.group(1) is None
        is_text = is_json is False or (is_json is None and self._values.types_of(key) == {"string"})
        self._value = _Value(key, self._tags.close.replace(KEY, key).strip(), is_json, is_text)
        self._out.append(f'{", " if self._num_started else "{"}"{written(key)}": ')
        self._num_started += 1
        return separator.end()

    def _read_text(self, value: _Value, text: str, at: int) -> int | None:
        if not value.is_open:
            start = at + (self._tags.sep.endswith("\n") and text.startswith("\n", at))
            first = text[start : start + len(CDATA)]
            if first == CDATA:  # the value is what the brackets contain
                value.is_text = False
                return at
            if CDATA.startswith(first):
                return None
            value.is_open = True
            self._out.append('"')
            return start
        line_end = "\n" if self._tags.close.startswith("\n") else ""
        end = text.find(value.close, at)
        if end >= 0:
            self._out.append(written(text[at:end].removesuffix(line_end)) + '"')
            self._value = None
            return end + len(value.close)
        certain = len(text) - partial_marker_length(text[at:], (value.close, line_end + value.close))
        self._out.append(written(text[at:certain]))
        return certain if certain > at else None

    def _read_value(self, text: str, at: int) -> int | None:
        value = self._value
        assert value is not None
        end = end_of_value(text, at, value.close, lambda after: self._follows_value(text, after))
        if end < 0:
            return None
        given = self._tags.trimmed(text[at:end])
        try:
            new = json.dumps(self._values.read(value.key, given, value.is_json), ensure_ascii=False, allow_nan=False)
        except ValueError:  # NaN, or 1e999
            new = json.dumps(given, ensure_ascii=False)
        self._out.append(encodable(new))
        self._value = None
        return end + len(value.close)

    def _follows_value(self, text: str, at: int) -> bool:
        return self._argument.match(text, at) is not None or self._closing.match(text, at) is not None


def end_of_value(text: str, at: int, close: str, follows: Callable[[int], bool]) -> int:
    """Return the position of the closing tag of a value, or -1 if the tag is missing.

    The value may itself contain the tag. `follows` returns whether the next argument or the end of the call is at a
    position.
    """
    while (at := text.find(close, at)) >= 0:
        after = at + len(close)
        if follows(after):
            return at
        at = after
    return -1
