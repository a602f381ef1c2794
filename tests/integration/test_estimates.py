"""Estimates of waits with the real ledger and client, on a clock that the test moves.

Two simulated workers run jobs: each slot generates tokens at the worker's speed and reports them to the ledger.
"""

from __future__ import annotations

import heapq
import json
import random
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.client import Pipeline

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import service_times_key, workers_key
from cellama.tasks.contract.names import queue_key, queue_name
from cellama.tasks.contract.shapes.results import usage_of
from cellama.tasks.estimates.position import Position
from cellama.tasks.estimates.samples import MAX_SAMPLES, SampleWriter, class_of
from cellama.tasks.state import scripts
from cellama.tasks.state.ledger import Attempt, Entry, Ledger, Message, Submission, TaskCall, new_run, work_of

from ..conftest import worker_entry
from .ledgers import submission
from .test_model_check import CLOCK, MovedRedis

NOW = f"return {{redis.call('GET', '{CLOCK}'), 0}}"

MODEL, QUEUE = "m", queue_name("m")
START = 1e6
HEARTBEAT_S = 2.0


class MovedPipeline(Pipeline):
    """A pipeline that uses the clock of the test."""

    def time(self, **_: Any) -> Any:
        return self.execute_command("EVAL", NOW, 0)


class SteadyRedis(MovedRedis):
    """A Redis whose pipelines also use the clock of the test."""

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return MovedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[MovedRedis]:
    """Return a separate Redis, whose clock stands still."""
    source = scripts.source
    own = "local time = {redis.call('GET', '" + CLOCK + "') or 0, 0}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts, "source", lambda name: source(name).replace("local time = redis.call('TIME')", own))
        scripts._script_with.cache_clear()
        with RedisServer.start(tmp_path) as server, SteadyRedis.from_url(server.url) as client:
            yield client
    scripts._script_with.cache_clear()


@dataclass
class Played:
    """A job with its course and the estimate from its submission."""

    asked: int
    tokens: float  # amount of work, including the prefill of the prompt
    asked_at: float = 0.0
    priority: int = 3
    said: Position | None = None
    began_at: float = 0.0
    attempt: Attempt | None = None

    @property
    def waited_s(self) -> float:
        return self.began_at - self.asked_at


