"""Turns with calls, cut out of rendered conversations, and what is common to all forms of calls. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from cellama.engine.text.formats.call_format import CallFormat
from cellama.engine.text.formats.literals import ID, NAME, SLOTS, TAG, shared_end, shared_start, tags_of

from .probes import CALLS, CONTENT, IDS, NAMES, NUMBER, RESULT, USER, VALUES, Rendered, probe_name

_MAX_CHARS = 1 << 15  # of a turn


class Unknown(ValueError):
    """The rendered conversations show no way of writing calls that is known."""


def turns_of(
    rendered: Rendered, variant: tuple[str, str, str], ends: frozenset[str], think_close: str
) -> dict[str, str]:
    """The turns with calls, each from its first words that are no other turn's to its end. Raises Unknown."""
    form, ids, end = variant
    before, said, after = _after_user(rendered.get(f"said {end}")).partition(CONTENT)
    whole = {name: _after_user(rendered.get(probe_name(name, form, ids, end))) for name in CALLS}
    if not said or not whole["call"]:
        raise Unknown
    head = len(shared_start(before, whole["call"]))
    if end == "answered":  # more turns follow, of which the beginning of the next one is known
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


def with_slots(literal: str, at: int) -> str:
    for call_id in IDS:
        literal = literal.replace(call_id, ID)
    return literal.replace(NAMES[at], NAME)


def told_by_prefix(found: CallFormat) -> CallFormat:
    """The format of calls whose name stands behind a tag, or within one. Raises Unknown."""
    unclosed = re.search(r"<[^<>]*\Z", found.open)
    tags = list(TAG.finditer(found.open))
    start = unclosed.start() if unclosed else tags[-1].start() if tags else -1
    prefix = found.open[start:]
    if start < 0 or SLOTS & set(prefix):
        raise Unknown
    between = found.middle or ""
    tag = TAG.match(prefix)
    return replace(
        found,
        lead=found.open[:start],
        prefix=prefix,
        between=between.removesuffix(prefix),
        tail=found.close,
        markers=tuple(dict.fromkeys((*first_marker(found.open[:start]), tag.group() if tag else prefix.rstrip('"')))),
    )


def first_marker(lead: str) -> tuple[str, ...]:
    """What tells that calls begin: the first tag, or the first word; nothing if they begin with their JSON."""
    word = next(iter(lead.split()), "")
    tag = TAG.match(lead)
    if tag or len(word) < 3 or SLOTS & set(word):
        return (tag.group(),) if tag and not SLOTS & set(tag.group()) else ()
    return (word,)
