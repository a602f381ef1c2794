"""Renews the leases of a worker: as long as it lives, Redis gives its messages to no other worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from celery.worker import state
from redis.exceptions import RedisError

from cellama.tasks.broker.holding import forget_lost, taken_of
from cellama.tasks.broker.message import JobRequest
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.state.ledger import Ledger

log = logging.getLogger(__name__)


class LeaseKeeper:
    """A thread of its own, whose ledger has its own connection: Celery's event loop stops while a worker drains."""

    def __init__(self, ledger: Ledger, consumer: Any, lease_s: float) -> None:
        """`consumer` is Celery's; its channels are looked up each time, because reconnecting replaces them.

        Until Celery has reconnected, which it tries again after 2, 4, 6 … s, there are none.
        """
        self._ledger = ledger
        self._consumer = consumer
        self._lease_s = lease_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellama-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=self._lease_s)

    def _run(self) -> None:
        wait_s = self._lease_s / 3
        while not self._closing.wait(wait_s):
            wait_s = self._lease_s / 12  # soon again, if this fails: the reapers look as soon as Redis is back
            try:
                self.renew()
                wait_s = self._lease_s / 3
                redis_waits.ended("the renewal of leases")
            except RedisError as error:
                if is_passing(error):
                    redis_waits.began("the renewal of leases", error)
                else:
                    log.warning("leases: Redis refuses a command: %s; they are renewed the next time", error)
            except Exception as error:  # the consumer changed while it was read
                log.info("leases are renewed the next time: %s: %s", type(error).__name__, error)

    def renew(self) -> int:
        """Renews the lease of every message that this worker holds; returns how many there are.

        What another worker holds by now, because this worker was frozen or cut off, is given up.
        """
        held = {taken_of(message): message for message in self._held()}
        messages = {taken: message for taken, message in held.items() if taken is not None and taken.token}
        for lost in self._ledger.renew(list(messages), self._lease_s):
            log.warning("job %s was given to another worker: this one did not renew its lease in time", lost.job_id)
            forget_lost(messages[lost])
        return len(messages)

    def _held(self) -> Iterator[Any]:
        """The messages of jobs that run, also while Celery's own connections are gone, and those that wait."""
        for request in list(state.requests.values()):
            if isinstance(request, JobRequest) and request.holds_message:
                yield request.message
        for channel in self._consumer.channels:
            yield from channel.qos.messages()