@dataclass
class Cluster:
    """Simulated workers by name with `slots` slots each, and a clock."""

    redis: MovedRedis
    slots: int = 4
    speeds: dict[str, float] = field(default_factory=lambda: {"one": 20.0, "two": 12.0})
    now: float = START
    jobs: dict[str, Played] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.redis)
        self.samples = SampleWriter(self.redis)
        self.ends: list[tuple[float, str, str]] = []  # time, worker, job
        self.beat_at = self.now
        self.client = Client()
        self.client._redis = self.redis
        self.beat()

    def beat(self) -> None:
        """Write the samples that workers write every 2 s."""
        self.redis.set(CLOCK, self.now)
        for name, speed in self.speeds.items():
            busy = sum(worker == name for _, worker, _ in self.ends)
            engine = {"slots_total": self.slots, "slots_decoding": busy, "slots_prefilling": 0}
            rate = busy * speed * self.chance.uniform(0.8, 1.2)
            model = {"id": MODEL, "status": "ready", "default": False, "engine": {**engine, "generation_rate": rate}}
            self.redis.hset(workers_key(), name, json.dumps(asdict(worker_entry(name, model, seen_at=self.now))))
        self.samples.flush()
        self.beat_at = self.now + HEARTBEAT_S

    def submit(self, asked: int, part: float = 1.0, priority: int = 3, **params: Any) -> Played:
        """Submit a job that generates this part of the requested tokens, plus up to a third of that for its prompt."""
        made = max(1.0, asked * part)
        job = submission(QUEUE, str(uuid.UUID(int=len(self.jobs))))  # jobs of the same time are sorted by their ids
        kwargs = {"max_tokens": asked, **params}
        call = TaskCall(task="cellama.generate", args=[MODEL, "Hi"], kwargs=kwargs, queue=QUEUE, priority=priority)
        self.ledger.submit([Submission(job.job_id, call, Message(queue_key(QUEUE, priority), job.message.payload))])
        played = Played(asked, made * self.chance.uniform(1.0, 1.3), self.now, priority)
        self.jobs[job.job_id] = played
        self.fill()
        if played.attempt is None:
            played.said = self.client.position(job.job_id)
        return played

    def submit_when_full(self) -> Played:
        """Submit twenty jobs, and return the last one if it has a slot, or else a further job."""
        jobs = [self.submit(100) for _ in range(20)]
        self.run(HEARTBEAT_S + 0.1)
        return jobs[-1] if jobs[-1].attempt else self.submit(100)

    def fill(self) -> None:
        """Give the next jobs to free slots."""
        for worker in self.speeds:
            while sum(name == worker for _, name, _ in self.ends) < self.slots:
                found = self.redis.zrange(f"cellama:waiting:{QUEUE}", 0, 0)
                if not found:
                    return
                job_id = found[0].decode()
                job = self.jobs[job_id]
                job.attempt, job.began_at = self.ledger.begin(job_id, new_run(), f"{worker} 1 1"), self.now
                self.write(job, 0, events.started(MODEL, 1, worker, 0))
                heapq.heappush(self.ends, (self.now + job.tokens / self.speeds[worker], worker, job_id))

    def write(self, job: Played, seq: int, event: events.Event) -> None:
        assert job.attempt is not None
        self.ledger.write([Entry(job_id=job.attempt.job_id, run=job.attempt.run, event={"seq": seq, **event})])  # type: ignore[arg-type]

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while min(self.beat_at, self.ends[0][0] if self.ends else until) < until:
            if self.ends and self.ends[0][0] <= self.beat_at:
                self.now, worker, job_id = heapq.heappop(self.ends)
                self.redis.set(CLOCK, self.now)
                self.end(worker, job_id)
                self.fill()
            else:
                self.now = self.beat_at
                self.beat()
        self.now = until
        self.redis.set(CLOCK, self.now)

    def end(self, worker: str, job_id: str) -> None:
        job = self.jobs[job_id]
        self.write(job, 1, events.done("stop", usage_of(prompt_tokens=1, completion_tokens=1)))
        work = work_of("cellama.generate", [], {"max_tokens": job.asked})
        kind = class_of(QUEUE, work, job.priority)
        self.samples.note(kind, size=job.asked, amount=job.tokens, speed=self.speeds[worker])


@pytest.fixture
def cluster(redis: MovedRedis) -> Cluster:
    return Cluster(redis)


def hits(jobs: list[Played]) -> float:
    """Return the share of jobs whose wait was within the estimated range."""
    return sum(j.said.eta_least_s <= j.waited_s <= (j.said.eta_most_s or 0) for j in jobs if j.said) / len(jobs)


