"""End the jobs that no worker serves, so that their callers don't wait forever.

Each worker reports its queues every few seconds (`report_served`), from the start of its process on. A queue therefore
counts as served while a worker downloads or loads its model. The time of a job starts at the latest of three moments:

1. when the job could start: its submission, or its ETA
2. when a worker last reported the queue of the job
3. since when workers have looked for such jobs without an interruption. After an outage of Redis, or of all workers,
   every job gets its whole time again

One worker at a time looks. It ends jobs through the ledger, so a worker that starts to serve a queue at this moment
does not run a job that has ended.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.config.logging import event_logger
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import queues_key, reaper_key, served_key, waiting_key, watched_key
from cellama.tasks.contract.names import DEFAULT_MODEL, is_model_queue, model_of, queue_name

from .ledger import Ending, Ledger
from .registry import WorkerEntry, live_workers
from .scripts import run_script

log = event_logger(__name__)

MIN_LEASES = 4  # shortest timeout in leases, longer than an interruption that is not noticed
MAX_GAP_LEASES = 3  # longest time in leases between two looks, before all jobs get their whole time again
LOCK_SHARE = 0.9  # fraction of the period, so that the lock expires before the next look
MAX_JOBS = 1000  # jobs of a queue and priority that are checked in one look, which takes a few milliseconds


def report_served(redis: Redis, queues: Collection[str]) -> None:
    """Record that a worker reads these queues, or will read them once it has loaded their models."""
    if queues:
        run_script(redis, "serve", [], list(queues))


def queues_of(workers: Iterable[WorkerEntry]) -> set[str]:
    """Return the queues of the models that these workers have, or load, according to the registry."""
    models: set[str] = set()
    for worker in workers:
        models |= {model["id"] for model in worker.models}
        models |= {DEFAULT_MODEL for model in worker.models if model["default"]}
        models |= {thing["model"] for thing in worker.wanted if thing["state"] in ("ready", "loading")}
    return set(map(queue_name, models))


def model_hint(model: str, served: Collection[str]) -> str:
    """Return the remedy for a model that none of the workers serves."""
    close = difflib.get_close_matches(model, served, n=1)
    return f"did you mean {close[0]!r}?" if close else f"models: {', '.join(sorted(set(served))) or 'none'}"


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

        `store` stores the end of a job for Celery, and sends the next tasks of its canvas. `queues_read` asks all
        Celery workers for the queues that they read. It is only called for queues that don't belong to a model.
        """
        self._redis = redis
        self._ledger = ledger
        self._store = store
        self._timeout_s = max(timeout_s, MIN_LEASES * lease_s)
        self.period_s = lease_s
        self._queues_read = queues_read

    def run_once(self) -> int:
        """End unserved jobs unless another worker looks in this period. Return the number of ended jobs."""
        lock_ms = max(1, int(self.period_s * 1e3 * LOCK_SHARE))
        if not self._redis.set(reaper_key("unserved"), "1", nx=True, px=lock_ms):
            return 0
        args = [MAX_GAP_LEASES * self.period_s]
        now, watched_since = map(float, run_script(self._redis, "watch", [watched_key()], args))
        workers = live_workers(self._redis)
        report_served(self._redis, queues_of(workers))  # of workers of versions that don't report their queues
        if now - watched_since < self._timeout_s:
            return 0
        unserved = [queue for queue in self._queues_with_jobs() if self._is_unserved(queue, now)]
        return sum(self._end_jobs(queue, now - self._timeout_s, workers) for queue in unserved)

    def _queues_with_jobs(self) -> list[str]:
        names: Any = self._redis.smembers(queues_key())
        return sorted(raw.decode() for raw in names)

    def _is_unserved(self, queue: str, now: float) -> bool:
        served_at: Any = self._redis.zscore(served_key(), queue)
        return now - (served_at or 0.0) >= self._timeout_s

    def _end_jobs(self, queue: str, before: float, workers: Collection[WorkerEntry]) -> int:
        """End the jobs of an unserved queue that could have started before this time, and return their number."""
        found: Any = run_script(self._redis, "unserved", [waiting_key(queue)], [before, MAX_JOBS])
        if not found:
            return 0
        if not is_model_queue(queue) and queue in self._queues_read():
            report_served(self._redis, [queue])
            return 0
        event = events.error("unknown_model", self._reason(queue, workers))
        num_ended = sum(self._end(raw.decode(), event) for raw in found)
        log.warning("unserved jobs ended", queue=queue, num_jobs=num_ended, detail=event["message"])
        return num_ended

    def _reason(self, queue: str, workers: Collection[WorkerEntry]) -> str:
        unserved = f"is not served by any worker, and the job has waited for {self._timeout_s:g} s (unserved_timeout_s)"
        if is_model_queue(queue):
            served = {model["id"] for worker in workers for model in worker.models if model["status"] == "ready"}
            return f"model: {model_of(queue)!r} {unserved}; {model_hint(model_of(queue), served)}"
        return (
            f"queue: {queue!r} {unserved}; send the job to the queue of its model, {queue_name('MODEL')!r}, or make "
            "workers read this queue with add_consumer"
        )

    def _end(self, job_id: str, event: events.ErrorEvent) -> bool:
        """End a job unless a worker runs it. If the end can't be stored now, the reaper stores it later."""
        if not self._ledger.end_waiting(job_id, event):
            return False
        try:
            self._store(job_id, Ending(event, None))
            self._ledger.settle(job_id)
        except RedisError:
            raise
        except Exception:  # for example because the user's own broker refuses an errback
            log.exception("job not settled", job_id=job_id, detail="this step is retried later")
        return True
