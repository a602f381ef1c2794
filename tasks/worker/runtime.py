"""The runtime of a worker process: its models, its threads, the quarantine of jobs, and the limits of its heap."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.config import ModelSettings, Settings
from cellama.config.logging import event_logger
from cellama.engine import STACK_BYTES, EngineOptions, HubOptions, ModelManager, Watchdog
from cellama.tasks.app import num_jobs_of
from cellama.tasks.broker.consumer import JobLimits
from cellama.tasks.broker.pool import Interruption, JobControl
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_waits import RedisLoop
from cellama.tasks.contract.keys import cancel_key
from cellama.tasks.contract.names import DEFAULT_MODEL, queues_of_model
from cellama.tasks.estimates.samples import SampleWriter
from cellama.tasks.middleware import Middleware
from cellama.tasks.publishing.publisher import Publisher
from cellama.tasks.state.ledger import Attempt, Ledger
from cellama.tasks.state.pools import PoolRecorder
from cellama.tasks.state.registry import Registration
from cellama.tasks.state.tenants import ServiceWriter
from cellama.tasks.state.unserved import UnservedJobs, report_served

from .auto_tune import AutoTuner
from .commands import ModelChanges
from .desired_state import DesiredState, DesiredStateRecord, desired_state, loads_the_same
from .middlewares import start_middlewares
from .model_loading import ModelLoader, Reconciler, default_of, options_of
from .neighbours import Neighbours
from .on_demand import OnDemandModels
from .prefix_cache import PrefixCache
from .reaper import LeaseKeeper, Reaper, Store
from .signing import Signer

if TYPE_CHECKING:
    from cellama.engine.llama import LoadPlan

log = event_logger(__name__)

SOCKET_TIMEOUT_S = 10  # a Redis that does not answer for 10 s counts as unreachable; every script is far faster
MIN_SAVE_S = 2.0  # seconds for saving KV states when a worker stops, even if its jobs took all of `drain_s`
SWITCH_INTERVAL_S = 0.0005  # maximum wait of an engine for the GIL after a call of llama.cpp; Python's default is 5 ms
REPORTS_PER_LEASE = 3  # reports of the worker's queues, of which several may fail before jobs count as unserved
CLOSE_S = 1.0  # seconds to wait for threads that only wait for Redis
QUARANTINE_POLL_S = 0.1  # seconds between two checks whether a waiting job was interrupted
# Options of mallopt (malloc.h). By default, glibc raises both thresholds to up to 32 and 64 MB when large blocks are
# freed. The heap of each thread that ever had a large job then keeps up to 64 MB of free memory.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
MAX_FREE_BYTES = 8 << 20  # free bytes at the end of a heap; less would cost fresh pages per token of a large vocabulary
MAPPED_BYTES = 4 << 20  # size from which a freed block returns to the system immediately
# Python collects cyclic garbage after this many allocations. The default of 700 would cost 5 % of the CPU time of small
# jobs, and most of what they allocate is freed without a collection.
GC_THRESHOLD = 20_000
NUM_HEAPS = 4  # shared by all threads, most of which wait, or hold the GIL and use Python's own allocator


def _hub_options(model: ModelSettings) -> HubOptions:
    return HubOptions(model.hub_cache_dir, model.hub_token, model.hub_force, model.hub_offline)


def _queues_of(models: Iterable[str]) -> set[str]:
    return {queue for model in models for queue in queues_of_model(model)}


def _prepare_process() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    limit_free_heap()
    threading.stack_size(STACK_BYTES)  # for the pool's threads, which tokenize and compile grammars
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    gc.freeze()  # objects that exist now live until the process exits, so later collections can skip them


def limit_free_heap(libc: Any = None) -> bool:
    """Make glibc return most freed memory to the operating system.

    Return False if the C library is not glibc, or if glibc rejects an option.
    """
    libc = libc or ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return False
    options = ((_TRIM_THRESHOLD, MAX_FREE_BYTES), (_MMAP_THRESHOLD, MAPPED_BYTES), (_ARENA_MAX, NUM_HEAPS))
    refused = [option for option, value in options if not libc.mallopt(option, value)]
    if refused:
        log.warning(
            "mallopt options refused",
            options=refused,
            detail="the process may return less freed memory to the system",
        )
    return not refused


def trim_heap(libc: Any = None) -> None:
    """Return free memory between used blocks to the operating system. With a C library other than glibc, do nothing.

    This takes a few milliseconds, during which other threads can't allocate memory.
    """
    libc = libc or ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class Quarantine:
    """Finds the job that crashes workers, by running each suspected job while no other jobs start.

    A job is unproven until its first token, or its outcome, is in Redis. When a worker crashes, each unproven job is a
    suspect. The next attempt of a suspect starts when no other job is unproven, and no other job starts until the
    suspect is proven. If the worker crashes again, the suspect is the cause, and no other job counts as a suspect.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_unproven = 0
        self._num_suspects = 0  # suspects that wait or are unproven

    @contextlib.contextmanager
    def passed(self, is_interrupted: Callable[[], bool], *, alone: bool) -> Iterator[Callable[[], None]]:
        """Wait until the job may start or is interrupted, and yield a function that marks the job as proven.

        Set `alone` for a suspect. When the block ends, the job counts as proven in any case. Thread-safe.
        """
        with self._changed:
            self._num_suspects += alone
            while (self._num_unproven if alone else self._num_suspects) and not is_interrupted():
                self._changed.wait(QUARANTINE_POLL_S)
            self._num_unproven += 1
        unproven = True

        def prove() -> None:
            nonlocal unproven
            with self._changed:
                if unproven:
                    unproven = False
                    self._num_unproven -= 1
                    self._num_suspects -= alone
                    self._changed.notify_all()

        try:
            yield prove
        finally:
            prove()


