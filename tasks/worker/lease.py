"""Renew the leases of a worker: while it lives, Redis gives its messages to no other worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from celery.worker import state

from cellama.tasks.broker.holding import forget_lost, taken_of
from cellama.tasks.broker.message import JobRequest
from cellama.tasks.connection.redis_loop import RedisLoop
from cellama.tasks.state.ledger import Ledger

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews the leases in a thread of its own, with a connection of its own.

    Celery's event loop stops while a worker drains. It also reconnects only after 2, 4, 6 … s, and has no channels
    until then, so they are looked up each time.
    """

    def __init__(self, ledger: Ledger, consumer: Any, lease_s: float) -> None:
        self._ledger = ledger
        self._consumer = consumer
        self._lease_s = lease_s
        # After a failure it is soon retried, because the reapers return messages as soon as Redis is back.
        self._loop = RedisLoop("lease", self.renew, lease_s / 3, retry_s=lease_s / 12)
        self._loop.start()

    def close(self) -> None:
        self._loop.close(self._lease_s)

    def renew(self) -> int:
        """Renew the lease of every message that this worker holds. Returns how many there are.

        The worker gives up what another worker holds by now, because this one was frozen or cut off.
        """
        try:
            held = {taken_of(message): message for message in self._held()}
        except (AttributeError, RuntimeError) as error:
            log.info("leases: the consumer changed while it was read: %r; they are renewed in the next period", error)
            return 0
        messages = {taken: message for taken, message in held.items() if taken is not None and taken.token}
        for lost in self._ledger.renew(list(messages), self._lease_s):
            log.warning("job %s was given to another worker: this one did not renew its lease in time", lost.job_id)
            forget_lost(messages[lost])
        return len(messages)

    def _held(self) -> Iterator[Any]:
        """Yield the messages of jobs that run, also while Celery has no connection, and of those that wait."""
        for request in list(state.requests.values()):
            if isinstance(request, JobRequest) and request.holds_message:
                yield request.message
        for channel in self._consumer.channels:
            yield from channel.qos.messages()
