"""Load and unload models while a worker is running, either on command or because its desired state requires it.

`ModelLoader` works in the background, and adapts the worker's queues and the size of its pool. `Reconciler` compares
the loaded models with the desired state, starts the required actions, and reports missing models and adapters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery.worker import state
from redis.exceptions import RedisError

from cellama.config import ModelSettings, Settings, SettingsError
from cellama.config.logging import event_logger
from cellama.config.settings import AdapterSettings
from cellama.engine import EngineError, EngineOptions, ModelBusy, ModelManager
from cellama.engine.models.sources import check_source
from cellama.tasks.app import num_jobs_of
from cellama.tasks.contract.names import DEFAULT_MODEL, evicting_key, queues_of_model
from cellama.tasks.contract.shapes.workers import LoadFailure, WantedState, WantedThing

from .desired_state import (
    Correction,
    DesiredState,
    DesiredStateRecord,
    Key,
    Origin,
    Overrides,
    adapter_key,
    corrections,
    desired_state,
    key_text,
    model_key,
)

log = event_logger(__name__)

DRAIN_POLL_S = 0.05  # seconds between two counts of a draining model's jobs, whose ends are not reported here
DRAIN_S = 60.0  # seconds to wait for jobs of a model that reconciling unloads; after that the unload is retried later
FAILURE_TTL_S = 60.0  # seconds to report a failure; clients that wait for a command poll several times a second
STOP_INTAKE_S = 10.0  # seconds for the event loop to stop taking jobs; it needs longer only if Redis is unreachable
MIN_RETRY_S, MAX_RETRY_S = 30.0, 900.0  # seconds before a retry; doubled after each failure, so mistakes cost little
NOT_OPTIONS = {name for name in ModelSettings.model_fields if name not in EngineOptions.__dataclass_fields__}


def options_of(model: ModelSettings, settings: Settings) -> EngineOptions:
    """Return the options of a model, with defaults from the worker's settings. Raises InvalidRequest."""
    values = model.model_dump(exclude=NOT_OPTIONS)
    for name in ("cache_dir", "cache_disk_bytes"):
        if values[name] is None:
            values[name] = getattr(settings, name)
    return EngineOptions(**values)


def check_models(settings: Settings) -> None:
    """Check the models in the settings. Raises SettingsError with one line for each mistake.

    Nothing is downloaded or loaded, so files on the hub and the contents of local files are not checked.
    """
    problems = []
    for model in settings.models:
        sources = {"source": model.source, "draft": model.draft}
        sources |= {f"adapters.{name}": adapter.source for name, adapter in model.adapters.items()}
        for field, source in sources.items():
            try:
                if source is not None:
                    check_source(source)
            except EngineError as error:
                problems.append(f"models.{model.id}.{field}: {error}")
        try:
            options_of(model, settings)
        except EngineError as error:
            problems.append(f"models.{model.id}: {error}")
    if problems:
        raise SettingsError("\n".join(problems))


def default_of(desired: DesiredState, settings: Settings) -> str | None:
    """Return the id of the desired default model."""
    if desired.default is not None:
        return desired.default
    return settings.default_model.id if settings.default_model.id in desired.models else None


@dataclass(frozen=True, slots=True)
class FailedAction:
    """A failure to load or unload a model or adapter, and the time of the next retry."""

    failure: LoadFailure
    at: float  # monotonic time in seconds
    delay_s: float

    @property
    def retry_at(self) -> float:
        return self.at + self.delay_s


