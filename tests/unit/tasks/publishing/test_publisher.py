"""The publisher numbers events, writes many at once, retries without effects, and drops superseded attempts."""

from __future__ import annotations

import json
import queue
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from cellama.engine import Context, DecodeFailed, Finished, Started, Text, ToolCallDelta, Watchdog
from cellama.tasks.broker.pool import Interruption
from cellama.tasks.broker.result_backend import CeleryEnd
from cellama.tasks.connection.redis_errors import RefusedForNow
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import context_key
from cellama.tasks.publishing.publisher import LINE_MARK, STRIDE
from cellama.tasks.publishing.results import resume_of
from cellama.tasks.state.history import Past
from cellama.tasks.state.ledger import CeleryState

from ....conftest import PATIENCE_S, wait_until
from .memory_ledger import COMPLETION, MemoryLedger, publisher_of


def test_publisher_numbers_events_of_each_attempt_separately_and_stores_its_outcome() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    ends = [publisher.open_job("a"), publisher.open_job("b", 3, next_seq=5)]
    report = publisher.listener("tiny")
    report((Started("a#1", 0, 3, 0, 7), Started("b#3", 1, 3, 0, 8)))
    report((Text("a#1", "x", (1,)), Text("b#3", "y", (2,)), Text("a#1", "z", (3,))))
    report((Finished("a#1", COMPLETION), Finished("b#3", error=DecodeFailed("no"))))
    assert publisher.close()
    assert [(e["seq"], e["type"]) for e in ledger.journal("a")] == [
        *((0, "started"), (1, "token"), (2, "token"), (3, "done"))
    ]
    assert ledger.journal("a")[0] == {"seq": 0, **events.started("tiny", 3, "w", 7)}
    assert ledger.journal("b")[-1] == {"seq": 7, **events.error("decode_failed", "no", True)}
    assert {entry.run for entry in ledger.entries if entry.job_id == "b"} == {"3"}
    assert [entry.result is not None for entry in ledger.entries if entry.event_class == "terminal"] == [True, False]
    assert [end.ended.result(1) for end in ends] == [True, True]


def test_publisher_continues_the_numbers_of_an_earlier_attempt() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open_job("a", 2, next_seq=4, started=True)
    publisher.listener("tiny")((Started("a#2", 0, 3, 0, 7), Text("a#2", "x", (1,))))
    assert publisher.close()
    assert ledger.journal("a") == [{"seq": 4, **events.token("x", [1])}]


def test_publisher_gathers_tokens_when_the_job_does_not_stream() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open_job("a", streams=False)
    report = publisher.listener("tiny")
    for token in range(STRIDE + 1):
        report((Text("a#1", str(token), (token,)),))
    report((Text("a#1", "x", (1, 2), index=1), Finished("a#1", COMPLETION)))
    assert publisher.close()
    first, second, other, end = ledger.journal("a")
    assert first == {"seq": 0, **events.token("01234567", list(range(STRIDE)))}
    assert second == {"seq": 1, **events.token(str(STRIDE), [STRIDE])}
    assert other == {"seq": 2, **events.token("x", [1, 2], index=1)}
    assert (end["seq"], end["type"]) == (3, "done")


def test_publisher_joins_the_parts_of_one_token() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open_job("a", streams=False)
    report = publisher.listener("tiny")
    report((Text("a#1", "I ", (1,), kind="reasoning"),))
    report(
        (
            Text("a#1", "see", (2, 3), kind="reasoning"),
            Text("a#1", "I see", (), kind="reasoning_end"),
            Text("a#1", "Yes", ()),
        )
    )
    report((Text("a#1", ".", (4,)),))
    wait_until(lambda: len(ledger.entries) == 3, "three entries")
    assert ledger.journal("a") == [
        {"seq": 0, **events.reasoning("I see", [1, 2, 3])},
        {"seq": 1, **events.reasoning_end("", [])},
        {"seq": 2, **events.token("Yes", [])},
    ]
    assert publisher.close()


