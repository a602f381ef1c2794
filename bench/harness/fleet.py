"""Simulate a fleet of workers in virtual time, with the ledger's real scripts on a real Redis.

A worker takes jobs like the consumer does, but computes nothing. Instead, the costs of passes determine the time.
Therefore, the result depends only on the seed, and simulating hours of work takes seconds. A worker has slots, jobs
that are waiting for a slot, and a prefix cache, which is an LRU list of token blocks.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from redis import Redis

from cellama.tasks.connection import connections
from cellama.tasks.contract import events
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, SUBMITTED_AT_HEADER, key_prefix, queue_key
from cellama.tasks.contract.shapes.results import usage_of
from cellama.tasks.state import scripts
from cellama.tasks.state.ledger import (
    CeleryState,
    Entry,
    JobsLeft,
    Ledger,
    Message,
    Submission,
    TaskCall,
    WorkerCache,
)

from .simulation import CPU, Costs
from .traces import BLOCK, CHARS_PER_TOKEN, Session, text_of

QUEUE = "cellama:queue:fleet"
CHUNK = 512  # tokens of prompts in a step
LEASE_S = 1e9  # no worker dies


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The size of the fleet and the speed of its workers."""

    num_workers: int = 8
    num_slots: int = 8
    look_ahead: int = 4
    cache_tokens: int = 1_000_000  # per worker, on the device and in RAM
    costs: Costs = CPU
    has_affinity: bool = False  # whether workers prefer jobs whose prefix they hold
    max_steps: int = 1000  # steps that are simulated at once; 1 records the service of each step


class VirtualClock:
    """The scripts' clock in seconds, which is stored in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._key = f"{key_prefix()}:simulated_time"
        self._now = -1.0
        self.set(0.0)

    def set(self, now: float) -> None:
        if now != self._now:
            self._redis.set(self._key, f"{START_S + now:.6f}")
            self._now = now

    @contextlib.contextmanager
    def replacing_the_real_one(self) -> Iterator[None]:
        """Make all of this process's scripts read this clock within the block."""
        real = connections.LUA_CLOCK
        connections.LUA_CLOCK = (
            f"local function clock() return tonumber(redis.call('GET', '{self._key}')) end\n"
            "local function stamp(seconds) return string.format('%.6f', seconds) end\n"
        )
        _forget_scripts()
        try:
            yield
        finally:
            connections.LUA_CLOCK = real
            _forget_scripts()


START_S = 1e9  # so that the times have as many digits as real ones


def _forget_scripts() -> None:
    scripts._parts.cache_clear()
    scripts._script_with.cache_clear()


@dataclass(eq=False, slots=True)
class FleetJob:
    """A simulated job, and the times in seconds at which the job received its tokens."""

    id: str
    session: Session
    turn: int
    blocks: tuple[int, ...]
    num_prompt: int
    num_new: int
    submitted_at: float
    token: str = ""
    num_computed: int = 0  # prompt tokens that were not in the cache
    first_token_at: float = 0.0
    ended_at: float = 0.0