class ModelLoader:
    """Loads and unloads models, and adapts the consumer's queues and the pool's size.

    Each load or unload is an action, whose name comes from `key_text` or `evicting_key`. Actions with the same name
    never run concurrently.
    """

    def __init__(
        self,
        manager: ModelManager,
        consumer: Any,
        *,
        load: Callable[[ModelSettings], None],
        num_jobs: dict[str, int],
        loaded: Iterable[ModelSettings],
        on_change: Callable[[], None],
    ) -> None:
        """Create a loader that starts with the models in `loaded`.

        `load` loads a model and connects it to the publisher. `num_jobs` is the number of jobs that each model adds to
        the pool, and the loader updates this number. `on_change` is called after each action.
        """
        self._manager = manager
        self._consumer = consumer
        self._load = load
        self._num_jobs = num_jobs
        self.on_change = on_change
        self._loaded = {model.id: model for model in loaded}
        self.busy: set[str] = set()  # names of running actions
        self.failed: dict[str, FailedAction] = {}  # by name of the action
        self.evicted: dict[str, float] = {}  # unix time at which the cache of each model was emptied last

    # Loaded models and failures

    def models(self) -> dict[str, ModelSettings]:
        """Return the settings with which each model was loaded."""
        return {model_id: model for model_id, model in list(self._loaded.items()) if self._manager.is_loaded(model_id)}

    def adapters(self) -> dict[Key, AdapterSettings]:
        """Return the adapters that are loaded or loading."""
        return {
            adapter_key(model_id, adapter.name): AdapterSettings(source=adapter.source, scale=adapter.scale)
            for model_id, model in list(self._manager.models().items())
            for adapter in model.adapters()
        }

    def recent_failures(self) -> dict[str, LoadFailure]:
        """Return the failures of the last minute, keyed by action name."""
        now = time.monotonic()
        return {name: each.failure for name, each in list(self.failed.items()) if now - each.at < FAILURE_TTL_S}

    def has_failed(self, name: str) -> bool:
        """Return whether an action has failed and must not be retried yet."""
        failed = self.failed.get(name)
        return failed is not None and time.monotonic() < failed.retry_at

    def forget_failures(self, needed: set[str]) -> None:
        """Forget old failures of actions whose names are not in `needed`."""
        now = time.monotonic()
        for name, each in list(self.failed.items()):
            if name not in needed and now - each.at >= FAILURE_TTL_S:
                self.failed.pop(name, None)

    # Actions, each on a thread of its own

    def start(self, name: str, action: Callable[[], object]) -> None:
        """Run an action in the background. If the action fails, `failed` records the failure."""
        self.busy.add(name)
        threading.Thread(target=self.run, args=(name, action), name=f"cellama-{name}", daemon=True).start()

    def start_command(self, name: str, action: Callable[[], object]) -> None:
        """Run a command's action in the background, and forget earlier failures of this action."""
        self.failed.pop(name, None)
        self.start(name, action)

    def run(self, name: str, action: Callable[[], object]) -> None:
        """Run an action on this thread. This method never raises."""
        self.busy.add(name)
        try:
            action()
            self.failed.pop(name, None)
        except EngineError as error:
            self._note_failure(name, error.code, str(error))
        except RedisError as error:
            self._note_failure(name, "redis_unreachable", str(error))
        except TimeoutError as error:
            self._note_failure(name, "timeout", str(error))
        except Exception as error:
            log.exception("model action raised an unexpected error", action=name)
            self._note_failure(name, "internal_error", repr(error))
        finally:
            self.busy.discard(name)
        self.on_change()

    def _note_failure(self, name: str, code: str, message: str) -> None:
        log.error("model action failed", action=name, code=code, detail=message)
        earlier = self.failed.get(name)
        delay_s = min(MAX_RETRY_S, 2 * earlier.delay_s) if earlier else MIN_RETRY_S
        self.failed[name] = FailedAction({"code": code, "message": message}, time.monotonic(), delay_s)

    def start_emptying_cache(self, model_id: str) -> None:
        """Empty the cache of a model in the background. Raises UnknownModel or WrongCapability."""
        engine = self._manager.get(model_id).engine

        def empty_cache() -> None:
            engine.evict()
            self.evicted[model_id] = time.time()

        self.start_command(evicting_key(model_id), empty_cache)

    # Loading, in an action

    def load_model(self, model: ModelSettings) -> None:
        """Load a model with its adapters, and take jobs for it. Raises EngineError."""
        self._load(model)
        self._loaded[model.id] = model
        loaded = self._manager.get(model.id)
        self._num_jobs[model.id] = num_jobs_of(model, loaded.options.num_slots, loaded.capabilities)
        self._consumer.call_soon(self._serve, model.id)

    def _serve(self, model_id: str) -> None:
        self.resize_pool(self._num_jobs[model_id])
        models = [model_id, *([DEFAULT_MODEL] if self._manager.default else [])]
        self._resume_intake([queue for model in models for queue in queues_of_model(model)])
        log.info("model ready for jobs", model=model_id)
        self.on_change()

    def resize_pool(self, num_jobs: int) -> None:
        """Add this number of threads to the pool, or remove threads if the number is negative.

        Call only on the main thread.
        """
        pool = self._consumer.pool
        (pool.grow if num_jobs >= 0 else pool.shrink)(abs(num_jobs))

    # Unloading

    def stop_intake(self, model_id: str) -> list[str]:
        """Stop taking the jobs that only this model serves, and return their queues. Call only on the main thread."""
        is_only_default = self._manager.default == model_id and self._manager.default_without(model_id) is None
        models = [model_id, DEFAULT_MODEL] if is_only_default else [model_id]
        queues = [queue for model in models for queue in queues_of_model(model)]
        for queue in queues:
            self._consumer.cancel_task_queue(queue)
        return queues

    def _resume_intake(self, queues: Sequence[str]) -> None:
        for queue in queues:
            self._consumer.add_task_queue(queue)

    def unload_model(self, model_id: str, timeout_s: float) -> None:
        """Stop taking a model's jobs, drain them, and unload the model. Raises ModelBusy.

        Don't call on the main thread.
        """
        queues: list[str] = []
        stopped = threading.Event()

        def stop() -> None:
            queues.extend(self.stop_intake(model_id))
            stopped.set()

        self._consumer.call_soon(stop)
        if not stopped.wait(STOP_INTAKE_S):
            self._consumer.call_soon(lambda: self._resume_intake(queues))  # the event loop runs this after `stop`
            raise ModelBusy(
                f"model {model_id!r} is busy: the worker did not stop taking its jobs within {STOP_INTAKE_S:g} s; "
                "check that Redis is reachable, and retry"
            )
        self.drain(model_id, queues, timeout_s)

    def drain(self, model_id: str, queues: Sequence[str], timeout_s: float) -> None:
        """Unload a model after its last job. If unloading fails, the worker starts taking the model's jobs again.

        Raises ModelBusy.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while _num_held(queues) and time.monotonic() < deadline:
                time.sleep(DRAIN_POLL_S)
            self._manager.unload(model_id, max(0.0, deadline - time.monotonic()))
        except EngineError:
            if self._manager.is_loaded(model_id):
                self._consumer.call_soon(self._resume_intake, queues)
            raise
        self._loaded.pop(model_id, None)
        self._consumer.call_soon(self.resize_pool, -self._num_jobs.pop(model_id, 0))


def _num_held(queues: Sequence[str]) -> int:
    """Return the number of this worker's unfinished jobs from these queues."""
    return sum(request.delivery_info.get("routing_key") in queues for request in list(state.requests.values()))


