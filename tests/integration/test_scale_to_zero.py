"""Scale real workers from 0 to 3 and back to 0 under a bursty trace, and drain or kill workers that run jobs.

Every step of a worker takes at least STEP_S, so a burst keeps several workers busy on any machine. The bundled tiny
model writes the texts.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api import Client, GenerateResult, Job
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.benchmarks.faults.outcomes import ends_row, is_clean, is_whole, journal_of, num_attempts
from cellama.bench.harness import pace
from cellama.bench.harness.reference_texts import LOGPROBS, reference_texts
from cellama.bench.harness.service import COUNTER_DIR, CountingStrategy, num_sampled
from cellama.tasks.estimates.backlog import pool_demands
from cellama.tasks.estimates.position import running_jobs
from cellama.tasks.estimates.scaling import PoolScaler, ScalingPolicy
from cellama.tasks.state.registry import live_workers

from ..conftest import PATIENCE_S, WorkerProcess, wait_until

SOURCE, SLOTS, STEP_S, MAX_TOKENS = "bundled://tiny", 2, 0.02, 120
POLICY = ScalingPolicy(max_workers=3, target_wait_s=8.0, cool_down_s=2.0, scale_down_s=1.0)
DRAIN_S = 1  # less than a job takes, so a drained worker hands jobs over
FIRST_BURST, SECOND_BURST = 3, 24  # numbers of jobs
NUM_WRITTEN = 5  # events of a job that must be in its journal before its worker is disturbed
PARAMS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


@dataclass
class Supervisor:
    """Starts and drains workers so that as many run as the pool needs, like KEDA and Kubernetes."""

    folder: Path
    server: RedisServer
    redis: Redis
    model: str
    rng: random.Random
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    leaving: list[WorkerProcess] = field(default_factory=list)
    numbers: list[int] = field(default_factory=lambda: [0])  # each number of workers that the pool needed, in order
    num_started: int = 0

    def __post_init__(self) -> None:
        self.counters = self.folder / "counters"
        self.counters.mkdir()
        self._scaler = PoolScaler(POLICY)

    def step(self) -> None:
        """Read the number of workers, and start or drain workers accordingly."""
        for name, worker in [*self.workers.items()]:
            if worker.process.poll() is not None:
                del self.workers[name]
        wanted = self._scaler.next(pool_demands(self.redis)[self.model], time.monotonic())
        if wanted != self.numbers[-1]:
            self.numbers.append(wanted)
        while len(self.workers) < wanted:
            self.start()
        while len(self.workers) > wanted:
            self.drain(self.rng.choice([*self.workers]))

    def start(self, step_s: float = STEP_S) -> WorkerProcess:
        folder = self.folder / f"{self.num_started}"
        folder.mkdir()
        strategy = f"{CountingStrategy.__module__}:{CountingStrategy.__name__}"
        model = {"id": self.model, "source": SOURCE, "n_parallel": SLOTS, "threads": 1, "speculation": "off"}
        model["batch_strategy"] = strategy
        settings = {
            "CELLAMA_MODELS": json.dumps([model]),
            "CELLAMA_POOL": self.model,
            "CELLAMA_DRAIN_S": str(DRAIN_S),
            COUNTER_DIR: str(self.counters),
            pace.LEAST_S: str(step_s),
        }
        name = f"{self.model}-{self.num_started}"
        self.workers[name] = WorkerProcess(folder, self.server.url, name=name, **settings)
        self.num_started += 1
        return self.workers[name]

    def drain(self, name: str) -> None:
        worker = self.workers.pop(name)
        worker.process.terminate()
        self.leaving.append(worker)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        def steps() -> Any:
            self.step()
            return condition()

        return wait_until(steps, f"{what}; numbers of workers: {self.numbers}", 2 * PATIENCE_S)

    def busy_worker(self) -> str | None:
        """Return a random worker whose jobs have written tokens to their journals, once three workers are live."""
        if sum(worker.pool == self.model for worker in live_workers(self.redis)) < POLICY.max_workers:
            return None
        return self.rng.choice(sorted(self.jobs_by_worker())) if self.jobs_by_worker() else None

    def jobs_by_worker(self) -> dict[str, list[str]]:
        """Return the jobs that are being generated, by the name of their worker."""
        ids = [raw.decode() for raw in self.redis.zrange("cellama:running", 0, -1)]
        found: dict[str, list[str]] = {}
        for job_id, job in zip(ids, running_jobs(self.redis), strict=False):
            name = job.worker.removesuffix(f"@{socket.gethostname()}")
            if name in self.workers and len(journal_of(self.redis, job_id)) > NUM_WRITTEN:
                found.setdefault(name, []).append(job_id)
        return found

    def close(self) -> None:
        for worker in (*self.workers.values(), *self.leaving):
            worker.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis server of its own, because the number of workers depends on the jobs of all tests on a server."""
    (tmp_path / "redis").mkdir()
    with RedisServer.start(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def redis_client(server: RedisServer) -> Iterator[Redis]:
    with Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def client(server: RedisServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture
def supervisor(
    server: RedisServer, redis_client: Redis, tmp_path: Path, settings_environment: Callable[..., None]
) -> Iterator[Supervisor]:
    model = f"t{uuid.uuid4().hex[:8]}"
    settings_environment(redis_url=server.url, pool=model, models=f"{model}={SOURCE}")
    supervisor = Supervisor(tmp_path, server, redis_client, model, random.Random(1))
    with contextlib.closing(supervisor):
        yield supervisor


def submit(client: Client, model: str, count: int, **params: Any) -> list[Job[GenerateResult]]:
    prompts = [f"Once upon a time, there were {number} frogs." for number in range(count)]
    return [client.generate(model, prompt, stream=True, wait=True, **PARAMS, **params) for prompt in prompts]


@pytest.mark.parametrize("disturbance", ["drain", "kill"])
def test_workers_scale_from_zero_to_three_and_back_without_losing_or_repeating_work(
    supervisor: Supervisor, client: Client, redis_client: Redis, disturbance: str
) -> None:
    jobs = submit(client, supervisor.model, FIRST_BURST)
    supervisor.until(lambda: is_clean(redis_client, [job.id for job in jobs]), "the end of the first burst")
    supervisor.until(lambda: not supervisor.workers, "no workers")
    assert supervisor.numbers == [0, 1, 0], "the duration of the first jobs was unknown"

    jobs += submit(client, supervisor.model, SECOND_BURST)
    supervisor.step()
    assert supervisor.numbers[3:] == [3], "samples of the last workers show how long the jobs take"
    victim = supervisor.until(supervisor.busy_worker, "three live workers with running jobs")
    disturbed = supervisor.jobs_by_worker()[victim]
    if disturbance == "kill":
        supervisor.workers[victim].process.kill()
    else:
        supervisor.drain(victim)
    supervisor.until(lambda: is_clean(redis_client, [job.id for job in jobs]), "the end of the second burst")
    supervisor.until(lambda: not supervisor.workers, "no workers")
    for worker in supervisor.leaving:
        assert worker.process.wait(PATIENCE_S) == 0, worker.log()

    ids = [job.id for job in jobs]
    assert max(num_attempts(redis_client, disturbed)) > 1, "the disturbance hit running jobs"
    texts = [job.result(timeout=PATIENCE_S)["text"] for job in jobs]
    row = ends_row(redis_client, ids, {})
    assert (row["ended once"], row["stored"]) == (len(jobs), len(jobs))
    assert all(is_whole(journal_of(redis_client, job.id), text) for job, text in zip(jobs, texts, strict=True))
    twice, num_resumed = num_sampled(supervisor.counters) - len(jobs) * MAX_TOKENS, row["attempts"] - len(jobs)
    assert 0 <= twice <= 0.01 * len(jobs) * MAX_TOKENS
    assert twice <= num_resumed or disturbance == "kill", "a drain repeats at most the step that it interrupts"
    assert_right_texts(supervisor, client, texts)


def assert_right_texts(supervisor: Supervisor, client: Client, texts: list[str]) -> None:
    """Compare the texts with those of a worker that is not disturbed. Both bursts have the same prompts."""
    supervisor.start(step_s=0.0).wait_ready()
    jobs = submit(client, supervisor.model, SECOND_BURST, logprobs=LOGPROBS)
    expected = reference_texts([job.result(timeout=PATIENCE_S) for job in jobs], SOURCE)
    found = zip(texts, (*expected[:FIRST_BURST], *expected), strict=True)
    assert {reference.compare(text) for text, reference in found} <= {"same", "tied"}
