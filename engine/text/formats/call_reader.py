"""Reads tool calls from what a model wrote, in the format of its family. Pure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cellama.engine.text.detokenizer import possible_marker

from .argument_values import Values
from .call_format import ArgumentTags, CallFormat
from .calls import NoCalls, ParsedToolCall, call_of, value_at
from .literals import ID, KEY, TAG, any_of, pattern_of, pieces_of, tags_of

Found = tuple[list[ParsedToolCall], int]  # calls, and where they end


@dataclass(frozen=True, slots=True)
class ToolReader:
    """Reads the calls of the tools that were offered. `parameters` are JSON Schemas by the names of the tools."""

    format: CallFormat
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only_one: bool = False  # further calls are left out

    def find(self, text: str, *, at_start: bool) -> int | None:
        """Return where the tool calls start. `at_start` says that this text is the start of the reply."""
        if self.format.bare_json and at_start and text.lstrip().startswith("{"):
            return 0
        found = [(at + len(marker), at) for marker in self.format.markers if (at := text.find(marker)) >= 0]
        return min(found)[1] if found else None  # the one that ends first: a longer text has the same

    def parse(self, text: str, *, cut: bool = False) -> tuple[tuple[ParsedToolCall, ...], str]:
        """Return the calls, and the text around them.

        All of it is text if a call is not well-formed, or calls a tool that was not offered. `cut` says that the
        generation ended within what a grammar enforces: then the last call may be partial, and the markup of a call
        without a complete name is left out.
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
        """Return one call and all that follow it. Raises NoCalls."""
        patterns = _patterns_of(self.format)
        calls: list[ParsedToolCall] = []
        end, begins = at, _after(patterns.before, text, at)
        while True:
            try:
                call, end = self._call(text, begins, patterns)
            except NoCalls:
                if cut and (partial := self._cut_call(text, begins, patterns)) is not None:
                    return [*calls, partial], len(text)
                if cut and (not calls or self._is_markup(text[_after(patterns.after, text, end) :])):
                    return calls, len(text)
                if not calls:
                    raise
                closed = _after(patterns.after, text, end)
                return calls, end + len(text[end:closed].rstrip())
            if cut and self.format.tags is not None and not self._is_closed(text[end:]):
                # More arguments may have followed.
                return [*calls, ParsedToolCall(call.name, call.arguments[:-1], is_partial=True)], len(text)
            calls.append(call)
            begins = _after(patterns.between, text, end)

    def _cut_call(self, text: str, at: int, patterns: _Patterns) -> ParsedToolCall | None:
        """Return the call that is incomplete at the end of the text; None if its name is not complete."""
        if self.format.style == "json":
            found = _cut_object(text[at:], self.format)
        else:
            header = patterns.header.match(text, at)
            found = None if header is None else (header.group(1), text[header.end() :])
        if found is None or not self.offers(found[0]):
            return None
        name, written = found
        if self.format.tags is not None:
            values = Values(self.parameters.get(name, {}))
            return ParsedToolCall(name, _cut_tagged(written, self.format.tags, patterns, values), is_partial=True)
        try:
            return call_of(name, value_at(written, 0)[0])
        except (NoCalls, RecursionError):
            return ParsedToolCall(name, written, is_partial=True)

    def _is_closed(self, text: str) -> bool:
        """Return whether the text starts with what closes a call."""
        tail = self.format.tail
        closing = next(iter(tags_of(tail)), "")
        return re.match(rf"\s*{pattern_of(tail[: tail.find(closing) + len(closing)].strip())}", text) is not None

    def _is_markup(self, text: str) -> bool:
        """Return whether this is the start of the markup between calls or after them."""
        seen, format_ = "".join(text.split()), self.format
        middle = format_.middle or ""
        wholes = ("".join(each.split()) for each in (middle, format_.close, format_.between, format_.tail))
        return any(seen and any(whole.startswith(seen, at) for at in range(len(whole))) for whole in wholes)

    def _call(self, text: str, at: int, patterns: _Patterns) -> tuple[ParsedToolCall, int]:
        call, end = self._any_call(text, at, patterns)
        if not self.offers(call.name):
            raise NoCalls
        return call, end

    def _any_call(self, text: str, at: int, patterns: _Patterns) -> tuple[ParsedToolCall, int]:
        if self.format.style == "json":
            value, end = value_at(text, at)
            return self._of_object(value), end
        header = patterns.header.match(text, at)
        if header is None:
            raise NoCalls
        name, end = header.group(1), header.end()
        arguments: Any
        if self.format.tags is not None:
            arguments, end = _tagged(text, end, self.format.tags, patterns, Values(self.parameters.get(name, {})))
        elif text[end:].lstrip().startswith(("{", '"')):
            arguments, end = value_at(text, end)
        else:
            raise NoCalls
        return call_of(name, arguments), end

    def _of_object(self, value: Any) -> ParsedToolCall:
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
        named = (self.format.arguments_key, "arguments", "parameters")
        arguments: Any = next((value[key] for key in named if key in value), {})
        return call_of(value.get(self.format.name_key), arguments)


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The patterns of one format: before the first call, between two, after the last; the head of a call; what comes
    before the name of an argument and after it, and after the last value."""

    before: re.Pattern[str]
    between: re.Pattern[str]
    after: re.Pattern[str]
    header: re.Pattern[str]
    argument: re.Pattern[str]
    separator: re.Pattern[str]
    end: re.Pattern[str]


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
    """Return the pattern of what follows a name; a tag with an id is optional."""
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


def _tagged(text: str, at: int, tags: ArgumentTags, patterns: _Patterns, values: Values) -> tuple[dict[str, Any], int]:
    """Return arguments in tags of their own, and where they end. Raises NoCalls."""
    arguments: dict[str, Any] = {}
    while (opened := patterns.argument.match(text, at)) is not None:
        separator = patterns.separator.search(text, opened.end())
        if separator is None:
            raise NoCalls
        key = text[opened.end() : separator.start()].strip()
        end, at = _end_of_value(text, separator.end(), tags.close.replace(KEY, key), patterns)
        is_json = None if tags.sep == tags.sep_of_json else separator.group(1) is None
        arguments[key] = values.read(key, _trimmed(text[separator.end() : end], tags), is_json)
    return arguments, at


def _end_of_value(text: str, start: int, close: str, patterns: _Patterns) -> tuple[int, int]:
    """Return the ends of a value and of its closing tag, which an argument or the end follows. Raises NoCalls."""
    at, tag = start, close.strip()
    while (at := text.find(tag, at)) >= 0:
        behind = at + len(tag)
        if patterns.argument.match(text, behind) or patterns.end.match(text, behind):
            return at, behind
        at = behind
    raise NoCalls


def _trimmed(value: str, tags: ArgumentTags) -> str:
    """Return the value without the line breaks that belong to the tags."""
    if tags.sep.endswith("\n"):
        value = value.removeprefix("\n")
    return value.removesuffix("\n") if tags.close.startswith("\n") else value


def _cut_object(text: str, format_: CallFormat) -> tuple[str, str] | None:
    """Return the name in an incomplete JSON object, and its arguments as far as they are written."""
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


def _cut_tagged(text: str, tags: ArgumentTags, patterns: _Patterns, values: Values) -> str:
    """Return the start of a JSON object for arguments in tags, the last of which may be incomplete."""
    arguments: dict[str, Any] = {}
    at, last = 0, ""
    while (opened := patterns.argument.match(text, at)) is not None:
        separator = patterns.separator.search(text, opened.end())
        if separator is None:
            break
        key = text[opened.end() : separator.start()].strip()
        is_json = None if tags.sep == tags.sep_of_json else separator.group(1) is None
        close = tags.close.replace(KEY, key).strip()
        end = text.find(close, separator.end())
        if end < 0:
            written = text[separator.end() :]
            written = _trimmed(written[: len(written) - possible_marker(written, (close,))], tags)
            is_text = is_json is False or (is_json is None and "string" in (values.types_of(key) or {"string"}))
            last = f"{json.dumps(key)}: {json.dumps(written, ensure_ascii=False)[:-1] if is_text else written}"
            break
        arguments[key] = values.read(key, _trimmed(text[separator.end() : end], tags), is_json)
        at = end + len(close)
    begun = json.dumps(arguments, ensure_ascii=False)[:-1]
    return f"{begun}, {last}" if arguments and last else begun + last
