"""The publisher: numbering, one write for many events, retries that change nothing, runs that are void."""

from __future__ import annotations

import json
import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError

from cellama.engine import Completion, DecodeFailed, Finished, Started, Text, Timings, ToolCall, Usage, Watchdog
from cellama.tasks.broker.pool import Interruption
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.publishing.attempt_events import STRIDE
from cellama.tasks.publishing.publisher import LINE_MARK, Publisher
from cellama.tasks.publishing.results import error_event, resume_of
from cellama.tasks.publishing.signing import Signer
from cellama.tasks.state.history import Past
from cellama.tasks.state.records import Attempt, Entry

from ..conftest import wait_until

COMPLETION = Completion("ab", (1, 2), "stop", None, Usage(3, 2), Timings(1.0, 2.0, 3.0, None, None), 0, 7)


def attempt(job_id: str, number: int = 1) -> Attempt:
    return Attempt(job_id, str(number), number, 1, "run")


class MemoryLedger:
    """Keeps what is written; `failures` are raised first, one per call."""

    def __init__(self, *failures: Exception, void: str = "", torn: str = "", refused: str = "") -> None:
        self.entries: list[Entry] = []
        self.num_calls = 0
        self._failures = list(failures)
        self._void, self._torn = void, torn
        self._refused = refused

    def write(self, entries: Sequence[Entry]) -> tuple[set[int], set[int]]:
        self.num_calls += 1
        if self._failures:
            raise self._failures.pop(0)
        if any(entry.job_id == self._refused for entry in entries):
            raise ResponseError("WRONGTYPE")
        self.entries += entries
        void = {place for place, entry in enumerate(entries) if entry.job_id == self._void}
        return void, {place for place, entry in enumerate(entries) if entry.job_id == self._torn}

    def journal(self, job_id: str) -> list[dict[str, Any]]:
        return [entry.event for entry in self.entries if entry.job_id == job_id]


def publisher_of(ledger: MemoryLedger, void: list[str] | None = None) -> Publisher:
    void = void if void is not None else []

    def interrupt(run_id: str, reason: Interruption) -> None:
        void.append(f"{run_id} {reason.name}")

    return Publisher(ledger, "w", interrupt, Signer(None))  # type: ignore[arg-type]


def test_publisher_numbers_each_run_by_itself_and_tells_the_attempt() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    ends = [publisher.open(attempt("a")), publisher.open(attempt("b", 3), next_seq=5)]
    tell = publisher.listener("tiny")
    tell((Started("a#1", 0, 3, 0, 7), Started("b#3", 1, 3, 0, 8)))
    tell((Text("a#1", "x", (1,)), Text("b#3", "y", (2,)), Text("a#1", "z", (3,))))
    tell((Finished("a#1", COMPLETION), Finished("b#3", error=DecodeFailed("no"))))
    assert publisher.close()
    assert [(e["seq"], e["type"]) for e in ledger.journal("a")] == [
        *((0, "started"), (1, "token"), (2, "token"), (3, "done"))
    ]
    assert ledger.journal("a")[0] == {"seq": 0, **events.started("tiny", 3, "w", 7)}
    assert ledger.journal("b")[-1] == {"seq": 7, **events.error("decode_failed", "no", True)}
    assert {entry.run for entry in ledger.entries if entry.job_id == "b"} == {"3"}
    assert [entry.result is not None for entry in ledger.entries if entry.kind == "end"] == [True, False]
    assert [end.result(1) for end in ends] == [True, True]


def test_publisher_goes_on_where_an_earlier_attempt_ended() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open(attempt("a", 2), next_seq=4, started=True)
    publisher.listener("tiny")((Started("a#2", 0, 3, 0, 7), Text("a#2", "x", (1,))))
    assert publisher.close()
    assert ledger.journal("a") == [{"seq": 4, **events.token("x", [1])}]


def test_publisher_gathers_the_tokens_of_a_job_that_does_not_stream() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open(attempt("a"), streams=False)
    tell = publisher.listener("tiny")
    for token in range(STRIDE + 1):
        tell((Text("a#1", str(token), (token,)),))
    tell((Text("a#1", "x", (1, 2), index=1), Finished("a#1", COMPLETION)))
    assert publisher.close()
    first, second, other, end = ledger.journal("a")
    assert first == {"seq": 0, **events.token("01234567", list(range(STRIDE)))}
    assert second == {"seq": 1, **events.token(str(STRIDE), [STRIDE])}
    assert other == {"seq": 2, **events.token("x", [1, 2], index=1)}
    assert (end["seq"], end["type"]) == (3, "done")


def test_publisher_writes_the_parts_of_one_token_together() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open(attempt("a"), streams=False)
    tell = publisher.listener("tiny")
    tell((Text("a#1", "I ", (1,), kind="reasoning"),))
    tell(
        (
            Text("a#1", "see", (2, 3), kind="reasoning"),
            Text("a#1", "I see", (), kind="reasoning_end"),
            Text("a#1", "Yes", ()),
        )
    )
    tell((Text("a#1", ".", (4,)),))
    wait_until(lambda: len(ledger.entries) == 3, "three entries")
    assert ledger.journal("a") == [
        {"seq": 0, **events.reasoning("I see", [1, 2, 3])},
        {"seq": 1, **events.reasoning_end("", [])},
        {"seq": 2, **events.token("Yes", [])},
    ]
    assert publisher.close()


def test_publisher_tells_of_the_first_token_once_it_is_written() -> None:
    ledger, told = MemoryLedger(), []
    publisher = publisher_of(ledger)
    publisher.open(attempt("a"), on_token=lambda: told.append(len(ledger.entries)))
    publisher.listener("tiny")((Started("a#1", 0, 3, 0, 7),))
    publisher.listener("tiny")((Text("a#1", "x", (1,)),))
    assert publisher.close()
    assert told == [2]


