"""Workers killed, Redis restarted, a worker frozen, a job that kills: what is lost, torn or done twice.

Real worker processes on a real Redis with the bundled model, all on this machine. Half of the jobs stream, all are
greedy, and each text is compared with that of an undisturbed run. A token counts as generated twice if a worker
sampled it and another one had to do so again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from cellama.bench.harness.report import Report
from cellama.bench.harness.service import PATIENCE_S, POISON_TOKENS, Service, wait_until
from cellama.tasks.contract.events import EVENT_FIELD, is_terminal
from cellama.tasks.contract.keys import LEASES_KEY, RUNNING_KEY, job_key, journal_key

MODEL = "bundled tiny"
SCENARIOS = ("kills", "outages", "freeze", "poison")
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")
SLOTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--new", type=int, default=600, help="tokens per job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--outages", type=int, default=10)
    parser.add_argument("--period", type=float, default=4.0, help="seconds between two of them")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    undisturbed: list[str] = []
    for name in args.scenarios:
        with tempfile.TemporaryDirectory() as folder:
            model = {"id": "tiny", "source": "bundled://tiny", "n_parallel": SLOTS, "threads": 1, "default": True}
            with Service(Path(folder), [model]) as service:
                for _ in range(args.workers):
                    service.start_worker()
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
        self._random = random.Random(args.seed)
        self._num_troubles = 0

    def run(self, name: str, undisturbed: Sequence[str]) -> dict[str, Any]:
        sampled_before = self._service.num_sampled()
        pids = {name: process.pid for name, process in self._service.processes.items()}
        trouble: Callable[[threading.Event], None] = getattr(self, f"_{name}")
        done = threading.Event()
        started = time.monotonic()
        with self._service.counting_results() as stored:
            jobs = self._submit()
            if name == "poison":
                poison = self._poison_job()  # urgent: it gets a slot beside jobs that run
            troubled = threading.Thread(target=trouble, args=(done,))
            troubled.start()
            texts = [self._result(job) for job in jobs]
            seconds = time.monotonic() - started
            end_of_poison = self._end_of(poison) if name == "poison" else ""
            done.set()
            troubled.join()
        row: dict[str, Any] = {
            "scenario": name,
            "troubles": self._num_troubles,
            "jobs": len(jobs),
            "seconds": round(seconds, 1),
        }
        row |= self._check(jobs, texts, undisturbed, stored)
        row["twice %"] = self._twice(len(jobs), self._service.num_sampled() - sampled_before)
        row["unacked"] = wait_until(lambda: self._is_clean() and "0", "every message acked", 60)
        alive = {n: p.pid for n, p in self._service.processes.items() if p.poll() is None}
        row["alive"] = f"{len(pids.items() & alive.items())}/{len(pids)}"
        return {**row, "poison": end_of_poison}

    def _submit(self) -> list[Any]:
        from cellama.tasks import generate

        params = {"max_tokens": self._args.new, "temperature": 0, "ignore_eos": True}
        return [
            generate.delay("tiny", prompt, stream=index % 2 == 0, **params)
            for index, prompt in enumerate(prompts(self._args.jobs))
        ]

    def undisturbed(self) -> list[str]:
        """The texts without trouble."""
        return [self._result(job) for job in self._submit()]

    @staticmethod
    def _result(job: Any) -> str:
        """The text; Redis may be away meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return str(job.get(timeout=max(1.0, deadline - time.monotonic()))["text"])
            except (RedisError, OSError, RuntimeError):
                if time.monotonic() > deadline:
                    raise
                job.backend.result_consumer.stop()
                time.sleep(0.5)

    # The troubles; each goes on until its number is full or the jobs are done.

    def _kills(self, done: threading.Event) -> None:
        for _ in range(self._args.kills):
            if done.wait(self._args.period):
                return
            name = self._random.choice(sorted(self._service.processes))
            self._service.kill(name)
            self._service.start_worker(name)
            self._num_troubles += 1

    def _outages(self, done: threading.Event) -> None:
        for number in range(self._args.outages):
            if done.wait(self._args.period):
                return
            if number % 2:
                self._service.redis.client_kill_filter(_type="normal", skipme=True)
                self._service.redis.client_kill_filter(_type="pubsub", skipme=True)
            else:
                self._service.restart_redis()
            self._num_troubles += 1

    def _freeze(self, done: threading.Event) -> None:
        if done.wait(self._args.period / 4):
            return
        process = self._service.processes["worker0"]
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: self._num_second_attempts() > 0, "jobs of the frozen worker begun elsewhere", 60)
        process.send_signal(signal.SIGCONT)
        self._num_troubles += 1

    def _poison(self, done: threading.Event) -> None:
        while not done.wait(0.05):  # what a supervisor does
            for name, process in list(self._service.processes.items()):
                if process.poll() is not None:
                    self._service.start_worker(name)
                    self._num_troubles += 1

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

    def _num_second_attempts(self) -> int:
        attempts: list[Any] = [
            self._service.redis.hget(key, "attempt") for key in self._service.redis.keys(job_key("*"))
        ]
        return sum(int(attempt or 0) > 1 for attempt in attempts)

    def _is_clean(self) -> bool:
        redis = self._service.redis
        return not redis.zcard(LEASES_KEY) and not redis.zcard(RUNNING_KEY)

    def _check(
        self, jobs: Sequence[Any], texts: Sequence[str], undisturbed: Sequence[str], stored: dict[str, list[str]]
    ) -> dict[str, Any]:
        torn = [job.id for job, text in zip(jobs, texts, strict=True) if not self._is_whole(job.id, text)]
        other = sum(text != expected for text, expected in zip(texts, undisturbed, strict=True))
        times_stored = Counter(len(stored.get(job.id, ())) for job in jobs)
        return {
            "results": sum(bool(text) for text in texts),
            "stored twice": sum(count for times, count in times_stored.items() if times > 1),
            "torn": len(torn),
            "texts off": other,
            "attempts": self._num_attempts(jobs),
        }

    def _is_whole(self, job_id: str, text: str) -> bool:
        entries: Any = self._service.redis.xrange(journal_key(job_id))
        events = [json.loads(fields[EVENT_FIELD.encode()]) for _, fields in entries]
        dense = [event["seq"] for event in events] == list(range(len(events)))
        ends = [is_terminal(event) for event in events]
        told = "".join(event.get("text", "") for event in events)
        return dense and ends == [False] * (len(events) - 1) + [True] and told == text

    def _num_attempts(self, jobs: Sequence[Any]) -> int:
        pipeline = self._service.redis.pipeline()
        for job in jobs:
            pipeline.hget(job_key(job.id), "attempt")
        return sum(int(attempt) for attempt in pipeline.execute())

    def _twice(self, num_jobs: int, num_sampled: int) -> float:
        """Share of tokens, in percent."""
        total: int = num_jobs * self._args.new
        return round(100 * (num_sampled - total) / total, 2)
