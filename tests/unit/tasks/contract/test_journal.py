from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cellama.tasks.contract.events import numbered
from cellama.tasks.contract.journal import EVENT_FIELD, EVENTS_FIELD, MAX_OTHERS, EventPacker, events_in
from cellama.tasks.contract.json_values import encode

STARTED: dict[str, Any] = {"type": "started", "model": "tiny", "prompt_tokens": 3, "worker": "w", "seed": 7}
DONE: dict[str, Any] = {"seq": 9, "type": "done", "finish_reason": "stop", "usage": {}}
PLAIN = st.builds(
    lambda type_, text, tokens: {"type": type_, "text": text, "tokens": tokens},
    st.sampled_from(["token", "reasoning"]),
    st.text(),
    st.lists(st.integers(0, 200_000), max_size=3),
)
OTHER = st.sampled_from(
    [
        {"type": "token", "text": "a", "tokens": [1], "index": 1},
        {"type": "token", "text": "", "tokens": [1], "logprobs": [{"id": 1, "logprob": -0.5}]},
        {"type": "reasoning_end", "signature": "", "tokens": []},
    ]
)


def packer_of(events: list[Any]) -> EventPacker:
    packer = EventPacker()
    for event in events:
        packer.add(event)
    return packer


def numbered_from_0(events: list[Any]) -> list[Any]:
    return [numbered(event, seq) for seq, event in enumerate(events)]


@given(st.lists(PLAIN | OTHER, max_size=MAX_OTHERS - 1))
def test_packed_events_are_read_as_they_were(events: list[Any]) -> None:
    whole = [STARTED, *events, *[{"type": "token", "text": " a", "tokens": [5]}] * 2]
    entries = [
        (b"1-0", {EVENTS_FIELD.encode(): packer_of(whole).packed()}),
        (b"2-0", {EVENT_FIELD.encode(): encode(DONE)}),
    ]
    assert events_in(entries) == [*numbered_from_0(whole), DONE]


def test_events_of_clients_that_decode_replies_are_read() -> None:
    assert events_in([("1-0", {EVENT_FIELD: json.dumps(DONE)})]) == [DONE]


def test_packed_events_are_shorter() -> None:
    events = [{"type": "token", "text": " there", "tokens": [480]} for _ in range(64)]
    size_of_events = sum(len(encode(event)) for event in numbered_from_0(events))
    assert len(packer_of(events).packed()) < size_of_events / 3  # entries of a stream take as much memory again


@pytest.mark.parametrize(
    "other",
    [
        [{"type": "line", "line": 0, "result": {}}],
        [{"type": "token", "text": "a", "tokens": [1], "index": 1}] * (MAX_OTHERS + 1),
    ],
    ids=["lines of a bulk run", "many other events"],
)
def test_events_that_would_take_much_memory_are_not_packed(other: list[Any]) -> None:
    plain = [{"type": "token", "text": "a", "tokens": [1]}] * 3
    assert packer_of([*plain, *other, *plain]).packed() == b""
