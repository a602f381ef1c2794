"""Celery's consumer, taught two things: to survive a Redis that restarts while jobs run, and urgent before bulk.

On a lost connection Celery 5.7 on Redis gives back everything that is not acked, although it still runs here, and its
acks go to the channel of yesterday. This consumer keeps what runs: after a reconnect the new channels take it over.

It has two channels, on two connections: one waits for urgent jobs, one for bulk jobs. A model that is full of bulk
jobs gets no more of them, but urgent ones as before; the engine makes room (docs/delivery.md).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from queue import Empty
from typing import Any

from celery import bootsteps
from celery.worker import state
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from kombu.common import ignore_errors
from redis.exceptions import RedisError

from cellama.config import get_settings
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.connection.refusals import RefusedForNow, probe_writes
from cellama.tasks.contract.names import BULK_PRIORITIES, URGENT_PRIORITIES

from .channels import QueueReader, keep_client
from .places import Places
from .task_events import TaskEvents

log = logging.getLogger(__name__)

ACK_RETRY_S = 1.0
REFUSED_RETRY_S = (0.5, 1.0, 2.0)  # before Redis is asked again whether it accepts commands; the last one from then on
EVENTS_EVERY_S = 0.1
MAX_EVENTS = 1000  # gathered


class SteadyConsumer(Consumer):  # type: ignore[misc]
    """Acks on the channels that are there now, and gives nothing back that still runs."""

    places: Places  # set before the first job is taken (Runtime.attach)
    bulk_connection: Any = None
    bulk_consumer: Any = None
    readers: Sequence[QueueReader] = ()  # of the urgent and of the bulk jobs, for the present connection
    _next_flush_at = 0.0  # monotonic s

    @property
    def channels(self) -> list[Any]:
        """Of the urgent and of the bulk jobs; none while there is no connection."""
        if self.connection is None or self.task_consumer is None or self.bulk_consumer is None:
            return []
        return [self.task_consumer.channel, self.bulk_consumer.channel]

    def channel_of(self, message: Any) -> Any:
        """The channel that answers for a message now; None while there is no connection."""
        channels = self.channels
        if not channels or any(channel.connection is None for channel in channels):
            return None
        if message.channel in channels:
            return message.channel
        return channels[(message.properties.get("priority") or 0) in BULK_PRIORITIES]

    def connect(self) -> Any:
        """As Celery's, once Redis accepts commands: each step of the consumer's start would be refused in turn."""
        retries_s = iter(REFUSED_RETRY_S)
        with redis_waits.of("the consumer") as waits:
            while (refusal := self._refusal()) is not None:
                waits(refusal)
                maybe_shutdown()
                time.sleep(next(retries_s, REFUSED_RETRY_S[-1]))
        return super().connect()

    def _refusal(self) -> RefusedForNow | None:
        try:
            probe_writes(self.app.runtime.redis)
        except RefusedForNow as error:
            return error
        except RedisError:  # connecting waits for a Redis that is away, and shows what else is wrong
            pass
        return None

    def on_connection_error_after_connected(self, exc: Exception) -> Any:
        """Connect again. What was taken stays with this worker until its lease ends."""
        for reader in self.readers:
            reader.keep_messages()
        self.close_bulk()
        return super().on_connection_error_after_connected(exc)

    def close_bulk(self) -> None:
        connection, self.bulk_connection, self.bulk_consumer = self.bulk_connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):  # whatever a dead connection says to that
                connection.collect(socket_timeout=1)
            ignore_errors(connection, connection.close)

    def add_task_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        """Takes messages of one more queue, on both channels."""
        super().add_task_queue(queue, *args, **kwargs)
        if self.bulk_consumer is not None and not self.bulk_consumer.consuming_from(queue):
            self.bulk_consumer.add_queue(self.app.amqp.queues[queue])
            self.bulk_consumer.consume()

    def cancel_task_queue(self, queue: str) -> None:
        """Takes no more messages of a queue."""
        super().cancel_task_queue(queue)
        if self.bulk_consumer is not None:
            self.bulk_consumer.cancel_by_queue(queue)

    def ask_again(self) -> None:
        """Asks Redis for jobs of models that have room by now; called at each turn of the event loop."""
        if self.channels:
            for reader in self.readers:
                reader.ask_again()

    def _flush_events(self) -> None:
        """Sends what Flower is told together with what comes within EVENTS_EVERY_S; Celery sends it at each turn."""
        now = time.monotonic()
        if now >= self._next_flush_at:  # a reconnect clears the timer: what was planned is not waited for
            self._next_flush_at = now + EVENTS_EVERY_S
            self.timer.call_after(EVENTS_EVERY_S, super()._flush_events)

    def call_soon_ack(self, p: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs an ack or a reject on the event loop, as soon as there is a channel."""
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
    """The second channel; and after a reconnect, the new channels answer for the messages of jobs that still run."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: SteadyConsumer) -> None:
        urgent = consumer.task_consumer.channel
        consumer.bulk_connection = consumer.connect()
        bulk = consumer.bulk_connection.default_channel
        ledger, lease_s = consumer.app.runtime.ledger, get_settings().lease_s

        def places() -> Places:
            return consumer.places

        of_urgent = QueueReader(urgent, ledger, lease_s, places=places, priorities=URGENT_PRIORITIES)
        of_bulk = QueueReader(bulk, ledger, lease_s, places=places, priorities=BULK_PRIORITIES, before=[of_urgent])
        consumer.readers = [of_urgent, of_bulk]
        keep_client(urgent)
        keep_client(bulk)
        if consumer.event_dispatcher is not None and consumer.event_dispatcher.enabled:
            consumer.event_dispatcher.buffer_limit = MAX_EVENTS
            keep_client(consumer.event_dispatcher.producer.channel, TaskEvents(consumer.event_dispatcher).note)
            consumer.update_strategies()  # they know `send`
        consumer.bulk_consumer = consumer.app.amqp.TaskConsumer(bulk, on_decode_error=consumer.on_decode_error)
        self._adopt(consumer)

    @staticmethod
    def _adopt(consumer: SteadyConsumer) -> None:
        for request in list(state.requests.values()):
            message = request.message
            if not request.acknowledged and message.channel not in consumer.channels:
                message.channel = consumer.channel_of(message)
                message.channel.qos.append(message, message.delivery_tag)

    def register_with_event_loop(self, consumer: SteadyConsumer, hub: Any) -> None:
        """Both take messages in the same way, from here on."""
        take = consumer.task_consumer.on_message

        def take_now(message: Any) -> None:
            if not message.channel.qos.set_aside_until_soon(message):
                take(message)

        consumer.task_consumer.on_message = consumer.bulk_consumer.on_message = take_now
        consumer.bulk_consumer.consume()
        hub.on_tick.add(consumer.ask_again)

    def stop(self, consumer: SteadyConsumer) -> None:
        """Takes no more jobs; a message that is on its way from Redis goes back at once."""
        if not consumer.channels:
            return
        for task_consumer, reader in zip(
            (consumer.task_consumer, consumer.bulk_consumer), consumer.readers, strict=True
        ):
            ignore_errors(consumer, task_consumer.cancel)
            with contextlib.suppress(Empty, *consumer.connection_errors):
                reader.finish_reading()

    def shutdown(self, consumer: SteadyConsumer) -> None:
        consumer.close_bulk()