class Runtime:
    """The models and Redis connections of a worker process, and its threads.

    `__init__` starts the threads of `manager` (one per engine, embedder and reranker), of `publisher` and `watchdog`,
    and of the middlewares that the settings enable. Another thread reports the worker's queues, so that a model's jobs
    wait while the model is loading.

    `attach`, called once Celery has created its consumer, starts the thread that renews leases. Each action of
    the loader has its own thread.

    `announce`, called when the worker can receive commands, starts `reaper`, the search for unserved jobs, and
    `registration`. The registration's heartbeat reconciles models, ends cancelled jobs, shares cores, trims the heap
    and writes samples for estimates.

    Jobs run on the threads of Celery's pool (broker/pool.py). `lifecycle.py` creates one runtime per process.
    """

    def __init__(
        self, settings: Settings, worker: str, store: Store, queues_read: Callable[[], Collection[str]]
    ) -> None:
        """Load the models in the settings. The reaper reports the outcomes of jobs to Celery through `store`.

        `queues_read` returns the queues that Celery workers read (`UnservedJobs`). Raises ModelLoadFailed and
        InvalidRequest, after closing everything that was started.
        """
        _prepare_process()
        self.settings = settings
        self.incarnation = f"{worker} {os.getpid()} {time.time():.3f}"
        self._worker = worker
        self._running: dict[str, tuple[str, JobControl]] = {}  # run id → job id
        self._trimmed = True  # whether the heap was trimmed since the last job started
        self.quarantine = Quarantine()
        self.signer = Signer(settings.reasoning_key.get_secret_value() if settings.reasoning_key else None)
        self.redis = self._connect()
        self.ledger = Ledger(self.redis, settings=settings, gathers=True)
        self.samples = SampleWriter(self.redis)
        self._service = ServiceWriter(self.redis)
        self._record = DesiredStateRecord(self.redis, settings.pool, worker)
        self._reaper = Reaper(self.redis, self.ledger, store, settings.lease_s)
        unserved = UnservedJobs(
            self.redis,
            self.ledger,
            store,
            timeout_s=settings.unserved_timeout_s,
            lease_s=settings.lease_s,
            queues_read=queues_read,
        )
        self._unserved = RedisLoop("unserved", unserved.run_once, unserved.period_s)
        self._served = RedisLoop("served", self._report_served, settings.lease_s / REPORTS_PER_LEASE, acts_first=True)
        self._consumer: Any = None  # set by `attach`
        self._reconciler: Reconciler | None = None
        self._models = self._initial_models()
        with contextlib.ExitStack() as on_failure:
            self.manager = ModelManager(settings.memory_budget)
            on_failure.callback(self.manager.close)
            self._served.start()
            on_failure.callback(self._served.close, CLOSE_S)
            self.middlewares = start_middlewares(
                settings, worker, manager=self.manager, signer=self.signer, samples=self.samples
            )
            on_failure.callback(self.middlewares.close)
            self.publisher = Publisher(self.ledger, worker, self.middlewares, self._service.note)
            on_failure.callback(self.publisher.close)
            # After twice the lease, the jobs of a hanging worker run on other workers already.
            self.watchdog = Watchdog(settings.hang_s, last_resort_s=2 * settings.lease_s)
            on_failure.callback(self.watchdog.close)
            self.watchdog.watch(self.publisher.pulse)
            if settings.hang_s:
                self.watchdog.start()
            for model in self._models:
                self._load(model)
            on_failure.pop_all()
        self.prefix_cache = PrefixCache(self.ledger, self.incarnation, self.manager)
        # Set by `attach`
        self.changes: ModelChanges
        self.on_demand: OnDemandModels | None = None
        self._lease: LeaseKeeper | None = None
        self._neighbours: Neighbours | None = None
        self._auto_tuner: AutoTuner | None = None
        self._registration: Registration | None = None

    def _connect(self) -> Redis:
        return connect(self.settings.redis_url, socket_timeout=SOCKET_TIMEOUT_S, health_check_interval=10)

    def _initial_models(self) -> list[ModelSettings]:
        """Return the models in the settings, except models that commands have unloaded or replaced."""
        try:
            desired = desired_state(self.settings, self._record.read()).models
        except RedisError as error:
            log.warning("desired state not read", detail=f"{error}; the worker loads the models in its settings")
            return [model for model in self.settings.models if not model.on_demand]
        return [
            model
            for model in self.settings.models
            if model.id in desired and loads_the_same(desired[model.id], model, adapters=False) and not model.on_demand
        ]

    def _desired(self) -> DesiredState:
        return desired_state(self.settings, {}) if self._reconciler is None else self._reconciler.desired

    def note_job(self, model_id: str, keep_alive_s: float | None) -> None:
        """Record that a job uses a model, and the keep-alive time that the job sets."""
        if self.on_demand is not None:
            self.on_demand.note_job(model_id, keep_alive_s)

    def is_on_demand(self, model_id: str) -> bool:
        """Return whether this worker loads a model when a job needs it."""
        desired = self._desired()
        name = default_of(desired, self.settings) if model_id == DEFAULT_MODEL else model_id
        return name is not None and name in desired.models and desired.models[name].on_demand

    def _plan(self, model: ModelSettings, evictable: Collection[str]) -> LoadPlan:
        return self.manager.plan(
            model.id,
            model.source,
            options=options_of(model, self.settings),
            capabilities=model.capabilities,
            hub=_hub_options(model),
            evictable=evictable,
        )

    def _load(self, model: ModelSettings) -> None:
        options = options_of(model, self.settings)
        default: bool | None = model.default or model == self.settings.default_model or None
        if model.on_demand or self.is_on_demand(DEFAULT_MODEL):
            # Otherwise, the model that serves `:default` would depend on the models that are loaded.
            default = model.id == default_of(self._desired(), self.settings)
        adapters = {name: (adapter.source, adapter.scale) for name, adapter in model.adapters.items()}
        loaded = self.manager.load(
            model.id,
            model.source,
            options=options,
            capabilities=model.capabilities,
            default=default,
            hub=_hub_options(model),
            adapters=adapters,
        )
        self.watchdog.watch(*loaded.pulses)
        if loaded.capabilities & {"generate", "chat"}:
            loaded.engine.add_listener(self.publisher.listener(model.id))
        self.middlewares.call(Middleware.on_model_loaded, model.id, loaded)

    def describe_slots(self) -> str:
        """Return a description of each model's slots, which Flower shows on the worker's page."""
        engines = {
            model_id: model.engine.snapshot()
            for model_id, model in self.manager.models().items()
            if model.capabilities & {"generate", "chat"}
        }
        return "; ".join(
            f"{model_id}: {engine.slots_busy} of {engine.slots_total} busy, {engine.requests_waiting} waiting"
            for model_id, engine in engines.items()
        )

    @contextlib.contextmanager
    def running(self, attempt: Attempt, control: JobControl) -> Iterator[None]:
        """Register a running attempt, so that it is interrupted if its job is cancelled."""
        self._trimmed = False
        self._running[attempt.run_id] = (attempt.job_id, control)
        try:
            yield
        finally:
            del self._running[attempt.run_id]

    def _interrupt_cancelled(self) -> None:
        """Interrupt cancelled jobs, because Celery's revoke may not have reached this worker."""
        running = list(self._running.values())
        if running:
            cancelled: Any = self.redis.mget([cancel_key(job_id) for job_id, _ in running])
            for (_, control), is_cancelled in zip(running, cancelled, strict=True):
                if is_cancelled:
                    control.interrupt(Interruption.CANCELLED)

    def _trim_when_idle(self) -> None:
        if not self._running and not self._trimmed:
            self._trimmed = True
            trim_heap()

    def _bulk_slots(self, model_id: str) -> int:
        """Return how many of a model's slots are guaranteed to bulk jobs, or 0 if the model is not loaded."""
        loaded = self.manager.models().get(model_id)
        return loaded.options.bulk_slots if loaded is not None else 0

    def attach(self, consumer: Any) -> None:
        """Start renewing the leases of this consumer's messages, and loading and unloading models. Idempotent.

        Raises RedisError, after which Celery reconnects and calls this method again.
        """
        if self._lease is not None:
            return
        overrides = self._record.read()
        loaded = self.manager.models()
        num_jobs = {
            model.id: num_jobs_of(model, loaded[model.id].options.num_slots, loaded[model.id].capabilities)
            for model in self._models
        }
        consumer.job_limits = JobLimits(
            num_jobs, self.settings.look_ahead, lambda: self.manager.default, self._bulk_slots
        )
        consumer.prefix_cache = self.prefix_cache if self.settings.affinity else lambda: None
        loader = ModelLoader(
            self.manager,
            consumer,
            load=self._load,
            num_jobs=num_jobs,
            loaded=self._models,
            on_change=self._report_now,
        )
        assumed = sum(num_jobs_of(model) for model in self.settings.models)
        loader.resize_pool(sum(num_jobs.values()) - assumed)  # tuned models may have another number of slots
        missing = [model.id for model in self.settings.models if model.id not in num_jobs]
        for name in [*missing, *([] if self.manager.default else [DEFAULT_MODEL])]:
            for queue in queues_of_model(name):
                consumer.cancel_task_queue(queue)
        reconciler = Reconciler(self.settings, self.manager, loader, self._record)
        self.changes = ModelChanges(
            self.manager,
            consumer,
            loader,
            self._record,
            self.ledger.num_waiting,
            desired=lambda: reconciler.desired.models,
        )
        if self.settings.on_full == "evict":  # not earlier, so that the models of the settings don't evict each other
            self.manager.evict_through(self.changes.evict)
        self._consumer, self._reconciler = consumer, reconciler
        reconciler.start_corrections(overrides, adapters_first=True)
        self.on_demand = OnDemandModels(
            self._connect(),
            self._worker,
            self.settings,
            self.manager,
            loader,
            self._record,
            desired=lambda: reconciler.desired,
            plan=self._plan,
        )
        self._neighbours = Neighbours(self.redis, self._worker, self.manager.cores)
        self._registration = Registration(
            self.redis,
            self._worker,
            self.manager,
            periodic_tasks=[
                reconciler.reconcile,
                self._interrupt_cancelled,
                self._neighbours.share_cores,
                self._trim_when_idle,
                PoolRecorder(
                    self.redis, self.settings.pool, [model.id for model in self.settings.models], self.manager
                ).write,
                self.samples.flush,
                self._service.flush,
                *([self.prefix_cache.keep] if self.settings.affinity else []),
            ],
            pool=self.settings.pool,
            failures=loader.recent_failures,
            wanted=reconciler.report,
            evicted=lambda: dict(loader.evicted),
            complete=self.on_demand.complete,
        )
        self._lease = LeaseKeeper(Ledger(self._connect(), settings=self.settings), consumer, self.settings.lease_s)

    def _report_served(self) -> None:
        """Report the queues that this worker reads, or will read once it has loaded their models."""
        if self._reconciler is None:
            models = {DEFAULT_MODEL, *(model.id for model in self.settings.models)}
            report_served(self.redis, _queues_of(models))
            return
        served = ("ready", "loading", "available")
        wanted = [thing["model"] for thing in self._reconciler.report() if thing["state"] in served]
        has_default = self.manager.default or default_of(self._reconciler.desired, self.settings) in wanted
        models = {*wanted, *([DEFAULT_MODEL] if has_default else [])}
        report_served(self.redis, {*_queues_of(models), *list(self._consumer.app.amqp.queues.consume_from)})

    def _report_now(self) -> None:
        if self._registration is not None:
            self._registration.beat_now()

    def announce(self) -> None:
        """Register this worker as ready for jobs and commands. Idempotent."""
        if self._registration is not None and not self._registration.is_started:
            self._reaper.start()
            if self.settings.unserved_timeout_s:
                self._unserved.start()
            self._registration.start()
            if self.on_demand is not None:
                self.on_demand.start()
            if self.settings.auto_tune_s:
                self._auto_tuner = AutoTuner(
                    self.settings.auto_tune_s,
                    models=self._tunable_models,
                    is_running=lambda: bool(self._running),
                    is_waiting=self._has_waiting_jobs,
                    memory=self._memory_left,
                )
                self._auto_tuner.start()

    def _tunable_models(self) -> dict[str, tuple[ModelSettings, EngineOptions, str]]:
        """Return the settings, untuned options and fingerprint of each loaded model."""
        desired, loaded = self._desired().models, self.manager.models()
        return {
            name: (desired[name], options_of(desired[name], self.settings), model.info.fingerprint)
            for name, model in loaded.items()
            if name in desired
        }

    def _has_waiting_jobs(self) -> bool:
        return any(self.ledger.num_waiting(queue) for queue in _queues_of([*self.manager.models(), DEFAULT_MODEL]))

    def _memory_left(self) -> int | str:
        """Return the part of the memory budget that the loaded models leave."""
        budget = self.settings.memory_budget
        if not isinstance(budget, int):
            return budget
        return max(1, budget - sum(model.memory.total_bytes for model in self.manager.models().values()))

    def close(self, save_until: float = 0.0) -> None:
        """Stop all threads. The registry is updated first, and the publisher writes all events.

        KV states are saved until `save_until` (monotonic time in seconds), and for at least `MIN_SAVE_S`, because other
        workers will have taken over the jobs by then. If `save_until` is 0, no states are saved.
        """
        if self._auto_tuner is not None:
            self._auto_tuner.close(CLOSE_S)
        if self._registration is not None:
            self._registration.close()
        if self._neighbours is not None:
            self._neighbours.close()
        with contextlib.suppress(RedisError):  # the record expires
            self.prefix_cache.forget()
        self._reaper.close()
        self._unserved.close(CLOSE_S)
        self._served.close(CLOSE_S)
        if self.on_demand is not None:
            self.on_demand.close(CLOSE_S)
        self._record.end_load(None)  # running loads are aborted by this exit, and must not count as crashes
        if save_until:
            save_until = max(save_until, time.monotonic() + MIN_SAVE_S)
        self.manager.close(save_until)
        self.middlewares.close()
        self.watchdog.close()
        if not self.publisher.close():
            log.error("publisher did not stop in time", detail="Redis does not answer; other workers resume the jobs")
        if self._lease is not None:
            self._lease.close()
        self.redis.close()
