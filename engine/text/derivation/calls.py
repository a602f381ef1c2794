"""Finds out how a template writes tool calls, from conversations that it rendered (see probes). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

from cellama.engine.text.formats.call_format import CallFormat
from cellama.engine.text.formats.call_reader import ToolReader

from .json_arguments import json_at, with_json
from .probes import CALLS, ENDS, FORMS, KEYS, NAMES, VALUES, Rendered
from .tagged_arguments import with_tags
from .turns import Unknown, turns_of

_MAX_LITERAL = 400  # characters
_PARAMETERS = {"properties": {KEYS[1]: {"type": ["integer", "object"]}}}  # of all arguments those that are no text


def derive_calls(rendered: Rendered, ends: Iterable[str], think_close: str) -> tuple[CallFormat, bool] | None:
    """How calls are written, and whether the template takes their arguments as text; None if it can't be told.

    `ends` are the tokens that end a reply.
    """
    ends = frozenset(filter(None, ends))
    for ids in ("ids", "named"):
        for form in FORMS:
            for end in ENDS:
                try:
                    turns = turns_of(rendered, (form, ids, end), ends, think_close)
                    found = _short(_format_of(turns))
                    return replace(found, can_be_forced=_is_whole(found, turns, ends)), form == "text"
                except Unknown:
                    continue
    return None


def _is_whole(found: CallFormat, turns: Mapping[str, str], ends: Iterable[str]) -> bool:
    """True if what the template wrote is read as the calls that it was asked for and nothing else, and no call begins
    with what ends a reply."""
    reader = ToolReader(found, dict.fromkeys(NAMES, _PARAMETERS))
    asked = {which: calls for which, calls in CALLS.items() if len(calls) == 1 or found.middle is not None}
    for which, calls in asked.items():
        read, rest = reader.parse(turns[which])
        if rest or [(call.name, json.loads(call.arguments)) for call in read] != list(zip(NAMES, calls, strict=False)):
            return False
    return not any(end in literal for end in ends for literal in (found.open, found.middle or ""))


def _short(found: CallFormat) -> CallFormat:
    """The format. Raises Unknown if its markup is so long that it can be none."""
    if any(len(text) > _MAX_LITERAL for text in (found.open, found.close, found.middle or "", *found.literals)):
        raise Unknown
    return found


def _format_of(turns: Mapping[str, str]) -> CallFormat:
    """Raises Unknown."""
    turn = turns["call"]
    if not all(word in turn for word in (NAMES[0], *KEYS, *VALUES)):
        raise Unknown
    if json_at(turn, CALLS["call"][0], 0) is None:
        return with_tags(turns)
    return with_json(turns)
