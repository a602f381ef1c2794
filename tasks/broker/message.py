"""Record in the ledger which messages a worker holds, and create Celery's request for each message.

Kombu records taken messages in its own hashes with times from the workers' clocks, and requeues them after a fixed
time. Here, each message belongs to a job, and the ledger records the message under the job's id with times from Redis'
clock. A worker that takes a message gets a token. Only the worker that has this token can start the job, renew the
lease, or return the message.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from celery import uuid
from celery.platforms import signals
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import state
from celery.worker.request import Request
from celery.worker.strategy import default
from kombu.asynchronous import get_event_loop
from kombu.transport import virtual
from kombu.transport.redis import QoS
from redis.exceptions import RedisError

from cellama.config import get_settings
from cellama.config.logging import event_logger
from cellama.tasks.contract.events import done
from cellama.tasks.contract.fairness import FAIRNESS_KEY_HEADER
from cellama.tasks.contract.names import (
    PROTECTED_PRIORITIES,
    SUBMITTED_AT_HEADER,
    TOKEN_HEADER,
    WEIGHT_HEADER,
    queue_key,
)
from cellama.tasks.state.history import read_past
from cellama.tasks.state.ledger import Ledger, Message, Submission, Taken, TaskCall

from .pool import Interruption, JobControl

log = event_logger(__name__)

ADOPT_RETRY_S = 1.0  # between two attempts to adopt a message of plain Celery while Redis is unreachable
HIDDEN = "(…)"  # shown by Flower instead of arguments
SOON_S = 6.0  # a worker takes a job this long before its ETA, because its timer is more exact than the reaper

HeldJobs = Mapping[str, Sequence[int]]  # the weights of the held messages, by queue


class LedgerQoS(QoS):  # type: ignore[misc]
    """The messages that one channel of a worker holds.

    Only the main thread may call a method, unless the method's docstring says otherwise.
    """

    def __init__(self, channel: Any, ledger: Ledger, can_take: Callable[[], bool]) -> None:
        """Record the messages of this channel. `can_take` returns whether kombu may read the next message."""
        super().__init__(channel)
        self._ledger = ledger
        self._can_take = can_take
        self._num_appended = 0
        self._held: tuple[Any, HeldJobs, HeldJobs] = (None, {}, {})

    def can_consume(self) -> bool:
        return self._can_take()

    def append(self, message: Any, delivery_tag: str) -> None:
        """Record that this channel holds a message, which the worker took on this channel or on an earlier channel."""
        self._num_appended += 1
        is_protected = (message.properties.get("priority") or 0) in PROTECTED_PRIORITIES
        message.held_as = message.delivery_info["routing_key"], _weight_of(message), is_protected
        virtual.QoS.append(self, message, delivery_tag)

    def held(self) -> HeldJobs:
        """Return the weights of the messages that this channel holds, excluding jobs that are waiting for their ETA."""
        return self._update_held()[1]

    def held_protected(self) -> HeldJobs:
        """Return the weights of the protected jobs among the messages in `held`."""
        return self._update_held()[2]

    def _update_held(self) -> tuple[Any, HeldJobs, HeldJobs]:
        """Return the held messages, which are cached until messages are added or settled.

        The event loop calls this method several times per iteration.
        """
        changes = (self._num_appended, len(self._dirty), len(state.scheduled_requests))
        if self._held[0] != changes:
            early = {request.message.delivery_tag for request in list(state.scheduled_requests)}
            numbers = Counter(message.held_as for message in self.messages() if message.delivery_tag not in early)
            held: dict[str, list[int]] = {}
            protected: dict[str, list[int]] = {}
            for (queue, weight, is_protected), number in numbers.items():
                held.setdefault(queue, []).extend([weight] * number)
                if is_protected:
                    protected.setdefault(queue, []).extend([weight] * number)
            self._held = changes, held, protected
        return self._held

    def ack(self, delivery_tag: str) -> None:
        self._settle(delivery_tag, self._ledger.release)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self._settle(delivery_tag, self._ledger.requeue if requeue else self._ledger.release)

    def _settle(self, delivery_tag: str, settle: Callable[[Taken], None]) -> None:
        """Release or requeue a message in the ledger.

        If Redis is unreachable, the lease expires, and another worker settles the message.
        """
        message = self._delivered.get(delivery_tag)
        if message is not None and (taken := taken_of(message)) is not None:
            try:
                settle(taken)
            except RedisError as error:
                log.warning("message not settled", job_id=taken.job_id, detail=f"{error}; the job's lease will expire")
        self._quick_ack(delivery_tag)

    def set_aside_until_soon(self, message: Any) -> bool:
        """Return a message to Redis until SOON_S seconds before its ETA. Return whether Redis accepted the message.

        If Redis does not accept the message, this worker keeps it.
        """
        taken, eta = taken_of(message), _unix_s(message.headers.get("eta"))
        if taken is None or not taken.token or eta is None or (wait_s := eta - time.time() - SOON_S) <= 0:
            return False
        try:
            self._ledger.set_aside(taken, wait_s)
        except RedisError as error:
            detail = f"{error}; the job waits for its ETA in this worker"
            log.warning("delayed message not returned to Redis", job_id=taken.job_id, detail=detail)
            return False
        self.forget(message)
        return True

    def forget(self, message: Any) -> None:
        """Forget a message that another worker holds, which frees the capacity that the message used. Thread-safe."""
        if self._delivered.get(message.delivery_tag) is message:
            self._quick_ack(message.delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """Return the messages that this channel still holds to their queues, because the worker is stopping."""
        for delivery_tag in list(self._delivered):
            self.reject(delivery_tag, requeue=True)
        self._delivered.clear()

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Do nothing, because reapers return the messages of workers that died."""

    def messages(self) -> list[Any]:
        """Return the messages that this channel holds. Thread-safe."""
        return [message for tag, message in list(self._delivered.items()) if tag not in self._dirty]