class BlockCache:
    """An LRU cache of token blocks."""

    def __init__(self, num_tokens: int) -> None:
        self._max_blocks = num_tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that are cached, and cache all blocks.

        The last blocks are evicted first.
        """
        num_cached = sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return num_cached


def num_computed(job: FleetJob, cache: BlockCache) -> int:
    """Return the number of prompt tokens to compute with this cache. The last token is always computed."""
    return max(1, job.num_prompt - cache.use(job.blocks) * BLOCK)


@dataclass(eq=False, slots=True)
class _Running:
    job: FleetJob
    num_to_compute: int  # prompt tokens
    num_to_generate: int

    @property
    def decodes(self) -> bool:
        return self.num_to_compute == 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """Consecutive equal steps of a worker, with their start and duration in seconds, and the tokens per step."""

    started_at: float
    num_steps: int
    step_s: float
    tokens: Sequence[tuple[_Running, int]]


class FleetWorker:
    """A worker whose steps compute a chunk of the oldest prompts and one token of each decoding sequence."""

    def __init__(self, name: str, shape: FleetShape) -> None:
        self.name = name
        self.is_waiting = False  # for a message
        self.leaves_until = 0.0  # seconds until which the worker leaves the jobs to others
        self._shape = shape
        self._cache = BlockCache(shape.cache_tokens)
        self._queue: deque[FleetJob] = deque()
        self._running: list[_Running] = []
        self.plan: _Plan | None = None

    @property
    def capacity(self) -> int:
        """The number of jobs that the worker can take."""
        return self._shape.num_slots + self._shape.look_ahead - len(self._queue) - len(self._running)

    @property
    def cache(self) -> WorkerCache | None:
        """The prefix cache that the worker reports."""
        if not self._shape.has_affinity:
            return None
        rate = CHARS_PER_TOKEN * 1e3 / self._shape.costs.prompt_row_ms
        return WorkerCache(self.name, CHARS_PER_TOKEN * self._shape.cache_tokens, rate)

    def add(self, job: FleetJob) -> None:
        self._queue.append(job)

    def start(self, now: float) -> float | None:
        """Plan the next steps, and return their end time, or None if the worker is idle or already has a plan."""
        if self.plan is not None:
            return None
        while self._queue and len(self._running) < self._shape.num_slots:
            job = self._queue.popleft()
            job.num_computed = num_computed(job, self._cache)
            self._running.append(_Running(job, job.num_computed, job.num_new))
        if not self._running:
            return None
        tokens: list[tuple[_Running, int]] = []
        budget = CHUNK
        for running in self._running:
            count = 1 if running.decodes else min(budget, running.num_to_compute)
            budget -= 0 if running.decodes else count
            if count:
                tokens.append((running, count))
        self.plan = _Plan(now, self._num_equal_steps(tokens), self._step_s(tokens), tokens)
        return now + self.plan.num_steps * self.plan.step_s

    def _num_equal_steps(self, tokens: Sequence[tuple[_Running, int]]) -> int:
        """Return the number of steps until a sequence finishes its prompt or its text."""
        lefts = [running.num_to_generate if running.decodes else running.num_to_compute // n for running, n in tokens]
        return max(1, min(self._shape.max_steps, *lefts))

    def _step_s(self, tokens: Sequence[tuple[_Running, int]]) -> float:
        num_decoding = sum(running.decodes for running, _ in tokens)
        chunks = [count for running, count in tokens if not running.decodes]
        costs = self._shape.costs
        prompt_ms = costs.pass_ms + costs.prompt_row_ms * sum(chunks) if chunks else 0.0
        return (prompt_ms + (costs.of_pass(1, num_decoding) if num_decoding else 0.0)) / 1e3

    def interrupt(self, now: float) -> float | None:
        """End the plan after the current step if a free slot can take a job. Return the new end time, or None."""
        plan = self.plan
        if plan is None or plan.num_steps == 1 or not self._queue or len(self._running) == self._shape.num_slots:
            return None
        num_steps = int((now - plan.started_at) / plan.step_s) + 1
        if num_steps >= plan.num_steps:
            return None
        self.plan = _Plan(plan.started_at, num_steps, plan.step_s, plan.tokens)
        return plan.started_at + num_steps * plan.step_s

    def finish(self, now: float) -> tuple[list[FleetJob], list[tuple[FleetJob, int, int]]]:
        """End the plan, and return the finished jobs and each job's numbers of computed and generated tokens."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        finished, served = [], []
        for running, count in plan.tokens:
            prompt, generated = (0, plan.num_steps) if running.decodes else (count * plan.num_steps, 0)
            running.num_to_compute -= prompt
            if prompt and running.decodes:
                running.job.first_token_at, generated = now, 1
            running.num_to_generate -= generated
            served.append((running.job, prompt, generated))
            if running.decodes and running.num_to_generate <= 0:
                running.job.ended_at = now
                finished.append(running.job)
                self._running.remove(running)
        return finished, served


