"""What kombu does with messages that a worker holds, done in the ledger: under the job's id, with Redis' clock.

Kombu keeps taken messages in hashes of its own, by the clocks of workers, and gives them back by time alone. Here a
message belongs to a job; taking it gives a token, and only who has the token may begin, go on holding, or give back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import state
from celery.worker.state import maybe_shutdown
from kombu.transport import virtual
from kombu.transport.redis import QoS
from redis.exceptions import RedisError

from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, TOKEN_HEADER
from cellama.tasks.state.ledger import Ledger, new_run
from cellama.tasks.state.records import Fetched, Room, Taken

log = logging.getLogger(__name__)

RETRY_S = 0.5  # until a message is taken again after Redis did not accept that
SOON_S = 6.0  # so long before its ETA a job is in the hands of a worker, whose timer is exact


class HoldingQoS(QoS):  # type: ignore[misc]
    """The messages that one channel of a worker holds. Main thread, but for what says otherwise."""

    def __init__(self, channel: Any, ledger: Ledger, lease_s: float) -> None:
        super().__init__(channel)
        self._ledger = ledger
        self._lease_s = lease_s
        self.room_beside: Callable[[str], Room] = lambda queue: ()  # for messages that come with one of this queue
        self._page: list[Fetched] = []
        self._coming: Taken | None = None  # the message of a page that is delivered just now
        self._num_appended = 0
        self.waits_for_redis = True  # not while the worker ends

    def append(self, message: Any, delivery_tag: str) -> None:
        """Takes a message, and a page of others for which there is room.

        Raises RedisError if Redis refuses that for good, or the worker ends; the reaper finds the message then.
        """
        headers, taken = message.headers, self._coming
        self._coming = None
        job_id = headers.get("id")
        if job_id is not None and SUBMITTED_AT_HEADER in headers:  # else plain Celery's: plain_messages.py
            if taken is None:
                room = self.room_beside(str(message.delivery_info.get("routing_key")))
                taken, self._page = self._take(str(job_id), room)
            headers[TOKEN_HEADER] = taken.token
            if taken.waited_s is not None and (headers.get("eta") or headers.get("expires")):
                set_by_this_clock(headers, taken.waited_s)
        else:
            headers.pop(TOKEN_HEADER, None)
        self.adopt(message)

    def _take(self, job_id: str, room: Room) -> tuple[Taken, list[Fetched]]:
        """Takes a message that Redis has given away already, however long Redis is away or refuses the taking: a full
        Redis gives messages away and refuses the script. The event loop stands still meanwhile."""
        token = new_run()
        with redis_waits.of("the consumer") as waits:
            while True:
                try:
                    return self._ledger.take(job_id, self._lease_s, room, token)
                except RedisError as error:
                    if not (is_passing(error) and self.waits_for_redis):
                        raise
                    waits(error)
                maybe_shutdown()
                time.sleep(RETRY_S)

    def take_page(self) -> Iterator[Fetched]:
        """The messages that were taken together with the last one, for the channel to deliver one after another.

        If one can't be delivered, the leases of those after it end, and they come again.
        """
        page, self._page = self._page, []
        for fetched in page:
            self._coming = fetched.taken
            yield fetched

    def adopt(self, message: Any) -> None:
        """Answers for a message that another channel of this worker took."""
        self._num_appended += 1
        virtual.QoS.append(self, message, message.delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        self._settle(delivery_tag, self._ledger.release)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self._settle(delivery_tag, self._ledger.give_back if requeue else self._ledger.release)

    def _settle(self, delivery_tag: str, how: Callable[[Taken], None]) -> None:
        """If Redis does not hear of it, the lease ends, and whoever takes the message next finds the job as it is."""
        message = self._delivered.get(delivery_tag)
        if message is not None and (taken := taken_of(message)) is not None:
            try:
                how(taken)
            except RedisError as error:
                log.warning("the message of job %s stays until its lease ends: %s", taken.job_id, error)
        self._quick_ack(delivery_tag)

    def set_aside_until_soon(self, message: Any) -> bool:
        """True if its ETA is far off: Redis has the message until shortly before it, and this worker no more.

        A message that Redis does not take back stays with this worker.
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
        """The message is another worker's: only its place here is free again. Any thread."""
        if self._delivered.get(message.delivery_tag) is message:
            self._quick_ack(message.delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """Gives back what is still held when the worker ends."""
        for delivery_tag in list(self._delivered):
            self.reject(delivery_tag, requeue=True)
        self._delivered.clear()

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Nothing: the reaper gives back what others have left."""

    def messages(self) -> list[Any]:
        """What this channel holds. Any thread."""
        return [message for tag, message in list(self._delivered.items()) if tag not in self._dirty]

    @property
    def num_changes(self) -> tuple[int, int]:
        """Another value whenever `messages` may give others."""
        return self._num_appended, len(self._dirty)


def set_by_this_clock(headers: dict[str, Any], waited_s: float) -> None:
    """Moves `eta` and `expires`, which are by the producer's clock, to that of this machine, with which Celery compares
    them: the message was sent `waited_s` ago, and says when that was by its producer's clock."""
    try:
        shift_s = time.time() - waited_s - float(headers[SUBMITTED_AT_HEADER])
        for name in ("eta", "expires"):
            if (at := _unix_s(headers.get(name))) is not None:
                headers[name] = datetime.fromtimestamp(at + shift_s, UTC).isoformat()
    except (TypeError, ValueError, OverflowError, OSError) as error:
        log.warning("job %s keeps the times of its producer's clock: %s", headers["id"], error)


def _unix_s(iso: Any) -> float | None:
    """Unix seconds; None also for what Celery shall complain of."""
    try:
        return float(maybe_make_aware(maybe_iso8601(iso)).timestamp()) if iso else None
    except (TypeError, ValueError, OverflowError):
        return None


def taken_of(message: Any) -> Taken | None:
    """The taking of a message, if there was one."""
    token = message.headers.get(TOKEN_HEADER)
    return None if token is None else Taken(str(message.headers["id"]), token)


def forget_lost(message: Any) -> None:
    """Ends what this worker does with a message that another worker holds by now. Any thread."""
    for request in list(state.requests.values()):
        if request.message is message:
            request.supersede()
    message.channel.qos.forget(message)
