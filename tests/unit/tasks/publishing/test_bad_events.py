"""Events that can not be told, or not be written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cellama.engine import Finished, Started, Text, ToolCall
from cellama.tasks.broker.pool import Interruption
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.publishing.publisher import LINE_MARK, Publisher
from cellama.tasks.publishing.results import error_event
from cellama.tasks.publishing.signing import Signer

from .memory_ledger import COMPLETION, MemoryLedger, attempt, publisher_of

HALF = "\ud800"  # of a surrogate pair, which has no UTF-8


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def test_text_without_utf8_reaches_readers_as_valid_text() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    ended, other = publisher.open(attempt("a")), publisher.open(attempt("b"))
    calls = (ToolCall("f", f'{{"city": "{HALF}"}}'),)
    publisher.listener("tiny")((Text("a#1", f"x{HALF}", (1,)), Finished("a#1", replace(COMPLETION, tool_calls=calls))))
    publisher.publish("b#1", error_event(JobFailed("invalid_request", f"{HALF} is no name")))
    assert ended.result(10) is True
    assert other.result(10) is True
    assert publisher.close()
    text, done = (json.loads(entry.event_json) for entry in ledger.entries if entry.job_id == "a")
    assert text["text"] == "x?"
    assert done["tool_calls"][0]["function"]["arguments"] == '{"city": "\ufffd"}'
    assert json.loads(ledger.entries[-1].event_json)["message"] == "\ufffd is no name"


@pytest.mark.parametrize("odd", [{1, 2}, deep(), object(), 10**5000], ids=["set", "deep", "object", "huge"])
def test_event_that_can_not_be_written_ends_its_run_and_no_other(odd: Any) -> None:
    ledger, interrupted = MemoryLedger(), []
    publisher = Publisher(ledger, "w", lambda *run: interrupted.append(run), Signer(None))  # type: ignore[arg-type]
    ended, other = publisher.open(attempt("a")), publisher.open(attempt("b"))
    tell = publisher.listener("tiny")
    tell((Started("a#1", 0, 3, 0, 7), Text("b#1", "y", (2,))))
    publisher.publish("a#1", events.token("x", odd))
    tell((Text("a#1", "z", (1,)), Finished("a#1", COMPLETION), Finished("b#1", COMPLETION)))
    with pytest.raises(JobFailed, match="an event could not be written") as caught:
        ended.result(10)
    assert other.result(10) is True
    assert publisher.close()
    failure = events.error("internal_error", str(caught.value), False)
    assert ledger.journal("a")[1:] == [{"seq": 1, **failure}]
    assert interrupted == [("a#1", Interruption.FAILED)]
    assert [event["type"] for event in ledger.journal("b")] == ["token", "done"]


def test_engine_event_that_can_not_be_told_ends_its_run_after_what_is_gathered() -> None:
    ledger = MemoryLedger()
    publisher = Publisher(ledger, "w", lambda *_: None, Signer(None))  # type: ignore[arg-type]
    ended = publisher.open(attempt("a"), streams=False)
    publisher.listener("tiny")((Text("a#1", "x", (1,)), Text("a#1", "y", (2,), logprobs=(object(),))))  # type: ignore[arg-type]
    with pytest.raises(JobFailed, match="AttributeError"):
        ended.result(10)
    assert publisher.close()
    assert [event["type"] for event in ledger.journal("a")] == ["token", "error"]


def test_line_that_can_not_be_written_fails_and_the_chunk_goes_on() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    ended = publisher.open(attempt("a"), streams=False)
    publisher.publish("a#1", events.line(0, {"result": {"text": object()}}))
    broken = Finished(f"a#1{LINE_MARK}1", replace(COMPLETION, logprobs=(object(),)))  # type: ignore[arg-type]
    publisher.listener("tiny")((broken,))
    publisher.publish("a#1", events.done("stop", {}))
    assert ended.result(10) is True
    assert publisher.close()
    first, second, done = ledger.journal("a")
    assert [event["error"]["code"] for event in (first, second)] == ["internal_error"] * 2
    assert (second["line"], done["seq"]) == (1, 2)