class Observer:
    """Receives the fleet's events. The methods of this base class do nothing."""

    def waits(self, job: FleetJob) -> None:
        """Handle a submitted job."""

    def taken(self, job: FleetJob) -> None:
        """Handle a job that a worker has taken."""

    def served(self, job: FleetJob, num_computed: int, num_generated: int) -> None:
        """Handle the numbers of tokens that a worker has computed and generated for a job."""


@dataclass
class Fleet:
    """Workers that take jobs from the same queue."""

    redis: Redis
    shape: FleetShape = field(default_factory=FleetShape)
    observer: Observer = field(default_factory=Observer)
    max_tokens_of: Callable[[FleetJob], int] = lambda job: job.num_new  # that the job requests

    def __post_init__(self) -> None:
        self._clock = VirtualClock(self.redis)
        self._ledger_of_redis = Ledger(self.redis)
        self._may_have_tickets = False
        self._key = queue_key(QUEUE, PRIORITY_INTERACTIVE)
        self._workers = [FleetWorker(f"worker{number}", self.shape) for number in range(self.shape.num_workers)]
        self._waiting: deque[FleetWorker] = deque()  # the longest first, which is the order of Redis
        self._jobs: dict[str, FleetJob] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0

    def run(self, sessions: Iterable[Session]) -> list[FleetJob]:
        """Run all sessions until the last job has ended, and return the jobs in the order of submission."""
        with self._clock.replacing_the_real_one():
            for session in sessions:
                self._at(session.at, partial(self._submit, session, 0))
            for worker in self._workers:
                self._wait(worker)
            while self._events:
                self._now, _, act = heapq.heappop(self._events)
                act()
                self._deliver()
        assert all(job.ended_at for job in self._jobs.values())
        return list(self._jobs.values())

    @property
    def _ledger(self) -> Ledger:
        """The ledger, with its clock set to the current time."""
        self._clock.set(self._now)
        return self._ledger_of_redis

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act))

    def _submit(self, session: Session, index: int) -> None:
        turn = session.turns[index]
        blocks = tuple(itertools.chain.from_iterable(each.blocks for each in session.turns[: index + 1]))
        job = FleetJob(
            id=f"job{len(self._jobs):07}",
            session=session,
            turn=index,
            blocks=blocks,
            num_prompt=turn.num_prompt,
            num_new=turn.num_new,
            submitted_at=self._now,
        )
        self._jobs[job.id] = job
        self._ledger.submit([_submission(job, self._key, self.max_tokens_of(job))])
        self._may_have_tickets = True
        self.observer.waits(job)

    def _wait(self, worker: FleetWorker) -> None:
        """Let a worker with capacity wait for a message."""
        if worker.capacity > 0 and not worker.is_waiting and self._now >= worker.leaves_until:
            worker.is_waiting = True
            self._waiting.append(worker)

    def _deliver(self) -> None:
        """Give messages to the waiting workers."""
        while self._waiting and self._may_have_tickets:
            ticket: Any = self.redis.rpop(self._key)
            if ticket is None:
                self._may_have_tickets = False
                return
            worker = self._waiting.popleft()
            worker.is_waiting = False
            self._take(worker, json.loads(ticket)["headers"]["id"])
            self._wait(worker)

    def _take(self, worker: FleetWorker, ticket_id: str) -> None:
        limits, token = [(worker.capacity - 1, [self._key])], f"{next(self._numbers)}"
        try:
            page = self._ledger.take(self._key, ticket_id, LEASE_S, limits, cache=worker.cache, token=token)
        except JobsLeft as left:
            worker.leaves_until = self._now + left.wait_s
            self._at(worker.leaves_until, partial(self._wait, worker))
            return
        for fetched in page:
            job = self._jobs[fetched.taken.job_id]
            job.token = fetched.taken.token
            self.observer.taken(job)
            worker.add(job)
        self._schedule(worker, worker.interrupt(self._now))
        self._schedule(worker, worker.start(self._now))

    def _schedule(self, worker: FleetWorker, end_at: float | None) -> None:
        if end_at is not None:
            self._at(end_at, partial(self._end_steps, worker, worker.plan))

    def _end_steps(self, worker: FleetWorker, plan: object) -> None:
        if worker.plan is not plan:
            return  # it was interrupted
        finished, served = worker.finish(self._now)
        for job, num_prompt, num_generated in served:
            self.observer.served(job, num_prompt, num_generated)
        for job in finished:
            self._end(job)
        self._schedule(worker, worker.start(self._now))
        self._wait(worker)

    def _end(self, job: FleetJob) -> None:
        usage = usage_of(prompt_tokens=job.num_prompt, completion_tokens=job.num_new)
        usage["cached_tokens"] = job.num_prompt - job.num_computed
        attempt = self._ledger.begin(job.id, job.token, "worker", token=job.token)
        written = self._ledger.write(
            [
                Entry(
                    job_id=job.id,
                    run=attempt.run,
                    event=events.numbered(events.done("stop", usage), 0),
                    stored=CeleryState(b"{}", 1),
                    token=job.token,
                )
            ]
        )
        assert written == (set(), set())
        if job.turn + 1 < len(job.session.turns):
            think_s = job.session.turns[job.turn + 1].think_s
            self._at(self._now + think_s, partial(self._submit, job.session, job.turn + 1))


