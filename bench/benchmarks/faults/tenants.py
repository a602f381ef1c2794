"""Kill workers while 20 tenants share them, and check limits and shares continuously.

All jobs are equal. The tenants queue their jobs one after another, so workers that took jobs in order would serve one
tenant at a time. One tenant and the model have limits. A script in Redis counts each tenant's held jobs many times per
second.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from cellama.bench.harness.reference_texts import ReferenceText
from cellama.bench.harness.service import Service
from cellama.tasks.contract.fairness import limit_name
from cellama.tasks.contract.keys import job_key, leases_key, slots_key

from .outcomes import of_jobs
from .scenario import SLOTS, Scenario, prompts, shown

if TYPE_CHECKING:  # tasks are made for the Redis of the settings, which the benchmark starts first
    from cellama.tasks import GenerateParams

NUM_TENANTS = 20
LIMITED = "tenant-00"
LIMIT = 2  # held jobs of this tenant
SAMPLE_S = 0.05  # seconds between two samples of the held jobs
HELD_BY_TENANT = """
local keys = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  keys[#keys + 1] = redis.call('HGET', ARGV[1] .. id, 'fairness_key') or ''
end
return keys
"""


def model_limit(num_workers: int) -> int:
    """Return the model's limit, which leaves a quarter of the slots free."""
    return num_workers * SLOTS * 3 // 4


def settings(num_workers: int) -> dict[str, str]:
    """Return the settings for workers and producers, with the limits of the tenant and of the model."""
    return {"fairness_limits": f'{{"{LIMITED}": {LIMIT}}}', "model_limits": f'{{"tiny": {model_limit(num_workers)}}}'}


class TenantScenario(Scenario):
    """Runs the jobs of 20 tenants while workers are killed."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        super().__init__(service, args)
        self._watch = Watch(service.redis)

    def tenants(self, undisturbed: Sequence[ReferenceText]) -> tuple[list[dict[str, Any]], list[str]]:
        """Run the scenario, and return its row and its violations of limits and shares."""
        with self._watch.running():
            row = self.run("kills", undisturbed)
        watch, limit = self._watch, model_limit(self._args.workers)
        leaked = sum(self._service.redis.scard(slots_key(name)) for name in (LIMITED, limit_name(model="tiny")))
        row |= {
            "scenario": "tenants",
            "samples": watch.num_samples,
            "held of limited": f"{watch.most_held_of_limited}/{LIMIT}",
            "held of model": f"{watch.most_held}/{limit}",
            "leaked": leaked,
            "apart": watch.most_apart,
        }
        wrong = []
        if watch.most_held_of_limited > LIMIT or watch.most_held > limit:
            wrong.append("tenants: a limit was exceeded")
        if leaked:
            wrong.append(f"tenants: {leaked} slots are still held after all jobs ended")
        if watch.most_apart > 2:
            wrong.append(f"tenants: two waiting tenants were {watch.most_apart} jobs apart")
        return [shown(row)], wrong

    def submit(self, logprobs: int | None = None, count: int | None = None) -> list[Any]:
        """Queue the jobs of one tenant after another while the workers are suspended.

        Otherwise, the workers would start several jobs of the first tenants before the other tenants have any jobs.
        """
        from cellama.tasks import generate

        params: GenerateParams = {"max_tokens": self._args.new, "temperature": 0, "ignore_eos": True}
        params["logprobs"] = logprobs
        jobs: list[Any] = []
        with self._suspended_workers():
            for index, prompt in enumerate(prompts(self._args.jobs)[:count]):
                tenant = f"tenant-{index * NUM_TENANTS // self._args.jobs:02d}"
                params["stream"] = index % 2 == 0
                jobs.append(generate.apply_async(("tiny", prompt), params, fairness_key=tenant))
                self._watch.add(jobs[-1].id, tenant)
        self._watch.is_complete = True
        return jobs

    @contextlib.contextmanager
    def _suspended_workers(self) -> Iterator[None]:
        processes = list(self._service.processes.values())
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)


class Watch:
    """Samples the numbers of held and started jobs of each tenant."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._jobs: dict[str, str] = {}  # tenant of each job
        self.is_complete = False  # whether all jobs are queued, so that shares can be compared
        self.num_samples = 0
        self.most_held = 0
        self.most_held_of_limited = 0
        self.most_apart = 0  # jobs that one waiting tenant has started before another

    def add(self, job_id: str, tenant: str) -> None:
        self._jobs[job_id] = tenant

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(target=self._run, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _run(self, done: threading.Event) -> None:
        next_shares = time.monotonic()
        while not done.wait(SAMPLE_S):
            with contextlib.suppress(RedisError):
                self._sample_held()
                if self.is_complete and time.monotonic() >= next_shares:
                    self._sample_started()
                    next_shares = time.monotonic() + 0.5

    def _sample_held(self) -> None:
        """Count the currently held jobs, using the leases instead of the sets that enforce the limits."""
        held = self._redis.eval(HELD_BY_TENANT, 1, leases_key(), job_key(""))
        self.most_held = max(self.most_held, len(held))
        self.most_held_of_limited = max(self.most_held_of_limited, held.count(LIMITED.encode()))
        self.num_samples += 1

    def _sample_started(self) -> None:
        """Compare how many jobs have started for each unlimited tenant with waiting jobs."""
        attempts = of_jobs(self._redis, list(self._jobs), "attempt")
        started: Counter[str] = Counter()
        waiting = set()
        for tenant, attempt in zip(self._jobs.values(), attempts, strict=True):
            if tenant == LIMITED:
                continue
            if int(attempt or 0):
                started[tenant] += 1
            else:
                waiting.add(tenant)
        counts = [started[tenant] for tenant in waiting]
        if counts:
            self.most_apart = max(self.most_apart, max(counts) - min(counts))
