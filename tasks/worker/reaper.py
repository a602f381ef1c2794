"""Looks after jobs that no worker looks after. Every worker has such a thread; locks in Redis give each duty to one.

- Leases that ended: the worker is gone, or frozen. The message goes back to the head of its queue.
- Jobs that are due: a timeout is over while no worker runs the job, or Celery has not heard how a job ended.
- Messages that Redis lost: a worker that is killed between two commands takes a message with it. The ledger still
  knows the job, and that it is neither held nor, by its place in the order of its queue, in there. A queue is first in,
  first out, but for what came back to its head; so a look at heads is enough, whatever the lengths. What is missing
  for a whole period, whoever looks, is queued again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.tasks.contract import events
from cellama.tasks.contract.keys import (
    DUE_KEY,
    LEASES_KEY,
    MISSING_KEY,
    PRIORITY_WEIGHT,
    QUEUES_KEY,
    RUNNING_KEY,
    cancel_key,
    job_key,
    reaper_key,
    waiting_key,
    waiting_score,
)
from cellama.tasks.contract.kinds import ending_of_late
from cellama.tasks.contract.names import PRIORITIES, queue_key
from cellama.tasks.state.history import read_past
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Ending
from cellama.tasks.state.scripts import run_script

log = logging.getLogger(__name__)

SETTLED_S = 5.0  # a younger job may be on its way into its queue
HEADS = 500  # messages looked at, at the head of a queue
PAGE = 1000  # jobs per question
LOOKS_PER_LEASE = 4

REFUSED = "Celery refused its message before anything of it ran; the workers' logs say why"

Store = Callable[[str, Ending], None]  # tells Celery how a job ended


class Reaper:
    """`look` does what is due, from one thread; `start` makes one that does so for good."""

    def __init__(self, redis: Redis, ledger: Ledger, store: Store, lease_s: float) -> None:
        self._redis = redis
        self._ledger = ledger
        self._store = store
        self._lease_s = lease_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellama-reaper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._lease_s)

    def _run(self) -> None:
        while not self._closing.wait(self._lease_s / LOOKS_PER_LEASE):
            try:
                self.look()
            except RedisError as error:
                log.warning("the reaper waits for Redis: %s", error)
            except Exception:
                log.exception("the reaper failed; it looks again")

    def look(self) -> None:
        """Does each duty that no other worker has done within its period."""
        if restored := self._ledger.restore(self._lease_s):
            log.warning("%d messages of workers that are gone are back in their queues", restored)
        if self._is_mine("due", self._lease_s / LOOKS_PER_LEASE):
            self.settle_due()
        if self._is_mine("missing", self._lease_s):
            self.find_missing()

    def _is_mine(self, duty: str, period_s: float) -> bool:
        return bool(self._redis.set(reaper_key(duty), "1", nx=True, px=max(1, int(period_s * 900))))

    def _now(self) -> float:
        seconds, micros = self._redis.time()
        return float(seconds) + micros / 1e6

    # What is due

    def settle_due(self) -> None:
        """Ends jobs whose timeout is over, or that are cancelled, if no worker runs them; tells Celery of ends."""
        for job_id in list(self._members(DUE_KEY, 0, self._now())):
            state = self._ledger.state(job_id)
            if state in ("queued", "handed_back"):
                self._end(job_id)
            elif state == "done" and (ending := self._ledger.ending(job_id)) is not None:
                self._store(job_id, ending)
                self._redis.zrem(DUE_KEY, job_id)
            elif state != "running":
                self._redis.zrem(DUE_KEY, job_id)

    def _end(self, job_id: str) -> None:
        past = read_past(self._redis, job_id)
        known: Any = self._redis.hmget(job_key(job_id), "task", "message")
        task, message = known
        event: events.Event
        result = None
        if self._redis.exists(cancel_key(job_id)):
            event = events.done("cancelled", past.usage)
        elif message is None:
            event = events.error("refused", REFUSED)
        else:
            event, result = ending_of_late((task or b"").decode(), past.text, past.num_tokens)
        if self._ledger.end_waiting(job_id, event, result):
            self._store(job_id, Ending(event, result))

    # What is missing

    def find_missing(self) -> int:
        """Queues again what was missing at the last look, too; returns how many there were."""
        suspects = dict.fromkeys(self._not_held(RUNNING_KEY, 0, self._now()), RUNNING_KEY)
        for queue in self._busy_queues():
            for priority in PRIORITIES:
                missing = self._not_in_queue(queue, priority)
                suspects |= dict.fromkeys(missing, waiting_key(queue))
        self._clear(suspects.keys())
        lost = [job_id for job_id, known_by in suspects.items() if self._is_lost(job_id, known_by)]
        for job_id in lost:
            log.warning("Redis lost the message of job %s; it is queued again", job_id)
        return len(lost)

    def _is_lost(self, job_id: str, known_by: str) -> bool:
        keys = [job_key(job_id), cancel_key(job_id)]
        return bool(run_script(self._redis, "missing", keys, [job_id, self._lease_s * 0.8, known_by]))

    def _clear(self, suspects: Any) -> None:
        """Forgets what was missing, and is not any more."""
        found = [job_id for job_id in self._members(MISSING_KEY, 0, self._now()) if job_id not in suspects]
        if found:
            self._redis.zrem(MISSING_KEY, *found)

    def _busy_queues(self) -> list[str]:
        """Queues in which a job waits; the others are noted no more."""
        names: Any = self._redis.smembers(QUEUES_KEY)
        queues = [raw.decode() for raw in names]
        with self._redis.pipeline(transaction=False) as pipe:
            for queue in queues:
                pipe.zcard(waiting_key(queue))
            lengths = pipe.execute()
        for queue, length in zip(queues, lengths, strict=True):
            if not length:
                run_script(self._redis, "forget_queue", [waiting_key(queue)], [queue])
        return [queue for queue, length in zip(queues, lengths, strict=True) if length]

    def _not_in_queue(self, queue: str, priority: int) -> set[str]:
        """The waiting jobs that were submitted before the first message which no worker has had, and are not in front
        of it, and not held."""
        low, settled = priority * PRIORITY_WEIGHT, waiting_score(priority, self._now() - SETTLED_S)
        old = set(self._not_held(waiting_key(queue), low, settled))
        if not old:
            return set()
        first, *ids = run_script(self._redis, "head", [queue_key(queue, priority)], [job_key(""), HEADS])
        if first == b"-":
            return set()  # too much at the head to tell
        if first:
            end = waiting_score(priority, float(first) - SETTLED_S)
            old &= set(self._members(waiting_key(queue), low, end))
        return old - {raw.decode() for raw in ids}

    def _not_held(self, key: str, low: float, high: float) -> Iterator[str]:
        page: list[str] = []
        for job_id in self._members(key, low, high):
            page.append(job_id)
            if len(page) == PAGE:
                yield from self._without_lease(page)
                page = []
        yield from self._without_lease(page)

    def _without_lease(self, job_ids: list[str]) -> list[str]:
        if not job_ids:
            return []
        leases: Any = self._redis.zmscore(LEASES_KEY, job_ids)
        return [job_id for job_id, lease in zip(job_ids, leases, strict=True) if lease is None]

    def _members(self, key: str, low: float, high: float) -> Iterator[str]:
        start = 0
        while True:
            found: Any = self._redis.zrangebyscore(key, low, high, start=start, num=PAGE)
            yield from (raw.decode() for raw in found)
            if len(found) < PAGE:
                return
            start += PAGE
