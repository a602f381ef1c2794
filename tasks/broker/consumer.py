"""Celery's consumer with three additions.

Jobs survive a restart of Redis. When Celery 5.7 loses its connection to Redis, it requeues all unacknowledged messages,
although their tasks are still running, and sends later acknowledgements to the old channel. This consumer keeps the
messages, and moves them to the new channels after it has reconnected.

Urgent jobs start before bulk jobs. The consumer has two channels on two connections: one for urgent and one for bulk
jobs. If bulk jobs use up a model's capacity, the worker still receives urgent jobs for this model, and the engine
preempts bulk requests to run the urgent jobs (docs/delivery.md). In the same way, the worker receives protected jobs
(priorities 0 to 2) even if other urgent jobs use up the capacity.

A worker reads only the queues of models that have capacity, and takes several messages at a time (`QueueReader`).
Kombu's own channels treat all queues alike, and take only one message at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from queue import Empty
from typing import Any

from celery import bootsteps, signals
from celery.utils.functional import maybe_list
from celery.worker import control, state
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from kombu.asynchronous import get_event_loop
from kombu.common import ignore_errors
from kombu.utils.json import loads
from redis.exceptions import RedisError, ResponseError

from cellama.config import get_settings
from cellama.config.logging import event_logger
from cellama.tasks.connection.kombu_internals import (
    deliver,
    make_clients_by,
    queues_in_turn,
    read_brpop,
    send_brpop,
    set_brpop_reader,
    set_brpop_sender,
    set_qos,
    socket_of,
    waits_for_message,
)
from cellama.tasks.connection.redis_errors import RefusedForNow, is_passing, probe_writes
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract.names import (
    BULK_PRIORITIES,
    DEFAULT_MODEL,
    PROTECTED_PRIORITIES,
    SUBMITTED_AT_HEADER,
    TOKEN_HEADER,
    URGENT_PRIORITIES,
    model_named,
    model_of,
    queue_key,
)
from cellama.tasks.state.ledger import Fetched, JobsLeft, Ledger, PageLimits, Taken, WorkerCache, new_run

from .control import store_revoke
from .message import HeldJobs, LedgerQoS, set_by_this_clock
from .unknown_task import end_unknown_task

log = event_logger(__name__)

TYPE_MARK = '"__type__"'  # in JSON that only kombu's own parser can read, which takes twice as long
NOT_A_MESSAGE = (KeyError, TypeError, ValueError)  # raised when data that is not a message is parsed
TAKE_RETRY_S = 0.5  # between two attempts to take a message while Redis is unreachable or refuses commands
ACK_RETRY_S = 1.0  # between two attempts to acknowledge a message while there is no channel
PROBE_WAITS_S = (0.5, 1.0, 2.0)  # seconds between two checks whether Redis accepts commands; the last value repeats
EVENT_FLUSH_S = 0.1  # Celery sends events in each turn of the loop, but Flower shows no difference
# Seconds without capacity after which a worker reads only protected jobs. If jobs last for milliseconds, ending such a
# BRPOP after each job would cost more than the wait for capacity.
FULL_S = 0.02
MAX_EVENTS = 1000  # per message of events; a full buffer is sent at once


class JobLimits:
    """Limits how many jobs of each model a worker may hold, and computes the remaining capacity.

    Each model has its own limit, so the backlog of one model does not block another. The limit is the maximum number of
    jobs in progress plus `look_ahead`, the number of jobs that may wait inside the worker.
    """

    def __init__(
        self,
        max_in_progress: Mapping[str, int],
        look_ahead: int,
        default: Callable[[], str | None],
        bulk_slots: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """Compute capacity from `max_in_progress`, the maximum number of jobs per model, which can change later.

        `default` returns the model that serves `:default`. `bulk_slots` returns how many of a model's slots are
        guaranteed to bulk jobs.
        """
        self._max_in_progress = max_in_progress
        self._look_ahead = look_ahead
        self._default = default
        self._bulk_slots = bulk_slots

    def model_of(self, queue: str) -> str:
        """Return the model that serves a queue, or the queue itself if it does not belong to a model."""
        model = model_named(model_of(queue))
        return self._default() or model if model == DEFAULT_MODEL else model

    def capacity(self, queues: Iterable[str], *held: HeldJobs) -> dict[str, int]:
        """Return how many more jobs each queue may deliver, given the jobs that are already `held`.

        A chunk of a bulk run counts as one job per line, but never as more than half of the model's limit. So a worker
        can hold two chunks for a model, and the second chunk gets the slots that the first chunk no longer needs.
        """
        return self._remaining(queues, held, self._limit)

    def guaranteed(self, queues: Iterable[str], held: HeldJobs) -> dict[str, int]:
        """Return how many bulk jobs each queue may deliver regardless of urgent jobs.

        `held` contains the bulk jobs that the worker already holds.
        """
        return self._remaining(queues, [held], self._bulk_slots)

    def _remaining(
        self, queues: Iterable[str], held: Iterable[HeldJobs], limit: Callable[[str], int]
    ) -> dict[str, int]:
        models = {queue: self.model_of(queue) for queue in queues}
        free = {model: limit(model) for model in models.values()}
        for queue, weights in (item for jobs in held for item in jobs.items()):
            model = self.model_of(queue)
            if model in free:
                free[model] -= sum(map(min, weights, repeat((limit(model) + 1) // 2)))
        return {queue: max(0, free[model]) for queue, model in models.items()}

    def _limit(self, model: str) -> int:
        return max(1, self._max_in_progress.get(model, 0) + self._look_ahead)

    def by_model(self, queues: Iterable[str]) -> list[list[str]]:
        """Return the queues grouped by model, in the order in which the models first appear."""
        groups: dict[str, list[str]] = {}
        for queue in queues:
            groups.setdefault(self.model_of(queue), []).append(queue)
        return list(groups.values())


class QueueReader:
    """Reads messages with one channel's priorities from the queues of models that have capacity.

    BRPOP returns a message from the first list that is not empty. Kombu moves the queue of the last message to the end
    of its cycle, so models take turns. Within a model, more urgent lists come first.

    When Redis replies to a BRPOP (`_read`), a script takes a job in the ledger, together with a page of further jobs
    (`_take`). The message in the reply is only a ticket: it stands for the next job in its list, which may be a
    different job. Then kombu delivers the message of each job: it records the message in `LedgerQoS`, and calls
    Celery's consumer.
    """

    def __init__(
        self,
        channel: Any,
        ledger: Ledger,
        lease_s: float,
        *,
        job_limits: Callable[[], JobLimits],
        priorities: Sequence[int],
        before: Sequence[QueueReader] = (),
        cache: Callable[[], WorkerCache | None] = lambda: None,
    ) -> None:
        """Read messages with the `priorities` of this channel.

        Messages that the readers in `before` hold also count against the capacity of this reader, except for the
        guaranteed part of its own capacity (`JobLimits.guaranteed`). `cache` describes the worker's prefix cache, or
        returns None if the worker takes jobs in order.
        """
        self.channel = channel
        self._ledger = ledger
        self._lease_s = lease_s
        self._job_limits = job_limits
        self._priorities = priorities
        self._protected_priorities = [priority for priority in priorities if priority in PROTECTED_PRIORITIES]
        self._counted_readers = [*before, self]
        self._has_guarantee = bool(before)
        self._cache = cache
        self._full_since: dict[str, float] = {}  # monotonic seconds, by model without capacity
        self._left_until: dict[str, float] = {}  # monotonic seconds, by model whose next jobs are left to other workers
        self.waits_for_redis = True  # False once the worker stops
        self._requested: frozenset[str] = frozenset()  # the keys of the BRPOP that waits
        self._client_id: tuple[Any, int] | None = None  # the socket, and the id of its client in Redis
        self._can_unblock = True
        self._qos = LedgerQoS(channel, ledger, self.can_take)
        set_qos(channel, self._qos)
        set_brpop_sender(channel, self._request)
        set_brpop_reader(channel, self._read)

    def capacity(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many messages can be taken now from each of these queues."""
        job_limits = self._job_limits()
        capacity = job_limits.capacity(queues, *(reader._qos.held() for reader in self._counted_readers))
        if self._has_guarantee:
            for queue, guaranteed in job_limits.guaranteed(queues, self._qos.held()).items():
                capacity[queue] = max(capacity[queue], guaranteed)
        return capacity

    def _protected_capacity(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many protected jobs can be taken from each of these queues, regardless of less urgent jobs.

        The result is 0 for models that have had no capacity for less than FULL_S.
        """
        if not self._protected_priorities or not self._full_since:
            return dict.fromkeys(queues, 0)
        capacity = self._job_limits().capacity(queues, self._qos.held_protected())
        full_before = time.monotonic() - FULL_S
        return {
            queue: free if self._full_since.get(self._model_of(queue), math.inf) <= full_before else 0
            for queue, free in capacity.items()
        }

    def note_full_models(self) -> None:
        """Record since when models have had no capacity. The event loop calls this method on each iteration."""
        if not self._protected_priorities:
            return
        now = time.monotonic()
        capacity = self.capacity(self.channel.active_queues)
        full = {self._model_of(queue) for queue, free in capacity.items() if not free}
        if full.difference(self._full_since) and (hub := get_event_loop()) is not None:
            hub.call_later(FULL_S, lambda: None)  # wakes the loop, which reads the queues in each turn
        self._full_since = {model: self._full_since.get(model, now) for model in full}

    def can_take(self) -> bool:
        """Return whether kombu may read from this channel.

        Kombu may also read while a reply is pending, so that a message in this reply is not left unread.
        """
        queues = self.channel.active_queues
        return (
            waits_for_message(self.channel)
            or any(self.capacity(queues).values())
            or any(self._protected_capacity(queues).values())
        )

    def keep_messages(self) -> None:
        """Keep the messages when a lost connection's channel is closed, so the next channel can adopt the messages."""
        self._qos.restore_at_shutdown = False

    # Requests

    def _open_keys(self) -> list[str]:
        """Return the keys of the Redis lists from which jobs can be taken, in the order in which the lists are read."""
        queues = [queue for queue in queues_in_turn(self.channel) if not self._is_left(queue)]
        capacity, protected = self.capacity(queues), self._protected_capacity(queues)
        groups = self._job_limits().by_model(queues)
        return [
            key
            for group in groups
            for key in self._keys(group, has_capacity=capacity[group[0]] > 0, has_protected=protected[group[0]] > 0)
        ]

    def _is_left(self, queue: str) -> bool:
        """Return whether this worker leaves a queue's jobs to other workers that hold the prefixes of these jobs."""
        return bool(self._left_until) and self._left_until.get(self._model_of(queue), 0.0) > time.monotonic()

    def _leave(self, queue: str, seconds: float) -> None:
        self._left_until[self._model_of(queue)] = time.monotonic() + seconds
        if (hub := get_event_loop()) is not None:
            hub.call_later(seconds, lambda: None)  # wakes the loop, which reads the queues in each turn

    def _model_of(self, queue: str) -> str:
        return self._job_limits().model_of(queue)

    def _keys(self, queues: Sequence[str], *, has_capacity: bool, has_protected: bool) -> list[str]:
        """Return the keys of the Redis lists from which a model's jobs can be taken, in the order of priority."""
        priorities = self._priorities if has_capacity else self._protected_priorities if has_protected else ()
        return [queue_key(queue, priority) for priority in priorities for queue in queues]

    def _request(self, timeout: float | None = None) -> None:
        """Send a BRPOP, as kombu's Channel._brpop_start does, but only for models that have capacity."""
        keys = self._open_keys()
        if not keys:
            return
        self._update_client_id(self.channel.client.connection)
        send_brpop(self.channel, keys, timeout or self.channel.brpop_timeout or 0)
        self._requested = frozenset(keys)

    def _update_client_id(self, connection: Any) -> None:
        if self._can_unblock and (self._client_id is None or self._client_id[0] is not socket_of(connection)):
            connection.send_command("CLIENT", "ID")
            try:
                self._client_id = (socket_of(connection), int(connection.read_response()))
            except ResponseError as error:
                self._disable_unblocking(error)

    def request_again(self) -> None:
        """End a pending BRPOP if it omits a model that now has capacity, so that kombu sends another BRPOP."""
        channel = self.channel
        if not waits_for_message(channel) or self._client_id is None or self._requested.issuperset(self._open_keys()):
            return
        try:
            with channel.conn_or_acquire() as client:
                if client.client_unblock(self._client_id[1]):
                    self._requested = frozenset(self._open_keys())  # so that it is unblocked only once
        except ResponseError as error:
            self._disable_unblocking(error)

    def _disable_unblocking(self, error: ResponseError) -> None:
        detail = f"{error}; a model whose jobs have just ended may wait up to 1 s for its next job"
        log.warning("BRPOP unblocking disabled", detail=detail)
        self._client_id, self._can_unblock = None, False

    # Replies

    def finish_reading(self) -> None:
        """Read the reply to a pending BRPOP, if there is one. Raises queue.Empty and RedisError."""
        self.waits_for_redis = False
        if waits_for_message(self.channel):
            self._read()

    def _read(self) -> None:
        """Deliver the message in a reply to BRPOP, and the messages that are taken together with it.

        Data that is not a message is dropped, because such data would otherwise crash every worker that reads it. If a
        message can't be delivered, its lease expires, and the reaper requeues the message. Raises queue.Empty and
        RedisError.
        """
        key, payload = read_brpop(self.channel)
        page: list[Fetched] = []
        with _dropping_malformed_messages():
            message = _decode_message(payload)
            headers = message["headers"]
            if headers.get("id") is not None and SUBMITTED_AT_HEADER in headers:
                page = self._take(key, str(headers["id"]))
            else:  # from plain Celery
                headers.pop(TOKEN_HEADER, None)
                deliver(self.channel, message, self._queue_of(key))
        for fetched in page:
            with _dropping_malformed_messages():
                message = _decode_message(fetched.payload or payload)
                _add_token(message["headers"], fetched.taken)
                deliver(self.channel, message, self._queue_of(fetched.key))

    def _queue_of(self, key: str) -> str:
        return key.rsplit(self.channel.sep, 1)[0]

    def _take(self, key: str, ticket_id: str) -> list[Fetched]:
        """Take the job that a ticket stands for, and a page of further jobs.

        Redis has already removed the ticket from the list `key`. The script is retried while Redis is unreachable or
        temporarily refuses it, for example because Redis is full. In the meantime, the event loop waits. Raises
        RedisError if Redis refuses the script permanently, or if the worker stops. In both cases, the reaper replaces
        the lost ticket later.
        """
        token, is_repeated = new_run(), False
        limits = self._page_limits(self._queue_of(key))
        with redis_waits.of("the consumer") as waits:
            while True:
                try:
                    return self._ledger.take(
                        key, ticket_id, self._lease_s, limits, cache=self._cache(), token=token, is_repeated=is_repeated
                    )
                except JobsLeft as left:
                    self._leave(self._queue_of(key), left.wait_s)
                    return []
                except RedisError as error:
                    if not (is_passing(error) and self.waits_for_redis):
                        raise
                    waits(error)
                is_repeated = True
                maybe_shutdown()
                time.sleep(TAKE_RETRY_S)

    def _page_limits(self, queue: str) -> PageLimits:
        """Return how many messages one page may take from each list, in addition to the message from this queue."""
        job_limits = self._job_limits()
        queues = [other for other in self.channel.active_queues if not self._is_left(other)]
        capacity, protected = self.capacity(queues), self._protected_capacity(queues)
        limits = []
        for group in job_limits.by_model(queues):
            not_held = job_limits.model_of(group[0]) == job_limits.model_of(queue)  # the message itself
            free, free_protected = capacity[group[0]] - not_held, protected[group[0]] - not_held
            if keys := self._keys(group, has_capacity=free > 0, has_protected=free_protected > 0):
                limits.append((free if free > 0 else free_protected, keys))
        return limits


def _decode_message(payload: bytes) -> dict[str, Any]:
    """Return a message in kombu's format. Raises one of the errors in NOT_A_MESSAGE."""
    text = payload.decode()
    message = loads(text) if TYPE_MARK in text else json.loads(text)
    if not isinstance(message, dict) or not isinstance(message.setdefault("headers", {}), dict):
        raise TypeError("the message is not an object with headers")
    return message


def _add_token(headers: dict[str, Any], taken: Taken) -> None:
    headers[TOKEN_HEADER] = taken.token
    if taken.waited_s is not None and (headers.get("eta") or headers.get("expires")):
        set_by_this_clock(headers, taken.waited_s)


@contextlib.contextmanager
def _dropping_malformed_messages() -> Iterator[None]:
    try:
        yield
    except NOT_A_MESSAGE:
        log.exception("malformed message dropped")


def keep_client(channel: Any) -> None:
    """Make a channel use a single client for all commands.

    Kombu creates a client for each command, which takes longer than the command itself.
    """
    clients: dict[Any, Any] = {}  # the client of the current pool

    def once(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_once(asynchronous: bool = False) -> Any:
            if asynchronous:  # for connections that the event loop polls
                return create(asynchronous=True)
            pool = channel.pool
            if pool not in clients:
                clients.clear()
                clients[pool] = create()
            return clients[pool]

        return create_once

    make_clients_by(channel, once)


class ReconnectingConsumer(Consumer):  # type: ignore[misc]
    """A consumer that acknowledges messages on the current channels and keeps messages whose jobs are running."""

    job_limits: JobLimits  # set before the first job is taken (Runtime.attach)
    prefix_cache: Callable[[], WorkerCache | None]  # like `job_limits`
    bulk_connection: Any = None
    bulk_consumer: Any = None
    readers: Sequence[QueueReader] = ()  # for urgent and bulk jobs, on the current connection
    _next_flush_at = 0.0  # in monotonic seconds

    @property
    def channels(self) -> list[Any]:
        """Return the channels for urgent and bulk jobs. The list is empty while there is no connection."""
        if self.connection is None or self.task_consumer is None or self.bulk_consumer is None:
            return []
        return [self.task_consumer.channel, self.bulk_consumer.channel]

    def channel_of(self, message: Any) -> Any:
        """Return the channel that now holds a message, or None while there is no connection."""
        channels = self.channels
        if not channels or any(channel.connection is None for channel in channels):
            return None
        if message.channel in channels:
            return message.channel
        return channels[(message.properties.get("priority") or 0) in BULK_PRIORITIES]

    def connect(self) -> Any:
        """Wait until Redis accepts commands, then connect as Celery does.

        Without this wait, each startup step would fail and be retried.
        """
        retries_s = iter(PROBE_WAITS_S)
        with redis_waits.of("the consumer") as waits:
            while (refusal := self._refusal()) is not None:
                waits(refusal)
                maybe_shutdown()
                time.sleep(next(retries_s, PROBE_WAITS_S[-1]))
        return super().connect()

    def _refusal(self) -> RefusedForNow | None:
        try:
            probe_writes(self.app.runtime.redis)
        except RefusedForNow as error:
            return error
        except RedisError:  # `connect` itself waits for an unreachable Redis, and raises other errors
            pass
        return None

    def on_connection_error_after_connected(self, exc: Exception) -> Any:
        """Reconnect. This worker keeps the messages that it holds until their leases expire."""
        for reader in self.readers:
            reader.keep_messages()
        self.close_bulk()
        return super().on_connection_error_after_connected(exc)

    def close_bulk(self) -> None:
        connection, self.bulk_connection, self.bulk_consumer = self.bulk_connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):  # the connection may be lost
                connection.collect(socket_timeout=1)
            ignore_errors(connection, connection.close)

    def add_task_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        """Start reading a queue on both channels."""
        super().add_task_queue(queue, *args, **kwargs)
        if self.bulk_consumer is not None and not self.bulk_consumer.consuming_from(queue):
            self.bulk_consumer.add_queue(self.app.amqp.queues[queue])
            self.bulk_consumer.consume()

    def cancel_task_queue(self, queue: str) -> None:
        """Stop reading a queue on both channels."""
        super().cancel_task_queue(queue)
        if self.bulk_consumer is not None:
            self.bulk_consumer.cancel_by_queue(queue)

    def request_again(self) -> None:
        """Request jobs for models that have gained capacity. The event loop calls this method on each iteration."""
        if self.channels:
            for reader in self.readers:
                reader.note_full_models()
                reader.request_again()

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """End a job with an unknown task: its stream ends with an error, and its canvas fails."""
        if "task" not in message.headers:  # Celery's first protocol
            super().on_unknown_task(body, message, exc)
            return
        job_id, task = message.headers["id"], message.headers["task"]
        try:
            failure = end_unknown_task(self.app, message)
        except RedisError as error:
            log.warning(
                "job with unknown task not marked as failed",
                job_id=job_id,
                detail=f"{error}; retrying in {ACK_RETRY_S:g} s",
            )
            self.timer.call_after(ACK_RETRY_S, self.on_unknown_task, (body, message, exc))
            return
        message.ack_log_error(logging.getLogger(__name__), self.connection_errors)
        if self.event_dispatcher:
            self.event_dispatcher.send("task-failed", uuid=job_id, exception=repr(failure))
        signals.task_unknown.send(sender=self, message=message, exc=exc, name=task, id=job_id)

    def _flush_events(self) -> None:
        """Send the events of the last EVENT_FLUSH_S seconds in one message."""
        now = time.monotonic()
        if now >= self._next_flush_at:  # compares times because a reconnect clears the timers
            self._next_flush_at = now + EVENT_FLUSH_S
            self.timer.call_after(EVENT_FLUSH_S, super()._flush_events)

    def call_soon_ack(self, p: Any, *args: Any, **kwargs: Any) -> Any:
        """Send an acknowledgement or a rejection from the event loop as soon as a channel is available."""
        message = getattr(p, "__self__", None)

        def run(*run_args: Any, **run_kwargs: Any) -> Any:
            if message is not None:
                channel = self.channel_of(message)
                if channel is None:
                    self.timer.call_after(ACK_RETRY_S, run, run_args, run_kwargs)
                    return None
                message.channel = channel
            return p(*run_args, **run_kwargs)

        return super().call_soon_ack(run, *args, **kwargs)


class Intake(bootsteps.StartStopStep):  # type: ignore[misc]
    """Opens the second channel.

    After a reconnect, this step also moves the messages of running jobs to the new channels.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: ReconnectingConsumer) -> None:
        urgent = consumer.task_consumer.channel
        consumer.bulk_connection = consumer.connect()
        bulk = consumer.bulk_connection.default_channel
        ledger, lease_s = consumer.app.runtime.ledger, get_settings().lease_s

        def job_limits() -> JobLimits:
            return consumer.job_limits

        def cache() -> WorkerCache | None:
            return consumer.prefix_cache()

        make_reader = partial(QueueReader, ledger=ledger, lease_s=lease_s, job_limits=job_limits, cache=cache)
        urgent_reader = make_reader(urgent, priorities=URGENT_PRIORITIES)
        bulk_reader = make_reader(bulk, priorities=BULK_PRIORITIES, before=[urgent_reader])
        consumer.readers = [urgent_reader, bulk_reader]
        keep_client(urgent)
        keep_client(bulk)
        if consumer.event_dispatcher is not None and consumer.event_dispatcher.enabled:
            consumer.event_dispatcher.buffer_limit = MAX_EVENTS
            keep_client(consumer.event_dispatcher.producer.channel)
        consumer.bulk_consumer = consumer.app.amqp.TaskConsumer(bulk, on_decode_error=consumer.on_decode_error)
        self._adopt(consumer)

    @staticmethod
    def _adopt(consumer: ReconnectingConsumer) -> None:
        for request in list(state.requests.values()):
            message = request.message
            if not request.acknowledged and message.channel not in consumer.channels:
                message.channel = consumer.channel_of(message)
                message.channel.qos.append(message, message.delivery_tag)

    def register_with_event_loop(self, consumer: ReconnectingConsumer, hub: Any) -> None:
        """Start reading both channels with the same message handlers."""
        take = consumer.task_consumer.on_message

        def take_now(message: Any) -> None:
            if not message.channel.qos.set_aside_until_soon(message):
                take(message)

        consumer.task_consumer.on_message = consumer.bulk_consumer.on_message = take_now
        consumer.bulk_consumer.consume()
        hub.on_tick.add(consumer.request_again)

    def stop(self, consumer: ReconnectingConsumer) -> None:
        """Stop taking jobs.

        A message that Redis is already sending is still read, and is returned to its queue when the channel is closed.
        """
        task_consumers = (consumer.task_consumer, consumer.bulk_consumer)
        for task_consumer, reader in zip(task_consumers, consumer.readers, strict=False):  # no readers before start
            if task_consumer is None or consumer.connection is None:
                continue
            reader.waits_for_redis = False
            ignore_errors(consumer, task_consumer.cancel)
            with contextlib.suppress(Empty, *consumer.connection_errors):
                reader.finish_reading()

    def shutdown(self, consumer: ReconnectingConsumer) -> None:
        consumer.close_bulk()


# Celery's commands for revokes, which also update the ledger

_REVOKE = control.revoke


@control.control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def revoke(state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **options: Any) -> Any:
    """Revoke tasks by their ids."""
    try:
        store_revoke(state.app, maybe_list(task_id) or [], terminate)
    except RedisError as error:
        log.warning("revocation not stored in Redis", detail=f"{error}; the revocation is lost if this worker stops")
    return _REVOKE(state, task_id, terminate, signal, **options)


@control.control_command(  # type: ignore[untyped-decorator]
    variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [id2 [... [idN]]]]"
)
def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> Any:
    """Terminate tasks by their ids."""
    return revoke(state, task_id, terminate=True, signal=signal)
