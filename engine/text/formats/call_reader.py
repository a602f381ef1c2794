"""Parse the tool calls in a model's reply, in the format of the model."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cellama.engine.text.detokenizer import partial_marker_length

from .argument_values import ArgumentValues
from .call_format import ArgumentTags, CallFormat
from .calls import NoCalls, ParsedToolCall, call_of, value_at
from .literals import ID, KEY, TAG, any_of, pattern_of, pieces_of, tags_of

Found = tuple[list[ParsedToolCall], int]  # calls, and where they end


@dataclass(frozen=True, slots=True)
class ToolReader:
    """Parses calls of the offered tools. `parameters` are their JSON Schemas by name."""

    format: CallFormat
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only_one: bool = False  # drop all calls except the first

    def find(self, text: str, *, at_start: bool) -> int | None:
        """Return where the tool calls start, or None. `at_start` means that the text is the start of the reply."""
        if self.format.bare_json and at_start and text.lstrip().startswith("{"):
            return 0
        found = [(at + len(marker), at) for marker in self.format.markers if (at := text.find(marker)) >= 0]
        return min(found)[1] if found else None  # the match that ends first, because more text does not change it

    def parse(self, text: str, *, cut: bool = False) -> tuple[tuple[ParsedToolCall, ...], str]:
        """Return the calls, and the text around them.

        If a call is malformed or its tool was not offered, the whole text is returned as text. `cut` means that a
        grammar enforces calls and generation stopped early. The last call may then be partial, and a call without a
        complete name is dropped.
        """
        calls: list[ParsedToolCall] = []
        rest = []
        try:
            at = 0
            while (start := self.find(text[at:], at_start=not calls)) is not None:
                rest.append(text[at : at + start])
                more, at = self._calls(text, at + start, cut)
                calls += more
        except (NoCalls, RecursionError):
            return (), text
        return tuple(calls[:1] if self.only_one else calls), "".join([*rest, text[at:]]).rstrip()

    def offers(self, name: str) -> bool:
        """Return whether the tool may be called."""
        return not self.parameters or name in self.parameters

    def _calls(self, text: str, at: int, cut: bool) -> Found:
        """Return a call and all calls that follow it directly, and where they end. Raises NoCalls."""
        patterns = _patterns_of(self.format)
        calls: list[ParsedToolCall] = []
        end, start = at, _after(patterns.before, text, at)
        while True:
            try:
                call, end = self._call(text, start, patterns)
            except NoCalls:
                if cut and (partial := self._cut_call(text, start, patterns)) is not None:
                    return [*calls, partial], len(text)
                if cut and (not calls or self._is_markup(text[_after(patterns.after, text, end) :])):
                    return calls, len(text)
                if not calls:
                    raise
                closed = _after(patterns.after, text, end)
                return calls, end + len(text[end:closed].rstrip())
            if cut and self.format.tags is not None and not self._is_closed(text[end:]):
                # More arguments might have followed.
                return [*calls, ParsedToolCall(call.name, call.arguments[:-1], is_partial=True)], len(text)
            calls.append(call)
            start = _after(patterns.between, text, end)

    def _cut_call(self, text: str, at: int, patterns: _Patterns) -> ParsedToolCall | None:
        """Return the incomplete call at the end of the text, or None if its name is incomplete."""
        if self.format.style == "json":
            found = _cut_object(text[at:], self.format)
        else:
            header = patterns.header.match(text, at)
            found = None if header is None else (header.group(1), text[header.end() :])
        if found is None or not self.offers(found[0]):
            return None
        name, written = found
        if self.format.tags is not None:
            values = ArgumentValues(self.parameters.get(name, {}))
            arguments, last, _ = _read_arguments(written, 0, self.format.tags, patterns, values, cut=True)
            start = json.dumps(arguments, ensure_ascii=False)[:-1]
            return ParsedToolCall(name, f"{start}, {last}" if arguments and last else start + last, is_partial=True)
        try:
            return call_of(name, value_at(written, 0)[0])
        except (NoCalls, RecursionError):
            return ParsedToolCall(name, written, is_partial=True)

    def _is_closed(self, text: str) -> bool:
        """Return whether the text starts with the closing markup of a call."""
        tail = self.format.tail
        closing = next(iter(tags_of(tail)), "")
        return re.match(rf"\s*{pattern_of(tail[: tail.find(closing) + len(closing)].strip())}", text) is not None

    def _is_markup(self, text: str) -> bool:
        """Return whether the text is a piece of the markup between calls or after them."""
        compact, format_ = "".join(text.split()), self.format
        middle = format_.middle or ""
        wholes = ("".join(each.split()) for each in (middle, format_.close, format_.between, format_.tail))
        return any(compact and compact in whole for whole in wholes)

    def _call(self, text: str, at: int, patterns: _Patterns) -> tuple[ParsedToolCall, int]:
        call, end = self._parse_call(text, at, patterns)
        if not self.offers(call.name):
            raise NoCalls
        return call, end

    def _parse_call(self, text: str, at: int, patterns: _Patterns) -> tuple[ParsedToolCall, int]:
        if self.format.style == "json":
            value, end = value_at(text, at)
            return self._call_of_object(value), end
        header = patterns.header.match(text, at)
        if header is None:
            raise NoCalls
        name, end = header.group(1), header.end()
        arguments: Any
        if self.format.tags is not None:
            values = ArgumentValues(self.parameters.get(name, {}))
            arguments, _, end = _read_arguments(text, end, self.format.tags, patterns, values)
        elif text[end:].lstrip().startswith(("{", '"')):
            arguments, end = value_at(text, end)
        else:
            raise NoCalls
        return call_of(name, arguments), end

    def _call_of_object(self, value: Any) -> ParsedToolCall:
        """Return the call that a JSON object describes. Raises NoCalls."""
        if not isinstance(value, dict):
            raise NoCalls
        if self.format.name_is_key:
            if len(value) != 1:
                raise NoCalls
            return call_of(*next(iter(value.items())))
        if self.format.name_key not in value:  # {"type": "function", "function": {…}}
            inner = (part for part in value.values() if isinstance(part, dict) and self.format.name_key in part)
            value = next(inner, {})
        keys = (self.format.arguments_key, "arguments", "parameters")
        arguments: Any = next((value[key] for key in keys if key in value), {})
        return call_of(value.get(self.format.name_key), arguments)


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The regular expressions of a call format."""

    before: re.Pattern[str]  # before the first call
    between: re.Pattern[str]  # between two calls
    after: re.Pattern[str]  # after the last call
    header: re.Pattern[str]  # from the start of a call to its arguments
    argument: re.Pattern[str]  # before the name of an argument
    separator: re.Pattern[str]  # between the name and the value of an argument
    end: re.Pattern[str]  # after the last argument


