"""One service of real workers, one kind of trouble, and what has become of each job afterwards."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from redis.exceptions import RedisError

from cellama.bench.harness.reference_texts import LOGPROBS, ReferenceText, reference_texts
from cellama.bench.harness.service import PATIENCE_S, POISON_TOKENS, Service, Stored, wait_until
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import EVENT_FIELD, is_terminal
from cellama.tasks.contract.keys import LEASES_KEY, RUNNING_KEY, job_key, journal_key

from .live_readers import LiveReaders
from .troubles import Troubles

SOURCE = "bundled://tiny"
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")
SLOTS = 8
NUM_READERS = 8


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Write a row to stderr at once, as benchmarks of many minutes do."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def prompts(count: int) -> list[str]:
    """All different, so that nothing is right by accident."""
    return [f"Once upon a time, there were {i} friends of a little {ANIMALS[i % 6]}." for i in range(count)]


def journal_of(redis: Any, job_id: str) -> list[Any]:
    """The events in the journal of a job."""
    return [json.loads(fields[EVENT_FIELD.encode()]) for _, fields in redis.xrange(journal_key(job_id))]


def ends_once(events: Sequence[Any]) -> bool:
    """Whether the last event, and no other, is terminal, and no event is missing between the first and the last."""
    seqs = [event["seq"] for event in events]
    dense = seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else False
    return dense and [is_terminal(event) for event in events] == [False] * (len(events) - 1) + [True]


def is_whole(events: Sequence[Any], text: str) -> bool:
    """Whether the events begin with the first one, end once, and have this text."""
    return ends_once(events) and events[0]["seq"] == 0 and "".join(event.get("text", "") for event in events) == text


def num_attempts(redis: Any, job_ids: Sequence[str]) -> list[int]:
    """How often a worker has begun each job."""
    pipeline = redis.pipeline()
    for job_id in job_ids:
        pipeline.hget(job_key(job_id), "attempt")
    return [int(attempt or 0) for attempt in pipeline.execute()]


def is_clean(redis: Any, job_ids: Sequence[str]) -> bool:
    """Whether all these jobs have ended, no message is held and nothing runs."""
    pipeline = redis.pipeline()
    for job_id in job_ids:
        pipeline.hget(job_key(job_id), "state")
    pipeline.zcard(LEASES_KEY)
    pipeline.zcard(RUNNING_KEY)
    *states, num_leases, num_running = pipeline.execute()
    return not num_leases and not num_running and set(states) <= {b"done"}


class Scenario:
    """One service, one kind of trouble."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        self._service = service
        self._args = args

    def run(self, name: str, undisturbed: Sequence[ReferenceText]) -> dict[str, Any]:
        sampled_before = self._service.num_sampled()
        pids = {name: process.pid for name, process in self._service.processes.items()}
        done = threading.Event()
        started = time.monotonic()
        with self._service.counting_results() as stored:
            troubles = self._troubles(stored)
            jobs = self.submit()
            readers = LiveReaders([job.id for job in (jobs[::2][:NUM_READERS])], PATIENCE_S)
            if name == "poison":
                poison = self._poison_job()  # urgent: it gets a slot beside jobs that run
            trouble = ThreadPoolExecutor(max_workers=1).submit(getattr(troubles, name), done)
            texts = [self._text(job) for job in jobs]
            seconds = time.monotonic() - started
            end_of_poison = self._end_of(poison) if name == "poison" else ""
            readers.close()
            done.set()
            trouble.result()
        row: dict[str, Any] = {
            "scenario": name,
            "troubles": troubles.count,
            "jobs": len(jobs),
            "seconds": round(seconds, 1),
        }
        row["unacked"] = wait_until(
            # Redis may have lost the end of a job after it was reported: then the job runs again
            lambda: is_clean(self._service.redis, [job.id for job in jobs]) and "0",
            "every job ended, every message acked",
        )
        row |= self.check(jobs, texts, undisturbed) | self._check_readers(readers, jobs, texts)
        row |= {"stored twice": stored.num_twice(), "lost": stored.num_lost}
        sampled = self._service.num_sampled() - sampled_before - troubles.num_more_tokens
        row["twice %"] = self._twice(len(jobs), sampled)
        alive = {n: p.pid for n, p in self._service.processes.items() if p.poll() is None}
        row["alive"] = f"{len(pids.items() & alive.items())}/{len(pids)}"
        return {**row, "poison": end_of_poison, "untimely": "; ".join(troubles.wrong)}

    def _troubles(self, stored: Stored) -> Troubles:
        return Troubles(self._service, self._args, stored)

    def submit(self, logprobs: int | None = None, count: int | None = None) -> list[Any]:
        """Queue all jobs of the scenario, or the first `count` of them."""
        from cellama.tasks import generate

        params = {"max_tokens": self._args.new, "temperature": 0, "ignore_eos": True, "logprobs": logprobs}
        return [
            generate.delay("tiny", prompt, stream=index % 2 == 0, **params)
            for index, prompt in enumerate(prompts(self._args.jobs)[:count])
        ]

    def undisturbed(self) -> list[ReferenceText]:
        """The texts without trouble."""
        return reference_texts([self._result(job) for job in self.submit(LOGPROBS)], SOURCE)

    def _text(self, job: Any) -> str:
        """The text, '' of a job that fails or does not end."""
        try:
            return str(self._result(job)["text"])
        except (JobFailed, TaskRevokedError, CeleryTimeoutError) as error:
            print(f"job {job.id}: {error!r}", file=sys.stderr, flush=True)
            return ""

    @staticmethod
    def _result(job: Any) -> Any:
        """What the job returns; Redis may be away meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return job.get(timeout=max(1.0, deadline - time.monotonic()))
            except (RedisError, OSError, RuntimeError):
                if time.monotonic() > deadline:
                    raise
                job.backend.result_consumer.stop()
                time.sleep(0.5)

    def _poison_job(self) -> Any:
        from cellama.tasks import generate

        return generate.delay("tiny", [300] * POISON_TOKENS, max_tokens=4, priority=0, cache_prompt=False)

    def _end_of(self, poison: Any) -> str:
        try:
            poison.get(timeout=PATIENCE_S)
        except Exception as error:
            attempts: Any = self._service.redis.hget(job_key(poison.id), "attempt")
            return f"{getattr(error, 'code', error)} after {int(attempts) - 1} attempts"
        return "finished"

    # What became of it

    def check(self, jobs: Sequence[Any], texts: Sequence[str], undisturbed: Sequence[ReferenceText]) -> dict[str, Any]:
        """Count results, torn journals, texts other than those of the undisturbed run, and attempts."""
        torn = [
            job.id
            for job, text in zip(jobs, texts, strict=True)
            if not is_whole(journal_of(self._service.redis, job.id), text)
        ]
        compared = [expected.compare(text) for text, expected in zip(texts, undisturbed, strict=True)]
        for job, kind, text, expected in zip(jobs, compared, texts, undisturbed, strict=True):
            if kind == "other":
                show_difference(job.id, expected, text)
        return {
            "results": sum(bool(text) for text in texts),
            "torn": len(torn),
            "texts off": compared.count("other"),
            "texts tied": compared.count("tied"),
            "attempts": sum(num_attempts(self._service.redis, [job.id for job in jobs])),
        }

    def _check_readers(self, readers: LiveReaders, jobs: Sequence[Any], texts: Sequence[str]) -> dict[str, Any]:
        expected = {job.id: text for job, text in zip(jobs, texts, strict=True)}
        torn = sum(text != expected[job_id] for job_id, text in readers.texts.items())
        return {"read": len(readers.texts), "read torn": torn, "gaps told": readers.num_told}

    def _twice(self, num_jobs: int, num_sampled: int) -> float:
        """TokenAllocation of tokens, in percent."""
        total: int = num_jobs * self._args.new
        return round(100 * (num_sampled - total) / total, 2)


def show_difference(job_id: str, expected: ReferenceText, text: str) -> None:
    place = expected.place_of_difference(text)
    around = slice(max(0, place - 40), place + 40)
    said = f"{job_id} has another text from character {place} on: {text[around]!r} instead of {expected.text[around]!r}"
    print(f"{said}; ties: {expected.ties}", file=sys.stderr, flush=True)