def _submission(job: FleetJob, key: str, max_tokens: int) -> Submission:
    """Return a submission of the job as a chat in which each turn is a message."""
    turns = job.session.turns[: job.turn + 1]
    messages = [{"role": "user", "content": text_of(turn.blocks)} for turn in turns]
    headers = {"id": job.id, "task": "cellama.chat", SUBMITTED_AT_HEADER: 1.0}
    properties = {"correlation_id": job.id, "delivery_tag": job.id}
    call = TaskCall(
        task="cellama.chat",
        args=["fleet", messages],
        kwargs={"max_tokens": max_tokens},
        queue=QUEUE,
        priority=PRIORITY_INTERACTIVE,
        given_fairness_key=job.session.tenant,
    )
    message = json.dumps({"body": "W10=", "headers": headers, "properties": properties})
    return Submission(job.id, call, Message(key, message))


class ServiceGaps(Observer):
    """Measures the differences in weighted service between tenants.

    `largest` is the largest difference in the service that two tenants received during an interval in which both
    tenants had waiting jobs.
    """

    def __init__(self, weights: Mapping[str, float], prefill_cost: float) -> None:
        self.largest = 0.0
        self.service: Counter[str] = Counter()  # in tokens per weight
        self._weights = weights
        self._prefill_cost = prefill_cost
        self._num_waiting: Counter[str] = Counter()
        self._extremes: dict[tuple[str, str], tuple[float, float]] = {}  # of the differences since both wait

    def _backlogged(self) -> list[str]:
        return sorted(tenant for tenant, count in self._num_waiting.items() if count)

    def waits(self, job: FleetJob) -> None:
        tenant = job.session.tenant
        self._num_waiting[tenant] += 1
        if self._num_waiting[tenant] == 1:
            self._update(tenant)

    def taken(self, job: FleetJob) -> None:
        tenant = job.session.tenant
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            self._extremes = {pair: found for pair, found in self._extremes.items() if tenant not in pair}

    def served(self, job: FleetJob, num_computed: int, num_generated: int) -> None:
        tenant = job.session.tenant
        cost = self._prefill_cost * num_computed + num_generated
        self.service[tenant] += cost / self._weights.get(tenant, 1)  # type: ignore[assignment]
        if self._num_waiting[tenant]:
            self._update(tenant)

    def _update(self, tenant: str) -> None:
        for other in self._backlogged():
            if other != tenant:
                first, second = sorted((tenant, other))
                difference = self.service[first] - self.service[second]
                low, high = self._extremes.get((first, second), (difference, difference))
                self._extremes[first, second] = low, high = min(low, difference), max(high, difference)
                self.largest = max(self.largest, high - low)
