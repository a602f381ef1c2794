"""The faults that the chaos benchmarks inject.

Each kind of fault is repeated a fixed number of times or until all jobs end.
"""

from __future__ import annotations

import argparse
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from cellama.bench.harness.service import PATIENCE_S, Service, StoredStates, wait_until
from cellama.tasks.contract.keys import job_key, running_key

if TYPE_CHECKING:  # tasks are made for the Redis of the settings, which the benchmark starts first
    from cellama.tasks import CallOptions, GenerateParams

APART_S = 60.0  # seconds between the clocks of two workers
LEASE_S = 15  # seconds, while only Redis is down; longer than a thread waits on a busy machine
TIMED_TOKENS = 16
TIMED: dict[str, tuple[GenerateParams, CallOptions, float]] = {  # payload, options, when it may end
    "expires": ({}, {"expires": 45}, 0.0),
    "countdown": ({}, {"countdown": 10}, 9.5),
    "timeout": ({"timeout": 50}, {}, 0.0),
}
LATE_S = 45.0  # seconds after the earliest time; less than the difference of the clocks


class Troubles:
    """Injects different kinds of faults into a service."""

    def __init__(self, service: Service, args: argparse.Namespace, stored: StoredStates) -> None:
        self._service, self._args, self._stored = service, args, stored
        self._random = random.Random(args.seed)
        self.count = 0
        self.num_more_tokens = 0  # tokens that jobs outside of the scenario requested
        self.wrong: list[str] = []  # violations by these jobs

    def kills(self, done: threading.Event) -> None:
        while self.count < self._args.kills and not done.wait(self._args.period):
            name = self._random.choice(sorted(self._service.processes))
            self._service.kill(name)
            self._service.start_worker(name)
            self.count += 1

    def outages(self, done: threading.Event) -> None:
        """Alternate between restarting Redis with its data and disconnecting all clients."""
        while self.count < self._args.outages and not done.wait(self._args.period):
            if self.count % 2:
                self._service.redis.client_kill_filter(_type="normal", skipme=True)
                self._service.redis.client_kill_filter(_type="pubsub", skipme=True)
            else:
                self._service.restart_redis()
            self.count += 1

    def freezes(self, done: threading.Event) -> None:
        """Repeatedly suspend a worker until other workers run its jobs, and for up to one more second."""
        while self.count < self._args.freezes and not done.wait(self._args.period / 2):
            process = self._service.processes[self._random.choice(sorted(self._service.processes))]
            process.send_signal(signal.SIGSTOP)
            try:
                self._wait_until_given_away(process.pid, done)
                done.wait(self._random.random())
            finally:
                process.send_signal(signal.SIGCONT)
            self.count += 1

    def rollbacks(self, done: threading.Event) -> None:
        """Repeatedly restart Redis without the writes of the last second."""
        while self.count < self._args.rollbacks and not done.wait(self._args.period):
            before = set(self._stored.states)
            self._service.roll_back_redis()
            self._stored.forget_lost(before, self._service.redis)
            self.count += 1

    def clocks(self, _: threading.Event) -> None:
        """Check that the time limits of urgent jobs hold on workers whose clocks differ by a minute."""
        from cellama.tasks import generate

        params: GenerateParams = {"max_tokens": TIMED_TOKENS, "temperature": 0, "ignore_eos": True, "priority": 0}
        started = time.monotonic()
        waiting = [
            (kind, generate.apply_async(("tiny", f"{kind} {number}"), {**params, **payload}, **options))
            for number in range(8)
            for kind, (payload, options, _) in TIMED.items()
        ]
        self.count, self.num_more_tokens = len(waiting), len(waiting) * TIMED_TOKENS
        while waiting and time.monotonic() - started < PATIENCE_S:
            for kind, job in list(waiting):
                if job.ready():
                    waiting.remove((kind, job))
                    self._check_timed(kind, job, time.monotonic() - started)
            time.sleep(0.1)
        self.wrong += [f"{kind}: no end" for kind, _ in waiting]

    def _check_timed(self, kind: str, job: Any, after_s: float) -> None:
        earliest = TIMED[kind][2]
        reason = job.result["finish_reason"] if job.successful() else job.state
        if reason != "length" or not earliest <= after_s <= earliest + LATE_S:
            self.wrong.append(f"{kind}: {reason} after {after_s:.1f} s")

    def poison(self, done: threading.Event) -> None:
        """Restart workers, as a supervisor would, while a job repeatedly crashes them."""
        while not done.wait(0.05):
            for name, process in list(self._service.processes.items()):
                if process.poll() is not None:
                    self._service.start_worker(name)
                    self.count += 1

    def _wait_until_given_away(self, pid: int, done: threading.Event) -> None:
        wait_until(
            lambda: done.is_set() or not self._num_running(pid), "new attempts at the jobs of a frozen worker", 60
        )

    def _num_running(self, pid: int) -> int:
        """Return the number of jobs whose latest attempt is running in this process."""
        redis: Any = self._service.redis
        pipeline = redis.pipeline()
        for raw in redis.zrange(running_key(), 0, -1):
            pipeline.hget(job_key(raw.decode()), "worker")
        return sum(bool(worker) and worker.decode().split()[-2] == str(pid) for worker in pipeline.execute())
