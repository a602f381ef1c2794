"""The entries of a job's journal, which is a Redis stream.

While a job runs, each of its events is an entry with the field `event`. When a job ends that had a single attempt, one
entry with the field `events` replaces the entries of all events but the last one. This entry takes an eighth of their
memory. It has the id of the last event that it contains, so readers continue after any event as before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .events import Event, numbered
from .json_values import encode

EVENT_FIELD, EVENTS_FIELD = "event", "events"
PLAIN_TYPES = ("token", "reasoning")
PLAIN_FIELDS = {"type", "text", "tokens"}
MAX_OTHERS = 64  # events that are not plain, because an attempt keeps them in memory
MAX_PACKED_BYTES = 1 << 20


class EventPacker:
    """Collects the events of an attempt, to pack them when the job ends. Bulk runs, which have results, aren't packed.

    Events of generated text usually have only the fields `type`, `text` and `tokens`. The packed form has the texts and
    the tokens of these plain events in two lists. The list `runs` has the number of consecutive plain events of the
    same type, and all other events: `{"runs": [{"type": "started", …}, ["token", 2]], "texts": [" a", " b"],
    "tokens": [264, 300]}`. The tokens of an event are a list unless it has exactly one. The first event has the seq 0.
    """

    def __init__(self) -> None:
        self._runs: list[Any] = []
        self._texts: list[str] = []
        self._tokens: list[Any] = []
        self._num_others = 0
        self._gave_up = False

    def add(self, event: Event) -> None:
        """Add the next event, without its seq."""
        values: Any = event
        if self._gave_up:
            return
        if event["type"] not in PLAIN_TYPES or event.keys() != PLAIN_FIELDS:
            self._num_others += 1
            self._runs.append(event)
            if self._num_others > MAX_OTHERS or event["type"] == "line":
                self._gave_up = True
                self._runs, self._texts, self._tokens = [], [], []
            return
        tokens = values["tokens"]
        self._texts.append(values["text"])
        self._tokens.append(tokens[0] if len(tokens) == 1 else tokens)
        if self._runs and isinstance(self._runs[-1], list) and self._runs[-1][0] == event["type"]:
            self._runs[-1][1] += 1
        else:
            self._runs.append([event["type"], 1])

    def packed(self) -> bytes:
        """Return the packed events, or an empty string if packing saves nothing or takes too much memory."""
        if len(self._texts) < 2:
            return b""
        packed = encode({"runs": self._runs, "texts": self._texts, "tokens": self._tokens})
        return packed if len(packed) <= MAX_PACKED_BYTES else b""


def events_in(entries: Sequence[Any]) -> list[Event]:
    """Return the events of some entries of a journal, as redis-py returns them."""
    events: list[Event] = []
    for _, fields in entries:
        [(field, value)] = fields.items()
        found = json.loads(value)
        if field in (EVENT_FIELD, EVENT_FIELD.encode()):
            events.append(found)
        else:
            events += _unpack(found)
    return events


def _unpack(packed: Mapping[str, Any]) -> list[Event]:
    events: list[Event] = []
    plain = zip(packed["texts"], packed["tokens"], strict=True)
    for run in packed["runs"]:
        if isinstance(run, dict):
            found: list[Any] = [run]
        else:
            found = [_plain(run[0], *next(plain)) for _ in range(run[1])]
        events += [numbered(event, seq) for seq, event in enumerate(found, start=len(events))]
    return events


def _plain(type_: str, text: str, tokens: int | list[int]) -> dict[str, Any]:
    return {"type": type_, "text": text, "tokens": tokens if isinstance(tokens, list) else [tokens]}
