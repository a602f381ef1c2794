"""The remote control commands that load, unload and change the models and adapters of a worker.

Commands run on the worker's main thread. Each command returns immediately, and the worker's registry entry reports the
result. A command that succeeds also changes the desired state (docs/adr/012-pools.md) of the worker's pool, so that the
other workers follow. If `whole_pool` is false, the command only changes the desired state of this worker. Only workers
import this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery.worker.control import control_command
from pydantic import ValidationError
from redis.exceptions import RedisError

from cellama.config import ModelSettings
from cellama.config.settings import AdapterSettings, explain
from cellama.engine import EngineError, IdTaken, ModelBusy, ModelManager
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract.names import DEFAULT_MODEL, queues_of_model

from .desired_state import (
    DEFAULT_KEY,
    DesiredStateRecord,
    Key,
    Override,
    adapter_key,
    key_text,
    loads_the_same,
    model_key,
    override_in,
)
from .model_loading import STOP_INTAKE_S, ModelLoader

Reply = dict[str, Any]  # the summary of the command and the time by this worker's clock, or an error
WRITE_RETRY_S = 1.0  # seconds between two writes while Redis is unreachable


class ModelChanges:
    """Changes the models of this worker, and the desired state of the worker or of its pool."""

    def __init__(
        self,
        manager: ModelManager,
        consumer: Any,
        loader: ModelLoader,
        record: DesiredStateRecord,
        num_waiting: Callable[[str], int],
        desired: Callable[[], Mapping[str, ModelSettings]] = dict,
    ) -> None:
        """Prepare the changes.

        `num_waiting` returns how many of a queue's jobs are waiting for a slot. `desired` returns the desired models.
        """
        self._manager = manager
        self._consumer = consumer
        self._loader = loader
        self._record = record
        self._num_waiting = num_waiting
        self._desired = desired

    def _start(self, key: Key, action: Callable[[], object], override: Override | None, *, whole_pool: bool) -> None:
        """Run an action in the background.

        Then write the override, unless the desired state's entry has changed in the meantime.
        """
        before = self._record.text_of(key, whole_pool=whole_pool)

        def act() -> None:
            action()
            if override is not None:
                self._write(key, override, whole_pool=whole_pool, before=before)
            self._record.end_load(key)

        self._loader.start_command(key_text(key), act)

    def _write(self, key: Key, override: Override, *, whole_pool: bool, before: bytes | None = None) -> None:
        """Write an entry to the desired state.

        Retry until Redis accepts the entry, because the change has already been made.
        """
        with redis_waits.of("the desired state") as waits:
            while True:
                try:
                    return self._record.write(key, override, whole_pool=whole_pool, before=before)
                except RedisError as error:
                    if not is_passing(error):
                        raise
                    waits(error)
                    time.sleep(WRITE_RETRY_S)

    def load(self, model: dict[str, Any], *, whole_pool: bool = True) -> None:
        """Start loading a model from the fields of a `[[models]]` table.

        The worker takes the model's jobs once the model is loaded. An on-demand model is only added to the catalogue.
        """
        settings = ModelSettings(**model)
        key = model_key(settings.id)
        override, loaded = override_in(self._record.read(), key), self._loader.models().get(settings.id)
        desired = override.model if override is not None else None
        if desired is not None and loads_the_same(desired, settings):
            if key_text(key) in self._loader.busy:
                return
        elif desired is not None and whole_pool:
            raise IdTaken(
                f"model id {settings.id!r} is taken by a model loaded from {desired.source!r}; choose another id, or "
                "unload that model first"
            )
        is_loaded = loaded is not None and loads_the_same(desired or loaded, settings)
        is_in_settings = is_loaded and override is None and not settings.on_demand

        def load() -> None:
            if not is_loaded and not settings.on_demand:
                self._loader.load_model(settings)
            if settings.default:
                self._write(DEFAULT_KEY, Override(default=settings.id), whole_pool=whole_pool)
                if self._manager.is_loaded(settings.id):
                    self._manager.set_default(settings.id)

        self._start(key, load, None if is_in_settings else Override(model=settings), whole_pool=whole_pool)

    def unload(self, model_id: str, timeout_s: float, *, whole_pool: bool = True) -> None:
        """Stop taking jobs of a model, and unload it in the background after its last job. Raises UnknownModel.

        If the model is desired but not loaded, it is only removed from the desired state. If the model is loading, it
        is unloaded after the load has finished.
        """
        key = model_key(model_id)
        override = override_in(self._record.read(), key)
        desired = self._desired().get(model_id)
        is_on_demand = desired is not None and desired.on_demand
        if (override is not None or is_on_demand) and not self._manager.is_loaded(model_id):
            if override is not None and override.gone:
                return
            if not self._manager.is_leaving(model_id):
                self._loader.failed.pop(key_text(key), None)
                self._record.write(key, Override(gone=True), whole_pool=whole_pool)
                return
        self._manager.get(model_id)
        queues = self._loader.stop_intake(model_id)
        drain = partial(self._loader.drain, model_id, queues, timeout_s)
        self._start(key, drain, Override(gone=True), whole_pool=whole_pool)

    def evict(self, model_id: str) -> None:
        """Unload an idle model to free memory for another model, on the thread that loads the other model.

        Raises ModelBusy.
        """
        desired = self._desired().get(model_id)
        if desired is not None and desired.pinned:
            raise ModelBusy(f"model {model_id!r} is pinned")
        if any(map(self._num_waiting, queues_of_model(model_id))):
            raise ModelBusy(f"model {model_id!r} is needed by waiting jobs")
        key = model_key(model_id)
        self._loader.busy.add(key_text(key))
        try:
            self._loader.unload_model(model_id, STOP_INTAKE_S)
            if desired is None or not desired.on_demand:
                self._write(key, Override(gone=True), whole_pool=False)
        finally:
            self._loader.busy.discard(key_text(key))
        self._loader.on_change()

    def empty_cache(self, model_id: str, *, whole_pool: bool = True) -> None:
        """Start emptying a model's cache on this worker only. Raises UnknownModel or WrongCapability."""
        self._loader.start_emptying_cache(model_id)

    def set_default(self, model_id: str, *, whole_pool: bool = True) -> None:
        """Make this model serve the jobs for `:default`. Raises UnknownModel."""
        self._manager.get(model_id)
        # The entry first, else reconciling could undo the change.
        self._record.write(DEFAULT_KEY, Override(default=model_id), whole_pool=whole_pool)
        self._manager.set_default(model_id)
        for queue in queues_of_model(DEFAULT_MODEL):
            self._consumer.add_task_queue(queue)
        self._loader.on_change()

    def load_adapter(self, model_id: str, name: str, source: str, scale: float, *, whole_pool: bool = True) -> None:
        """Start loading a LoRA adapter. Raises UnknownModel, WrongCapability, IdTaken or InvalidRequest."""
        model, key = self._manager.get(model_id), adapter_key(model_id, name)
        override, adapter = override_in(self._record.read(), key), AdapterSettings(source=source, scale=scale)
        is_loaded_soon = key_text(key) in self._loader.busy or self._loader.adapters().get(key) == adapter
        if override is not None and override.adapter == adapter and is_loaded_soon:
            return
        model.engine.adapters.check_new(name, scale)
        load = partial(model.load_adapter, name, source, scale)
        self._start(key, load, Override(adapter=adapter), whole_pool=whole_pool)

    def set_adapter_scale(self, model_id: str, name: str, scale: float, *, whole_pool: bool = True) -> None:
        """Set the scale of an adapter for jobs that don't choose adapters. Raises UnknownModel or UnknownAdapter."""
        model, key = self._manager.get(model_id), adapter_key(model_id, name)
        model.engine.adapters.check_scale(name, scale)
        adapter = AdapterSettings(source=self._loader.adapters()[key].source, scale=scale)
        self._record.write(key, Override(adapter=adapter), whole_pool=whole_pool)  # first, as in `set_default`
        model.set_adapter_scale(name, scale)
        self._loader.on_change()

    def unload_adapter(self, model_id: str, name: str, timeout_s: float, *, whole_pool: bool = True) -> None:
        """Reject new jobs for an adapter, and unload the adapter in the background after its last job.

        If the adapter is desired but not loaded, it is only removed from the desired state. Raises UnknownModel or
        UnknownAdapter.
        """
        model, key = self._manager.get(model_id), adapter_key(model_id, name)
        override = override_in(self._record.read(), key)
        if override is not None and key not in self._loader.adapters():
            if not override.gone:
                self._record.write(key, Override(gone=True), whole_pool=whole_pool)
            return
        model.engine.adapters.check_unload(name)
        unload = partial(model.unload_adapter, name, timeout_s)
        self._start(key, unload, Override(gone=True), whole_pool=whole_pool)


