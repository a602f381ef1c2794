"""The publisher thread: what engines tell in one step becomes one Redis pipeline."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from .contract import events
from .contract.events import EVENT_FIELD, Event
from .contract.keys import events_channel, journal_key, stream_id

if TYPE_CHECKING:
    from cellama.config import Settings
    from cellama.engine import Event as EngineEvent

log = logging.getLogger(__name__)

RETRY_S = 0.5
CLOSING_ATTEMPTS = 4
ALREADY_WRITTEN = "equal or smaller"  # Redis on an XADD whose id stands there: the reply of the first was lost

Batch = list[tuple[str, Event]]  # job id, event without its seq


class Publisher:
    """Numbers, journals and publishes the events of all jobs of a worker."""

    def __init__(self, redis: Redis, settings: Settings, worker: str) -> None:
        self._redis = redis
        self._settings = settings
        self._worker = worker
        self._next_seq: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[Callable[[], Batch] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellama-publisher", daemon=True)
        self._thread.start()

    def listener(self, model_id: str) -> Callable[[tuple[EngineEvent, ...]], None]:
        """What an engine calls once per step; the conversion is left to the publisher thread."""
        return lambda engine_events: self._inbox.put(lambda: self._convert(model_id, engine_events))

    def publish(self, job_id: str, event: Event) -> None:
        """Publishes an event that no engine tells. Any thread."""
        self._inbox.put(lambda: [(job_id, event)])

    def close(self, timeout_s: float = 5.0) -> bool:
        """Writes what is there, then ends; False if Redis did not take it in time."""
        self._closing.set()
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _convert(self, model_id: str, engine_events: tuple[EngineEvent, ...]) -> Batch:
        from .results import event_of

        return [(event.request_id, event_of(event, model_id, self._worker)) for event in engine_events]

    # The publisher thread

    def _run(self) -> None:
        while (make := self._inbox.get()) is not None:
            batch = make()
            while not self._inbox.empty() and len(batch) < 1000:  # a slow Redis must not make it slower still
                make = self._inbox.get()
                if make is None:
                    self._write(batch)
                    return
                batch += make()
            self._write(batch)

    def _write(self, batch: Batch) -> None:
        """Writes a batch until Redis took it. Entries have fixed ids, so writing them twice changes nothing."""
        numbered = [(job_id, self._number(job_id, event)) for job_id, event in batch]
        failures = failures_while_closing = 0
        while failures_while_closing < CLOSING_ATTEMPTS:
            try:
                self._check(self._pipeline(numbered).execute(raise_on_error=False))
                return
            except RedisError as error:
                if not failures:
                    log.warning("events of %d job(s) wait for Redis: %s", len({j for j, _ in batch}), error)
            failures += 1
            failures_while_closing += self._closing.is_set()
            time.sleep(RETRY_S)
        log.error("%d events were not written: Redis did not answer before the worker ended", len(batch))

    def _number(self, job_id: str, event: Event) -> Event:
        seq = self._next_seq.pop(job_id, 0)
        if not events.is_terminal(event):
            self._next_seq[job_id] = seq + 1
        return {"seq": seq, **event}

    def _pipeline(self, numbered: list[tuple[str, Event]]) -> Pipeline:
        settings = self._settings
        pipeline = self._redis.pipeline(transaction=False)
        for job_id, event in numbered:
            data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
            key = journal_key(job_id)
            pipeline.xadd(key, {EVENT_FIELD: data}, id=stream_id(event["seq"]), maxlen=settings.journal_max_events)
            pipeline.publish(events_channel(job_id), data)
            if events.is_terminal(event):
                pipeline.expire(key, settings.event_ttl_s)
            elif event["seq"] == 0:
                pipeline.expire(key, settings.journal_ttl_s)
        return pipeline

    def _check(self, replies: list[object]) -> None:
        """Raises what may pass, so that the batch is written again; one event that Redis refuses holds up no other."""
        for reply in replies:
            if isinstance(reply, ResponseError) and not isinstance(reply, OutOfMemoryError | ReadOnlyError):
                if ALREADY_WRITTEN not in str(reply):
                    log.error("Redis refused an event: %s", reply)
            elif isinstance(reply, Exception):
                raise reply
