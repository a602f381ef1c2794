"""A ledger in memory, and publishers on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import ResponseError

from cellama.engine import Completion, Timings, Usage
from cellama.tasks.broker.pool import JobControl
from cellama.tasks.middleware import Middlewares
from cellama.tasks.publishing.publisher import AttemptStream, Publisher
from cellama.tasks.state.ledger import Attempt, Entry

COMPLETION = Completion("ab", (1, 2), "stop", None, Usage(3, 2), Timings(1.0, 2.0, 3.0, None, None), 0, 7)


def attempt(job_id: str, number: int = 1) -> Attempt:
    return Attempt(job_id, str(number), number, 1, "run")


class MemoryLedger:
    """Stores written entries. Each of the first calls raises one of `failures`."""

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


class PublisherOfTest(Publisher):
    """A publisher that opens attempts by the ids of their jobs."""

    def open_job(self, job_id: str, number: int = 1, next_seq: int = 0, **options: Any) -> AttemptStream:
        """Open the stream of an attempt whose control interrupts nothing."""
        made = replace(attempt(job_id, number), next_seq=next_seq)
        return self.open(made, JobControl(number), **options)


def publisher_of(ledger: MemoryLedger) -> PublisherOfTest:
    return PublisherOfTest(ledger, "w", Middlewares())  # type: ignore[arg-type]
