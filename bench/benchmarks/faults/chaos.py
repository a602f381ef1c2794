"""Workers killed or frozen, clocks apart, Redis restarted or rolled back, a job that kills: what is lost or torn?

Real worker processes on a real Redis with the bundled model, all on this machine. Half of the jobs stream, all are
greedy, and each text is compared with that of an undisturbed run; of some streams a client reads along. Texts that go
another way at a near tie are counted apart (reference_texts.py). A token counts as generated twice if a worker sampled
it and another one had to do so again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from celery.exceptions import TaskRevokedError
from redis.exceptions import RedisError

from cellama.bench.harness.reference_texts import LOGPROBS, ReferenceText, reference_texts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import PATIENCE_S, POISON_TOKENS, Service, Stored, wait_until
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import EVENT_FIELD, is_terminal
from cellama.tasks.contract.keys import LEASES_KEY, RUNNING_KEY, job_key, journal_key

from .live_readers import LiveReaders
from .troubles import APART_S, LEASE_S, Troubles

MODEL = "bundled tiny"
SOURCE = "bundled://tiny"
SCENARIOS = ("kills", "outages", "freezes", "clocks", "rollbacks", "poison")
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")
SLOTS = 8
NUM_READERS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--new", type=int, default=600, help="tokens per job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--outages", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--rollbacks", type=int, default=5)
    parser.add_argument("--period", type=float, default=4.0, help="seconds between two of them")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    undisturbed: list[ReferenceText] = []
    for name in args.scenarios:
        with tempfile.TemporaryDirectory() as folder:
            model = {"id": "tiny", "source": SOURCE, "n_parallel": SLOTS, "threads": 1, "default": True}
            lease = {"lease_s": str(LEASE_S)} if name == "outages" else {}
            with Service(Path(folder), [model], **lease) as service:
                for number in range(args.workers):
                    service.start_worker(ahead_s=(0.5 - number % 2) * APART_S if name == "clocks" else 0.0)
                service.wait_ready()
                scenario = Scenario(service, args)
                undisturbed = undisturbed or scenario.undisturbed()
                rows.append(scenario.run(name, undisturbed))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    caveats = ["The workers share the cores with Redis and the producer; times say little."]
    return Report(rows, caveats=caveats)


def prompts(count: int) -> list[str]:
    """All different, so that nothing is right by accident."""
    return [f"Once upon a time, there were {i} friends of a little {ANIMALS[i % 6]}." for i in range(count)]


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
            jobs = self._submit()
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
        row["unacked"] = wait_until(lambda: self._is_clean(jobs) and "0", "every job ended, every message acked")
        row |= self._check(jobs, texts, undisturbed) | self._check_readers(readers, jobs, texts)
        row |= {"stored twice": stored.num_twice(), "lost": stored.num_lost}
        sampled = self._service.num_sampled() - sampled_before - troubles.num_more_tokens
        row["twice %"] = self._twice(len(jobs), sampled)
        alive = {n: p.pid for n, p in self._service.processes.items() if p.poll() is None}
        row["alive"] = f"{len(pids.items() & alive.items())}/{len(pids)}"
        return {**row, "poison": end_of_poison, "untimely": "; ".join(troubles.wrong)}

    def _troubles(self, stored: Stored) -> Troubles:
        return Troubles(self._service, self._args, stored)

    def _submit(self, logprobs: int | None = None) -> list[Any]:
        from cellama.tasks import generate

        params = {"max_tokens": self._args.new, "temperature": 0, "ignore_eos": True, "logprobs": logprobs}
        return [
            generate.delay("tiny", prompt, stream=index % 2 == 0, **params)
            for index, prompt in enumerate(prompts(self._args.jobs))
        ]

    def undisturbed(self) -> list[ReferenceText]:
        """The texts without trouble."""
        return reference_texts([self._result(job) for job in self._submit(LOGPROBS)], SOURCE)

    def _text(self, job: Any) -> str:
        """The text, '' of a job that fails."""
        try:
            return str(self._result(job)["text"])
        except (JobFailed, TaskRevokedError) as error:
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

    def _is_clean(self, jobs: Sequence[Any]) -> bool:
        """Redis may have lost the end of a job after it was told: then it runs again."""
        pipeline = self._service.redis.pipeline()
        for job in jobs:
            pipeline.hget(job_key(job.id), "state")
        pipeline.zcard(LEASES_KEY)
        pipeline.zcard(RUNNING_KEY)
        *states, num_leases, num_running = pipeline.execute()
        return not num_leases and not num_running and set(states) == {b"done"}

    def _check(self, jobs: Sequence[Any], texts: Sequence[str], undisturbed: Sequence[ReferenceText]) -> dict[str, Any]:
        torn = [job.id for job, text in zip(jobs, texts, strict=True) if not self._is_whole(job.id, text)]
        compared = [expected.compare(text) for text, expected in zip(texts, undisturbed, strict=True)]
        for job, kind, text, expected in zip(jobs, compared, texts, undisturbed, strict=True):
            if kind == "other":
                _show_difference(job.id, expected, text)
        return {
            "results": sum(bool(text) for text in texts),
            "torn": len(torn),
            "texts off": compared.count("other"),
            "texts tied": compared.count("tied"),
            "attempts": self._num_attempts(jobs),
        }

    def _is_whole(self, job_id: str, text: str) -> bool:
        entries: Any = self._service.redis.xrange(journal_key(job_id))
        events = [json.loads(fields[EVENT_FIELD.encode()]) for _, fields in entries]
        dense = [event["seq"] for event in events] == list(range(len(events)))
        ends = [is_terminal(event) for event in events]
        told = "".join(event.get("text", "") for event in events)
        return dense and ends == [False] * (len(events) - 1) + [True] and told == text

    def _check_readers(self, readers: LiveReaders, jobs: Sequence[Any], texts: Sequence[str]) -> dict[str, Any]:
        expected = {job.id: text for job, text in zip(jobs, texts, strict=True)}
        torn = sum(text != expected[job_id] for job_id, text in readers.texts.items())
        return {"read": len(readers.texts), "read torn": torn, "gaps told": readers.num_told}

    def _num_attempts(self, jobs: Sequence[Any]) -> int:
        pipeline = self._service.redis.pipeline()
        for job in jobs:
            pipeline.hget(job_key(job.id), "attempt")
        return sum(int(attempt or 0) for attempt in pipeline.execute())

    def _twice(self, num_jobs: int, num_sampled: int) -> float:
        """TokenAllocation of tokens, in percent."""
        total: int = num_jobs * self._args.new
        return round(100 * (num_sampled - total) / total, 2)


def _show_difference(job_id: str, expected: ReferenceText, text: str) -> None:
    place = expected.place_of_difference(text)
    around = slice(max(0, place - 40), place + 40)
    said = f"{job_id} has another text from character {place} on: {text[around]!r} instead of {expected.text[around]!r}"
    print(f"{said}; ties: {expected.ties}", file=sys.stderr, flush=True)
