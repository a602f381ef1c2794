"""Revoking and purging that last: Celery's own live in the memory of workers, and know nothing of the ledger.

Who asks does not matter: our app writes it down where it is asked for, a worker when it hears of it from any app.
Commands and answers are sent with a bound: Celery's own try it until Redis is back.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.app.control import Control
from kombu import Connection
from kombu.pidbox import Mailbox
from redis import Redis

from cellama.tasks.calls.canvas_steps import tell_end
from cellama.tasks.contract.keys import QUEUES_KEY, cancel_key
from cellama.tasks.contract.names import PRIORITIES, is_model_queue, queue_key
from cellama.tasks.state.ledger import Ledger

REVOKED_S = 10800  # how long Celery's workers remember a revoke
RETRY_POLICY = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}  # Celery's for tasks
PURGE_PAGE = 100  # messages taken at once: what a purge has taken and not ended when it is killed, the reaper finds


class BoundedMailbox(Mailbox):  # type: ignore[misc]
    """Kombu's, which sends no command and no answer again and again until Redis is back.

    A worker's event loop would stand still in that, and hear of no signal; Flower's threads would keep it from ending.
    """

    @contextlib.contextmanager
    def producer_or_acquire(self, producer: Any = None, channel: Any = None) -> Iterator[Any]:
        """What kombu publishes through; it names no policy itself."""
        with super().producer_or_acquire(producer, channel) as found:
            yield SimpleNamespace(publish=partial(found.publish, retry_policy=RETRY_POLICY))


class LastingControl(Control):  # type: ignore[misc]
    """Celery's remote control, whose `revoke` and `purge` are written down as well."""

    Mailbox = BoundedMailbox

    def revoke(self, task_id: Any, destination: Any = None, terminate: bool = False, **options: Any) -> Any:
        """Ends waiting jobs at once, and with `terminate` running ones, now or when a worker comes back to them."""
        note_revoke(self.app, task_id, terminate)
        return super().revoke(task_id, destination=destination, terminate=terminate, **options)

    def purge(self, connection: Connection | None = None) -> int:
        """Ends all jobs that wait in any model's queue; tells how many messages are gone."""
        found: Any = self.app.backend.client.smembers(QUEUES_KEY)
        known = [name for name in self.app.amqp.queues.consume_from if is_model_queue(name)]
        return sum(purge_queue(self.app, queue) for queue in {*known, *(raw.decode() for raw in found)})

    discard_all = purge


def note_revoke(app: Celery, task_ids: str | Iterable[str], terminate: bool) -> None:
    """Ends jobs that wait; with `terminate`, a worker that runs one ends it, too."""
    redis: Redis = app.backend.client
    ledger = Ledger(redis)
    for job_id in {task_ids} if isinstance(task_ids, str) else set(task_ids):
        if ledger.state(job_id) is not None:
            _cancel(app, ledger, job_id, running=terminate)
        else:  # of plain Celery, and not taken yet, or another app's: remembered as long as Celery does
            redis.set(cancel_key(job_id), "1", ex=REVOKED_S)


def _cancel(app: Celery, ledger: Ledger, job_id: str, *, running: bool) -> None:
    if ledger.cancel(job_id, running=running) and (ending := ledger.ending(job_id)) is not None:
        tell_end(app, job_id, ending)


def purge_queue(app: Celery, queue: str) -> int:
    """Takes all messages out of a model's queue, and ends their jobs; tells how many they were."""
    redis: Redis = app.backend.client
    ledger, num_messages = Ledger(redis), 0
    for priority in PRIORITIES:
        while messages := _pop(redis, queue_key(queue, priority)):
            num_messages += len(messages)
            for message in messages:
                _cancel(app, ledger, str(json.loads(message).get("headers", {}).get("id")), running=True)
    return num_messages


def _pop(redis: Redis, key: str) -> list[bytes]:
    found: Any = redis.lpop(key, PURGE_PAGE)
    return found or []


def purging_with(purge: Callable[[str], int], connection: Connection) -> Connection:
    """The connection; its channels purge models' queues like that. `celery purge` uses nothing but a channel."""
    transport = connection.transport

    class Channel(transport.Channel):  # type: ignore[misc,name-defined]
        def _purge(self, queue: str) -> int:
            return purge(queue) if is_model_queue(queue) else super()._purge(queue)

    transport.Channel = Channel
    return connection
