"""Provide journals as workers write them, and the record of a response."""

from __future__ import annotations

from typing import Any

from cellama.api.openai.responses.bodies import response_fields
from cellama.api.openai.responses.record import ResponseRecord
from cellama.tasks.contract import events
from cellama.tasks.contract.shapes.results import usage_of

CALL: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PROB: Any = {"token": 1, "logprob": -0.5, "top": [], "text": "Hi", "top_texts": []}
STARTED = events.started("tiny", 3, "w", 7)
ID = "resp_" + "0" * 32


def done(reason: Any = "stop", **details: Any) -> Any:
    usage = usage_of(prompt_tokens=3, completion_tokens=4)
    return events.done(reason, usage, timings={"duration_ms": 2500.0}, finish_key="k", **details)


PROBS: Any = [{**PROB, "text": text} for text in ("Hm", "Hi")]
REASONING = (events.reasoning("Hm", [1]), events.reasoning(", so", [2, 3]), events.reasoning_end("sig", [4]))
TEXT = (events.token("Hi", [5], logprobs=[PROB]), events.token("", [6]), events.token(" there", [7]))
PIECES = (
    events.token("So", [5], tool_call_deltas=[{"index": 0, "id": "c1", "name": "f", "arguments": ""}]),
    events.token("", [6], tool_call_deltas=[{"index": 0, "arguments": '{"a'}]),
    events.token("", [7], tool_call_deltas=[{"index": 0, "arguments": '": 1}'}]),
)
CUT_CALL: Any = {**CALL, "function": {"name": "f", "arguments": '{"a'}, "partial": True}
JOURNALS: dict[str, tuple[Any, ...]] = {
    "text": (STARTED, *TEXT, done()),
    "reasoning": (STARTED, *REASONING, *TEXT, done()),
    "calls": (STARTED, *REASONING, done(tool_calls=[CALL, {**CALL, "id": "c2"}])),
    "text and call": (STARTED, *TEXT, done(tool_calls=[CALL])),
    "call in pieces": (STARTED, *PIECES, done(tool_calls=[CALL])),
    "calls in pieces": (
        STARTED,
        *PIECES,
        events.token("", [8], tool_call_deltas=[{"index": 1, "id": "c2", "name": "f", "arguments": "{}"}]),
        done(tool_calls=[CALL, {**CALL, "id": "c2", "function": {"name": "f", "arguments": "{}"}}]),
    ),
    "call that an older worker ends": (STARTED, *PIECES[:2], done(tool_calls=[CALL, {**CALL, "id": "c2"}])),
    "call that an older worker starts": (STARTED, events.token("So", [5]), PIECES[2], done(tool_calls=[CALL])),
    "call with text after it": (STARTED, *PIECES, events.token("Hm", [8]), done(tool_calls=[CALL])),
    "call that is cut off": (STARTED, *PIECES[:2], done("length", tool_calls=[CUT_CALL])),
    "failed in a call": (STARTED, *PIECES[:2], events.error("internal", "no more memory")),
    "nothing": (STARTED, done()),
    "warned": (STARTED, *TEXT, done(warnings=["a"])),
    "cut off": (STARTED, *TEXT, done("length")),
    "out of time": (done("timeout"),),
    "cut off in thought": (STARTED, *REASONING[:2], done("length")),
    "stopped in thought": (STARTED, *REASONING[:2], done(stop_sequence="so")),
    "cancelled": (STARTED, *TEXT[:1], done("cancelled")),
    "failed": (STARTED, *TEXT[:1], events.error("internal", "no more memory")),
    "failed at once": (events.error("prompt_too_long", "9 tokens"),),
}


def record(**fields: Any) -> ResponseRecord:
    body = {"model": "tiny", "input": "Hello", "metadata": {"a": "b"}, **fields.pop("body", {})}
    given: dict[str, Any] = {
        "tenant": "acme",
        "job_id": "j",
        "digest": "",
        "created_at": 1000,
        "model": "tiny",
        "items": [],
        "params": {},
    }
    return ResponseRecord(
        **{
            "id": ID,
            "shown": {**response_fields(body, {}), "model": "tiny", "service_tier": "default"},
            **given,
            **fields,
        }
    )
