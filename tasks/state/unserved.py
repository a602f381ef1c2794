"""End the jobs that no worker serves, so that their callers don't wait forever.

Each worker reports its queues every few seconds (`report_served`), starting when its process starts. A queue therefore
counts as served while a worker downloads or loads its model. A job's timeout starts at the latest of three moments:

1. when the job could start, which is its submission or its ETA
2. when a worker last reported the job's queue
3. when workers started to search for such jobs without interruption

After an outage of Redis or of all workers, every job's timeout therefore starts again.

Only one worker at a time searches. This worker ends jobs through the ledger, so a worker that starts to serve a queue
at this moment does not run a job that has ended.

Producers with plain Celery can send jobs to a queue that no worker reads. Such a message, called a *stray*, has no
entry in the ledger. The search finds strays among the oldest messages of all queues that kombu has declared, and gives
each stray an entry when its timeout has passed. Then the search ends the stray like any other job. Messages of other
tasks are never changed.

If no worker is running, a caller that is waiting for the result of a job ends this job itself (`UnservedWait`).
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import redis_time
from cellama.tasks.contract import events
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.keys import (
    job_key,
    leases_key,
    queues_key,
    reaper_key,
    served_key,
    strays_key,
    waiting_key,
    watched_key,
)
from cellama.tasks.contract.names import (
    DEFAULT_MODEL,
    PRIORITIES,
    PRIORITY_SEPARATOR,
    is_model_queue,
    model_of,
    queue_key,
    queue_name,
)

from .ledger import Ending, Ledger
from .registry import WorkerEntry, is_served, live_workers
from .scripts import run_script

log = event_logger(__name__)

MIN_LEASES = 4  # shortest timeout in leases, longer than an interruption that is not noticed
MAX_GAP_LEASES = 3  # longest time in leases between two searches, after which every job's timeout starts again
LOCK_SHARE = 0.9  # fraction of the period, so that the lock expires before the next search
STRAYS_PERIOD_S = 60.0  # longest time between two searches for strays, which read the names of all keys
MAX_STRAYS = 200  # messages at the head of each list that are searched for strays
MAX_STRAY_BYTES = 8 << 20  # size of the messages of a queue that are searched, which takes a few milliseconds
SCAN_COUNT = 1000  # keys per command, during which Redis serves no other client
BINDINGS = "_kombu.binding.*"  # sets of the queues that producers and workers have declared (kombu.transport.redis)
MAX_CHECKED = 1000  # jobs of a queue and priority that are checked in one search, which takes a few milliseconds
MAX_ENDED = 500  # jobs of a queue that are ended in one search, which takes about a second


def report_served(redis: Redis, queues: Collection[str]) -> None:
    """Record that a worker reads these queues, or will read them once it has loaded their models."""
    if queues:
        run_script(redis, "serve", [], list(queues))


def queues_of(workers: Iterable[WorkerEntry]) -> set[str]:
    """Return the queues of the models that these workers have or are loading, according to the registry."""
    models: set[str] = set()
    for worker in workers:
        models |= {model["id"] for model in worker.models}
        models |= {DEFAULT_MODEL for model in worker.models if model["default"]}
        models |= {thing["model"] for thing in worker.wanted if thing["state"] in ("ready", "loading", "available")}
    return set(map(queue_name, models))


def model_hint(model: str, served: Collection[str]) -> str:
    """Return the remedy to suggest for a model that no worker serves."""
    close = difflib.get_close_matches(model, served, n=1)
    if not served:
        return "start a worker with `cellama up` or `cellama worker`"
    return f"did you mean {close[0]!r}?" if close else f"models: {', '.join(sorted(set(served)))}"


@dataclass(frozen=True, slots=True)
class Stray:
    """A message from plain Celery in a queue that no cellama worker reads."""

    queue: str
    priority: int
    job_id: str
    task: str


class UnservedJobs:
    """Finds and ends the waiting jobs whose queue no worker has served for `timeout_s`."""

    def __init__(
        self,
        redis: Redis,
        ledger: Ledger,
        store: Callable[[str, Ending], None],
        *,
        timeout_s: float,
        lease_s: float,
        queues_read: Callable[[], Collection[str]],
    ) -> None:
        """Prepare the search.

        A `timeout_s` of 0 disables the search. `store` stores a job's outcome for Celery, and sends the next tasks of
        the job's canvas. `queues_read` asks all Celery workers for the queues that they read. `queues_read` is called
        only for queues that don't belong to a model.
        """
        self._redis = redis
        self._ledger = ledger
        self._store = store
        self.timeout_s = max(timeout_s, MIN_LEASES * lease_s) if timeout_s else math.inf
        self.period_s = lease_s
        self._queues_read = queues_read

    def run_once(self) -> int:
        """End unserved jobs, unless another worker does so in this period. Return the number of ended jobs."""
        if not self._acquire_duty("unserved", self.period_s):
            return 0
        args = [MAX_GAP_LEASES * self.period_s]
        now, watched_since = map(float, run_script(self._redis, "watch", [watched_key()], args))
        workers = live_workers(self._redis)
        report_served(self._redis, queues_of(workers))  # of workers of versions that don't report their queues
        if self._acquire_duty("strays", min(STRAYS_PERIOD_S, self.timeout_s / 4)):
            self._adopt_strays(now, watched_since)
        if now - watched_since < self.timeout_s:
            return 0
        unserved = [queue for queue in self._queues_with_jobs() if self._is_unserved(queue, now)]
        return sum(self._end_jobs(queue, now - self.timeout_s, workers) for queue in unserved)

    def _acquire_duty(self, duty: str, period_s: float) -> bool:
        """Acquire the lock for a duty in this period, and return whether this process performs the duty."""
        lock_ms = max(1, int(period_s * 1e3 * LOCK_SHARE))
        return bool(self._redis.set(reaper_key(duty), "1", nx=True, px=lock_ms))

    def _queues_with_jobs(self) -> list[str]:
        names: Any = self._redis.smembers(queues_key())
        return sorted(raw.decode() for raw in names)

    def _is_unserved(self, queue: str, now: float) -> bool:
        served_at: Any = self._redis.zscore(served_key(), queue)
        return now - (served_at or 0.0) >= self.timeout_s

    def _end_jobs(self, queue: str, before: float, workers: Collection[WorkerEntry]) -> int:
        """End the jobs of an unserved queue that could have started before this time, and return their number."""
        found: Any = run_script(self._redis, "unserved", [waiting_key(queue)], [before, MAX_CHECKED, MAX_ENDED])
        if not found:
            return 0
        if not is_model_queue(queue) and queue in self._queues_read():
            report_served(self._redis, [queue])
            return 0
        event = events.error("unknown_model", self._reason(queue, workers))
        num_ended = sum(self.end(raw.decode(), event) for raw in found)
        log.warning("jobs that no worker serves were ended", queue=queue, num_jobs=num_ended, detail=event["message"])
        return num_ended

    def _reason(self, queue: str, workers: Collection[WorkerEntry]) -> str:
        unserved = f"is not served by any worker, and the job has waited for {self.timeout_s:g} s (unserved_timeout_s)"
        if is_model_queue(queue):
            served = {model["id"] for worker in workers for model in worker.models if is_served(model)}
            return f"model: {model_of(queue)!r} {unserved}; {model_hint(model_of(queue), served)}"
        return (
            f"queue: {queue!r} {unserved}; send the job to the queue of its model, {queue_name('MODEL')!r}, or make "
            "workers read this queue with add_consumer"
        )

    def end(self, job_id: str, event: events.ErrorEvent) -> bool:
        """End a job unless a worker is running it.

        If Celery's result can't be stored now, the reaper stores it later.
        """
        if not self._ledger.end_waiting(job_id, event):
            return False
        try:
            self._store(job_id, Ending(event, None))
            self._ledger.settle(job_id)
        except RedisError:
            raise
        except Exception:  # for example because the user's own broker refuses an errback
            log.exception("job not settled", job_id=job_id, detail="the reaper will settle the job later")
        return True

    def end_of(self, job_id: str) -> events.ErrorEvent | None:
        """Return the last event of a waiting job whose model no worker serves, or None if the job must not end yet."""
        fields: Any = self._redis.hmget(job_key(job_id), "state", "queue", "submitted_at", "delay")
        state, queue, submitted_at, delay = (value and value.decode() for value in fields)
        is_waiting = state in ("queued", "handed_back") and self._redis.zscore(leases_key(), job_id) is None
        if not is_waiting or not is_model_queue(queue):
            return None
        now, workers = redis_time(self._redis), live_workers(self._redis)
        may_start_at = float(submitted_at) + float(delay or 0)
        if now - may_start_at < self.timeout_s or not self._is_unserved(queue, now) or queue in queues_of(workers):
            return None
        return events.error("unknown_model", self._reason(queue, workers))

    # Messages of plain Celery

    def _adopt_strays(self, now: float, watched_since: float) -> None:
        """Record when strays are detected, and add strays whose timeout has passed to the ledger."""
        strays = {
            stray.job_id: stray
            for queue in self._declared_queues()
            if self._is_unserved(queue, now)
            for stray in self._strays_in(queue)
        }
        known: Any = self._redis.zrange(strays_key(), 0, -1, withscores=True)
        detected_at = {raw.decode(): at for raw, at in known}
        if gone := [job_id for job_id in detected_at if job_id not in strays]:
            self._redis.zrem(strays_key(), *gone)
        if new := {job_id: now for job_id in strays if job_id not in detected_at}:
            self._redis.zadd(strays_key(), new)
        before = now - self.timeout_s
        if watched_since > before:
            return
        old = [stray for job_id, stray in strays.items() if detected_at.get(job_id, now) <= before]
        others = {stray.queue for stray in old if not is_model_queue(stray.queue)}
        read = others and others.intersection(self._queues_read())
        for stray in old:
            if stray.queue not in read:
                self._adopt(stray, detected_at[stray.job_id])

    def _declared_queues(self) -> set[str]:
        """Return the queues that any Celery app has declared in this database."""
        names: set[str] = set()
        for key in self._redis.scan_iter(match=BINDINGS, count=SCAN_COUNT, _type="set"):
            bindings: Any = self._redis.smembers(key)
            names |= {raw.decode(errors="replace").rpartition(PRIORITY_SEPARATOR)[2] for raw in bindings}
        return names

    def _strays_in(self, queue: str) -> list[Stray]:
        """Return the strays among the oldest messages of a queue.

        Return an empty list if this worker may not read the queue, or if the queue's keys are not lists.
        """
        lists = {queue_key(queue, priority): priority for priority in PRIORITIES}
        try:
            found: Any = run_script(self._redis, "strays", list(lists), [MAX_STRAYS, MAX_STRAY_BYTES])
        except ResponseError:
            return []
        texts = [value.decode() for value in found]
        strays = [Stray(queue, lists[texts[at]], texts[at + 1], texts[at + 2]) for at in range(0, len(texts), 3)]
        return [stray for stray in strays if is_model_queue(queue) or stray.task in KINDS]

    def _adopt(self, stray: Stray, detected_at: float) -> None:
        keys = [queue_key(stray.queue, stray.priority), job_key(stray.job_id)]
        args = [stray.job_id, stray.task, stray.queue, stray.priority, detected_at, MAX_STRAYS]
        run_script(self._redis, "adopt_stray", keys, args)


class UnservedWait:
    """Ends the jobs that a caller is waiting for, if their timeout passes during the wait and no worker ends them.

    The timeout of these jobs also starts again when the wait starts, because a worker may be about to start. A job ends
    only if no worker serves it in two consecutive checks, because workers may not have reported their queues yet after
    an outage of Redis.
    """

    def __init__(self, jobs: UnservedJobs) -> None:
        self._jobs = jobs
        self._checked_at = -math.inf  # monotonic time in seconds
        self._next_at = time.monotonic() + jobs.timeout_s
        self._suspects: set[str] = set()

    @property
    def is_due(self) -> bool:
        """Return whether `check` should be called now."""
        return time.monotonic() >= self._next_at

    def check(self, job_ids: Iterable[str]) -> None:
        """If a check is due, end the jobs that no worker serves. While Redis is unreachable, do nothing."""
        if not self.is_due:
            return
        now = time.monotonic()
        if now - self._checked_at > MAX_GAP_LEASES * self._jobs.period_s:
            self._suspects = set()
        try:
            ends = {job_id: event for job_id in job_ids if (event := self._jobs.end_of(job_id)) is not None}
            for job_id in self._suspects & ends.keys():
                self._jobs.end(job_id, ends[job_id])
            self._suspects = set(ends)
        except RedisError as error:
            log.info("check for unserved jobs failed", detail=f"{error}; the check will be repeated")
            self._suspects = set()
        self._checked_at, self._next_at = now, time.monotonic() + self._jobs.period_s
