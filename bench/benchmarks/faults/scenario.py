"""Run jobs on real workers while one kind of fault is injected, and check the outcome of each job."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery.exceptions import TaskRevokedError, TimeoutError as CeleryTimeoutError
from redis.exceptions import RedisError

from cellama.api import Client
from cellama.bench.harness.reference_texts import LOGPROBS, ReferenceText, reference_texts
from cellama.bench.harness.service import PATIENCE_S, POISON_TOKENS, Service, StoredStates, wait_until
from cellama.tasks.contract.errors import JobFailed, RedisUnreachable, StreamTrimmed
from cellama.tasks.contract.keys import job_key

from .outcomes import compare_text, is_clean, is_whole, journal_of, num_attempts
from .troubles import Troubles

SOURCE = "bundled://tiny"
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")
SLOTS = 8
NUM_READERS = 8


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Write a row to stderr immediately, because the benchmark takes many minutes."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def prompts(count: int) -> list[str]:
    """Return distinct prompts, so that the result of a different job is never correct by accident."""
    return [f"Once upon a time, there were {i} friends of a little {ANIMALS[i % 6]}." for i in range(count)]


class LiveReaders:
    """Reads streams in separate threads while faults are injected. Each reader must receive exactly the final text."""

    def __init__(self, job_ids: Sequence[str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.texts: dict[str, str] = {}
        self.num_told = 0  # gaps reported to a reader, which then started over
        self._client = Client()
        self._threads = [threading.Thread(target=self._read, args=(job_id,), daemon=True) for job_id in job_ids]
        for thread in self._threads:
            thread.start()

    def _read(self, job_id: str) -> None:
        while job_id not in self.texts:
            text = ""
            try:
                for event in self._client.stream(job_id, timeout=self._timeout_s):
                    text += event["text"] if event["type"] == "token" else ""
                self.texts[job_id] = text
            except StreamTrimmed:
                self.num_told += 1
            except RedisUnreachable:
                continue

    def close(self) -> None:
        """Wait until all streams have ended."""
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._client.close()


class Scenario:
    """Runs jobs on a service while one kind of fault is injected."""

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
                poison = self._poison_job()  # urgent, so it gets a slot alongside running jobs
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

    def _troubles(self, stored: StoredStates) -> Troubles:
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
        """Return the texts of an undisturbed run."""
        return reference_texts([self._result(job) for job in self.submit(LOGPROBS)], SOURCE)

    def _text(self, job: Any) -> str:
        """Return the job's text, or an empty string if the job fails or does not end."""
        try:
            return str(self._result(job)["text"])
        except (JobFailed, TaskRevokedError, CeleryTimeoutError) as error:
            print(f"job {job.id}: {error!r}", file=sys.stderr, flush=True)
            return ""

    @staticmethod
    def _result(job: Any) -> Any:
        """Return the result of the job, even if Redis is unreachable for a while."""
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

    # Outcome

    def check(self, jobs: Sequence[Any], texts: Sequence[str], undisturbed: Sequence[ReferenceText]) -> dict[str, Any]:
        """Count results, attempts, incomplete journals, and texts that differ from the undisturbed run."""
        torn = [
            job.id
            for job, text in zip(jobs, texts, strict=True)
            if not is_whole(journal_of(self._service.redis, job.id), text)
        ]
        compared = [
            compare_text(job.id, text, expected) for job, text, expected in zip(jobs, texts, undisturbed, strict=True)
        ]
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
        """Return the percentage of tokens that were generated twice."""
        total: int = num_jobs * self._args.new
        return round(100 * (num_sampled - total) / total, 2)
