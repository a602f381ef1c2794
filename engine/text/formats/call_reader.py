"""Parse the tool calls in a reply according to the model's call format."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .argument_values import ArgumentValues
from .arguments_stream import end_of_value
from .call_format import ArgumentTags, CallFormat
from .calls import NoCalls, ParsedToolCall, call_of, value_at
from .literals import ID, KEY, NAME, TAG, any_of, pattern_of, pieces_of, tags_of

_STRING = r'"((?:[^"\\]|\\.)*)"'
Found = tuple[list[ParsedToolCall], int]  # calls, and where they end


@dataclass(frozen=True, slots=True)
class ToolReader:
    """Parses calls to the offered tools. `parameters` maps the tools' names to their JSON Schemas."""

    format: CallFormat
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only_one: bool = False  # drop all calls except the first

    def find(self, text: str, *, at_start: bool) -> int | None:
        """Return the position at which the tool calls start, or None if the text contains no calls.

        Set `at_start` if the text is the start of the reply.
        """
        if self.format.bare_json and at_start and text.lstrip().startswith("{"):
            return 0
        found = [(at + len(marker), at) for marker in self.format.markers if (at := text.find(marker)) >= 0]
        return min(found)[1] if found else None  # the match that ends first, because more text does not change it

    def parse(self, text: str) -> tuple[tuple[ParsedToolCall, ...], str]:
        """Return the calls and the surrounding text.

        If a call is malformed or its tool was not offered, no calls are returned, and the whole text is returned
        unchanged.
        """
        calls: list[ParsedToolCall] = []
        rest = []
        try:
            at = 0
            while (start := self.find(text[at:], at_start=not calls)) is not None:
                rest.append(text[at : at + start])
                more, at = self._calls(text, at + start)
                calls += more
        except (NoCalls, RecursionError):
            return (), text
        return tuple(calls[:1] if self.only_one else calls), "".join([*rest, text[at:]]).rstrip()

    def offers(self, name: str) -> bool:
        """Return True if the model may call a tool with this name."""
        return not self.parameters or name in self.parameters

    def _calls(self, text: str, at: int) -> Found:
        """Return a call and all calls that directly follow it, and the end position of the last call.

        Raises NoCalls if the first call is malformed or its tool was not offered.
        """
        patterns = patterns_of(self.format)
        calls: list[ParsedToolCall] = []
        end, start = at, after(patterns.before, text, at)
        while True:
            try:
                call, end = self._call(text, start, patterns)
            except NoCalls:
                if not calls:
                    raise
                closed = after(patterns.after, text, end)
                return calls, end + len(text[end:closed].rstrip())
            calls.append(call)
            start = after(patterns.between, text, end)

    def _call(self, text: str, at: int, patterns: CallPatterns) -> tuple[ParsedToolCall, int]:
        call, end = self._parse_call(text, at, patterns)
        if not self.offers(call.name):
            raise NoCalls
        return call, end

    def _parse_call(self, text: str, at: int, patterns: CallPatterns) -> tuple[ParsedToolCall, int]:
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
            arguments, end = _read_arguments(text, end, self.format.tags, patterns, values)
        elif text[end:].lstrip().startswith(("{", '"')):
            arguments, end = value_at(text, end)
        else:
            raise NoCalls
        return call_of(name, arguments), end

    def _call_of_object(self, value: Any) -> ParsedToolCall:
        """Return the call that a JSON object describes. Raises NoCalls if the object is not a call."""
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
class CallPatterns:
    """The regular expressions of a call format."""

    before: re.Pattern[str]  # before the first call
    between: re.Pattern[str]  # between two calls
    after: re.Pattern[str]  # after the last call
    header: re.Pattern[str]  # from the start of a call to its arguments
    head: re.Pattern[str]  # the same, but only where more text can't change the match
    bare_head: re.Pattern[str]  # the same for calls that only being JSON distinguishes from text
    argument: re.Pattern[str]  # before the name of an argument
    separator: re.Pattern[str]  # between the name and the value of an argument
    end: re.Pattern[str]  # after the last argument
    closing: re.Pattern[str] | None  # the same, but not at the end of the text; None if the format has no closing tag


