"""Which workers live and what they serve: each worker keeps an entry in Redis, and readers ignore stale ones."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from redis import Redis
from redis.exceptions import RedisError

from .contract.keys import WORKERS_KEY

if TYPE_CHECKING:
    from cellama.engine import Model, ModelManager

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
STALE_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A live worker. `models` are as `_describe` below makes them; `at` is unix seconds."""

    name: str
    host: str
    pid: int
    started_at: float
    at: float
    models: list[dict[str, Any]]


def live_workers(redis: Redis) -> list[WorkerEntry]:
    """The workers whose heartbeat is fresh, by name."""
    entries: Any = redis.hgetall(WORKERS_KEY)
    workers = [WorkerEntry(**json.loads(data)) for data in entries.values()]
    return sorted((w for w in workers if time.time() - w.at < STALE_S), key=lambda w: w.name)


class Registration:
    """Keeps one worker's entry fresh, prunes what dead workers left, and does what else is due with every beat."""

    def __init__(self, redis: Redis, worker: str, manager: ModelManager, chores: Sequence[Callable[[], Any]]) -> None:
        self._redis = redis
        self._chores = chores
        self._worker = worker
        self._manager = manager
        self._started_at = time.time()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellama-registry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes the entry out."""
        self._closing.set()
        self._thread.join(timeout=HEARTBEAT_S)

    def _run(self) -> None:
        while True:
            try:
                self._beat()
                for chore in self._chores:
                    chore()
            except RedisError as error:
                log.warning("the worker's heartbeat waits for Redis: %s", error)
            if self._closing.wait(HEARTBEAT_S):
                break
        try:
            self._redis.hdel(WORKERS_KEY, self._worker)
        except RedisError:
            log.warning("the worker's entry stays until it is stale: Redis does not answer")

    def _beat(self) -> None:
        models = [describe(model, model.id == self._manager.default) for model in self._manager.models().values()]
        entry = WorkerEntry(self._worker, socket.gethostname(), os.getpid(), self._started_at, time.time(), models)
        self._redis.hset(WORKERS_KEY, self._worker, json.dumps(asdict(entry)))
        stored: Any = self._redis.hgetall(WORKERS_KEY)
        stale = [name for name, data in stored.items() if time.time() - json.loads(data)["at"] > 6 * STALE_S]
        if stale:
            self._redis.hdel(WORKERS_KEY, *stale)


def describe(model: Model, default: bool) -> dict[str, Any]:
    """A model and the state of its engine, in JSON."""
    able = sorted(model.capabilities)
    engine = asdict(model.engine.snapshot()) if {"generate", "chat"} & model.capabilities else None
    return {"id": model.id, "default": default, "capabilities": able, **asdict(model.info), "engine": engine}
