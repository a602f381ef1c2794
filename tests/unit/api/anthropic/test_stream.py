"""Test the conversion of job events into Anthropic's events, with the accumulator of Anthropic's client."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event

from cellama.api.anthropic.answers import calls_of, message_of, stop_of
from cellama.api.anthropic.stream import MessageStream

USAGE = {"prompt_tokens": 10, "completion_tokens": 6, "cached_tokens": 4}
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}},
    {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]
STARTED = {"type": "started", "model": "m", "prompt_tokens": 10, "worker": "w", "seed": 1}
REASONING = [
    {"type": "reasoning", "text": "H", "tokens": [1]},
    {"type": "reasoning", "text": "m", "tokens": [2, 3]},
    {"type": "reasoning_end", "signature": "5160", "tokens": [4]},
]
TEXT = [{"type": "token", "text": "We", "tokens": [5]}, {"type": "token", "text": "ll", "tokens": [6]}]


def done(**more: Any) -> dict[str, Any]:
    return {"type": "done", "finish_reason": "stop", "stop_sequence": None, "usage": USAGE, **more}


def stream_events(*events: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    stream = MessageStream("msg_1", "m", "default", 100, **how)
    return [one for event in events for one in stream.of(event)]


def read(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that Anthropic's client accumulates."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)  # type: ignore[arg-type]
    return dict(message.to_dict())


def test_stream_adds_up_to_the_message() -> None:
    end = done(tool_calls=CALLS)
    message = {"content": "Well", "reasoning": "Hm", "signature": "5160", "tool_calls": CALLS}
    whole = message_of(
        "msg_1", {**end, "model": "m", "message": message}, max_tokens=100, tier="default", thinking_tokens=4
    )
    read_message = read(stream_events(STARTED, *REASONING, *TEXT, end))
    assert {name: read_message[name] for name in ("id", "model", "stop_reason")} == {
        "id": "msg_1", "model": "m", "stop_reason": "tool_use"
    }  # fmt: skip
    for mine, theirs in zip(whole["content"], read_message["content"], strict=True):
        assert mine.items() <= theirs.items()
    assert whole["usage"].items() <= read_message["usage"].items()


def test_pieces_of_a_call_add_up_to_the_message() -> None:
    pieces: list[dict[str, Any]] = [
        {"index": 0, "id": "1", "name": "add", "arguments": ""},
        {"index": 0, "arguments": '{"a": 1, "b"'},
        {"index": 0, "arguments": ': "ü"}'},
    ]
    tokens = [{"type": "token", "text": "", "tokens": [7], "tool_call_deltas": [piece]} for piece in pieces]
    events = stream_events(STARTED, *TEXT, *tokens, done(tool_calls=CALLS))  # the second call is only known at the end
    deltas = [event["delta"].get("partial_json") for event in events if event["type"] == "content_block_delta"]
    assert deltas == [None, None, '{"a": 1, "b"', ': "ü"}', "{}"]
    content = read(events)["content"]
    assert content[0] == {"type": "text", "text": "Well"}
    assert [block.items() <= got.items() for block, got in zip(calls_of(CALLS), content[1:], strict=True)] == [True] * 2


def test_truncated_reasoning_has_no_signature() -> None:
    end = done(finish_reason="length")
    message = {"content": "", "reasoning": "Hm", "signature": "5160"}
    whole = message_of("msg_1", {**end, "model": "m", "message": message}, max_tokens=6, tier="default")
    assert whole["content"] == read(stream_events(STARTED, *REASONING[:2], end))["content"]


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": "\\ud800"}', '{"a": NaN}'])
def test_arguments_are_returned_as_text_when_they_cannot_be_represented_in_json(arguments: str) -> None:
    sent = '{"a": "\\u0000"}'
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": a}} for a in (arguments, sent)]
    assert [block["input"] for block in calls_of(calls)] == [{"value": arguments}, {"a": "\0"}]


def test_blocks_are_numbered_and_closed_in_order() -> None:
    events = stream_events(STARTED, *REASONING, *TEXT, done(tool_calls=CALLS))
    shape = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events if "index" in event]
    assert [one for one in shape if one[0] != "delta"] == [(what, at) for at in range(4) for what in ("start", "stop")]
    assert [events[0]["type"], *(event["type"] for event in events[-2:])] == [
        "message_start", "message_delta", "message_stop"
    ]  # fmt: skip


def test_omitted_reasoning_becomes_an_empty_block() -> None:
    [thought, said] = read(stream_events(STARTED, *REASONING, *TEXT, done(), shows_reasoning=False))["content"]
    assert (thought["thinking"], thought["signature"], said["text"]) == ("", "", "Well")


def test_job_without_output_returns_an_empty_message() -> None:
    message = read(stream_events(done(finish_reason="timeout")))
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")


def test_truncated_reasoning_block_is_closed() -> None:
    events = stream_events(STARTED, REASONING[0], done(finish_reason="length"))
    assert [event["type"] for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (done(), "end_turn"),
        (done(stop_sequence="END"), "stop_sequence"),
        (done(tool_calls=CALLS), "tool_use"),
        (done(finish_reason="length", usage={**USAGE, "completion_tokens": 100}), "max_tokens"),
        (done(finish_reason="length"), "model_context_window_exceeded"),
        (done(finish_reason="timeout"), "max_tokens"),
    ],
)
def test_last_event_has_an_anthropic_stop_reason(end: dict[str, Any], reason: str) -> None:
    assert stop_of(end, 100)["stop_reason"] == reason


def test_last_event_and_message_contain_the_warnings() -> None:
    end = done(warnings=["a"])
    (delta,) = [event for event in stream_events(STARTED, *TEXT, end) if event["type"] == "message_delta"]
    assert delta["warnings"] == ["a"]
    read(stream_events(STARTED, *TEXT, end))  # Anthropic's client ignores unknown members
    whole = message_of("msg_1", {**end, "model": "m", "message": {"content": "Well"}}, max_tokens=9, tier="default")
    assert whole["warnings"] == ["a"]