@functools.lru_cache(maxsize=32)
def _patterns_of(format_: CallFormat) -> _Patterns:
    closings, tags = pieces_of(format_.tail), format_.tags
    openings = [*format_.markers, *pieces_of(format_.lead)]
    if format_.style != "json":
        openings = [piece for piece in openings if not format_.prefix.startswith(piece)]
    between = [*pieces_of(format_.between), *closings, *openings, *([";"] if format_.bare_json else [])]
    name = r"([^\s<>\"'{}\[\]()]+?)"
    last = "|".join(pattern_of(part) for part in (closings[0] if closings else "", format_.tail.strip()) if part)
    return _Patterns(
        before=any_of(openings),
        between=any_of(between),
        after=any_of(closings),
        header=re.compile(rf"\s*{pattern_of(format_.prefix.strip())}\s*{name}{_after_name(format_)}"),
        argument=re.compile(rf"\s*{pattern_of(tags.open.strip())}(?!/)" if tags else ""),
        separator=re.compile(_separator(tags) if tags else ""),
        end=re.compile(rf"\s*(?:{last}|\Z)" if last else r"\s*\Z"),
    )


def _separator(tags: ArgumentTags) -> str:
    return f"({pattern_of(tags.sep.strip())})|{pattern_of(tags.sep_of_json.strip())}"


