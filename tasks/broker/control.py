"""Celery's remote control with persistent revokes and purges.

Celery keeps revokes only in workers' memory, and its purges don't change the ledger. Here, a revoke is recorded in the
ledger by the process that calls `revoke`, and by each worker that receives a revoke from any app. Commands and replies
are sent with a few retries, whereas Celery retries until Redis is available again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from celery import Celery, states
from celery.app.control import Control
from celery.exceptions import TaskRevokedError
from kombu import Connection
from kombu.pidbox import Mailbox
from redis import Redis

from cellama.tasks.contract.keys import backlog_key, cancel_key, leases_key, queues_key, waiting_key
from cellama.tasks.contract.names import PRIORITIES, is_model_queue, queue_key
from cellama.tasks.state.ledger import Ledger

from .result_backend import ChordClaimed, end_without_worker, request_of

REVOKED_TTL_S = 10800  # Celery's workers keep a revoke for the same time
RETRY_POLICY = {
    "max_retries": 3,
    "interval_start": 0,
    "interval_step": 0.2,
    "interval_max": 0.2,
}  # as for tasks in Celery
PURGE_PAGE = 200  # messages per script, which blocks Redis for a few milliseconds


class BoundedMailbox(Mailbox):  # type: ignore[misc]
    """Kombu's mailbox, with a limit on retries.

    Without this limit, the event loop of a worker would block and handle no signals while Redis is unreachable, and
    Flower would not exit.
    """

    @contextlib.contextmanager
    def producer_or_acquire(self, producer: Any = None, channel: Any = None) -> Iterator[Any]:
        """Yield a producer that adds the retry policy, because kombu itself doesn't pass one."""
        with super().producer_or_acquire(producer, channel) as found:
            yield SimpleNamespace(publish=partial(found.publish, retry_policy=RETRY_POLICY))


class PersistentControl(Control):  # type: ignore[misc]
    """Celery's remote control, whose `revoke` and `purge` also change the ledger."""

    Mailbox = BoundedMailbox

    def revoke(self, task_id: Any, destination: Any = None, terminate: bool = False, **options: Any) -> Any:
        """End waiting jobs. With `terminate`, also end running jobs, now or when another worker resumes them."""
        store_revoke(self.app, task_id, terminate)
        return super().revoke(task_id, destination=destination, terminate=terminate, **options)

    def purge(self, connection: Connection | None = None) -> int:
        """End all jobs that are waiting in model queues, and return how many jobs this call ended."""
        found: Any = self.app.backend.client.smembers(queues_key())
        known = [name for name in self.app.amqp.queues.consume_from if is_model_queue(name)]
        return sum(purge_queue(self.app, queue) for queue in {*known, *(raw.decode() for raw in found)})

    discard_all = purge


def store_revoke(app: Celery, task_ids: str | Iterable[str], terminate: bool) -> None:
    """End waiting jobs. With `terminate`, workers also end running jobs."""
    redis: Redis = app.backend.client
    ledger = Ledger(redis)
    for job_id in {task_ids} if isinstance(task_ids, str) else set(task_ids):
        if ledger.state(job_id) is not None:
            _cancel(app, ledger, job_id, running=terminate)
        else:  # plain Celery sent the job and no worker has taken it, or it belongs to another app
            redis.set(cancel_key(job_id), "1", ex=REVOKED_TTL_S)


def _cancel(app: Celery, ledger: Ledger, job_id: str, *, running: bool) -> bool:
    """Cancel a job. Return True if this call ended the job, because no worker was running it."""
    if not ledger.cancel(job_id, running=running) or (ending := ledger.ending(job_id)) is None:
        return False
    try:
        end_without_worker(app, job_id, ending)
    except ChordClaimed:
        return True  # the reaper settles the job once the claim has expired
    ledger.settle(job_id)
    return True


def purge_queue(app: Celery, queue: str) -> int:
    """Cancel all jobs that are waiting in a model's queue, and return how many jobs were cancelled.

    Running jobs are not affected. Jobs that are queued during the call may remain in the queue.
    """
    redis: Redis = app.backend.client
    ledger, revoked = Ledger(redis), app.backend.value_around_id(TaskRevokedError("cancelled"), states.REVOKED)
    num_ended = 0
    for priority in PRIORITIES:
        key = queue_key(queue, priority)
        counts: Any = [redis.llen(key), redis.zcard(backlog_key(key))]
        num_remaining = max(counts)
        while num_remaining > 0:
            page = ledger.purge_page(queue, priority, PURGE_PAGE, revoked, app.backend.expires)
            num_ended += page.num_ended + sum(_end_purged(app, ledger, message) for message in page.others)
            num_remaining = num_remaining - page.num_messages if page.num_messages else 0
    waiting: Any = redis.zrange(waiting_key(queue), 0, -1)  # jobs without a slot, which a worker may hold
    leases: Any = redis.zmscore(leases_key(), waiting) if waiting else []
    held_jobs = [raw.decode() for raw, lease in zip(waiting, leases, strict=True) if lease is not None]
    return num_ended + sum(_cancel(app, ledger, job_id, running=False) for job_id in held_jobs)


def _end_purged(app: Celery, ledger: Ledger, message: bytes) -> bool:
    """End the job whose message was removed from its queue. Return whether this call ended the job."""
    try:
        job_id = str(json.loads(message)["headers"]["id"])
    except (KeyError, TypeError, ValueError):
        return False  # a malformed message
    if ledger.state(job_id) is not None:
        return _cancel(app, ledger, job_id, running=False)
    app.backend.mark_as_revoked(job_id, "cancelled", request=request_of(message))  # plain Celery sent it
    return True


def purging_with(purge: Callable[[str], int], connection: Connection) -> Connection:
    """Make a connection's channels use `purge` for model queues when `celery purge` runs, and return the connection."""
    transport = connection.transport

    class Channel(transport.Channel):  # type: ignore[misc,name-defined]
        def _purge(self, queue: str) -> int:
            return purge(queue) if is_model_queue(queue) else super()._purge(queue)

    transport.Channel = Channel
    return connection
