"""The registry of live workers and the models they serve.

Each worker updates an entry in Redis periodically, and readers ignore stale entries.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

from redis import Redis
from redis.exceptions import RedisError

from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import redis_time, seconds_of
from cellama.tasks.connection.redis_waits import RedisLoop
from cellama.tasks.contract.keys import reaper_key, workers_key
from cellama.tasks.contract.shapes.snapshots import Totals
from cellama.tasks.contract.shapes.workers import (
    CacheHit,
    LoadFailure,
    ModelFile,
    WantedThing,
    WorkerCores,
    WorkerMemory,
    WorkerModel,
)

if TYPE_CHECKING:
    from cellama.engine import Model, ModelEntry, ModelManager

log = event_logger(__name__)

HEARTBEAT_S = 2.0  # frequent enough for `cellama top`; a heartbeat costs about a millisecond
STALE_S = 10.0  # after five missed heartbeats, the worker is dead, suspended or disconnected
PRUNE_S = 30.0  # between two searches for old entries, which one worker does for all
ENTRY_TTL_S = 60.0  # entries of stopped workers, because a successor may load the same models


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """The state of a worker `age_s` seconds before the entry was read.

    Times are in Unix seconds. `seen_at` is measured by Redis' clock, and all other times by the worker's clock.
    """

    name: str  # name of the worker
    host: str  # host name of its machine
    pid: int  # its process id
    started_at: float  # time of its start
    at: float  # time of the report, by the worker's clock
    models: list[WorkerModel]  # its models
    failures: dict[str, LoadFailure]  # recent failures to load, by model id, or `failure_key` of an adapter
    memory: WorkerMemory  # its memory
    cores: WorkerCores  # its CPU cores
    totals: Totals  # sums over its models
    seen_at: float  # time of the report, by Redis' clock
    age_s: float = 0.0  # age of the report in seconds
    pool: str = "default"
    wanted: list[WantedThing] = field(default_factory=list)  # its desired state, and the progress towards it
    evicted: dict[str, float] = field(default_factory=dict)  # time of the last command that emptied the cache, by model
    llguidance: str = ""  # version of llguidance; "" if the worker does not report one
    has_ended: bool = False  # True if it stopped normally; its entry then expires like that of a killed worker
    cellama: str = ""  # version of cellama; "" if the worker does not report one


@functools.cache
def llguidance_version() -> str:
    """Return the version of llguidance, the library for constrained output, which only workers have."""
    return importlib.metadata.version("llguidance")


@functools.cache
def cellama_version() -> str:
    """Return the version of cellama."""
    return importlib.metadata.version("cellama")


def live_workers(redis: Redis) -> list[WorkerEntry]:
    """Return the live workers, sorted by name. Their last heartbeat is at most `STALE_S` seconds old."""
    return [worker for worker in recent_workers(redis, STALE_S) if not worker.has_ended]


def recent_workers(redis: Redis, within_s: float = ENTRY_TTL_S) -> list[WorkerEntry]:
    """Return the workers that ran within the last `within_s` seconds, sorted by name.

    Some of these workers may have stopped.
    """
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    pipeline.hgetall(workers_key())
    now, entries = pipeline.execute()
    stored = [entry for entry in map(_entry_of, entries.values()) if entry is not None]
    workers = [replace(entry, age_s=round(max(0.0, seconds_of(now) - entry.seen_at), 3)) for entry in stored]
    return sorted((worker for worker in workers if worker.age_s < within_s), key=lambda worker: worker.name)


_FIELDS = {each.name for each in fields(WorkerEntry)}


def _entry_of(data: bytes) -> WorkerEntry | None:
    """Parse an entry, ignoring fields that a later version has added. Return None if the entry is malformed."""
    try:
        entry = WorkerEntry(**{name: value for name, value in json.loads(data).items() if name in _FIELDS})
        return entry if entry.name and entry.seen_at + entry.at > 0 else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


class Registration:
    """Updates one worker's entry with a heartbeat, which also removes old entries and runs periodic tasks.

    `start` starts the thread. A periodic task that fails is retried with the next heartbeat.
    """

    def __init__(
        self,
        redis: Redis,
        worker: str,
        manager: ModelManager,
        *,
        periodic_tasks: Sequence[Callable[[], Any]] = (),
        pool: str = "default",
        failures: Callable[[], dict[str, LoadFailure]] = dict,
        wanted: Callable[[], list[WantedThing]] = list,
        evicted: Callable[[], dict[str, float]] = dict,
        complete: Callable[[list[WorkerModel]], list[WorkerModel]] = list,
    ) -> None:
        """Prepare the registration.

        `failures`, `wanted` and `evicted` return the values of the entry's fields with the same names. `complete`
        adds the on-demand models that are not loaded.
        """
        self._redis = redis
        self._worker = worker
        self._manager = manager
        self._periodic_tasks = periodic_tasks
        self._pool = pool
        self._failures = failures
        self._wanted = wanted
        self._evicted = evicted
        self._complete = complete
        self._started_at = time.time()
        self._last: WorkerEntry | None = None  # the entry that was written last
        self._loop = RedisLoop(
            "registry", self._beat_and_run_tasks, HEARTBEAT_S, acts_first=True, finish=self._mark_as_ended
        )

    @property
    def is_started(self) -> bool:
        return self._loop.is_started

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        """Mark the worker as stopped. Other workers remove its entry after `ENTRY_TTL_S` seconds."""
        self._loop.close(HEARTBEAT_S)

    def beat_now(self) -> None:
        """Update the entry now instead of with the next heartbeat."""
        self._loop.wake()

    def _mark_as_ended(self) -> None:
        if self._last is None:
            return
        try:
            ended = replace(self._last, has_ended=True, seen_at=redis_time(self._redis))
            self._redis.hset(workers_key(), self._worker, json.dumps(asdict(ended)))
        except RedisError as error:
            log.warning(
                "worker not marked as stopped", detail=f"{error}; the worker's entry remains until the entry is stale"
            )

    def _beat_and_run_tasks(self) -> None:
        """Send a heartbeat and run the periodic tasks. A failure of one task does not affect the others."""
        self._beat()
        for task in self._periodic_tasks:
            try:
                task()
            except RedisError:
                raise
            except Exception:
                log.exception("periodic task failed", detail="the task will be retried with the next heartbeat")

    def _beat(self) -> None:
        host, pid, now = socket.gethostname(), os.getpid(), time.time()  # before the state is collected
        seen_at = redis_time(self._redis)
        models = [describe(entry, entry.id == self._manager.default) for entry in self._manager.entries()]
        memory = cast(WorkerMemory, self._manager.memory())
        cores = cast(WorkerCores, self._manager.cores.report())
        totals = cast(Totals, asdict(self._manager.snapshot()))
        entry = WorkerEntry(
            name=self._worker,
            host=host,
            pid=pid,
            started_at=self._started_at,
            at=now,
            models=self._complete(models),
            failures=self._failures(),
            memory=memory,
            cores=cores,
            totals=totals,
            seen_at=seen_at,
            pool=self._pool,
            wanted=self._wanted(),
            evicted=self._evicted(),
            llguidance=llguidance_version(),
            cellama=cellama_version(),
        )
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hset(workers_key(), self._worker, json.dumps(asdict(entry)))
            pipeline.set(reaper_key("registry"), self._worker, nx=True, px=int(PRUNE_S * 1000))
            _, is_pruning = pipeline.execute()
        self._last = entry
        if is_pruning:
            self._prune(seen_at)

    def _prune(self, now: float) -> None:
        """Remove old entries. Workers take turns, because this method reads all entries."""
        stored: Any = self._redis.hgetall(workers_key())
        found = {name: _entry_of(data) for name, data in stored.items()}
        stale = [name for name, other in found.items() if other is None or now - other.seen_at > ENTRY_TTL_S]
        if stale:
            self._redis.hdel(workers_key(), *stale)


def _last_cache_hit(model: Model) -> CacheHit | None:
    hit = model.engine.last_cache_hit if model.capabilities & {"generate", "chat"} else None
    return None if hit is None else {"kind": hit.kind, "num_tokens": hit.num_tokens, "tier": hit.tier}


def is_served(model: ModelFile) -> bool:
    """Return whether a worker runs a model's jobs now, or loads the model when a job needs it."""
    return model["status"] == "ready" or model.get("on_demand", False)