def _after_name(format_: CallFormat) -> str:
    """Return a pattern for the text after a name, in which a tag with an id is optional."""
    inner = format_.inner.strip()
    if inner:
        named = re.match(rf"(?:{TAG.pattern}){ID}", inner)
        optional = f"(?:{pattern_of(named.group())})?" if named else ""
        return rf"\s*{optional}{pattern_of(inner[named.end() if named else 0 :])}\s*"
    if format_.tags is None:
        return r"(?=\s*[{\"])"
    following = [format_.tags.open.strip(), *pieces_of(format_.tail)[:1]]
    return rf"(?=\s*(?:{'|'.join(map(pattern_of, following))}|\Z))"


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _read_arguments(
    text: str, at: int, tags: ArgumentTags, patterns: _Patterns, values: ArgumentValues, *, cut: bool = False
) -> tuple[dict[str, Any], str, int]:
    """Return the arguments in tags, the JSON of an unfinished last argument so far, and where the arguments end.

    The last argument may be unfinished only with `cut`. Raises NoCalls.
    """
    arguments: dict[str, Any] = {}
    while (opened := patterns.argument.match(text, at)) is not None:
        separator = patterns.separator.search(text, opened.end())
        if separator is None:
            if cut:
                break
            raise NoCalls
        start = separator.end()
        key = text[opened.end() : separator.start()].strip()
        is_json = None if tags.sep == tags.sep_of_json else separator.group(1) is None
        close = tags.close.replace(KEY, key).strip()
        end = text.find(close, start) if cut else _end_of_value(text, start, close, patterns)
        if end < 0:
            if not cut:
                raise NoCalls
            value = _trimmed(text[start : len(text) - partial_marker_length(text[start:], (close,))], tags)
            is_text = is_json is False or (is_json is None and "string" in (values.types_of(key) or {"string"}))
            written = json.dumps(value, ensure_ascii=False)[:-1] if is_text else value
            return arguments, f"{json.dumps(key)}: {written}", len(text)
        arguments[key] = values.read(key, _trimmed(text[start:end], tags), is_json)
        at = end + len(close)
    return arguments, "", at


def _end_of_value(text: str, at: int, close: str, patterns: _Patterns) -> int:
    """Return the position of the closing tag before the next argument or the end of the call, or -1."""
    while (at := text.find(close, at)) >= 0:
        after = at + len(close)
        if patterns.argument.match(text, after) or patterns.end.match(text, after):
            return at
        at = after
    return -1


def _trimmed(value: str, tags: ArgumentTags) -> str:
    """Return the value without the line breaks that belong to its tags."""
    if tags.sep.endswith("\n"):
        value = value.removeprefix("\n")
    return value.removesuffix("\n") if tags.close.startswith("\n") else value


def _cut_object(text: str, format_: CallFormat) -> tuple[str, str] | None:
    """Return the name in an incomplete JSON object, and the text of its arguments so far, or None if it has no name."""
    string = r'"((?:[^"\\]|\\.)*)"'
    if format_.name_is_key:
        named = re.match(rf"\s*\{{\s*{string}\s*:\s*", text)
        start = named.end() if named else 0
    else:
        named = re.search(rf'"{re.escape(format_.name_key)}"\s*:\s*{string}', text)
        keys = "|".join(re.escape(key) for key in (format_.arguments_key, "arguments", "parameters"))
        follows = named and re.compile(rf'\s*,\s*"(?:{keys})"\s*:\s*').match(text, named.end())
        start = follows.end() if follows else len(text)
    if named is None:
        return None
    try:
        return str(json.loads(f'"{named.group(1)}"')), text[start:]
    except ValueError:
        return None
