"""Derive a template's tool call format from the rendered conversations of `probes`.

First, the turn with the calls is extracted from each conversation. The turn contains the name and the arguments of the
probe's call. Either the arguments form a JSON object, or each argument has its own tags. A JSON object with the
arguments either follows the name, or is part of a larger object that also contains the name.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cellama.engine.text.formats.call_format import ArgumentTags, CallFormat
from cellama.engine.text.formats.call_reader import ToolReader
from cellama.engine.text.formats.literals import (
    ID,
    KEY,
    NAME,
    SLOTS,
    TAG,
    merged,
    occurrences,
    shared_end,
    shared_start,
    tags_of,
)

from .probes import (
    ARGUMENT_FORMATS,
    CALLS,
    CONTENT,
    ENDINGS,
    IDS,
    KEYS,
    NAMES,
    NUMBER,
    RESULT,
    USER,
    VALUES,
    RenderedProbes,
    probe_name,
)

_MAX_CHARS = 1 << 15  # characters of a turn; each of its words has at most a dozen
_MAX_LITERAL = 400  # characters; longer literals are text rather than markup
_PARAMETERS = {"properties": {KEYS[1]: {"type": ["integer", "object"]}}}  # the other arguments are strings
_DECODER = json.JSONDecoder()


class UnknownCallFormat(ValueError):
    """Raised if the rendered conversations do not match any known call format."""


def derive_calls(rendered: RenderedProbes, ends: Iterable[str], think_close: str) -> tuple[CallFormat, bool] | None:
    """Return the call format and whether the template expects arguments as text, or None if they can't be derived.

    `ends` are the tokens that end a reply.
    """
    ends = frozenset(filter(None, ends))
    for ids, arguments_format, ending in itertools.product(("ids", "named"), ARGUMENT_FORMATS, ENDINGS):
        try:
            turns = _turns_of(rendered, arguments_format, ids, ending, ends, think_close)
            found = _format_of(turns)
            return replace(found, can_be_forced=_is_complete(found, turns, ends)), arguments_format == "text"
        except UnknownCallFormat:
            continue
    return None


def _is_complete(found: CallFormat, turns: Mapping[str, str], ends: Iterable[str]) -> bool:
    """Return True if parsing the turns yields the probes' calls and no call contains a token that ends a reply."""
    reader = ToolReader(found, dict.fromkeys(NAMES, _PARAMETERS))
    rendered_calls = {which: calls for which, calls in CALLS.items() if len(calls) == 1 or found.middle is not None}
    for which, calls in rendered_calls.items():
        read, rest = reader.parse(turns[which])
        if rest or [(call.name, json.loads(call.arguments)) for call in read] != list(zip(NAMES, calls, strict=False)):
            return False
    return not any(end in literal for end in ends for literal in (found.open, found.middle or ""))


def _format_of(turns: Mapping[str, str]) -> CallFormat:
    """Return the call format of these turns. Raises UnknownCallFormat."""
    turn = turns["call"]
    if not all(word in turn for word in (NAMES[0], *KEYS, *VALUES)):
        raise UnknownCallFormat
    in_tags = _json_at(turn, CALLS["call"][0], 0) is None
    found = _with_tags(turns) if in_tags else _with_json(turns)
    if any(len(text) > _MAX_LITERAL for text in (found.open, found.close, found.middle or "", *found.literals)):
        raise UnknownCallFormat
    return found


# Turns


def _turns_of(
    rendered: RenderedProbes, arguments_format: str, ids: str, ending: str, ends: frozenset[str], think_close: str
) -> dict[str, str]:
    """Return the turns that contain calls, without the text that other turns also start or end with.

    Raises UnknownCallFormat.
    """
    before, found, after = _after_user(rendered.get(f"reply {ending}")).partition(CONTENT)
    whole = {name: _after_user(rendered.get(probe_name(name, arguments_format, ids, ending))) for name in CALLS}
    if not found or not whole["call"]:
        raise UnknownCallFormat
    head = len(shared_start(before, whole["call"]))
    if ending == "answered":  # more turns follow, and the start of the next one is known
        ends |= {*tags_of(after.partition(USER)[0])}
        after = ""
    return {name: _cut(turn[head:], after, ends, think_close) for name, turn in whole.items()}


def _after_user(text: str | None) -> str:
    turn = "" if text is None or SLOTS & set(text) else text.partition(USER)[2]
    return turn if len(turn) <= _MAX_CHARS else ""


def _cut(turn: str, after: str, ends: Iterable[str], think_close: str) -> str:
    if think_close and think_close in turn:
        turn = turn.partition(think_close)[2]
    turn = turn[: len(turn) - len(shared_end(turn, after))].partition(RESULT)[0]
    last = max(turn.rfind(word) + len(word) for word in (*VALUES, str(NUMBER)))
    end = min((at for word in ends if (at := turn.find(word, last)) >= 0), default=len(turn))
    return turn[:end].strip()