def _weight_of(message: Any) -> int:
    weight = message.headers.get(WEIGHT_HEADER, 1)
    return weight if isinstance(weight, int) and weight > 0 else 1  # any producer can set this header


def set_by_this_clock(headers: dict[str, Any], waited_s: float) -> None:
    """Convert `eta` and `expires` from the producer's clock to the clock of this machine, which Celery uses.

    The message was sent `waited_s` seconds ago. A header contains the time at which the message was sent, by the
    producer's clock.
    """
    try:
        shift_s = time.time() - waited_s - float(headers[SUBMITTED_AT_HEADER])
        for name in ("eta", "expires"):
            if (at := _unix_s(headers.get(name))) is not None:
                headers[name] = datetime.fromtimestamp(at + shift_s, UTC).isoformat()
    except (TypeError, ValueError, OverflowError, OSError) as error:
        log.warning(
            "ETA and expiry not converted", job_id=headers["id"], detail=f"{error}; the producer's clock is used"
        )


def _unix_s(iso: Any) -> float | None:
    """Convert a time into Unix seconds, or return None if the value is missing or Celery will reject it."""
    try:
        return float(maybe_make_aware(maybe_iso8601(iso)).timestamp()) if iso else None
    except (TypeError, ValueError, OverflowError):
        return None


def taken_of(message: Any) -> Taken | None:
    """Return the `Taken` record of a message, or None if plain Celery sent the message."""
    token = message.headers.get(TOKEN_HEADER)
    return None if token is None else Taken(str(message.headers["id"]), token)


def forget_lost(message: Any) -> None:
    """Stop working on a message that another worker now holds. Thread-safe."""
    for request in list(state.requests.values()):
        if request.message is message:
            request.supersede()
    message.channel.qos.forget(message)


