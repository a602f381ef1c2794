"""The publisher: numbering, one write for many events, retries that change nothing, runs that are void."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from cellama.engine import Completion, DecodeFailed, Finished, Started, Text, Timings, Usage
from cellama.tasks.contract import events
from cellama.tasks.publisher import STRIDE, Publisher
from cellama.tasks.records import Attempt, Entry
from cellama.tasks.signing import Signer

from ..conftest import wait_until

COMPLETION = Completion("ab", (1, 2), "stop", None, Usage(3, 2), Timings(1.0, 2.0, 3.0, None, None), 0, 7)


def attempt(job_id: str, number: int = 1) -> Attempt:
    return Attempt(job_id, number, 1, "run")


class MemoryLedger:
    """Keeps what is written; `failures` are raised first, one per call."""

    def __init__(self, *failures: Exception, void: str = "", refused: str = "") -> None:
        self.entries: list[Entry] = []
        self.num_calls = 0
        self._failures = list(failures)
        self._void = void
        self._refused = refused

    def write(self, entries: Sequence[Entry]) -> set[int]:
        self.num_calls += 1
        if self._failures:
            raise self._failures.pop(0)
        if any(entry.job_id == self._refused for entry in entries):
            raise ResponseError("WRONGTYPE")
        self.entries += entries
        return {place for place, entry in enumerate(entries) if entry.job_id == self._void}

    def journal(self, job_id: str) -> list[dict[str, Any]]:
        return [entry.event for entry in self.entries if entry.job_id == job_id]


def publisher_of(ledger: MemoryLedger, void: list[str] | None = None) -> Publisher:
    void = void if void is not None else []
    return Publisher(ledger, "w", void.append, Signer(None))  # type: ignore[arg-type]


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
    assert {entry.attempt for entry in ledger.entries if entry.job_id == "b"} == {3}
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


def test_publisher_ends_a_run_whose_attempt_is_void() -> None:
    ledger, void = MemoryLedger(void="a"), []
    publisher = publisher_of(ledger, void)
    ended, other = publisher.open(attempt("a")), publisher.open(attempt("b"))
    publisher.publish("a#1", events.token("x", [1]))
    assert ended.result(10) is False
    assert void == ["a#1"]
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
    assert void == ["broken#1"]


def test_publisher_writes_again_what_redis_did_not_take() -> None:
    ledger = MemoryLedger(RedisConnectionError("gone"), RedisConnectionError("still gone"))
    publisher = publisher_of(ledger)
    ended = publisher.open(attempt("a"))
    publisher.publish("a#1", events.done("stop", {}))
    assert ended.result(10) is True
    assert publisher.close()
    assert ledger.num_calls == 3
    assert [e["seq"] for e in ledger.journal("a")] == [0]
