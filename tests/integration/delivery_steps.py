"""The steps of the model check, which can happen to jobs, workers and Redis in any order. No step waits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from cellama.config import get_settings
from cellama.tasks.contract import events
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import due_key, job_key, journal_key, leases_key, reaper_key, result_key, slots_key
from cellama.tasks.contract.names import queue_key
from cellama.tasks.state.history import read_past
from cellama.tasks.state.ledger import Attempt, CeleryState, Ending, Entry, Ledger, Taken, new_run
from cellama.tasks.worker.reaper import Reaper

from .ledgers import submission

LEASE_S = 6.0

TICK_S = 1.5

QUEUE = "cellama:queue:checked"

LIST = queue_key(QUEUE, 3)

CLOCK = "test:clock"

TOKENS = 4  # tokens of a job that is not ended earlier

MAX_JOBS = 5
MAX_HELD = 3  # limit of the tenant ''

redis_of_test: list[Any] = []


class MovedRedis(Redis):
    """A Redis whose clock the test moves."""

    def time(self, **_: Any) -> Any:
        now = float(self.get(CLOCK) or 0)  # type: ignore[arg-type]
        return int(now), int(now % 1 * 1e6)


@dataclass
class Held:
    """A message in a worker's memory, and the attempt at its job, if there is one."""

    taken: Taken
    attempt: Attempt | None = None
    number: int = 0  # number of the attempt among the attempts at all jobs, which no rollback reuses
    num_tokens: int = 0
    next_seq: int = 0


@dataclass
class Worker:
    held: dict[str, Held] = field(default_factory=dict)
    frozen: bool = False