# Messages of producers with plain Celery, without cellama
#
# The first worker that takes such a message records its job in the ledger, and queues it again as a message of cellama.
# Kombu sets priority 0, the most urgent one, for a message without a priority, so 0 stands for the default priority
# here. A producer that needs the most urgent priority sets it in the payload.


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return Celery's strategy for starting a message's job. The strategy adopts messages from plain Celery first."""
    handle: Callable[..., Any] = default(task, app, consumer, **options)

    def take(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **others: Any) -> Any:
        runtime = getattr(consumer.app, "runtime", None)  # None: a worker of another app
        if runtime is None or SUBMITTED_AT_HEADER in message.headers:
            return handle(message, body, ack, reject, callbacks, **others)
        try:
            adopt(runtime.ledger, task, message)
        except RedisError as error:
            log.warning("plain Celery message not added to ledger", detail=f"{error}; retrying in {ADOPT_RETRY_S:g} s")
            arguments = (message, body, ack, reject, callbacks)
            return consumer.timer.call_after(ADOPT_RETRY_S, take, arguments, others)
        return ack(log, consumer.connection_errors)

    return take


def adopt(ledger: Ledger, task: Any, message: Any) -> None:
    """Requeue a message from plain Celery as a cellama message, with a ledger entry and the intended priority.

    A message whose job is in the ledger is a copy of a message that was adopted before, and is dropped.
    """
    args, kwargs, _ = message.payload
    given = message.properties.get("priority")
    delivery, fairness_key = {**message.delivery_info, "priority": given}, message.headers.get(FAIRNESS_KEY_HEADER)
    call: TaskCall = task.call_of_plain(args, kwargs, delivery, fairness_key)
    adopted = Message(queue_key(call.queue, call.priority), _adopted_payload(message, call.priority, ledger.now()))
    ledger.submit([Submission(message.headers["id"], call, adopted)])


def _adopted_payload(message: Any, priority: int, now: float) -> str:
    """Return a message's JSON with this priority and a new delivery tag, because the old tag is still in use.

    The producer's clock is unknown, so `eta` and `expires` are interpreted by Redis' clock, which also provides `now`.
    """
    copy = message.serializable()
    copy["properties"] = {**copy["properties"], "priority": priority, "delivery_tag": uuid()}
    copy["headers"][SUBMITTED_AT_HEADER] = now
    if not get_settings().show_prompts:
        copy["headers"] |= {"argsrepr": HIDDEN, "kwargsrepr": HIDDEN}
    return json.dumps(copy)


class JobRequest(Request):  # type: ignore[misc]
    """Celery's request for a job's message. The request acknowledges or rejects the message exactly once.

    Celery checks and sets `acknowledged` in two steps, which is safe with one thread. Here, a job can end in its own
    thread while the main thread revokes the job. A second acknowledgement would raise an exception in Celery's event
    loop and crash the worker.

    If the attempt is superseded, this worker no longer holds the message, so the request only forgets it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._settle_lock = threading.Lock()
        self._settled = False
        super().__init__(*args, **kwargs)

    def maybe_expire(self) -> bool | None:
        """Return whether the job has expired.

        A job that has already started is resumed, so such a job never expires.
        """
        expires: datetime | None = self.expires  # type: ignore[has-type]
        if expires and maybe_make_aware(expires) < datetime.now(UTC) and self._has_started():
            self.expires = None
        result: bool | None = super().maybe_expire()
        return result

    def _has_started(self) -> bool:
        try:
            return Ledger(self.app.backend.client).state(self.id) not in (None, "queued")
        except RedisError:
            return True  # unknown; expiring a job that has started would be worse

    def _claim_settlement(self) -> bool:
        with self._settle_lock:
            first, self._settled = not self._settled, True
        return first

    @property
    def _control(self) -> JobControl | None:
        return self._apply_result() if self._apply_result is not None else None  # `_apply_result` is a weak reference

    @property
    def _is_superseded(self) -> bool:
        control = self._control
        return control is not None and control.interruption is Interruption.SUPERSEDED

    @property
    def holds_message(self) -> bool:
        """Return whether this worker holds the message, and no other worker has taken it. Thread-safe."""
        return not self.acknowledged and not self._is_superseded

    def supersede(self) -> None:
        """End the attempt without an event, because another worker has taken over the job. Thread-safe."""
        if (control := self._control) is not None:
            control.interrupt(Interruption.SUPERSEDED)

    def _forget_message(self) -> None:
        """Forget the message without settling it, which frees the capacity that the message used in this worker."""
        self._message.channel.qos.forget(self._message)
        self.acknowledged = True
        if (hub := get_event_loop()) is not None:
            hub.call_soon(lambda: None)  # wakes the loop, which reads the queues in each turn

    def acknowledge(self) -> None:
        if self._claim_settlement():
            control = self._control
            if self._is_superseded or (control is not None and control.is_settled):
                self._forget_message()
            else:
                super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        if self._claim_settlement():
            if self._is_superseded:
                self._forget_message()
            else:
                super().reject(requeue)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Terminate the job as Celery does, but send Celery's `task-revoked` event and signal before the job ends."""
        if not self.time_start:
            super().terminate(pool, signal)  # Celery calls this method again once the job has started
            return
        control = self._control
        if control is not None and not control.claim_outcome("revoked"):
            return  # the job fails at this moment
        signum = signals.signum(signal or "TERM")
        try:
            self._announce_revoked("terminated", True, signum, False)
        finally:
            pool.terminate_job(self.worker_pid, signum)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Report the timeout as Celery does, and end a job whose hard time limit expires before it starts."""
        super().on_timeout(soft, timeout)
        if soft or state.should_terminate:
            return
        redis = self.app.backend.client
        ledger = Ledger(redis)
        try:
            if ledger.state(self.id) in ("queued", "handed_back"):
                ledger.end_waiting(self.id, done("timeout", read_past(redis, self.id).usage))
        except RedisError as error:
            log.warning("job timeout not stored", job_id=self.id, detail=f"{error}; the job exceeded its time limit")

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Return the job to its queue, because Celery exits immediately."""
        control = self._control
        if control is not None:
            control.interrupt(Interruption.HANDED_BACK)
