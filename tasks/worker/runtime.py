"""The runtime of a worker process: what it has besides Celery, which threads there are, and who ends them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.config import ModelSettings, Settings
from cellama.engine import STACK_BYTES, HubOptions, ModelManager, Watchdog
from cellama.tasks.app import num_jobs_of
from cellama.tasks.broker.places import Places
from cellama.tasks.broker.pool import Interruption, JobControl
from cellama.tasks.connection.connections import connect
from cellama.tasks.contract.keys import cancel_key
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_name
from cellama.tasks.estimates.samples import SampleWriter
from cellama.tasks.middleware import Middleware
from cellama.tasks.publishing.publisher import Publisher
from cellama.tasks.publishing.signing import Signer
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Attempt
from cellama.tasks.state.registry import Registration

from .commands import ModelChanges
from .desired_state import DesiredStateRecord, desired_state, loads_the_same
from .heap import bound_free_heap, trim_heap
from .lease import LeaseKeeper
from .middlewares import start_middlewares
from .model_loading import ModelLoader
from .model_options import options_of
from .neighbours import Neighbours
from .quarantine import Quarantine
from .reaper import Reaper, Store
from .reconciling import Reconciler

log = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 10  # far more than any script takes: a Redis that is silent for longer counts as away
LEAST_SAVE_S = 2.0  # for KV states at the end, if jobs took all of `drain_s`
SWITCH_INTERVAL_S = 0.0005  # an engine that comes out of llama.cpp waits no longer for the GIL; Python's own is 5 ms


def _prepare_process() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    bound_free_heap()
    threading.stack_size(STACK_BYTES)  # of the pool's threads, which tokenize and compile grammars
    gc.freeze()  # what is there now stays: collecting after an unload need not look at it while engines wait


class Runtime:
    """What a worker process runs on: models, Redis, and these threads, which it starts and ends.

    - From the start: those of `manager` (one per engine, embedder and reranker), `publisher` (writes the events of
      jobs), `watchdog`, and those of `middlewares`, as far as the settings enable them.
    - From `attach`, once Celery has a consumer: `lease` (renews the leases of messages), and one for each action of the
      loader, which loads and unloads models.
    - From `announce`, once the worker receives commands: `reaper`, and `registration`, whose heartbeat does the chores:
      reconciling, cancelled jobs, neighbours, free memory, samples for estimates.

    The threads of jobs are those of Celery's pool (broker/pool.py). There is one runtime per process, which the
    lifecycle makes.
    """

    def __init__(self, settings: Settings, worker: str, store: Store) -> None:
        """Load the models of the settings. `store` is how the reaper gives Celery the ends of jobs.

        Raises ModelLoadFailed, InvalidRequest; nothing is left then.
        """
        _prepare_process()
        self.settings = settings
        self.incarnation = f"{worker} {os.getpid()} {time.time():.3f}"
        self._worker = worker
        self._running: dict[str, tuple[str, JobControl]] = {}  # run id → job id
        self._trimmed = True  # since the last job began
        self.quarantine = Quarantine()
        self.signer = Signer(settings.reasoning_key.get_secret_value() if settings.reasoning_key else None)
        self.redis = self._connect()
        self.ledger = Ledger(self.redis, settings=settings, gathers=True)
        self.samples = SampleWriter(self.redis)
        self._record = DesiredStateRecord(self.redis, settings.pool, worker)
        self._reaper = Reaper(self.redis, self.ledger, store, settings.lease_s)
        self._models = self._models_to_start_with()
        with contextlib.ExitStack() as on_failure:
            self.manager = ModelManager(settings.memory_budget)
            on_failure.callback(self.manager.close)
            self.middlewares = start_middlewares(
                settings, worker, manager=self.manager, signer=self.signer, samples=self.samples
            )
            on_failure.callback(self.middlewares.close)
            self.publisher = Publisher(self.ledger, worker, self.middlewares)
            on_failure.callback(self.publisher.close)
            # Twice the lease: the jobs of a worker that is silent for so long run elsewhere already.
            self.watchdog = Watchdog(settings.hang_s, last_resort_s=2 * settings.lease_s)
            on_failure.callback(self.watchdog.close)
            self.watchdog.watch(self.publisher.pulse)
            if settings.hang_s:
                self.watchdog.start()
            for model in self._models:
                self._load(model)
            on_failure.pop_all()
        # Set by `attach`
        self.changes: ModelChanges
        self._lease: LeaseKeeper | None = None
        self._neighbours: Neighbours | None = None
        self._registration: Registration | None = None

    def _connect(self) -> Redis:
        return connect(self.settings.redis_url, socket_timeout=SOCKET_TIMEOUT_S, health_check_interval=10)

    def _models_to_start_with(self) -> list[ModelSettings]:
        """Return the models of the settings, without those that commands have unloaded or replaced."""
        try:
            desired = desired_state(self.settings, self._record.read()).models
        except RedisError as error:
            log.warning("the worker starts with the models of its settings, because it can't read Redis: %s", error)
            return list(self.settings.models)
        return [
            model
            for model in self.settings.models
            if model.id in desired and loads_the_same(desired[model.id], model, adapters=False)
        ]

    def _load(self, model: ModelSettings) -> None:
        options = options_of(model, self.settings)
        default = model.default or model == self.settings.default_model
        hub = HubOptions(model.hub_cache_dir, model.hub_token, model.hub_force, model.hub_offline)
        adapters = {name: (adapter.source, adapter.scale) for name, adapter in model.adapters.items()}
        loaded = self.manager.load(
            model.id,
            model.source,
            options=options,
            capabilities=model.capabilities,
            default=default,
            hub=hub,
            adapters=adapters,
        )
        self.watchdog.watch(*loaded.pulses)
        if loaded.capabilities & {"generate", "chat"}:
            loaded.engine.add_listener(self.publisher.listener(model.id))
        self.middlewares.call(Middleware.on_model_loaded, model.id, loaded)

    def describe_slots(self) -> str:
        """The slots of each model, for people who look at the worker in Flower."""
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
        """The run of a job, which ends when its job is found to be cancelled, or to run elsewhere."""
        self._trimmed = False
        self._running[attempt.run_id] = (attempt.job_id, control)
        try:
            yield
        finally:
            del self._running[attempt.run_id]

    def _end_cancelled(self) -> None:
        """Ends what was cancelled while this worker did not hear of it."""
        running = list(self._running.values())
        if running:
            wanted: Any = self.redis.mget([cancel_key(job_id) for job_id, _ in running])
            for (_, control), cancelled in zip(running, wanted, strict=True):
                if cancelled:
                    control.interrupt(Interruption.CANCELLED)

    def _trim_when_idle(self) -> None:
        if not self._running and not self._trimmed:
            self._trimmed = True
            trim_heap()

    def attach(self, consumer: Any) -> None:
        """Renew the leases of what this consumer of Celery's takes, and let models be loaded and unloaded."""
        if self._lease is not None:
            return
        overrides = self._record.read()  # Celery connects again if this fails
        loaded = self.manager.models()
        num_jobs = {
            model.id: num_jobs_of(model, loaded[model.id].options.num_slots, loaded[model.id].capabilities)
            for model in self._models
        }
        consumer.places = Places(num_jobs, self.settings.look_ahead, lambda: self.manager.default)
        loader = ModelLoader(
            self.manager,
            consumer,
            load=self._load,
            num_jobs=num_jobs,
            loaded=self._models,
            on_change=self._report_now,
        )
        assumed = sum(num_jobs_of(model) for model in self.settings.models)
        loader.resize_pool(sum(num_jobs.values()) - assumed)  # tuned models have other slots than were assumed
        missing = [model.id for model in self.settings.models if model.id not in num_jobs]
        for name in [*missing, *([] if self.manager.default else [DEFAULT_MODEL])]:
            consumer.cancel_task_queue(queue_name(name))
        self.changes = ModelChanges(self.manager, consumer, loader, self._record, self.ledger.num_waiting)
        if self.settings.on_full == "evict":  # only now: the models of the settings don't push each other out
            self.manager.evict_through(self.changes.evict)
        reconciler = Reconciler(self.settings, self.manager, loader, self._record)
        reconciler.start_corrections(overrides, adapters_first=True)
        self._neighbours = Neighbours(self.redis, self._worker, self.manager.cores)
        self._registration = Registration(
            self.redis,
            self._worker,
            self.manager,
            chores=[
                reconciler.reconcile,
                self._end_cancelled,
                self._neighbours.look,
                self._trim_when_idle,
                self.samples.flush,
            ],
            pool=self.settings.pool,
            failures=loader.recent_failures,
            wanted=reconciler.report,
            evicted=lambda: dict(loader.evicted),
        )
        self._lease = LeaseKeeper(Ledger(self._connect(), settings=self.settings), consumer, self.settings.lease_s)

    def _report_now(self) -> None:
        if self._registration is not None:
            self._registration.beat_now()

    def announce(self) -> None:
        """Enter this worker into the registry, because it takes jobs and commands now. Later calls do nothing."""
        if self._registration is not None and not self._registration.is_started:
            self._reaper.start()
            self._registration.start()

    def close(self, save_until: float = 0.0) -> None:
        """End everything in order: the registry names no worker that is gone, and no event is lost.

        KV states that are worth it are saved until `save_until` (monotonic s), and for `LEAST_SAVE_S` in any case,
        because the jobs have gone to other workers by then. 0: none are saved.
        """
        if self._registration is not None:
            self._registration.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self._reaper.close()
        self._record.end_load(None)  # the loads that run end with an orderly end, and did not crash it
        if save_until:
            save_until = max(save_until, time.monotonic() + LEAST_SAVE_S)
        self.manager.close(save_until)
        self.middlewares.close()
        self.watchdog.close()
        if not self.publisher.close():
            log.error("the publisher did not end: Redis does not answer")
        if self._lease is not None:
            self._lease.close()
        self.redis.close()
