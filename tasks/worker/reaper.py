"""Take care of jobs that no worker takes care of. Each worker has a reaper thread, and several may work concurrently.

- Leases that have ended, because the worker died or is frozen: the message returns to the head of its queue.
- Jobs whose ETA has come: the message returns to the head of its queue.
- Jobs that are due: a timeout has passed while no worker runs the job, or a job has ended, and Celery does not have the
  end, or what follows the job has not been sent. A reaper claims a few jobs at a time, so no two work on the same one.
- Messages that are lost: a worker that is killed between two commands takes a message with it. The ledger still has the
  job, which is neither held nor, by the order of its queue, in the queue. A queue is first in, first out, except for
  messages that returned to its head, so it suffices to read the head, however many jobs wait. A job that is missing for
  a whole period is queued again. A lock in Redis gives this search to one reaper per period.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from celery import states
from redis import Redis
from redis.exceptions import RedisError

from cellama.tasks.connection.redis_loop import RedisLoop
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import (
    cancel_key,
    job_key,
    leases_key,
    missing_key,
    queues_key,
    reaper_key,
    running_key,
    waiting_key,
)
from cellama.tasks.contract.late import ending_of_late
from cellama.tasks.contract.names import PRIORITIES, queue_key
from cellama.tasks.state.history import read_past
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Ending
from cellama.tasks.state.scripts import run_script

log = logging.getLogger(__name__)

SETTLED_S = 5.0  # a younger job may be on its way into its queue
HEADS = 500  # messages read at the head of a queue; the first one that no worker has had is usually among the first
PAGE = 1000  # jobs per command, because Redis serves no other client meanwhile
DUE_PAGE = 50  # jobs that a reaper claims together; it ends each of them with a few commands
LOOKS_PER_LEASE = 4  # a message waits at most a quarter of a lease longer than its lease

REFUSED = "Celery refused its message before anything of it ran; the workers' logs say why"

Store = Callable[[str, Ending], None]  # stores for Celery how a job ended, and sends what follows it


class Reaper:
    """Does what is due: once with `look`, or periodically in a thread after `start`."""

    def __init__(self, redis: Redis, ledger: Ledger, store: Store, lease_s: float) -> None:
        self._redis = redis
        self._ledger = ledger
        self._store = store
        self._lease_s = lease_s
        self._loop = RedisLoop("reaper", self.look, lease_s / LOOKS_PER_LEASE)

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        self._loop.close(self._lease_s)

    def look(self) -> None:
        """Do what is due. Raises RedisError."""
        if restored := self._ledger.restore(self._lease_s):
            log.warning("%d messages of workers that died or froze are back in their queues", restored)
        self.settle_due()
        if self._is_mine("missing", self._lease_s):
            self.find_missing()

    def _is_mine(self, duty: str, period_s: float) -> bool:
        return bool(self._redis.set(reaper_key(duty), "1", nx=True, px=max(1, int(period_s * 900))))

    # What is due

    def settle_due(self) -> None:
        """End jobs that no worker runs and that are cancelled or late, and give Celery the ends that it lacks."""
        while claimed := self._ledger.claim_due(DUE_PAGE, self._lease_s):
            for job_id, state in claimed:
                self._settle_or_log(job_id, state)
            if len(claimed) < DUE_PAGE:
                return

    def _settle_or_log(self, job_id: str, state: str) -> None:
        try:
            self._settle(job_id, state)
        except RedisError:
            raise
        except Exception:  # for instance, the user's own broker refuses the next step of a canvas
            log.exception("reaper: can't settle job %s; it is retried later", job_id)

    def _settle(self, job_id: str, state: str) -> None:
        if state in ("queued", "handed_back"):
            self._end(job_id)
        elif state == "done":
            ending = self._ledger.ending(job_id)
            if ending is not None:
                self._store(job_id, ending)
            self._ledger.settle(job_id)

    def _end(self, job_id: str) -> None:
        past = read_past(self._redis, job_id)
        known: Any = self._redis.hmget(job_key(job_id), "task", "refused", "stored")
        task, is_refused, stored = known
        event: events.Event
        result = None
        if stored == states.REVOKED.encode() or self._redis.exists(cancel_key(job_id)):
            event = events.done("cancelled", past.usage)
        elif is_refused:
            event = events.error("refused", REFUSED)
        else:
            event, result = ending_of_late((task or b"").decode(), past.text, past.num_tokens)
        if self._ledger.end_waiting(job_id, event, result):
            self._store(job_id, Ending(event, result))
            self._ledger.settle(job_id)

    # What is missing

    def find_missing(self) -> int:
        """Queue again what was missing in the last period as well. Returns how many jobs that were."""
        suspects = dict.fromkeys(self._running_without_lease(), running_key())
        for queue in self._busy_queues():
            for priority in PRIORITIES:
                suspects |= dict.fromkeys(self._not_in_queue(queue, priority), waiting_key(queue))
        self._clear(suspects)
        lost = [job_id for job_id, known_by in suspects.items() if self._is_lost(job_id, known_by)]
        for job_id in lost:
            log.warning("Redis lost the message of job %s; it is queued again", job_id)
        return len(lost)

    def _is_lost(self, job_id: str, known_by: str) -> bool:
        keys = [job_key(job_id), cancel_key(job_id)]
        return bool(run_script(self._redis, "missing", keys, [job_id, self._lease_s * 0.8, known_by]))

    def _clear(self, suspects: dict[str, str]) -> None:
        """Forget jobs that were missing and are there again."""
        missing: Any = self._redis.zrange(missing_key(), 0, -1)
        if found := [raw for raw in missing if raw.decode() not in suspects]:
            self._redis.zrem(missing_key(), *found)

    def _busy_queues(self) -> list[str]:
        """Return the queues with waiting jobs or messages, and remove the others from the set of queues."""
        names: Any = self._redis.smembers(queues_key())
        queues = [raw.decode() for raw in names]
        keys = {queue: [waiting_key(queue), *(queue_key(queue, p) for p in PRIORITIES)] for queue in queues}
        with self._redis.pipeline(transaction=False) as pipe:
            for each in keys.values():
                pipe.exists(*each)
            are_busy = dict(zip(keys, pipe.execute(), strict=True))
        for queue, is_busy in are_busy.items():
            if not is_busy:
                run_script(self._redis, "forget_queue", keys[queue], [queue])
        return [queue for queue, is_busy in are_busy.items() if is_busy]

    def _not_in_queue(self, queue: str, priority: int) -> Iterator[str]:
        """Yield the waiting jobs that no worker holds and that are not where the order of the queue puts them."""
        keys = [queue_key(queue, priority), waiting_key(queue)]
        after: bytes = b""
        while True:
            last, *found = run_script(self._redis, "suspects", keys, [priority, SETTLED_S, HEADS, PAGE, after])
            yield from (raw.decode() for raw in found)
            if last in (b"", after):
                return
            after = last

    def _running_without_lease(self) -> Iterator[str]:
        running: Any = self._redis.zrange(running_key(), 0, -1)
        for start in range(0, len(running), PAGE):
            yield from self._without_lease(running[start : start + PAGE])

    def _without_lease(self, ids: list[Any]) -> list[str]:
        leases: Any = self._redis.zmscore(leases_key(), ids)
        return [raw.decode() for raw, lease in zip(ids, leases, strict=True) if lease is None]