@functools.lru_cache(maxsize=32)
def patterns_of(format_: CallFormat) -> CallPatterns:
    closings, tags = pieces_of(format_.tail), format_.tags
    openings = [*format_.markers, *pieces_of(format_.lead)]
    if format_.style != "json":
        openings = [piece for piece in openings if not format_.prefix.startswith(piece)]
    between = [*pieces_of(format_.between), *closings, *openings, *([";"] if format_.bare_json else [])]
    name = r"([^\s<>\"'{}\[\]()]+?)"
    header = rf"\s*{pattern_of(format_.prefix.strip())}\s*{name}"
    closing = next(iter(tags_of(format_.tail)), "")
    closed = pattern_of(format_.tail[: format_.tail.find(closing) + len(closing)].strip())
    last = "|".join(pattern_of(part) for part in (closings[0] if closings else "", format_.tail.strip()) if part)
    return CallPatterns(
        before=any_of(openings),
        between=any_of(between),
        after=any_of(closings),
        header=re.compile(header + _after_name(format_)),
        head=_json_head(format_) if format_.style == "json" else re.compile(header + _after_name(format_, r"(?!)")),
        bare_head=_bare_head(format_),
        argument=re.compile(rf"\s*{pattern_of(tags.open.strip())}(?!/)" if tags else ""),
        separator=re.compile(_separator(tags) if tags else ""),
        end=re.compile(rf"\s*(?:{last}|\Z)" if last else r"\s*\Z"),
        closing=re.compile(rf"\s*{closed}") if closing else None,
    )


def _separator(tags: ArgumentTags) -> str:
    return f"({pattern_of(tags.sep.strip())})|{pattern_of(tags.sep_of_json.strip())}"


def _json_head(format_: CallFormat) -> re.Pattern[str]:
    """Return a pattern for the start of a JSON object, up to the arguments.

    The pattern skips members before the name.
    """
    if format_.name_is_key:
        return re.compile(rf"\s*\{{\s*{_STRING}\s*:\s*(?=\{{)")
    keys = "|".join(re.escape(key) for key in (format_.arguments_key, "arguments", "parameters"))
    name = rf'"{re.escape(format_.name_key)}"\s*:\s*{_STRING}'
    return re.compile(rf'\s*\{{(?s:.*?){name}\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)')


def _bare_head(format_: CallFormat) -> re.Pattern[str]:
    """Return a pattern for the start of a call without a marker, with any whitespace that a grammar allows."""
    tokens = re.findall(r'"[^"]*"|[{}:,\[\]]', format_.open_without_markers + NAME + format_.inner)
    parts = (_STRING if NAME in token else re.escape(token) for token in tokens)
    return re.compile(r"\s*" + r"\s*".join(parts) + r"\s*(?=\{)")


def _after_name(format_: CallFormat, end: str = r"\Z") -> str:
    """Return a pattern that matches the text after a name, which may include a tag with an id.

    `end` matches the position at which a call without arguments may end although its closing tag is missing.
    """
    inner = format_.inner.strip()
    if inner:
        named = re.match(rf"(?:{TAG.pattern}){ID}", inner)
        optional = f"(?:{pattern_of(named.group())})?" if named else ""
        return rf"\s*{optional}{pattern_of(inner[named.end() if named else 0 :])}\s*"
    if format_.tags is None:
        return r"(?=\s*[{\"])"
    following = [format_.tags.open.strip(), *pieces_of(format_.tail)[:1]]
    return rf"(?=\s*(?:{'|'.join(map(pattern_of, following))}|{end}))"


def after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the position after a pattern's match, or the given position if the pattern does not match."""
    match = pattern.match(text, at)
    return match.end() if match else at


def _read_arguments(
    text: str, at: int, tags: ArgumentTags, patterns: CallPatterns, values: ArgumentValues
) -> tuple[dict[str, Any], int]:
    """Return the tagged arguments and their end position. Raises NoCalls if an argument is malformed."""

    def follows(at: int) -> bool:
        return patterns.argument.match(text, at) is not None or patterns.end.match(text, at) is not None

    arguments: dict[str, Any] = {}
    while (opened := patterns.argument.match(text, at)) is not None:
        separator = patterns.separator.search(text, opened.end())
        if separator is None:
            raise NoCalls
        start = separator.end()
        key = text[opened.end() : separator.start()].strip()
        is_json = None if tags.sep == tags.sep_of_json else separator.group(1) is None
        close = tags.close.replace(KEY, key).strip()
        end = end_of_value(text, start, close, follows)
        if end < 0:
            raise NoCalls
        arguments[key] = values.read(key, tags.trimmed(text[start:end]), is_json)
        at = end + len(close)
    return arguments, at
