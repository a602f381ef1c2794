"""Models that come and go while a worker runs: loaded in the background, served from then on, drained before they go.

Celery's remote control calls the methods on the worker's main thread; each returns at once, and what becomes of it is
in the worker's registry entry.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from celery.worker import state

from cellama.config import ModelSettings, Settings
from cellama.config.settings import AdapterSettings
from cellama.engine import EngineError, ModelBusy, ModelManager
from cellama.tasks.app import num_jobs_of
from cellama.tasks.connection.kombu_internals import prefetch_more
from cellama.tasks.contract.names import DEFAULT_MODEL, failure_key, queue_name
from cellama.tasks.contract.shapes.workers import LoadFailure

from .wanted import AdapterChoices, Wanted, WantedKeeper

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
FAILURES_KEPT_S = 60.0
EVICT_TIMEOUT_S = 10.0  # for jobs that came just then


class Residency:
    """Loads and unloads, and keeps the consumer's queues and the pool's size in step with what is there."""

    def __init__(
        self,
        manager: ModelManager,
        consumer: Any,
        load: Callable[[ModelSettings], None],
        jobs: dict[str, int],
        num_waiting: Callable[[str], int],
        on_change: Callable[[], None],
        configured: Settings,
        keeper: WantedKeeper,
    ) -> None:
        """`load` loads a model and makes it tell its events; `jobs` has the jobs that each model adds to the pool.

        `num_waiting` counts the jobs of a queue that have no slot. What differs from `configured` goes to `keeper`.
        """
        self._manager = manager
        self._consumer = consumer
        self._load_now = load
        self._jobs = jobs
        self._num_waiting = num_waiting
        self._tell_change = on_change
        self._configured = configured
        self._keeper = keeper
        self._given: dict[str, ModelSettings] = {}  # by command, not by the settings
        self._restoring: set[str] = set()  # models that are on their way
        self._restored_default: str | None = None
        self._failures: dict[str, tuple[float, LoadFailure]] = {}

    def failures(self) -> dict[str, LoadFailure]:
        """Model id, or `failure_key` of an adapter → code and message of why it could not be (un)loaded lately."""
        now = time.monotonic()
        self._failures = {id_: entry for id_, entry in self._failures.items() if now - entry[0] < FAILURES_KEPT_S}
        return {id_: failure for id_, (_, failure) in self._failures.items()}

    def restore(self, wanted: Wanted) -> None:
        """Brings back what the predecessor had: adapters at once, before a job comes, models in the background."""
        for model_id, choices in wanted.adapters.items():
            for name, (source, scale) in choices.items():
                self._restore_adapter(model_id, name, source, scale)
        self._restoring = {model.id for model in wanted.models}
        self._restored_default = wanted.default
        self._settle_restored()
        for model in wanted.models:
            log.info("model %s was loaded by command before this worker started; it is brought back", model.id)
            self._begin(model.id, partial(self._restore_model, model))

    def _restore_adapter(self, model_id: str, name: str, source: str, scale: float) -> None:
        try:
            model = self._manager.get(model_id)
            if any(adapter.name == name for adapter in model.adapters()):
                model.set_adapter_scale(name, scale)
            else:
                model.load_adapter(name, source, scale)
        except EngineError as error:
            log.error("adapter %s of model %s is not brought back: %s", name, model_id, error)
            self._note_failure(failure_key(model_id, name), error.code, str(error))

    def _restore_model(self, model: ModelSettings) -> None:
        try:
            self._load(model)
        finally:
            self._restoring.discard(model.id)
            self._settle_restored()

    def _settle_restored(self) -> None:
        """The default is the one of before, as soon as it is there; from the last one on, changes are stored."""
        default = self._restored_default
        if default is not None and self._manager.is_loaded(default):
            self._manager.set_default(default)
            self._restored_default = None
        if not self._restoring:
            self._keeper.keep(self._wanted)

    def _wanted(self) -> Wanted:
        configured = {model.id: model for model in self._configured.models}
        there: dict[str, AdapterChoices] = {
            model_id: {a.name: (a.source, a.scale) for a in model.adapters() if a.status == "ready"}
            for model_id, model in list(self._manager.models().items())
        }
        known = {id_: {n: (a.source, a.scale) for n, a in model.adapters.items()} for id_, model in configured.items()}
        adapters = {
            model_id: {name: choice for name, choice in choices.items() if known[model_id].get(name) != choice}
            for model_id, choices in there.items()
            if model_id in known and model_id not in self._given
        }
        models = [
            model.model_copy(update={"adapters": _settings_of(there[id_])}) if id_ in there else model
            for id_, model in list(self._given.items())
        ]
        default, usual = self._manager.default, self._configured.default_model
        return Wanted(
            tuple(models),
            {model_id: choices for model_id, choices in adapters.items() if choices},
            default if default is not None and (usual is None or default != usual.id) else None,
        )

    def _on_change(self) -> None:
        if not self._restoring:
            self._keeper.save()
        self._tell_change()

    def load(self, model: ModelSettings) -> None:
        """Begins to load a model; its queue is taken from once it is there."""
        self._begin(model.id, lambda: self._load(model))

    def _load(self, model: ModelSettings) -> None:
        self._load_now(model)
        self._given[model.id] = model
        loaded = self._manager.get(model.id)
        self._jobs[model.id] = num_jobs_of(model, loaded.options.num_slots, loaded.capabilities)
        self._consumer.call_soon(self._begin_serving, model.id)

    def _begin_serving(self, model_id: str) -> None:
        self.resize(self._jobs[model_id])
        self._resume_intake(self._queues_of(model_id))
        log.info("model %s is served from now on", model_id)
        self._on_change()

    def unload(self, model_id: str, timeout_s: float) -> None:
        """Takes no more jobs of a model; when the last one has ended, it goes. Main thread only."""
        self._failures.pop(model_id, None)
        self._manager.get(model_id)  # raises UnknownModel, at once
        queues = self._queues_of(model_id)
        for queue in queues:
            self._consumer.cancel_task_queue(queue)
        self._in_background(model_id, lambda: self._unload(model_id, queues, timeout_s))

    def _queues_of(self, model_id: str) -> list[str]:
        """The queues whose jobs are not served here without this model."""
        others = self._manager.models().keys() - {model_id}
        alone = self._manager.default == model_id and not others
        return [queue_name(name) for name in ([model_id, DEFAULT_MODEL] if alone else [model_id])]

    def _resume_intake(self, queues: Sequence[str]) -> None:
        for queue in queues:
            self._consumer.add_task_queue(queue)

    def _unload(self, model_id: str, queues: Sequence[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            while _num_held(queues) and time.monotonic() < deadline:
                time.sleep(DRAIN_POLL_S)
            self._manager.unload(model_id, max(0.0, deadline - time.monotonic()))
        except EngineError:
            if self._manager.is_loaded(model_id):
                self._consumer.call_soon(self._resume_intake, queues)
            raise
        self._given.pop(model_id, None)
        self._consumer.call_soon(self.resize, -self._jobs.pop(model_id, 0))

    def evict(self, model_id: str) -> None:
        """Unloads an idle model to make room, on the thread of the load that needs it. Raises ModelBusy."""
        queue, stopped = queue_name(model_id), threading.Event()
        if self._num_waiting(queue):
            raise ModelBusy(f"jobs wait for model {model_id!r}")

        def stop_intake() -> None:
            self._consumer.cancel_task_queue(queue)
            stopped.set()

        self._consumer.call_soon(stop_intake)
        if not stopped.wait(EVICT_TIMEOUT_S):
            self._consumer.call_soon(self._consumer.add_task_queue, queue)  # after the other, whenever that is
            raise ModelBusy(f"the worker did not stop taking jobs of {model_id!r} within {EVICT_TIMEOUT_S:g} s")
        self._unload(model_id, [queue], EVICT_TIMEOUT_S)
        self._on_change()

    def set_default(self, model_id: str) -> None:
        """Serves jobs for `:default` from this model. Raises UnknownModel."""
        self._manager.set_default(model_id)
        self._consumer.add_task_queue(queue_name(DEFAULT_MODEL))
        self._on_change()

    def load_adapter(self, model_id: str, name: str, source: str, scale: float) -> None:
        """Begins to load a LoRA adapter. Raises UnknownModel, WrongCapability, IdTaken, InvalidRequest at once."""
        model = self._manager.get(model_id)
        model.engine.adapters.check_new(name, scale)
        self._begin(failure_key(model_id, name), lambda: model.load_adapter(name, source, scale))

    def set_adapter_scale(self, model_id: str, name: str, scale: float) -> None:
        """Jobs that do not choose have the adapter with this scale. Raises UnknownModel, UnknownAdapter, …"""
        self._manager.get(model_id).set_adapter_scale(name, scale)
        self._on_change()

    def unload_adapter(self, model_id: str, name: str, timeout_s: float) -> None:
        """Begins to drain an adapter, which goes with the last job that has it. Raises UnknownModel, UnknownAdapter."""
        model = self._manager.get(model_id)
        model.engine.adapters.check_unload(name)
        self._begin(failure_key(model_id, name), lambda: model.unload_adapter(name, timeout_s))

    def _begin(self, key: str, action: Callable[[], object]) -> None:
        self._failures.pop(key, None)
        self._in_background(key, action)

    def resize(self, num_jobs: int) -> None:
        """So many more jobs, or fewer, may be in this worker from now on. Main thread only."""
        if num_jobs == 0:
            return
        pool = self._consumer.pool
        (pool.grow if num_jobs >= 0 else pool.shrink)(abs(num_jobs))
        prefetch_more(self._consumer, num_jobs)

    def _note_failure(self, key: str, code: str, message: str) -> None:
        self._failures[key] = (time.monotonic(), {"code": code, "message": message})

    def _in_background(self, key: str, action: Callable[[], object]) -> None:
        def run() -> None:
            try:
                action()
            except EngineError as error:
                log.error("%s: %s", key, error)
                self._note_failure(key, error.code, str(error))
            except Exception as error:
                log.exception("%s could not be loaded or unloaded", key)
                self._note_failure(key, "internal_error", repr(error))
            self._on_change()

        threading.Thread(target=run, name=f"cellama-residency-{key}", daemon=True).start()


def _settings_of(choices: AdapterChoices) -> dict[str, AdapterSettings]:
    return {name: AdapterSettings(source=source, scale=scale) for name, (source, scale) in choices.items()}


def _num_held(queues: Sequence[str]) -> int:
    """Jobs of these queues that this worker has taken and not ended."""
    return sum(request.delivery_info.get("routing_key") in queues for request in list(state.requests.values()))