def test_publisher_keeps_all_pieces_of_calls_when_the_job_does_not_stream() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open_job("a", streams=False)
    report = publisher.listener("tiny")
    report((Text("a#1", "So", (1,)), Text("a#1", "", (2,), calls=(ToolCallDelta(0, "look"),))))
    report((Text("a#1", "", (3,), calls=(ToolCallDelta(0, arguments="{}"),)), Finished("a#1", COMPLETION)))
    assert publisher.close()
    (first, second) = ledger.journal("a")[0]["tool_call_deltas"]
    assert (first["name"], first["arguments"], second) == ("look", "", {"index": 0, "arguments": "{}"})
    assert (ledger.journal("a")[0]["text"], ledger.journal("a")[0]["tokens"]) == ("So", [1, 2, 3])


def test_publisher_reports_a_token_after_writing_it() -> None:
    ledger, received = MemoryLedger(), []
    publisher = publisher_of(ledger)
    publisher.open_job("a", on_token=lambda: received.append(len(ledger.entries)))
    publisher.listener("tiny")((Started("a#1", 0, 3, 0, 7),))
    publisher.listener("tiny")((Text("a#1", "x", (1,)),))
    assert publisher.close()
    assert received == [2]


@pytest.mark.parametrize(("problem", "reason"), [("void", Interruption.SUPERSEDED), ("torn", Interruption.HANDED_BACK)])
def test_publisher_interrupts_a_superseded_attempt(problem: str, reason: Interruption) -> None:
    ledger = MemoryLedger(**{problem: "a"})  # type: ignore[arg-type]
    publisher = publisher_of(ledger)
    stream, other = publisher.open_job("a"), publisher.open_job("b")
    stream.publish(events.token("x", [1]))
    assert stream.ended.result(10) is False
    assert stream.control.interruption is reason
    stream.publish(events.done("stop", {}))
    other.publish(events.done("stop", {}))
    assert publisher.close()
    assert len(ledger.journal("a")) == 1
    assert other.ended.result(1) is True


def test_publisher_writes_only_gathered_tokens_of_an_attempt_that_is_handed_back() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    stream = publisher.open_job("a", streams=False)
    report = publisher.listener("tiny")
    report((Text("a#1", "x", (1,)),))
    stream.hand_back()
    report((Text("a#1", "y", (2,)), Finished("a#1", COMPLETION)))
    assert publisher.close()
    assert stream.ended.result(1) is False
    assert ledger.journal("a") == [{"seq": 0, **events.token("x", [1])}]
    assert stream.control.interruption is None


def test_publisher_continues_when_redis_refuses_the_events_of_one_job() -> None:
    ledger = MemoryLedger(refused="broken")
    publisher = publisher_of(ledger)
    stream = publisher.open_job("broken")
    publisher.open_job("good")
    publisher.listener("tiny")((Finished("broken#1", COMPLETION), Finished("good#1", COMPLETION)))
    assert publisher.close()
    assert [e["seq"] for e in ledger.journal("good")] == [0]
    assert stream.ended.result(1) is False
    assert stream.control.interruption is Interruption.SUPERSEDED


def test_publisher_retries_events_that_redis_did_not_accept() -> None:
    ledger = MemoryLedger(RedisConnectionError("gone"), RedisConnectionError("still gone"))
    publisher = publisher_of(ledger)
    stream = publisher.open_job("a")
    stream.publish(events.done("stop", {}))
    assert stream.ended.result(10) is True
    assert publisher.close()
    assert ledger.num_calls == 3
    assert [e["seq"] for e in ledger.journal("a")] == [0]


def test_process_exits_when_the_publisher_fails() -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    publisher = publisher_of(MemoryLedger(ZeroDivisionError()))
    Watchdog(end=reasons.put).watch(publisher.pulse)
    publisher.open_job("a").publish(events.done("stop", {}))
    assert reasons.get(timeout=10) == "thread 'cellama-publisher' failed: ZeroDivisionError: "


def test_publisher_waiting_for_redis_does_not_count_as_hanging() -> None:
    requested, answer = threading.Event(), threading.Event()
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    write = ledger.write
    ledger.write = lambda entries: (requested.set(), answer.wait(30), write(entries))[-1]  # type: ignore[assignment]
    publisher.open_job("a").publish(events.done("stop", {}))
    assert requested.wait(10)
    assert publisher.pulse.step is None
    answer.set()
    assert publisher.close()
    assert publisher.pulse.closed