def _with_slots(literal: str, at: int) -> str:
    for call_id in IDS:
        literal = literal.replace(call_id, ID)
    return literal.replace(NAMES[at], NAME)


# Arguments in JSON


class RenderedObject(NamedTuple):
    """A JSON object and its position in a turn."""

    start: int
    end: int
    value: Any


@dataclass(frozen=True, slots=True)
class RenderedCall:
    """The positions of a call's name and arguments in a turn.

    If a JSON object contains the name and the arguments, the object's position is also included.
    """

    name: int
    start: int
    end: int
    whole: RenderedObject | None = None


def _with_json(turns: Mapping[str, str]) -> CallFormat:
    (first,) = _calls_in(turns, "call")
    turn, name = turns["call"], len(NAMES[0])
    inner = _with_slots(turn[first.name + name : first.start], 0)
    found = CallFormat(
        "tag",
        open=_with_slots(turn[: first.name], 0),
        inner=inner,
        close=_with_slots(turn[first.end :], 0),
    )
    pair, three = _several(turns, "calls"), _several(turns, "three")
    if pair:
        inners = [turns["calls"][call.name + len(NAMES[i]) : call.start] for i, call in enumerate(pair)]
        joined = merged(*(_with_slots(text, i) for i, text in enumerate(inners)))
        middle = _middle(turns["calls"], pair, 0)
        if joined is not None and three:
            middle = merged(middle, _middle(turns["three"], three, 1)) or ""
        if joined is not None and middle and NAMES[0] not in middle:
            found = replace(found, inner=joined, middle=middle)
    if first.whole is None:
        if found.inner.rstrip().endswith("{"):  # the arguments have an unknown syntax
            raise UnknownCallFormat
        return _after_prefix(found)
    return _with_objects(found, turns, first.whole, pair)


def _middle(turn: str, calls: list[RenderedCall], at: int) -> str:
    return _with_slots(turn[calls[at].end : calls[at + 1].name], at + 1)


def _several(turns: Mapping[str, str], which: str) -> list[RenderedCall]:
    """Return a turn's calls, or an empty list if a call is missing. Some templates write only one call per turn."""
    try:
        return _calls_in(turns, which)
    except UnknownCallFormat:
        return []


def _calls_in(turns: Mapping[str, str], which: str) -> list[RenderedCall]:
    """Return a turn's calls. Raises UnknownCallFormat if any call is missing."""
    turn, found = turns[which], list[RenderedCall]()
    for i, values in enumerate(CALLS[which]):
        before = (found[-1].whole or found[-1]) if found else None
        after = before.end if before else 0
        arguments = _json_at(turn, values, after)
        name = turn.rfind(NAMES[i], after, arguments[0]) if arguments else -1
        if arguments is None or name < 0:
            raise UnknownCallFormat
        start, end = arguments
        found.append(RenderedCall(name, start, end, whole=_object_around(turn, after, name, NAMES[i], values)))
    return found


def _json_at(turn: str, values: Mapping[str, Any], start: int) -> tuple[int, int] | None:
    """Return the position of a JSON object with these arguments, or of a string that contains the object."""
    key = next(iter(values))
    at = turn.rfind("{", start, max(start, turn.find(key, start)))
    for position in (at, at - 1):
        if at >= 0 and position >= start:
            value, end = _decoded(turn, position)
            if _is_same(value, values):
                return position, end
    return None