def _register(command: str, change: Callable[..., None], /, **arguments: type) -> None:
    """Register a method of `ModelChanges` as a remote control command.

    The command takes these arguments and `whole_pool`.
    """
    summary = (change.__doc__ or "").partition("\n")[0]

    @control_command(name=command, args=list(arguments.items()), help=summary)  # type: ignore[untyped-decorator]
    def run(state: Any, whole_pool: bool = True, **options: Any) -> Reply:
        try:
            values = {argument: options[argument] for argument in arguments}
            change(state.app.runtime.changes, **values, whole_pool=whole_pool)
        except EngineError as error:
            return {"error": str(error), "code": error.code}
        except RedisError as error:
            return {"error": str(error), "code": "redis_unreachable"}
        except ValidationError as error:
            problems = "; ".join(explain(problem) for problem in error.errors())
            return {"error": problems, "code": "invalid_request"}
        return {"ok": summary, "at": time.time()}


_register("cellama_load", ModelChanges.load, model=dict)
_register("cellama_unload", ModelChanges.unload, model_id=str, timeout_s=float)
_register("cellama_evict", ModelChanges.empty_cache, model_id=str)
_register("cellama_default", ModelChanges.set_default, model_id=str)
_register("cellama_load_adapter", ModelChanges.load_adapter, model_id=str, name=str, source=str, scale=float)
_register("cellama_scale_adapter", ModelChanges.set_adapter_scale, model_id=str, name=str, scale=float)
_register("cellama_unload_adapter", ModelChanges.unload_adapter, model_id=str, name=str, timeout_s=float)
