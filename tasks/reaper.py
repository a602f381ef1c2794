"""Looks after jobs that no worker holds: finds those that the broker lost, and ends those whose time is over.

A worker that is killed between two commands of Redis takes a message with it. The ledger still knows the job, and
where it should be: in its queue, or among the messages that somebody holds. Queues are first in, first out, so a job
that was submitted before the first one in the queue, and is held by nobody, is lost. That takes a look at the ends of
queues, whatever their lengths. One worker at a time looks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from redis import Redis

from .contract import events
from .contract.errors import JobFailed
from .contract.keys import (
    DEADLINES_KEY,
    PRIORITY_WEIGHT,
    QUEUES_KEY,
    REAPER_KEY,
    RUNNING_KEY,
    UNACKED_KEY,
    job_key,
    waiting_key,
    waiting_score,
)
from .contract.names import PRIORITIES, TASK_EMBED, queue_key
from .ledger import Ledger

log = logging.getLogger(__name__)

SETTLED_S = 5.0  # a younger job may be on its way into its queue
HEADS = 50  # messages looked at, at the end of a queue
PAGE = 1000  # jobs per look

Requeue = Callable[[str, dict[str, Any]], None]  # job id, the call as the ledger has it
Expire = Callable[[str, dict[str, Any] | JobFailed], None]  # job id, how Celery shall hear of its end


class Reaper:
    """What one worker does now and then. `look` is called from one thread."""

    def __init__(self, redis: Redis, ledger: Ledger, requeue: Requeue, expire: Expire, period_s: float) -> None:
        self._redis = redis
        self._ledger = ledger
        self._requeue = requeue
        self._expire = expire
        self._period_s = period_s
        self._next = 0.0
        self._missing: set[str] = set()  # at the last look; what is missing twice is lost

    def look(self) -> int:
        """Looks, when it is time and no other worker does; returns how many jobs were queued again."""
        self._expire_waiting()
        if time.monotonic() < self._next:
            return 0
        self._next = time.monotonic() + self._period_s
        if not self._redis.set(REAPER_KEY, "1", nx=True, px=max(1, int(self._period_s * 900))):
            self._missing = set()
            return 0
        missing = self._find_missing()
        lost, self._missing = missing & self._missing, missing
        return sum(self._queue_again(job_id) for job_id in lost)

    def _now(self) -> float:
        seconds, micros = self._redis.time()
        return float(seconds) + micros / 1e6

    def _find_missing(self) -> set[str]:
        candidates = self._ids(RUNNING_KEY, 0, self._now())
        queues: Any = self._redis.smembers(QUEUES_KEY)
        for queue in (raw.decode() for raw in queues):
            for priority in PRIORITIES:
                candidates |= self._not_in_queue(queue, priority)
        if not candidates:
            return set()
        held: Any = self._redis.hvals(UNACKED_KEY)
        return candidates - {_id_of(json.loads(message)[0]) for message in held}

    def _not_in_queue(self, queue: str, priority: int) -> set[str]:
        """The waiting jobs of a queue and priority that were submitted before the first one which is in the queue."""
        settled = self._now() - SETTLED_S
        heads: Any = self._redis.lrange(queue_key(queue, priority), -HEADS, -1)  # what is taken first stands last
        if heads:
            ids = [_id_of(json.loads(message)) for message in heads]
            places: Any = self._redis.zmscore(waiting_key(queue), ids)
        known = [place for place in places if place is not None] if heads else []
        if heads and not known:
            return set()  # nothing there but jobs that have ended, or of which the ledger has not heard
        end = min([waiting_score(priority, settled), *(place - SETTLED_S for place in known)])
        return self._ids(waiting_key(queue), priority * PRIORITY_WEIGHT, end)

    def _ids(self, key: str, low: float, high: float) -> set[str]:
        found: Any = self._redis.zrangebyscore(key, low, high, start=0, num=PAGE)
        return {raw.decode() for raw in found}

    def _queue_again(self, job_id: str) -> bool:
        state = self._ledger.state(job_id)
        call: Any = self._redis.hget(job_key(job_id), "call")
        if state in (None, "done") or call is None:
            log.warning("job %s is noted as unended, but it is %s; it is noted no more", job_id, state or "unknown")
            self._ledger.drop(job_id)
            return False
        log.warning("the broker lost job %s; it is queued again", job_id)
        self._requeue(job_id, json.loads(call))
        return True

    def _expire_waiting(self) -> None:
        """Ends jobs whose timeout is over although no worker has taken them."""
        for job_id in self._ids(DEADLINES_KEY, 0, self._now()):
            if self._ledger.state(job_id) != "queued":
                continue  # who has it ends it
            call: Any = self._redis.hget(job_key(job_id), "call")
            self._end_late(job_id, json.loads(call or "{}"))

    def _end_late(self, job_id: str, call: dict[str, Any]) -> None:
        no_usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        if call.get("task") == TASK_EMBED:
            failure = JobFailed("timeout", "no worker came to the texts within the timeout; raise it", retryable=True)
            if self._ledger.end_waiting(job_id, events.error(failure.code, failure.message, failure.retryable)):
                self._expire(job_id, failure)
            return
        result = {"text": "", "finish_reason": "timeout", "stop_sequence": None, "usage": no_usage, "timings": {}}
        if self._ledger.end_waiting(job_id, events.done("timeout", no_usage)):
            self._expire(job_id, result)


def _id_of(message: dict[str, Any]) -> str:
    return str(message.get("headers", {}).get("id"))