def describe(entry: ModelEntry, default: bool) -> WorkerModel:
    """Return the state of a model, its engine, its embedder and its reranker.

    Most fields are missing while the model is loading.
    """
    capabilities, model = sorted(entry.capabilities), entry.model
    dead = model is not None and entry.status == "ready" and any(pulse.closed for pulse in model.pulses)
    status = "stopped" if dead else entry.status  # the process will exit soon
    known = {"id": entry.id, "status": status, "source": entry.source, "default": default, "capabilities": capabilities}
    if model is None:
        return cast(WorkerModel, {**known, "engine": None, "embedder": None, "reranker": None})
    parts = asdict(model.snapshot())
    resident = {
        "backend": " + ".join(model.devices),
        "threads": model.threads,
        "slots": parts["engine"]["slots_total"] if parts["engine"] else 0,
        "ctx_per_slot": model.ctx_per_slot,
        "follows_replies": model.follows_replies,
        "chat_features": list(model.chat_features) if "chat" in model.capabilities else [],
        "memory": {device: asdict(usage) for device, usage in model.memory.devices.items()},
        "memory_bytes": model.memory.total_bytes,
        "load_s": round(model.load_s, 3),
        "ready_at": entry.since,
        "last_used_at": model.last_used,
        "tuned": {name: getattr(model.options, name) for name in model.tuned},
        "sampling": dict(model.options.sampling_defaults),
        "adapters": [asdict(adapter) for adapter in model.adapters()],
        "last_cache_hit": _last_cache_hit(model),
    }
    return cast(WorkerModel, {**known, **asdict(model.info), **resident, **parts})
