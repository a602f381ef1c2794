"""How a template writes calls whose arguments stand in tags of their own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cellama.engine.text.formats.call_format import ArgumentTags, CallFormat
from cellama.engine.text.formats.literals import KEY, TAG, shared_end, shared_start

from .probes import KEYS, NAMES, NUMBER, VALUES
from .turns import Unknown, told_by_prefix, with_slots


def with_tags(turns: Mapping[str, str]) -> CallFormat:
    """Raises Unknown."""
    turn = turns["call"]
    name = turn.rfind(NAMES[0], 0, turn.find(KEYS[0]))
    before_key, sep, after_value, sep_again, rest = _between(turn, name, (*_pairs(0), *_pairs(1)))
    rest, after_value = rest.replace(KEYS[1], KEY), after_value.replace(KEYS[0], KEY)
    opening = shared_end(before_key, after_value).lstrip()
    closing = after_value[: len(after_value) - len(opening)]
    close = shared_start(closing, rest).rstrip()
    if sep != sep_again or not opening or not TAG.search(close):
        raise Unknown
    tags = ArgumentTags(opening, sep, close, closing[len(close) :], sep)
    found = CallFormat(
        "tagged",
        with_slots(turn[:name], 0),
        with_slots(before_key[: len(before_key) - len(opening)], 0),
        with_slots(rest[len(close) :], 0),
        middle=_middle_of_tags(turns["calls"], close),
        tags=replace(tags, sep_of_json=_separator_of_number(turns["number"], tags)),
    )
    return told_by_prefix(found)


def _pairs(at: int) -> tuple[str, str]:
    return KEYS[at], VALUES[at]


def _between(turn: str, name: int, words: Iterable[str]) -> list[str]:
    """What stands between a name and these words, and after the last. Raises Unknown."""
    at, found = name + len(NAMES[0]), []
    for word in words:
        following = turn.find(word, at)
        if name < 0 or following < 0:
            raise Unknown
        found.append(turn[at:following])
        at = following + len(word)
    return [*found, turn[at:]]


def _middle_of_tags(turn: str, close: str) -> str | None:
    """What stands between the last argument of a call and the name of the next one; None if there is none."""
    first = turn.find(VALUES[1])
    second = turn.find(NAMES[1], first)
    second = turn.rfind(NAMES[1], first, turn.find(KEYS[0], second)) if second >= 0 else -1
    middle = turn[first + len(VALUES[1]) : second].replace(KEYS[1], KEY) if 0 <= first < second else ""
    return with_slots(middle[len(close) :], 1) if middle.startswith(close) and middle != close else None


def _separator_of_number(turn: str, tags: ArgumentTags) -> str:
    """What stands before a number. Raises Unknown if it is written in another way than text."""
    key = turn.find(KEYS[1], turn.find(VALUES[0]))
    value = turn.find(str(NUMBER), key)
    if key < 0 or value < 0:
        raise Unknown
    if not turn[value + len(str(NUMBER)) :].replace(KEYS[1], KEY).startswith(tags.close):
        raise Unknown
    return turn[key + len(KEYS[1]) : value]