class Delivery:
    """Simulates workers and Redis. Each public method that takes a number from 0 to 11 is a step.

    Most steps use the number to choose a worker.
    """

    def __init__(self) -> None:
        self.redis = redis_of_test[0]
        self.redis.flushdb()
        self.redis.set(CLOCK, 1e6)
        settings = get_settings().model_copy(update={"fairness_limits": {"": MAX_HELD}})
        self.ledger = Ledger(self.redis, settings=settings)
        self.reaper = Reaper(self.redis, self.ledger, self.store, LEASE_S)
        self.workers = [Worker() for _ in range(3)]
        self.jobs: list[str] = []
        self.ticks = 0
        self.num_begun = 0
        self.snapshot: dict[bytes, bytes] = {}
        self.trimmed: set[str] = set()  # jobs whose journal has lost its first events

    def store(self, job_id: str, ending: Ending) -> None:
        """Store a result as Celery's result backend does."""
        assert self.ledger.state(job_id) == "done"
        if self.redis.setnx(result_key(job_id), json.dumps(ending.event)):
            self.redis.hset(job_key(job_id), "stored", "SUCCESS")

    def journal(self, job_id: str) -> list[Any]:
        return list(events_in(self.redis.xrange(journal_key(job_id))))

    # Producers

    def submit(self, number: int) -> None:
        if len(self.jobs) < MAX_JOBS:
            job = submission(QUEUE, timeout_s=5.0 if number == 0 else None)
            self.ledger.submit([job])
            self.jobs.append(job.job_id)

    def cancel(self, number: int) -> None:
        if not self.jobs:
            return
        job_id = self.jobs[number % len(self.jobs)]
        if self.ledger.cancel(job_id, running=True) and (ending := self.ledger.ending(job_id)):
            self.store(job_id, ending)
            self.ledger.settle(job_id)

    # Workers

    def lose(self, number: int) -> None:
        """Kill a worker between the two commands that take a message."""
        self.redis.rpop(LIST)
        self.die(number)

    def take(self, number: int) -> None:
        worker = self.workers[number % 3]
        if worker.frozen or (message := self.redis.rpop(LIST)) is None:
            return
        ticket_id = json.loads(message)["headers"]["id"]
        for fetched in self.ledger.take(LIST, ticket_id, LEASE_S, [(3, [LIST])] if number % 2 else ()):
            worker.held[fetched.taken.job_id] = Held(fetched.taken)

    def begin(self, number: int) -> None:
        worker = self.workers[number % 3]
        for job_id, held in list(worker.held.items()):
            if not worker.frozen and held.attempt is None:
                self.begin_one(worker, job_id, held)

    def begin_one(self, worker: Worker, job_id: str, held: Held) -> None:
        attempt = self.ledger.begin(job_id, new_run(), "w", token=held.taken.token, alone=True)
        if attempt.verdict in ("superseded", "done", "gone"):
            self.ledger.release(held.taken)
            del worker.held[job_id]
            return
        past = read_past(self.redis, job_id)
        assert not past.trimmed or job_id in self.trimmed
        assert (past.next_seq == attempt.next_seq) or job_id in self.trimmed
        self.num_begun += 1
        held.number = self.num_begun
        held.attempt, held.num_tokens, held.next_seq = attempt, past.num_tokens, attempt.next_seq
        if attempt.verdict in ("cancelled", "dead"):
            self.end(worker, job_id, held)
        elif past.trimmed or past.next_seq < attempt.next_seq:
            self.end(worker, job_id, held, event=events.error("stream_trimmed", "", False))

    def write(self, number: int) -> None:
        worker = self.workers[number % 3]
        for job_id, held in list(worker.held.items()):
            if not worker.frozen and held.attempt is not None:
                self.write_one(worker, job_id, held)

    def write_one(self, worker: Worker, job_id: str, held: Held) -> None:
        if held.num_tokens >= TOKENS:
            self.end(worker, job_id, held)
        elif held.next_seq == 0:
            self.tell(worker, job_id, held, events.started("m", 1, "w", 1))
        elif self.tell(worker, job_id, held, events.token(str(held.number), [held.num_tokens])):
            held.num_tokens += 1

    def tell(
        self, worker: Worker, job_id: str, held: Held, event: events.Event, stored: CeleryState | None = None
    ) -> bool:
        assert held.attempt is not None
        entry = Entry(
            job_id=job_id,
            run=held.attempt.run,
            event={"seq": held.next_seq, **event},
            stored=stored,
            token=held.taken.token,
        )
        superseded, gaps = self.ledger.write([entry])
        held.next_seq += 1
        if gaps:  # Redis has lost events, so continue from the journal
            self.hand_back_one(worker, job_id, held)
        elif superseded:
            holder = self.redis.hget(job_key(job_id), "holder")
            assert holder != held.taken.token.encode() or self.ledger.state(job_id) != "running", "its own run"
            worker.held.pop(job_id, None)
        return not superseded and not gaps

    def end(
        self, worker: Worker, job_id: str, held: Held, *, event: events.Event | None = None, dies: bool = False
    ) -> None:
        assert held.attempt is not None
        if event is None:
            event = events.done("cancelled" if held.attempt.verdict == "cancelled" else "stop", {})
        if held.number % 2 and event.get("finish_reason") == "stop":  # Celery gets it with the event
            if self.tell(worker, job_id, held, event, CeleryState(json.dumps(event).encode(), None)):
                assert self.redis.exists(result_key(job_id))
                assert self.redis.hget(job_key(job_id), "holder") != held.taken.token.encode()
        elif self.tell(worker, job_id, held, event) and not dies:
            self.store(job_id, Ending(event, None))
            self.ledger.release(held.taken)
        worker.held.pop(job_id, None)

    def end_and_die(self, number: int) -> None:
        worker = self.workers[number % 3]
        for job_id, held in list(worker.held.items()):
            if not worker.frozen and held.attempt is not None:
                self.end(worker, job_id, held, dies=True)

    def hand_back(self, number: int) -> None:
        worker = self.workers[number % 3]
        for job_id, held in list(worker.held.items()):
            if not worker.frozen:
                self.hand_back_one(worker, job_id, held)

    def hand_back_one(self, worker: Worker, job_id: str, held: Held) -> None:
        if held.attempt is not None:
            self.ledger.hand_back(held.attempt)
        self.ledger.requeue(held.taken)
        worker.held.pop(job_id, None)

    def die(self, number: int) -> None:
        self.workers[number % 3] = Worker()

    def freeze_or_thaw(self, number: int) -> None:
        worker = self.workers[number % 3]
        worker.frozen = not worker.frozen

    # Time, outages, failovers

    def pass_time(self, number: int) -> None:
        for _ in range(number + 1):
            self.redis.incrbyfloat(CLOCK, TICK_S)
            self.ticks += 1
            for worker in self.workers:
                if not worker.frozen:
                    self.renew(worker)
            if not all(worker.frozen for worker in self.workers):
                self.look()

    def renew(self, worker: Worker) -> None:
        held = {h.taken: job_id for job_id, h in worker.held.items() if h.taken.token}
        for lost in self.ledger.renew(list(held), LEASE_S):
            del worker.held[held[lost]]

    def look(self) -> None:
        if self.ticks % 4 == 0:
            self.redis.delete(reaper_key("missing"))
        self.reaper.run_once()

    def expire_journal(self, number: int) -> None:
        """Delete the journal of a waiting job, as if it had expired or been evicted."""
        waiting = [job_id for job_id in self.jobs if self.ledger.state(job_id) in ("queued", "handed_back")]
        if waiting:
            job_id = waiting[number % len(waiting)]
            if self.redis.delete(journal_key(job_id)):
                self.trimmed.add(job_id)

    def cut_off(self, number: int) -> None:
        """Make Redis unreachable for a while, or let a replica with a different clock take over."""
        self.redis.incrbyfloat(CLOCK, (2.0, 8.0, 60.0, -60.0)[number % 4])

    def remember(self, _: int) -> None:
        self.snapshot = {key: self.redis.dump(key) for key in self.redis.keys("*")}

    def roll_back(self, _: int) -> None:
        if not self.snapshot:
            return
        now = self.redis.get(CLOCK)
        self.redis.flushdb()
        for key, value in self.snapshot.items():
            self.redis.restore(key, 0, value)
        self.redis.set(CLOCK, now)
        self.snapshot = {}
        self.jobs = [job_id for job_id in self.jobs if self.ledger.state(job_id) is not None]

    # Invariants

    def streams_are_whole(self) -> None:
        for job_id in self.jobs:
            told = self.journal(job_id)
            first = told[0]["seq"] if told and job_id in self.trimmed else 0
            assert [event["seq"] for event in told] == list(range(first, first + len(told)))
            tokens = [token for event in told if event["type"] == "token" for token in event["tokens"]]
            assert tokens == list(range(len(tokens))) or job_id in self.trimmed
            if first:
                assert events.is_terminal(told[0]), "a stream that has lost its beginning only ends"
            attempts = [int(event["text"]) for event in told if event["type"] == "token"]
            assert attempts == sorted(attempts), "an older attempt wrote after a younger one"
            ends = [event["seq"] for event in told if events.is_terminal(event)]
            assert ends == ([told[-1]["seq"]] if self.ledger.state(job_id) == "done" else [])

    def somebody_looks_after_each_job(self) -> None:
        for job_id in self.jobs:
            if self.ledger.state(job_id) != "done":
                noted = self.ledger.ahead(job_id) is not None or self.redis.zscore("cellama:running", job_id)
                assert noted or self.redis.zscore(leases_key(), job_id) is not None

    def limit_is_kept(self) -> None:
        held = {job_id for job_id in self.jobs if self.redis.hexists(job_key(job_id), "holder")}
        assert {raw.decode() for raw in self.redis.smembers(slots_key(""))} == held
        assert len(held) <= MAX_HELD

    def finish(self) -> None:
        """Run the duties of workers until every job has ended and Celery has each result."""
        for worker in self.workers:
            worker.frozen = False
        for _ in range(60):
            for number in range(3):
                while self.redis.llen(LIST):
                    self.take(number)
                self.begin(number)
                self.write(number)
            self.pass_time(1)
            if all(self.redis.hexists(job_key(job_id), "settled") for job_id in self.jobs):
                break
        for job_id in self.jobs:
            assert self.ledger.state(job_id) == "done", job_id
            stored = json.loads(self.redis.get(result_key(job_id)))
            assert stored.get("finish_reason") or stored["code"] == "stream_trimmed"
            assert self.redis.hexists(job_key(job_id), "settled")
            assert self.redis.zscore(due_key(), job_id) is None
        self.streams_are_whole()
