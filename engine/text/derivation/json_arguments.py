"""How a template writes calls whose arguments are JSON: in an object with the name, or behind it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cellama.engine.text.formats.call_format import CallFormat
from cellama.engine.text.formats.literals import merged, occurrences

from .probes import CALLS, NAMES
from .turns import Unknown, first_marker, told_by_prefix, with_slots

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Call:
    """Where a call's name and arguments stand in a turn, and the object of JSON that has both, if there is one."""

    name: int
    start: int
    end: int
    whole: tuple[int, int, Any] | None = None


def with_json(turns: Mapping[str, str]) -> CallFormat:
    (first,) = _calls_in(turns, "call")
    turn, name = turns["call"], len(NAMES[0])
    inner = with_slots(turn[first.name + name : first.start], 0)
    found = CallFormat("tag", with_slots(turn[: first.name], 0), inner, with_slots(turn[first.end :], 0))
    pair, three = _several(turns, "calls"), _several(turns, "three")
    if pair:
        inners = [turns["calls"][call.name + len(NAMES[i]) : call.start] for i, call in enumerate(pair)]
        joined = merged(*(with_slots(text, i) for i, text in enumerate(inners)))
        middle = _middle(turns["calls"], pair, 0)
        if joined is not None and three:
            middle = merged(middle, _middle(turns["three"], three, 1)) or ""
        if joined is not None and middle and NAMES[0] not in middle:
            found = replace(found, inner=joined, middle=middle)
    if first.whole is None:
        if found.inner.rstrip().endswith("{"):  # arguments in a syntax of its own
            raise Unknown
        return told_by_prefix(found)
    return _of_objects(found, turns, first.whole, pair)


def _middle(turn: str, calls: list[_Call], at: int) -> str:
    return with_slots(turn[calls[at].end : calls[at + 1].name], at + 1)


def _several(turns: Mapping[str, str], which: str) -> list[_Call]:
    """The calls of a turn; none if they are not all there: some templates write one, or refuse more."""
    try:
        return _calls_in(turns, which)
    except Unknown:
        return []


def _calls_in(turns: Mapping[str, str], which: str) -> list[_Call]:
    """The calls of a turn. Raises Unknown if they are not all there."""
    turn, found = turns[which], list[_Call]()
    for i, values in enumerate(CALLS[which]):
        after = found[-1].whole[1] if found and found[-1].whole else found[-1].end if found else 0
        arguments = json_at(turn, values, after)
        name = turn.rfind(NAMES[i], after, arguments[0]) if arguments else -1
        if arguments is None or name < 0:
            raise Unknown
        found.append(_Call(name, *arguments, _object_around(turn, after, name, NAMES[i], values)))
    return found


def json_at(turn: str, values: Mapping[str, Any], start: int) -> tuple[int, int] | None:
    """Where these arguments stand as an object of JSON, or as a string with one."""
    key = next(iter(values))
    at = turn.rfind("{", start, max(start, turn.find(key, start)))
    for begin in (at, at - 1):
        if at >= 0 and begin >= start:
            value, end = _decoded(turn, begin)
            if _is_same(value, values):
                return begin, end
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


def _object_around(turn: str, start: int, name: int, word: str, values: Any) -> tuple[int, int, Any] | None:
    """The outermost object of JSON that has a name and its arguments."""
    for at in occurrences(turn[:name], "{", start):
        value, end = _decoded(turn, at)
        if isinstance(value, dict) and _keys_of(value, word, values) is not None:
            return at, end, value
    return None


def _keys_of(value: dict[str, Any], word: str, values: Any) -> tuple[str | None, str] | None:
    """The keys of name and arguments; (None, "") if the name is a key itself; None if this is no call."""
    if word in value and _is_same(value[word], values):
        return None, ""
    names = [key for key, part in value.items() if part == word]
    arguments = [key for key, part in value.items() if _is_same(part, values)]
    if names and arguments:
        return names[0], arguments[0]
    inner = [_keys_of(part, word, values) for part in value.values() if isinstance(part, dict)]
    return next((keys for keys in inner if keys is not None), None)


def _of_objects(
    found: CallFormat, turns: Mapping[str, str], whole: tuple[int, int, Any], pair: list[_Call]
) -> CallFormat:
    """The format of calls that are objects of JSON."""
    start, end, value = whole
    keys = _keys_of(value, NAMES[0], CALLS["call"][0])
    assert keys is not None
    lead, tail, between = turns["call"][:start], turns["call"][end:], ""
    if pair and pair[0].whole and pair[1].whole:
        between = turns["calls"][pair[0].whole[1] : pair[1].whole[0]]
    return replace(
        found,
        style="json",
        lead=lead,
        tail=tail,
        between=between,
        name_key=keys[0] or "",
        arguments_key=keys[1],
        name_is_key=keys[0] is None,
        markers=first_marker(lead),
    )
