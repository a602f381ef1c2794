"""Check that each job ends once when its worker and half of the journals are lost.

Journals of unfinished jobs must not expire while no worker is running, even after `journal_ttl_s`. Half of these
journals are then deleted, as if they had expired. Jobs without a journal end with `stream_trimmed`, and the other jobs
resume. No job may be repeated endlessly, and both the journal and Celery's result must contain each job's outcome.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from celery import states

from cellama.bench.harness.reference_texts import ReferenceText
from cellama.bench.harness.service import Service, wait_until
from cellama.tasks.contract.events import is_terminal
from cellama.tasks.contract.keys import job_key, journal_key

from .outcomes import (
    broken_promises,
    compare_text,
    ends_row,
    has_final_state,
    is_clean,
    is_whole,
    journal_of,
    metas,
    num_attempts,
    wait_until_quiet,
)
from .scenario import Scenario, shown

WAYS = ("killed", "handed back")  # how workers stop
JOURNAL_TTL_S = 1
SETTINGS = {"lease_s": "3", "drain_s": "0", "journal_ttl_s": str(JOURNAL_TTL_S)}
MOST_JOBS = 24
NUM_CANCELLED = 2  # jobs to cancel while no worker runs, in each of the first two attempts
NUM_LATE = 2
LATE_AFTER_S = 5  # timeout of the late jobs; the next workers take longer to start
FEW_EVENTS = 3  # events of a job before its worker stops
SLOW_S = 0.1  # seconds per step until then
QUIET_S = 45.0  # seconds without a new end, after which the other jobs count as stuck; longer than any wait of a reaper
FAIR_ATTEMPTS = 3  # attempts at a job whose worker stopped once; each further attempt is a rerun


class ExpiryScenario(Scenario):
    """A scenario in which journals expire while no worker is running."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        super().__init__(service, args)
        self._redis: Any = service.redis

    def expired(self, undisturbed: Sequence[ReferenceText]) -> tuple[list[dict[str, Any]], list[str]]:
        """Kill the workers or let them hand back their jobs, and return rows and violations."""
        rows = [shown(self._run_one(way, undisturbed)) for way in self._args.ways]
        return rows, [line for row in rows for line in _wrong(row)]

    def _run_one(self, way: str, undisturbed: Sequence[ReferenceText]) -> dict[str, Any]:
        num_workers = len(self._service.processes)
        with self._service.counting_results() as stored:
            with self._service.slowed(SLOW_S):
                late = self._submit_late()
                jobs = [*late, *(job.id for job in self.submit(count=MOST_JOBS))]
                begun = wait_until(lambda: self._begun(jobs), "started jobs in every worker")
                self._service.end_workers(signal.SIGTERM if way == "handed back" else signal.SIGKILL)
                lengths = {job_id: self._num_events(job_id) for job_id in jobs}  # more may have started meanwhile
                begun = sorted(filter(lengths.get, jobs), key=lambda job_id: -lengths[job_id])
                cancelled = self._cancel(begun[-NUM_CANCELLED:])  # while their workers still seem to hold them
                time.sleep(JOURNAL_TTL_S + 1.0)
                kept = list(filter(self._num_events, begun))
                expired = [job_id for job_id in begun if self._redis.hget(job_key(job_id), "state") != b"done"][::2]
                self._redis.delete(*map(journal_key, expired))
                for _ in range(num_workers):
                    self._service.start_worker()
                self._service.wait_ready()
                resumed = [job_id for job_id in expired if job_id not in (*cancelled, *late)][:NUM_CANCELLED]
                wait_until(lambda: all(map(self._is_tried_again, resumed)), "second attempts")
                cancelled += self._cancel(resumed)  # before they have as many events as in the first attempt
            self._wait(jobs)
        return {
            "scenario": "expired",
            "way": way,
            "jobs": len(jobs),
            "begun": len(begun),
            "kept": len(kept),
            "expired": len(expired),
            "cancelled": len(cancelled),
            "late": len(set(late) & set(begun)),
            **self._check(jobs[NUM_LATE:], late, undisturbed, stored.states),
        }

    def _submit_late(self) -> list[str]:
        """Queue jobs that start before the other jobs and time out before the next worker starts."""
        from cellama.tasks import generate

        params: Any = {"max_tokens": self._args.new, "temperature": 0, "ignore_eos": True, "timeout": LATE_AFTER_S}
        return [generate.delay("tiny", f"Late {number}", priority=0, **params).id for number in range(NUM_LATE)]

    def _num_events(self, job_id: str) -> int:
        return int(self._redis.xlen(journal_key(job_id)))

    def _begun(self, jobs: Sequence[str]) -> list[str]:
        """Return the ids of started jobs, or an empty list until enough of these jobs have tokens in their journals."""
        begun = [job_id for job_id in jobs if self._num_events(job_id)]
        streaming = [job_id for job_id in begun if self._num_events(job_id) >= FEW_EVENTS]
        return begun if len(streaming) >= NUM_CANCELLED else []

    def _is_tried_again(self, job_id: str) -> bool:
        """Return whether the job is running in a later attempt or has ended."""
        state, attempt = self._redis.hmget(job_key(job_id), "state", "attempt")
        return bool(state == b"done" or (state == b"running" and int(attempt) > 1))

    def _cancel(self, job_ids: Sequence[str]) -> list[str]:
        from cellama.api import Client

        with Client() as client:
            for job_id in job_ids:
                client.cancel(job_id)
        return list(job_ids)

    def _wait(self, jobs: Sequence[str]) -> None:
        """Wait until journals and Celery's results contain each job's outcome, or no job has ended for a while."""

        def num_ended() -> int:
            journals = [journal_of(self._redis, job_id) for job_id in jobs]
            in_journals = sum(any(map(is_terminal, events)) for events in journals)
            return in_journals + sum(map(has_final_state, metas(self._redis, jobs)))

        wait_until_quiet(num_ended, lambda num: num == 2 * len(jobs) and is_clean(self._redis, jobs), QUIET_S)

    def _check(
        self,
        jobs: Sequence[str],
        late: Sequence[str],
        undisturbed: Sequence[ReferenceText],
        stored: dict[str, list[str]],
    ) -> dict[str, Any]:
        everything = [*jobs, *late]
        journals = {job_id: journal_of(self._redis, job_id) for job_id in everything}
        texts: Counter[str] = Counter()
        num_torn = 0
        for job_id, meta, expected in zip(jobs, metas(self._redis, jobs), undisturbed, strict=False):
            if meta.get("status") == states.SUCCESS:
                text = meta["result"]["text"]
                texts[compare_text(job_id, text, expected)] += 1
                num_torn += not is_whole(journals[job_id], text)
        how = Counter(map(_how_it_ended, journals.values()))
        return {
            **ends_row(self._redis, everything, stored),
            "trimmed": how["stream_trimmed"],
            "how": ", ".join(f"{number} {name}" for name, number in sorted(how.items())),
            "torn": num_torn,
            "texts off": texts["other"],
            "texts tied": texts["tied"],
            "reruns": sum(max(0, number - FAIR_ATTEMPTS) for number in num_attempts(self._redis, everything)),
        }


def _how_it_ended(events: Sequence[Any]) -> str:
    """Return the finish reason or the error code in the last event."""
    last = events[-1] if events else {"type": "nothing"}
    if last["type"] not in ("done", "error"):
        return "without an end"
    return str(last["finish_reason"] if last["type"] == "done" else last["code"])


def _wrong(row: dict[str, Any]) -> list[str]:
    """Return a line for each violated guarantee."""
    where = f"expired: {row['way']}"
    none = ("stored otherwise", "torn", "texts off", "reruns")
    lines = broken_promises(where, row, ("ended once", "stored"), none)
    if not row["begun"] == row["kept"] > 0:
        lines.append(f"{where}: {row['kept']} journals of {row['begun']} started jobs still exist")
    if row["trimmed"] > row["expired"]:
        lines.append(
            f"{where}: {row['trimmed']} jobs ended with stream_trimmed, but only {row['expired']} journals have expired"
        )
    return lines
