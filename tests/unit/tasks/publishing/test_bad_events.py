"""Events that can't be converted or encoded end only their own attempt or line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cellama.engine import Finished, Started, Text, ToolCall
from cellama.tasks.broker.pool import Interruption
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.publishing.publisher import LINE_MARK
from cellama.tasks.publishing.results import error_event

from .memory_ledger import COMPLETION, MemoryLedger, publisher_of

HALF = "\ud800"  # half of a surrogate pair, which UTF-8 can't encode


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def test_text_that_is_not_valid_utf8_reaches_readers_as_valid_text() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    stream, other = publisher.open_job("a"), publisher.open_job("b")
    calls = (ToolCall("f", f'{{"city": "{HALF}"}}'),)
    publisher.listener("tiny")((Text("a#1", f"x{HALF}", (1,)), Finished("a#1", replace(COMPLETION, tool_calls=calls))))
    other.publish(error_event(JobFailed("invalid_request", f"{HALF} is no name")))
    assert stream.ended.result(10) is True
    assert other.ended.result(10) is True
    assert publisher.close()
    text, done = (json.loads(entry.event_json) for entry in ledger.entries if entry.job_id == "a")
    assert text["text"] == "x?"
    assert done["tool_calls"][0]["function"]["arguments"] == '{"city": "\ufffd"}'
    assert json.loads(ledger.entries[-1].event_json)["message"] == "\ufffd is no name"


@pytest.mark.parametrize(
    "odd",
    [*(events.token("x", odd) for odd in ({1, 2}, deep(), object(), 10**5000)), {"type": "in no table"}],  # type: ignore[arg-type]
    ids=["set", "deep", "object", "huge", "type"],
)
def test_unwritable_event_ends_only_its_attempt(odd: Any) -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    stream, other = publisher.open_job("a"), publisher.open_job("b")
    report = publisher.listener("tiny")
    report((Started("a#1", 0, 3, 0, 7), Text("b#1", "y", (2,))))
    stream.publish(odd)
    report((Text("a#1", "z", (1,)), Finished("a#1", COMPLETION), Finished("b#1", COMPLETION)))
    with pytest.raises(JobFailed, match="an event could not be written") as caught:
        stream.ended.result(10)
    assert other.ended.result(10) is True
    assert publisher.close()
    failure = events.error("internal_error", str(caught.value), False)
    assert ledger.journal("a")[1:] == [{"seq": 1, **failure}]
    assert (stream.control.interruption, other.control.interruption) == (Interruption.FAILED, None)
    assert [event["type"] for event in ledger.journal("b")] == ["token", "done"]


def test_unconvertible_event_ends_its_attempt_after_gathered_tokens_are_written() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    stream = publisher.open_job("a", streams=False)
    publisher.listener("tiny")((Text("a#1", "x", (1,)), Text("a#1", "y", (2,), logprobs=(object(),))))  # type: ignore[arg-type]
    with pytest.raises(JobFailed, match="AttributeError"):
        stream.ended.result(10)
    assert publisher.close()
    assert [event["type"] for event in ledger.journal("a")] == ["token", "error"]


def test_unwritable_line_fails_and_its_chunk_continues() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    stream = publisher.open_job("a", streams=False)
    stream.publish(events.line(0, {"result": {"text": object()}}))
    broken = Finished(f"a#1{LINE_MARK}1", replace(COMPLETION, logprobs=(object(),)))  # type: ignore[arg-type]
    publisher.listener("tiny")((broken,))
    stream.publish(events.done("stop", {}))
    assert stream.ended.result(10) is True
    assert publisher.close()
    first, second, done = ledger.journal("a")
    assert [event["error"]["code"] for event in (first, second)] == ["internal_error"] * 2
    assert (second["line"], done["seq"]) == (1, 2)
