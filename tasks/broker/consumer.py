"""Celery's consumer with two additions: jobs survive a restart of Redis, and urgent jobs come before bulk jobs.

When Celery 5.7 loses its connection to Redis, it returns all messages that are not acked, although their tasks still
run, and sends later acks to the old channel. This consumer keeps the messages, and moves them to the new channels after
it has connected again.

It has two channels on two connections: one reads urgent jobs, the other one bulk jobs. A model whose places are full of
bulk jobs still gets urgent jobs, and the engine preempts bulk requests for them (docs/delivery.md).
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

log = logging.getLogger(__name__)

ACK_RETRY_S = 1.0  # while there is no channel
REFUSED_RETRY_S = (0.5, 1.0, 2.0)  # until Redis is asked again whether it accepts commands; the last one repeats
EVENTS_EVERY_S = 0.1  # Celery sends events in each turn of the loop; Flower shows no difference
MAX_EVENTS = 1000  # in one message of events; more are sent at once


class SteadyConsumer(Consumer):  # type: ignore[misc]
    """Acks on the present channels, and returns no message whose job still runs."""

    places: Places  # set before the first job is taken (Runtime.attach)
    bulk_connection: Any = None
    bulk_consumer: Any = None
    readers: Sequence[QueueReader] = ()  # of the urgent and of the bulk jobs, for the present connection
    _next_flush_at = 0.0  # monotonic s

    @property
    def channels(self) -> list[Any]:
        """Return the channels of the urgent and of the bulk jobs; [] while there is no connection."""
        if self.connection is None or self.task_consumer is None or self.bulk_consumer is None:
            return []
        return [self.task_consumer.channel, self.bulk_consumer.channel]

    def channel_of(self, message: Any) -> Any:
        """Return the channel that holds a message now; None while there is no connection."""
        channels = self.channels
        if not channels or any(channel.connection is None for channel in channels):
            return None
        if message.channel in channels:
            return message.channel
        return channels[(message.properties.get("priority") or 0) in BULK_PRIORITIES]

    def connect(self) -> Any:
        """Connect as Celery does, once Redis accepts commands: it would refuse each step of the start in turn."""
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
            with contextlib.suppress(Exception):  # the connection may be lost
                connection.collect(socket_timeout=1)
            ignore_errors(connection, connection.close)

    def add_task_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        """Read one more queue on both channels."""
        super().add_task_queue(queue, *args, **kwargs)
        if self.bulk_consumer is not None and not self.bulk_consumer.consuming_from(queue):
            self.bulk_consumer.add_queue(self.app.amqp.queues[queue])
            self.bulk_consumer.consume()

    def cancel_task_queue(self, queue: str) -> None:
        """Stop reading a queue."""
        super().cancel_task_queue(queue)
        if self.bulk_consumer is not None:
            self.bulk_consumer.cancel_by_queue(queue)

    def ask_again(self) -> None:
        """Ask Redis for jobs of models that have capacity by now. The event loop calls it in each turn."""
        if self.channels:
            for reader in self.readers:
                reader.ask_again()

    def _flush_events(self) -> None:
        """Send the events of EVENTS_EVERY_S together."""
        now = time.monotonic()
        if now >= self._next_flush_at:  # not "once the last timer has fired": a reconnect clears the timers
            self._next_flush_at = now + EVENTS_EVERY_S
            self.timer.call_after(EVENTS_EVERY_S, super()._flush_events)

    def call_soon_ack(self, p: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an ack or a reject on the event loop as soon as there is a channel."""
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
    """Opens the second channel. After a reconnect, it moves the messages of running jobs to the new channels."""

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
            keep_client(consumer.event_dispatcher.producer.channel)
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
        """Start to read both channels, which handle messages alike."""
        take = consumer.task_consumer.on_message

        def take_now(message: Any) -> None:
            if not message.channel.qos.set_aside_until_soon(message):
                take(message)

        consumer.task_consumer.on_message = consumer.bulk_consumer.on_message = take_now
        consumer.bulk_consumer.consume()
        hub.on_tick.add(consumer.ask_again)

    def stop(self, consumer: SteadyConsumer) -> None:
        """Take no more jobs. A message that Redis is sending is read, and returned when the channel is closed."""
        task_consumers = (consumer.task_consumer, consumer.bulk_consumer)
        for task_consumer, reader in zip(task_consumers, consumer.readers, strict=False):  # no readers before the start
            if task_consumer is None or consumer.connection is None:
                continue
            reader.waits_for_redis = False
            ignore_errors(consumer, task_consumer.cancel)
            with contextlib.suppress(Empty, *consumer.connection_errors):
                reader.finish_reading()

    def shutdown(self, consumer: SteadyConsumer) -> None:
        consumer.close_bulk()