class Reconciler:
    """Brings a worker to its desired state, and reports missing models and adapters.

    The registry thread calls `reconcile`.
    """

    def __init__(
        self, settings: Settings, manager: ModelManager, loader: ModelLoader, record: DesiredStateRecord
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._loader = loader
        self._record = record
        self._desired = desired_state(settings, {})

    def reconcile(self) -> None:
        """Read the desired state, and start the actions that bring the worker to this state. Raises RedisError."""
        self.start_corrections(self._record.read())

    def start_corrections(self, overrides: Overrides, *, adapters_first: bool = False) -> None:
        """Start the actions that bring the worker to its desired state.

        With `adapters_first`, actions on adapters of loaded models have finished when this method returns.
        """
        loader = self._loader
        self._desired = desired = desired_state(self._settings, overrides)
        models, adapters = loader.models(), loader.adapters()
        keys = {*map(model_key, (*desired.models, *models)), *desired.adapters, *adapters}
        loader.forget_failures(set(map(key_text, keys)))
        for correction in corrections(desired, models, adapters):
            name = key_text(correction.key)
            failed = loader.failed.get(name)
            if not loader.busy.isdisjoint({name, correction.key[1]}) or (failed and time.monotonic() < failed.retry_at):
                continue
            action = partial(self._correct, desired, correction)
            if adapters_first and correction.key[0] == "adapter":
                loader.run(name, action)
            else:
                loader.start(name, action)
        default = desired.default
        if default is not None and default != self._manager.default and self._manager.is_loaded(default):
            self._manager.set_default(default)

    def _correct(self, desired: DesiredState, correction: Correction) -> None:
        kind, model_id, *rest = key = correction.key
        log.info("started applying desired state", action=correction.action, key=key_text(key))
        if kind == "model":
            if correction.action == "unload":
                self._loader.unload_model(model_id, DRAIN_S)
            else:
                self._count_load(key, partial(self._loader.load_model, desired.models[model_id]))
            return
        model, name = self._manager.get(model_id), rest[0]
        if correction.action == "unload":
            model.unload_adapter(name, DRAIN_S)
            return
        adapter = desired.adapters[key]
        if correction.action == "scale":
            model.set_adapter_scale(name, adapter.scale)
        else:
            self._count_load(key, partial(model.load_adapter, name, adapter.source, adapter.scale))

    def _count_load(self, key: Key, load: Callable[[], object]) -> None:
        self._record.start_load(key)
        try:
            load()
        finally:
            self._record.end_load(key)

    @property
    def desired(self) -> DesiredState:
        """The desired state at the last `reconcile`."""
        return self._desired

    # For the worker's registry entry

    def report(self) -> list[WantedThing]:
        """Return the state of every model and adapter that is desired, loaded, or both."""
        return list(self._report())

    def _report(self) -> Iterator[WantedThing]:
        desired, models, adapters = self._desired, self._loader.models(), self._loader.adapters()
        for model_id, model in desired.models.items():
            key = model_key(model_id)
            is_loaded, state = model_id in models, self._state_on_demand(model_id) if model.on_demand else None
            model_entry = self._entry(key, model.source, desired.origins[key], is_loaded=is_loaded, state=state)
            yield model_entry
            for key, adapter in desired.adapters.items():
                if key[1] == model_id:
                    entry = self._entry(key, adapter.source, desired.origins[key], is_loaded=key in adapters)
                    if model_entry["state"] != "ready":  # the model's entry gives the reason
                        entry = {**entry, "state": model_entry["state"], "why": None}
                    yield entry
        for model_id, model in models.items():
            if model_id not in desired.models:
                yield self._entry(model_key(model_id), model.source, "settings", state="leaving")
        for key, adapter in adapters.items():
            if key not in desired.adapters and key[1] in desired.models:
                yield self._entry(key, adapter.source, "settings", state="leaving")

    def _state_on_demand(self, model_id: str) -> WantedState:
        status = next((entry.status for entry in self._manager.entries() if entry.id == model_id), None)
        if status is None and self._loader.has_failed(key_text(model_key(model_id))):
            return "lacking"
        return "ready" if status == "ready" else "loading" if status == "loading" else "available"

    def _entry(
        self, key: Key, source: str, origin: Origin, *, is_loaded: bool = False, state: WantedState | None = None
    ) -> WantedThing:
        name = key_text(key)
        failed = self._loader.failed.get(name)
        if state is None:
            is_pending = failed is None or name in self._loader.busy
            state = "ready" if is_loaded else "loading" if is_pending else "lacking"
        why = failed.failure if failed is not None and state != "ready" else None
        adapter = key[2] if key[0] == "adapter" else None
        return {"model": key[1], "adapter": adapter, "source": source, "by": origin, "state": state, "why": why}