@pytest.mark.parametrize(("problem", "reason"), [("void", "SUPERSEDED"), ("torn", "HANDED_BACK")])
def test_publisher_ends_a_run_that_may_not_write(problem: str, reason: str) -> None:
    ledger, void = MemoryLedger(**{problem: "a"}), []  # type: ignore[arg-type]
    publisher = publisher_of(ledger, void)
    ended, other = publisher.open(attempt("a")), publisher.open(attempt("b"))
    publisher.publish("a#1", events.token("x", [1]))
    assert ended.result(10) is False
    assert void == [f"a#1 {reason}"]
    publisher.publish("a#1", events.done("stop", {}))
    publisher.publish("b#1", events.done("stop", {}))
    assert publisher.close()
    assert len(ledger.journal("a")) == 1
    assert other.result(1) is True


def test_publisher_writes_what_is_gathered_and_nothing_more_of_a_run_that_is_handed_back() -> None:
    ledger, void = MemoryLedger(), []
    publisher = publisher_of(ledger, void)
    ended = publisher.open(attempt("a"), streams=False)
    tell = publisher.listener("tiny")
    tell((Text("a#1", "x", (1,)),))
    publisher.hand_back("a#1")
    tell((Text("a#1", "y", (2,)), Finished("a#1", COMPLETION)))
    assert publisher.close()
    assert ended.result(1) is False
    assert ledger.journal("a") == [{"seq": 0, **events.token("x", [1])}]
    assert void == []


def test_publisher_goes_on_when_redis_refuses_the_events_of_one_job() -> None:
    ledger, void = MemoryLedger(refused="broken"), []
    publisher = publisher_of(ledger, void)
    ended = publisher.open(attempt("broken"))
    publisher.open(attempt("good"))
    publisher.listener("tiny")((Finished("broken#1", COMPLETION), Finished("good#1", COMPLETION)))
    assert publisher.close()
    assert [e["seq"] for e in ledger.journal("good")] == [0]
    assert ended.result(1) is False
    assert void == ["broken#1 SUPERSEDED"]


def test_publisher_writes_again_what_redis_did_not_take() -> None:
    ledger = MemoryLedger(RedisConnectionError("gone"), RedisConnectionError("still gone"))
    publisher = publisher_of(ledger)
    ended = publisher.open(attempt("a"))
    publisher.publish("a#1", events.done("stop", {}))
    assert ended.result(10) is True
    assert publisher.close()
    assert ledger.num_calls == 3
    assert [e["seq"] for e in ledger.journal("a")] == [0]


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


def test_publisher_that_can_not_go_on_ends_the_process() -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    publisher = publisher_of(MemoryLedger(ZeroDivisionError()))
    Watchdog(end=reasons.put).watch(publisher.pulse)
    publisher.open(attempt("a"))
    publisher.publish("a#1", events.done("stop", {}))
    assert reasons.get(timeout=10) == "thread 'cellama-publisher' died: ZeroDivisionError: "


def test_publisher_that_waits_for_redis_does_not_hang() -> None:
    asked, answer = threading.Event(), threading.Event()
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    write = ledger.write
    ledger.write = lambda entries: (asked.set(), answer.wait(30), write(entries))[-1]  # type: ignore[assignment]
    publisher.open(attempt("a"))
    publisher.publish("a#1", events.done("stop", {}))
    assert asked.wait(10)
    assert publisher.pulse.step is None
    answer.set()
    assert publisher.close()
    assert publisher.pulse.closed


@pytest.mark.parametrize("passing", [OutOfMemoryError("no room"), ResponseError("MISCONF no disk")])
def test_publisher_waits_while_redis_takes_no_writes(passing: Exception) -> None:
    ledger = MemoryLedger(passing)
    publisher = publisher_of(ledger)
    ended = publisher.open(attempt("a"))
    publisher.publish("a#1", events.done("stop", {}))
    assert ended.result(10) is True
    assert publisher.close()


def test_events_are_written_in_pages_that_redis_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellama.tasks.publishing.publisher.MAX_BATCH_BYTES", 1000)
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    ended = publisher.open(attempt("a"))
    publisher.listener("tiny")((*(Text("a#1", "x" * 400, (1,)) for _ in range(5)), Finished("a#1", COMPLETION)))
    assert ended.result(10) is True
    assert publisher.close()
    assert ledger.num_calls == 3
    assert [event["seq"] for event in ledger.journal("a")] == list(range(6))


def test_events_carry_what_mirostat_has_learned_and_the_past_reads_the_last() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open(attempt("a"), streams=False)
    tell = publisher.listener("tiny")
    for token in range(STRIDE):
        tell((Text("a#1", str(token), (token,), mirostat_mu=token / 3),))
    tell((Text("a#1", "x", (1, 2), index=1), Finished("a#1", COMPLETION)))
    assert publisher.close()
    past = Past()
    for event in ledger.journal("a"):
        past.add(json.loads(json.dumps(event)))
    learned, fresh = resume_of(past, 2)
    assert (learned.tokens, learned.mirostat_mu) == (tuple(range(STRIDE)), (STRIDE - 1) / 3)
    assert fresh.mirostat_mu is None


class Large(dict[str, Any]):
    """A result that can be looked at from afar."""


def test_publisher_that_waits_keeps_nothing_of_the_last_result() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    ended = publisher.open(attempt("a"))
    result = Large(text="ab")
    seen = weakref.ref(result)
    publisher.publish("a#1", events.done("stop", {}), result)
    assert ended.result(30)
    del result
    ledger.entries.clear()
    wait_until(lambda: seen() is None, "the result gone")
    assert publisher.close()
