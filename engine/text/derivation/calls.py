"""Finds out how a template writes tool calls, from conversations that it rendered (see probes). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cellama.engine.text.formats.call_format import CallFormat

from .json_arguments import json_at, with_json
from .probes import CALLS, ENDS, FORMS, KEYS, NAMES, VALUES, Rendered
from .tagged_arguments import with_tags
from .turns import Unknown, turns_of

_MAX_LITERAL = 400  # characters


def derive_calls(rendered: Rendered, ends: Iterable[str], think_close: str) -> tuple[CallFormat, bool] | None:
    """How calls are written, and whether the template takes their arguments as text; None if it can't be told.

    `ends` are the tokens that end a reply.
    """
    for ids in ("ids", "named"):
        for form in FORMS:
            for end in ENDS:
                try:
                    turns = turns_of(rendered, (form, ids, end), frozenset(ends), think_close)
                    return _short(_format_of(turns)), form == "text"
                except Unknown:
                    continue
    return None


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