def _decoded(turn: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(turn, at)
    except (ValueError, RecursionError):
        return None, at


def _is_same(value: Any, values: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        return _is_same(_decoded(value, 0)[0], values) if value.startswith("{") else False
    return bool(value == values)


def _object_around(turn: str, start: int, name: int, word: str, values: Any) -> RenderedObject | None:
    """Return the outermost JSON object that contains a name and its arguments."""
    for at in occurrences(turn[:name], "{", start):
        value, end = _decoded(turn, at)
        if isinstance(value, dict) and _keys_of(value, word, values) is not None:
            return RenderedObject(at, end, value)
    return None


def _keys_of(value: dict[str, Any], word: str, values: Any) -> tuple[str | None, str] | None:
    """Return the keys under which the object contains the name and the arguments, or None if the object is not a call.

    If the object uses the tool's name as the key of the arguments, the result is (None, "").
    """
    if word in value and _is_same(value[word], values):
        return None, ""
    names = [key for key, part in value.items() if part == word]
    arguments = [key for key, part in value.items() if _is_same(part, values)]
    if names and arguments:
        return names[0], arguments[0]
    inner = [_keys_of(part, word, values) for part in value.values() if isinstance(part, dict)]
    return next((keys for keys in inner if keys is not None), None)


def _with_objects(
    found: CallFormat, turns: Mapping[str, str], whole: RenderedObject, pair: list[RenderedCall]
) -> CallFormat:
    """Return the format of calls that are JSON objects."""
    keys = _keys_of(whole.value, NAMES[0], CALLS["call"][0])
    assert keys is not None
    lead, tail, between = turns["call"][: whole.start], turns["call"][whole.end :], ""
    if pair and pair[0].whole and pair[1].whole:
        between = turns["calls"][pair[0].whole.end : pair[1].whole.start]
    return replace(
        found,
        style="json",
        lead=lead,
        tail=tail,
        between=between,
        name_key=keys[0] or "",
        arguments_key=keys[1],
        name_is_key=keys[0] is None,
        markers=_first_marker(lead),
    )


# Arguments in tags


def _with_tags(turns: Mapping[str, str]) -> CallFormat:
    """Return the format of calls whose arguments have their own tags. Raises UnknownCallFormat."""
    turn = turns["call"]
    name = turn.rfind(NAMES[0], 0, turn.find(KEYS[0]))
    words = (KEYS[0], VALUES[0], KEYS[1], VALUES[1])
    before_key, sep, after_value, sep_again, rest = _between(turn, name, words)
    rest, after_value = rest.replace(KEYS[1], KEY), after_value.replace(KEYS[0], KEY)
    opening = shared_end(before_key, after_value).lstrip()
    closing = after_value[: len(after_value) - len(opening)]
    close = shared_start(closing, rest).rstrip()
    if sep != sep_again or not opening or not TAG.search(close):
        raise UnknownCallFormat
    tags = ArgumentTags(open=opening, sep=sep, close=close, gap=closing[len(close) :], sep_of_json=sep)
    found = CallFormat(
        "tagged",
        open=_with_slots(turn[:name], 0),
        inner=_with_slots(before_key[: len(before_key) - len(opening)], 0),
        close=_with_slots(rest[len(close) :], 0),
        middle=_middle_of_tags(turns["calls"], close),
        tags=replace(tags, sep_of_json=_separator_of_number(turns["number"], tags)),
    )
    return _after_prefix(found)


def _between(turn: str, name: int, words: Iterable[str]) -> list[str]:
    """Return the text before each word, starting after the name, and the text after the last word.

    Raises UnknownCallFormat.
    """
    at, found = name + len(NAMES[0]), []
    for word in words:
        following = turn.find(word, at)
        if name < 0 or following < 0:
            raise UnknownCallFormat
        found.append(turn[at:following])
        at = following + len(word)
    return [*found, turn[at:]]


def _middle_of_tags(turn: str, close: str) -> str | None:
    """Return the text between a call's last argument and the name of the next call, or None if no call follows."""
    first = turn.find(VALUES[1])
    second = turn.find(NAMES[1], first)
    second = turn.rfind(NAMES[1], first, turn.find(KEYS[0], second)) if second >= 0 else -1
    middle = turn[first + len(VALUES[1]) : second].replace(KEYS[1], KEY) if 0 <= first < second else ""
    return _with_slots(middle[len(close) :], 1) if middle.startswith(close) and middle != close else None


def _separator_of_number(turn: str, tags: ArgumentTags) -> str:
    """Return the text between a key and a number. Raises UnknownCallFormat if numbers and strings end differently."""
    key = turn.find(KEYS[1], turn.find(VALUES[0]))
    value = turn.find(str(NUMBER), key)
    if key < 0 or value < 0:
        raise UnknownCallFormat
    if not turn[value + len(str(NUMBER)) :].replace(KEYS[1], KEY).startswith(tags.close):
        raise UnknownCallFormat
    return turn[key + len(KEYS[1]) : value]


# Markers


def _after_prefix(found: CallFormat) -> CallFormat:
    """Return the format of calls whose name follows a tag or is inside a tag. Raises UnknownCallFormat."""
    unclosed = re.search(r"<[^<>]*\Z", found.open)
    tags = list(TAG.finditer(found.open))
    start = unclosed.start() if unclosed else tags[-1].start() if tags else -1
    prefix = found.open[start:]
    if start < 0 or SLOTS & set(prefix):
        raise UnknownCallFormat
    between = found.middle or ""
    tag = TAG.match(prefix)
    return replace(
        found,
        lead=found.open[:start],
        prefix=prefix,
        between=between.removesuffix(prefix),
        tail=found.close,
        markers=tuple(dict.fromkeys((*_first_marker(found.open[:start]), tag.group() if tag else prefix.rstrip('"')))),
    )


def _first_marker(lead: str) -> tuple[str, ...]:
    """Return the tag or word that marks the start of calls, or an empty tuple if calls start with JSON."""
    word = next(iter(lead.split()), "")
    tag = TAG.match(lead)
    if tag or len(word) < 3 or SLOTS & set(word):
        return (tag.group(),) if tag and not SLOTS & set(tag.group()) else ()
    return (word,)
