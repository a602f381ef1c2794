"""Load on-demand models when jobs need them, and unload idle ones (docs/how-to/models-on-demand.md).

The catalogue consists of the models with `on_demand` in the worker's desired state. `OnDemandModels` reads from Redis
how many jobs wait for each of them, and starts the actions that residency.py chooses. Workers don't need a
coordinator, because the worker whose load is cheapest waits least before it takes the model's lock in Redis.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery.worker import state
from redis import Redis

from cellama.config import ModelSettings, Settings
from cellama.config.logging import event_logger
from cellama.engine import EngineError, ModelManager
from cellama.engine.memory.budget import AvailableMemory, Footprint
from cellama.tasks.connection.redis_waits import RedisLoop
from cellama.tasks.contract.keys import loading_key
from cellama.tasks.contract.names import DEFAULT_MODEL, PRIORITY_SEPARATOR, queues_of_model
from cellama.tasks.contract.shapes.workers import WorkerModel
from cellama.tasks.state.registry import WorkerEntry, live_workers
from cellama.tasks.state.scripts import run_script

from .desired_state import DesiredState, DesiredStateRecord, key_text, loads_the_same, model_key
from .model_loading import ModelLoader, default_of
from .residency import LoadAction, Residency, ResidentModel, UnloadAction, WaitingModel, next_action

if TYPE_CHECKING:
    from cellama.engine.llama import LoadPlan

log = event_logger(__name__)

POLL_S = 0.05  # seconds between two looks at the waiting jobs; a look takes Redis about 0.1 ms
IDLE_POLL_S = 0.5  # seconds between two looks if no job has waited for IDLE_AFTER_S
IDLE_AFTER_S = 30.0
RATE_S = 600.0  # seconds after which a job counts 1/e in its model's rate; hours would react too late to new habits
LOCK_S = 3.0  # seconds; the lock of a worker that dies expires, and its jobs are loaded elsewhere
REGISTRY_S = 1.0  # seconds between two looks at the other workers
DRAIN_S = 600.0  # seconds for a model's running jobs, during which the jobs of the next model wait
EVICTION_WAIT_S = 0.1  # seconds by which a worker that must evict a model waits longer than one with free memory
MAX_WAIT_S = 1.0  # seconds; reloads may be expensive everywhere
ASSUMED_LOAD_S = 0.3  # seconds for a load of an empty file, before the first load was measured
ASSUMED_BYTES_PER_S = 1e9  # of a load, before the first load was measured


@dataclass(slots=True)
class ModelUse:
    """A worker's record of an on-demand model. Times are Unix seconds by Redis' clock."""

    load_s: float | None = None  # measured load time
    plan: LoadPlan | None = None
    planned: ModelSettings | None = None  # settings of the plan
    rate: float = 0.0  # jobs per second
    num_uses: int = 0  # at the last look
    loaded_at: float = 0.0
    busy_at: float = 0.0  # last time at which it had jobs
    demanded_at: float | None = None  # time at which the oldest waiting job was detected
    keep_alive_s: float | None = None  # of the last job
    chosen_at: float | None = None  # time at which its load was chosen

    def expected_load_s(self) -> float:
        if self.load_s is not None:
            return self.load_s
        size = 0 if self.plan is None else self.plan.footprint.total_bytes
        return ASSUMED_LOAD_S + size / ASSUMED_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Demand:
    """The waiting jobs of the catalogue's models, at the time `now` by Redis' clock."""

    now: float
    num_waiting: Mapping[str, int]
    oldest: Mapping[str, float]  # submission time of each model's oldest waiting job
    loading: Mapping[str, str]  # the worker that is loading each model


@dataclass(slots=True)
class RunningLoad:
    """A load on another thread: the memory that it needs, and the models that it unloads first."""

    footprint: Footprint
    victims: tuple[str, ...] = ()


@dataclass(slots=True)
class OtherWorkers:
    """The models of other workers, as of the last look at the registry."""

    read_at: float = -math.inf
    having: set[str] = field(default_factory=set)  # models that another worker has or loads
    sharing: set[str] = field(default_factory=set)  # models that another worker may load


class OnDemandModels:
    """Loads and unloads the on-demand models of a worker, on a thread that `start` starts."""

    def __init__(
        self,
        redis: Redis,
        worker: str,
        settings: Settings,
        manager: ModelManager,
        loader: ModelLoader,
        record: DesiredStateRecord,
        desired: Callable[[], DesiredState],
        plan: Callable[[ModelSettings, Collection[str]], LoadPlan],
    ) -> None:
        """Prepare the thread.

        `plan` plans the load of a model in the memory that is available without some other models.
        """
        self._redis = redis
        self._worker = worker
        self._settings = settings
        self._manager = manager
        self._loader = loader
        self._record = record
        self._desired = desired
        self._plan = plan
        self._uses: dict[str, ModelUse] = {}
        self._running: dict[str, RunningLoad] = {}
        self._others = OtherWorkers()
        self._preloads: set[str] | None = None  # models that must still be loaded because of `preload`
        self._planning: threading.Thread | None = None
        self._updated_at = 0.0
        self._next_look_at = self._demanded_at = -math.inf  # monotonic seconds
        self._clock = (0.0, 0.0)  # Redis' clock and the monotonic clock at the last look
        self._loop = RedisLoop("on-demand", self._poll, POLL_S, acts_first=True)

    def start(self) -> None:
        self._loop.start()

    def close(self, timeout_s: float) -> None:
        self._loop.close(timeout_s)

    def wake(self) -> None:
        """Look at the waiting jobs now."""
        self._next_look_at = -math.inf
        self._loop.wake()

    def note_job(self, model_id: str, keep_alive_s: float | None) -> None:
        """Record that a job uses a model, and the job's own keep-alive time. Any thread may call this method."""
        if (use := self._uses.get(model_id)) is not None:
            use.keep_alive_s = keep_alive_s

    def catalogue(self) -> dict[str, ModelSettings]:
        """Return the on-demand models in the desired state."""
        return {model_id: model for model_id, model in self._desired().models.items() if model.on_demand}

    def complete(self, models: Iterable[WorkerModel]) -> list[WorkerModel]:
        """Mark the on-demand models among the worker's models, and append those that are not loaded."""
        catalogue, default = self.catalogue(), default_of(self._desired(), self._settings)
        present = [self._marked(model) if model["id"] in catalogue else model for model in models]
        ids = {model["id"] for model in present}
        return present + [
            _describe(model, self._uses.get(model_id, ModelUse()), is_default=default == model_id)
            for model_id, model in catalogue.items()
            if model_id not in ids and not self._loader.has_failed(key_text(model_key(model_id)))
        ]

    def _marked(self, model: WorkerModel) -> WorkerModel:
        """Return the entry of an on-demand model, with its last load time while it is loading or unloading."""
        use = self._uses.get(model["id"])
        if "load_s" in model or use is None or use.load_s is None:
            return {**model, "on_demand": True}
        return {**model, "on_demand": True, "load_s": round(use.load_s, 3)}

    # The loop

    def _poll(self) -> None:
        catalogue = self.catalogue()
        if self._preloads is None:
            self._preloads = {model_id for model_id, model in catalogue.items() if model.preload}
        if not catalogue:
            return
        is_stopping = state.should_stop is not None and state.should_stop is not False
        if is_stopping or time.monotonic() < self._next_look_at:
            return
        for model_id in list(self._running):
            self._redis.set(loading_key(model_id), self._worker, xx=True, px=int(LOCK_S * 1e3))
        demand = self._read_demand(catalogue)
        self._update_uses(catalogue, demand)
        residency = self._residency(catalogue, demand)
        now = time.monotonic()
        if demand.num_waiting:
            self._demanded_at = now
        self._next_look_at = now + (POLL_S / 2 if now - self._demanded_at < IDLE_AFTER_S else IDLE_POLL_S)
        action = next_action(residency)
        if isinstance(action, UnloadAction):
            self._start_unload(action.model_id)
        elif action is not None and self._may_start(action, demand):
            self._start_load(catalogue[action.model_id], action)
        elif not residency.waiting:
            self._plan_next(catalogue)

    def _read_demand(self, catalogue: Iterable[str]) -> Demand:
        queues = [(model_id, queue) for model_id in catalogue for queue in self._queues(model_id)]
        now, *found = run_script(self._redis, "demand", [], [PRIORITY_SEPARATOR, *(queue for _, queue in queues)])
        num_waiting: Counter[str] = Counter()
        oldest: dict[str, float] = {}
        for (model_id, _), count, at in zip(queues, found[::2], found[1::2], strict=True):
            if count:
                num_waiting[model_id] += count
                known = self._demanded_since(model_id, float(now)) if at == b"" else float(at)
                oldest[model_id] = min(known, oldest.get(model_id, math.inf))
        wanted = [model_id for model_id in num_waiting if not self._manager.is_loaded(model_id)]
        locks: Any = self._redis.mget([loading_key(model_id) for model_id in wanted]) if wanted else []
        self._clock = (float(now), time.monotonic())
        loading = {model_id: holder.decode() for model_id, holder in zip(wanted, locks, strict=True) if holder}
        return Demand(float(now), num_waiting, oldest, loading)

    def _demanded_since(self, model_id: str, now: float) -> float:
        """Return the time at which jobs of plain Celery were detected, which don't have a submission time."""
        use = self._uses.get(model_id)
        return now if use is None or use.demanded_at is None else use.demanded_at

    def _now(self) -> float:
        """Return the time by Redis' clock."""
        redis_s, monotonic_s = self._clock
        return redis_s + time.monotonic() - monotonic_s

    def _queues(self, model_id: str) -> list[str]:
        """Return the queues whose jobs this model serves, or would serve once it is loaded."""
        default = self._manager.default or default_of(self._desired(), self._settings)
        models = [model_id, DEFAULT_MODEL] if default == model_id else [model_id]
        return [queue for model in models for queue in queues_of_model(model)]

    def _update_uses(self, catalogue: Mapping[str, ModelSettings], demand: Demand) -> None:
        entries = {entry.id: entry for entry in self._manager.entries()}
        held = Counter(str(request.delivery_info.get("routing_key")) for request in list(state.requests.values()))
        decay = math.exp(-(demand.now - self._updated_at) / RATE_S)
        self._updated_at = demand.now
        for model_id in catalogue:
            use = self._uses.setdefault(model_id, ModelUse())
            entry = entries.get(model_id)
            num_uses = 0 if entry is None else entry.num_uses
            use.rate = use.rate * decay + max(0, num_uses - use.num_uses) / RATE_S
            is_used = num_uses > use.num_uses or (entry is not None and entry.num_holds > 0)
            use.num_uses = num_uses
            if is_used or demand.num_waiting.get(model_id) or any(held[queue] for queue in self._queues(model_id)):
                use.busy_at = demand.now
            if model_id not in demand.num_waiting or self._manager.is_loaded(model_id):
                use.demanded_at = use.chosen_at = None
            elif use.demanded_at is None:
                use.demanded_at = demand.now
        for model_id in self._uses.keys() - catalogue.keys():
            del self._uses[model_id]

    def _residency(self, catalogue: Mapping[str, ModelSettings], demand: Demand) -> Residency:
        others = self._other_workers(demand)
        taken, available = self._memory()
        evictable = [model_id for model_id in taken if model_id in catalogue and not catalogue[model_id].pinned]
        residents = [
            ResidentModel(
                id=model_id,
                footprint=taken[model_id],
                load_s=use.expected_load_s(),
                loaded_at=use.loaded_at,
                idle_since=None if use.busy_at >= demand.now else use.busy_at,
                rate=use.rate,
                keep_alive_s=catalogue[model_id].keep_alive_s if use.keep_alive_s is None else use.keep_alive_s,
                is_pinned=catalogue[model_id].pinned,
            )
            for model_id, use in self._uses.items()
            if model_id in taken and self._manager.is_loaded(model_id) and not self._is_busy(model_id)
        ]
        preloads = self._preloads or set()
        demanded = {**dict.fromkeys(preloads & catalogue.keys(), demand.now), **demand.oldest}
        waiting = [
            WaitingModel(
                id=model_id,
                footprint=plan.footprint,
                load_s=self._uses[model_id].expected_load_s(),
                waiting_since=since,
                is_elsewhere=model_id in others.having and model_id not in preloads,
            )
            for model_id, since in demanded.items()
            if demand.loading.get(model_id, self._worker) == self._worker
            and self._may_load(model_id)
            and (plan := self._planned(catalogue[model_id])) is not None
        ]
        return Residency(
            now=demand.now,
            waiting=waiting,
            residents=residents,
            available=self._after_running_loads(taken, available),
            max_available=available.plus(taken[model_id] for model_id in evictable),
            swap_after_s=self._settings.swap_after_s,
        )

    def _memory(self) -> tuple[dict[str, Footprint], AvailableMemory]:
        """Return the memory of each model, and the available memory at the same point in time."""
        while True:
            taken, available = self._manager.footprints(), self._manager.available_memory()
            if taken == self._manager.footprints():
                return taken, available

    def _after_running_loads(self, taken: Mapping[str, Footprint], available: AvailableMemory) -> AvailableMemory:
        """Return the memory that will be available after all running loads."""
        for model_id, load in list(self._running.items()):
            available = available.plus(taken[victim] for victim in load.victims if victim in taken)
            if model_id not in taken:
                available = available.minus(load.footprint)
        return available

    def _is_busy(self, model_id: str) -> bool:
        """Return whether the model is being loaded or unloaded."""
        is_victim = any(model_id in load.victims for load in list(self._running.values()))
        return is_victim or model_id in self._running or key_text(model_key(model_id)) in self._loader.busy

    def _may_load(self, model_id: str) -> bool:
        """Return whether a model is neither present nor being loaded, and its last load did not just fail."""
        if self._is_busy(model_id) or any(entry.id == model_id for entry in self._manager.entries()):
            return False
        return not self._loader.has_failed(key_text(model_key(model_id)))

    def _other_workers(self, demand: Demand) -> OtherWorkers:
        now = time.monotonic()
        if demand.num_waiting and now - self._others.read_at >= REGISTRY_S:
            others = [worker for worker in live_workers(self._redis) if worker.name != self._worker]
            self._others = OtherWorkers(now, having=_models_of(others), sharing=_catalogues_of(others))
        return self._others

    # Plans

    def _planned(self, model: ModelSettings) -> LoadPlan | None:
        """Return the plan of a model's load, or start planning and return None."""
        use = self._uses[model.id]
        if use.plan is not None and use.planned is not None and loads_the_same(use.planned, model):
            return use.plan
        self._start_plan(model)
        return None

    def _plan_next(self, catalogue: Mapping[str, ModelSettings]) -> None:
        """Plan the load of one more local file in advance, which makes its first load faster."""
        for model_id, model in catalogue.items():
            is_local = Path(model.source).exists() or model.source.startswith("bundled://")
            if is_local and self._uses[model_id].plan is None and self._may_load(model_id):
                self._start_plan(model)
                return

    def _start_plan(self, model: ModelSettings) -> None:
        if self._planning is not None and self._planning.is_alive():
            return
        evictable = [other for other, settings in self.catalogue().items() if not settings.pinned]

        def plan() -> None:
            found, use = self._plan(model, evictable), self._uses.setdefault(model.id, ModelUse())
            use.plan, use.planned = found, model

        run = partial(self._loader.run, key_text(model_key(model.id)), plan)

        def run_and_wake() -> None:
            run()
            self.wake()

        self._planning = threading.Thread(target=run_and_wake, name=f"cellama-plan-{model.id}", daemon=True)
        self._planning.start()

    # Actions

    def _may_start(self, action: LoadAction, demand: Demand) -> bool:
        """Return whether this worker has waited long enough for workers with cheaper loads, and has got the lock."""
        use = self._uses[action.model_id]
        if use.chosen_at is None:
            use.chosen_at = demand.now
        if action.model_id in self._others.sharing:
            wait_s = EVICTION_WAIT_S + min(MAX_WAIT_S, action.reload_s) if action.victims else 0.0
            wait_s /= 1 if use.load_s is None else 2  # the file is probably in the page cache
            if demand.now - use.chosen_at < wait_s:
                return False
        is_own = demand.loading.get(action.model_id) == self._worker  # the lock of the last load
        return bool(self._redis.set(loading_key(action.model_id), self._worker, nx=not is_own, px=int(LOCK_S * 1e3)))

    def _start_load(self, model: ModelSettings, action: LoadAction) -> None:
        plan = self._uses[model.id].plan
        assert plan is not None  # the planner chooses only models with a footprint
        self._running[model.id] = RunningLoad(plan.footprint, action.victims)
        for victim in action.victims:
            self._loader.busy.add(key_text(model_key(victim)))
        if self._preloads:
            self._preloads.discard(model.id)
        log.info("model load on demand started", model=model.id, victims=", ".join(action.victims))
        self._loader.start(key_text(model_key(model.id)), partial(self._load, model, action))

    def _load(self, model: ModelSettings, action: LoadAction) -> None:
        is_loaded = False
        try:
            for victim in action.victims:
                if not self._unload(victim):
                    return
            started, key = time.monotonic(), model_key(model.id)
            self._record.start_load(key)
            try:
                self._loader.load_model(model)
            finally:
                self._record.end_load(key)
            is_loaded = True
            self._note_load(model.id, time.monotonic() - started)
        finally:
            for victim in action.victims:
                self._loader.busy.discard(key_text(model_key(victim)))
            del self._running[model.id]
            if not is_loaded:  # otherwise the lock lasts until the registry shows the model
                self._redis.delete(loading_key(model.id))
            self.wake()

    def _note_load(self, model_id: str, load_s: float) -> None:
        use = self._uses.setdefault(model_id, ModelUse())
        use.load_s = load_s if use.load_s is None else (use.load_s + load_s) / 2
        use.loaded_at = use.busy_at = self._now()

    def _unload(self, model_id: str) -> bool:
        """Unload a model after its running jobs, and return whether it was unloaded."""
        try:
            self._loader.unload_model(model_id, DRAIN_S)
        except EngineError as error:
            log.warning("model not unloaded", model=model_id, detail=f"{error}; the worker retries")
            if (use := self._uses.get(model_id)) is not None:
                use.loaded_at = self._now()
            return False
        return True

    def _start_unload(self, model_id: str) -> None:
        log.info("idle model unload started", model=model_id)
        self._loader.start(key_text(model_key(model_id)), partial(self._loader.unload_model, model_id, DRAIN_S))


def _models_of(workers: Iterable[WorkerEntry]) -> set[str]:
    statuses = ("ready", "loading")
    return {model["id"] for worker in workers for model in worker.models if model["status"] in statuses}


def _catalogues_of(workers: Iterable[WorkerEntry]) -> set[str]:
    return {model["id"] for worker in workers for model in worker.models if model.get("on_demand")}


def _describe(model: ModelSettings, use: ModelUse, *, is_default: bool) -> WorkerModel:
    capabilities = model.capabilities or (() if use.plan is None else sorted(use.plan.uses.capabilities))
    described: WorkerModel = {
        "id": model.id,
        "status": "available",
        "source": model.source,
        "default": is_default,
        "capabilities": list(capabilities),
        "on_demand": True,
        "engine": None,
        "embedder": None,
        "reranker": None,
    }
    if use.plan is not None:
        described["slots"] = use.plan.options.num_slots if use.plan.uses.generates else 0
    if use.load_s is not None:
        described["load_s"] = round(use.load_s, 3)
    return described
