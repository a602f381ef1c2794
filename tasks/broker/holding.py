"""The messages that a worker holds, kept in the ledger by the id of their job and Redis' clock, instead of by kombu.

Kombu keeps taken messages in hashes of its own, by the clocks of workers, and returns them after a fixed time. Here a
message belongs to a job. Taking it gives a token, and only the worker with this token may start the job, renew the
lease, or return the message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import state
from kombu.transport import virtual
from kombu.transport.redis import QoS
from redis.exceptions import RedisError

from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, TOKEN_HEADER, WEIGHT_HEADER
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Taken

from .places import HeldJobs

log = logging.getLogger(__name__)

SOON_S = 6.0  # before its ETA a worker takes a job, because its timer is exact; a reaper looks less often


class HoldingQoS(QoS):  # type: ignore[misc]
    """The messages that one channel of a worker holds. Main thread, except for the methods that say otherwise."""

    def __init__(self, channel: Any, ledger: Ledger, can_take: Callable[[], bool]) -> None:
        """`can_take` tells kombu whether the channel may read the next message."""
        super().__init__(channel)
        self._ledger = ledger
        self._can_take = can_take
        self._num_appended = 0
        self._held: tuple[Any, HeldJobs] = (None, {})

    def can_consume(self) -> bool:
        return self._can_take()

    def append(self, message: Any, delivery_tag: str) -> None:
        """Hold a message that this worker has taken in the ledger (QueueReader), on this channel or an earlier one."""
        self._num_appended += 1
        virtual.QoS.append(self, message, delivery_tag)

    def held(self) -> HeldJobs:
        """Return what this channel holds, except for jobs whose ETA has not come, which take no other job's place.

        The event loop asks several times in each of its turns, so it is counted again only when something has changed.
        """
        changes = (self._num_appended, len(self._dirty), len(state.scheduled_requests))
        if self._held[0] != changes:
            early = {request.message.delivery_tag for request in list(state.scheduled_requests)}
            held: dict[str, list[int]] = {}
            for message in self.messages():
                if message.delivery_tag not in early:
                    held.setdefault(message.delivery_info["routing_key"], []).append(_weight_of(message))
            self._held = changes, held
        return self._held[1]

    def ack(self, delivery_tag: str) -> None:
        self._settle(delivery_tag, self._ledger.release)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self._settle(delivery_tag, self._ledger.requeue if requeue else self._ledger.release)

    def _settle(self, delivery_tag: str, how: Callable[[Taken], None]) -> None:
        """Settle a message in the ledger. If Redis is away, its lease ends, and the next worker finds its job there."""
        message = self._delivered.get(delivery_tag)
        if message is not None and (taken := taken_of(message)) is not None:
            try:
                how(taken)
            except RedisError as error:
                log.warning("the message of job %s stays until its lease ends: %s", taken.job_id, error)
        self._quick_ack(delivery_tag)

    def set_aside_until_soon(self, message: Any) -> bool:
        """Return True if the ETA is far off, and Redis keeps the message until shortly before it.

        If Redis does not accept the message, this worker keeps it.
        """
        taken, eta = taken_of(message), _unix_s(message.headers.get("eta"))
        if taken is None or not taken.token or eta is None or (wait_s := eta - time.time() - SOON_S) <= 0:
            return False
        try:
            self._ledger.set_aside(taken, wait_s)
        except RedisError as error:
            log.warning(
                "job %s waits for its time in this worker: Redis does not take it back: %s", taken.job_id, error
            )
            return False
        self.forget(message)
        return True

    def forget(self, message: Any) -> None:
        """Free the place of a message that another worker holds. Any thread."""
        if self._delivered.get(message.delivery_tag) is message:
            self._quick_ack(message.delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """Return what is still held when the worker ends."""
        for delivery_tag in list(self._delivered):
            self.reject(delivery_tag, requeue=True)
        self._delivered.clear()

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Do nothing, because reapers return what other workers have left."""

    def messages(self) -> list[Any]:
        """Return what this channel holds. Any thread."""
        return [message for tag, message in list(self._delivered.items()) if tag not in self._dirty]


def _weight_of(message: Any) -> int:
    weight = message.headers.get(WEIGHT_HEADER, 1)
    return weight if isinstance(weight, int) and weight > 0 else 1  # any producer may have sent it


def set_by_this_clock(headers: dict[str, Any], waited_s: float) -> None:
    """Convert `eta` and `expires` from the producer's clock to this machine's, with which Celery compares them.

    The message was sent `waited_s` ago, and has that time by its producer's clock.
    """
    try:
        shift_s = time.time() - waited_s - float(headers[SUBMITTED_AT_HEADER])
        for name in ("eta", "expires"):
            if (at := _unix_s(headers.get(name))) is not None:
                headers[name] = datetime.fromtimestamp(at + shift_s, UTC).isoformat()
    except (TypeError, ValueError, OverflowError, OSError) as error:
        log.warning("job %s keeps the times of its producer's clock: %s", headers["id"], error)


def _unix_s(iso: Any) -> float | None:
    """Return unix seconds; None also for a value that Celery will refuse."""
    try:
        return float(maybe_make_aware(maybe_iso8601(iso)).timestamp()) if iso else None
    except (TypeError, ValueError, OverflowError):
        return None


def taken_of(message: Any) -> Taken | None:
    """Return how this worker has taken a message; None if plain Celery sent it."""
    token = message.headers.get(TOKEN_HEADER)
    return None if token is None else Taken(str(message.headers["id"]), token)


def forget_lost(message: Any) -> None:
    """Stop the work on a message that another worker holds by now. Any thread."""
    for request in list(state.requests.values()):
        if request.message is message:
            request.supersede()
    message.channel.qos.forget(message)