def test_publisher_waits_while_redis_refuses_writes() -> None:
    ledger = MemoryLedger(RefusedForNow("OOM", "no room"))
    publisher = publisher_of(ledger)
    stream = publisher.open_job("a")
    stream.publish(events.done("stop", {}))
    assert stream.ended.result(10) is True
    assert publisher.close()


def test_events_are_written_in_pages_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellama.tasks.publishing.publisher.MAX_BATCH_BYTES", 1500)
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    stream = publisher.open_job("a")
    publisher.listener("tiny")((*(Text("a#1", "x" * 400, (1,)) for _ in range(5)), Finished("a#1", COMPLETION)))
    assert stream.ended.result(10) is True
    assert publisher.close()
    assert ledger.num_calls == 3
    assert [event["seq"] for event in ledger.journal("a")] == list(range(6))


def test_events_contain_the_mirostat_state_and_resuming_uses_the_last_state() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open_job("a", streams=False)
    report = publisher.listener("tiny")
    for token in range(STRIDE):
        report((Text("a#1", str(token), (token,), mirostat_mu=token / 3),))
    report((Text("a#1", "x", (1, 2), index=1), Finished("a#1", COMPLETION)))
    assert publisher.close()
    past = Past()
    for event in ledger.journal("a"):
        past.add(json.loads(json.dumps(event)))
    learned, fresh = resume_of(past, 2)
    assert (learned.tokens, learned.mirostat_mu) == (tuple(range(STRIDE)), (STRIDE - 1) / 3)
    assert fresh.mirostat_mu is None


class Large(dict[str, Any]):
    """A result that a test can reference weakly."""


def test_idle_publisher_does_not_keep_the_last_result_in_memory() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    stream = publisher.open_job("a")
    result = Large(text="ab")
    seen = weakref.ref(result)
    stream.publish(events.done("stop", {}), result)
    assert stream.ended.result(30)
    del result
    ledger.entries.clear()
    wait_until(lambda: seen() is None, "the result gone")
    assert publisher.close()


def test_celery_receives_the_outcome_with_the_last_event_unless_the_job_fails() -> None:
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    ways = {
        "received": CeleryEnd(lambda result: CeleryState(b"received", 9), "token"),
        "interrupted": CeleryEnd(lambda result: None, "token"),
        "failed": CeleryEnd(lambda result: CeleryState(b"received", 9), "token"),
    }
    ends = [publisher.open_job(job_id, celery_end=way) for job_id, way in ways.items()]
    report = publisher.listener("tiny")
    report((Finished("received#1", COMPLETION), Finished("interrupted#1", COMPLETION)))
    report((Finished("failed#1", error=DecodeFailed("no")),))
    assert [end.ended.result(PATIENCE_S) for end in ends] == [True] * 3
    assert publisher.close()
    written = {entry.job_id: entry for entry in ledger.entries}
    assert (written["received"].stored, written["received"].token, written["received"].result) == (
        CeleryState(b"received", 9),
        "token",
        None,
    )
    assert written["interrupted"].stored is None
    assert written["interrupted"].result is not None
    assert [way.result is not None for way in ways.values()] == [True, False, False]


def test_last_event_of_a_job_contains_contexts_but_last_event_of_a_line_does_not() -> None:
    context = Context(b"an identity", (), "", (5, 6, 7), (1, 2))
    done = replace(COMPLETION, context=context, alternatives=(replace(COMPLETION, index=1, context=context),))
    ledger = MemoryLedger()
    publisher = publisher_of(ledger)
    publisher.open_job("a")
    publisher.open_job("b")
    publisher.listener("tiny")((Finished("a#1", done), Finished(f"b#1{LINE_MARK}0", done)))
    assert publisher.close()
    of_job, of_line = ledger.entries
    assert [key for key, _ in of_job.contexts] == [context_key(context.key)]  # the alternative has the same context
    assert of_job.event["finish_key"] == context.key
    assert of_line.event["result"]["finish_key"] == context.key
    assert of_line.contexts == ()