def test_estimated_range_contains_the_waits_of_500_mixed_jobs(cluster: Cluster) -> None:
    chance = random.Random(11)
    jobs: list[Played] = []
    for number in range(500):
        asked = round(2 ** chance.uniform(3, 9))
        jobs.append(cluster.submit(asked, chance.choice([0.1, 0.4, 1.0, 1.0])))
        cluster.run(chance.expovariate(2.5) if number % 50 else 12.0)
        if number == 300:  # another program uses half of the machine
            cluster.speeds["one"] /= 2
    cluster.run(10_000)
    waited = [job for job in jobs if job.said is not None and job.said.eta_s is not None]
    assert len(waited) > 400
    assert hits(waited) >= 0.8
    off = sorted(max(j.said.eta_s or 0.1, 0.1) / max(j.waited_s, 0.1) for j in waited if j.said and j.waited_s > 3)
    assert 1 / 1.5 <= off[len(off) // 2] <= 1.5
    mean_width = sum((j.said.eta_most_s or 0) - j.said.eta_least_s for j in waited if j.said) / len(waited)
    assert mean_width < 1.5 * sum(j.waited_s for j in waited) / len(waited)  # the range is narrow enough to be useful


def test_estimate_of_the_second_job_is_within_a_factor_of_one_and_a_half(redis: MovedRedis) -> None:
    cluster = Cluster(redis, slots=1, speeds={"one": 20.0})
    cluster.submit(200, ignore_eos=True)
    cluster.run(HEARTBEAT_S + 0.1)
    second = cluster.submit(200, ignore_eos=True)
    cluster.run(1000)
    assert second.said is not None
    assert second.said.eta_s is not None
    assert 1 / 1.5 <= second.said.eta_s / second.waited_s <= 1.5
    third, fourth = cluster.submit(100), cluster.submit(100)
    assert (third.attempt is not None, fourth.said is not None) == (True, True)
    cluster.run(1000)
    assert fourth.said is not None
    assert fourth.said.learnt_from == 2
    assert 1 / 1.5 <= (fourth.said.eta_s or 0) / fourth.waited_s <= 1.5


def test_estimate_without_history_is_unknown_until_the_first_tokens_arrive(cluster: Cluster) -> None:
    for _ in range(2 * cluster.slots):
        cluster.submit(100)
    unknown = cluster.submit(100).said
    assert unknown is not None
    assert (unknown.eta_s, unknown.eta_least_s, unknown.eta_most_s) == (None, 0.0, None)
    assert (unknown.learnt_from, unknown.served) == (0, True)
    cluster.run(HEARTBEAT_S + 0.1)
    guessed = cluster.submit(100)
    cluster.run(1000)
    assert guessed.said is not None
    assert guessed.said.learnt_from == 0
    assert guessed.said.eta_least_s <= guessed.waited_s <= (guessed.said.eta_most_s or 0)


def test_estimates_adapt_to_a_slower_machine_and_survive_in_redis(cluster: Cluster, redis: Redis) -> None:
    for _ in range(40):
        cluster.submit(100)
    cluster.run(1000)
    before = cluster.submit_when_full()
    cluster.run(1000)
    cluster.speeds = {name: speed / 4 for name, speed in cluster.speeds.items()}
    for _ in range(16):
        cluster.submit(100)
    cluster.run(40)
    after = cluster.submit_when_full()
    cluster.run(2000)
    for job in (before, after):
        assert job.said is not None
        assert job.said.eta_least_s <= job.waited_s <= (job.said.eta_most_s or 0)
    key = service_times_key(QUEUE, "generate", "interactive")
    assert 0 < redis.llen(key) <= MAX_SAMPLES
    assert redis.ttl(key) > 86400


def test_malformed_history_entries_are_ignored(cluster: Cluster, redis: Redis) -> None:
    key = service_times_key(QUEUE, "generate", "interactive")
    redis.lpush(key, "", "x y", "-1 5 1", "nan 3 1", "1e999 2 1", "1 2", "1 2 3 4", b"\xff", "100 100 20")
    for _ in range(2 * cluster.slots):
        cluster.submit(100)
    cluster.run(HEARTBEAT_S + 0.1)
    said = cluster.submit(100).said
    assert said is not None
    assert said.learnt_from == 1
    redis.delete(key)
    redis.set(key, "text")
    said = cluster.submit(100).said
    assert said is not None
    assert said.learnt_from == 0


def new_job_waits(cluster: Cluster) -> dict[str, float | None]:
    """Return the estimate of `cellama status` for a new job of each class."""
    classes = cluster.client.stats()["classes"][MODEL]
    return {name: told["eta_s"] for name, told in classes.items()}


@pytest.mark.parametrize("num_urgent", [0, 30])
def test_status_and_position_agree_for_each_class_when_the_bulk_queue_is_long(
    cluster: Cluster, num_urgent: int
) -> None:
    for _ in range(40):
        cluster.submit(100, priority=9)
    cluster.run(1000)  # collects samples of bulk jobs
    for _ in range(300):
        cluster.submit(100, priority=9)
    for _ in range(num_urgent):
        cluster.submit(100)
    cluster.run(HEARTBEAT_S + 0.1)
    waits = new_job_waits(cluster)
    for name, priority in (("interactive", 3), ("bulk", 9)):
        said, wait = cluster.submit(100, priority=priority).said, waits[name]
        assert said is not None
        assert said.eta_s is not None
        assert wait is not None
        assert said.eta_least_s <= wait <= (said.eta_most_s or 0)
        assert wait == pytest.approx(said.eta_s, rel=0.25)
    assert (waits["interactive"] == 0.0) == (num_urgent == 0)  # bulk work ahead of it does not count
    assert (waits["bulk"] or 0) > 100
