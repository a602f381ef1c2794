"""Celery remote control of a worker: models and their adapters come and go. Imported in workers only.

Commands are heard on the worker's main thread; each returns at once, and what becomes of it is in the worker's registry
entry. What a command asked for is written down once it is done (docs/adr/012-pools.md): for the worker's pool, whose
workers follow, those that did not hear it as well; or with `whole_pool` false for this worker alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from celery.worker.control import control_command
from pydantic import ValidationError

from cellama.config import ModelSettings
from cellama.config.settings import AdapterSettings, explain
from cellama.engine import EngineError, IdTaken, ModelBusy, ModelManager
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_name

from .model_loading import STOP_INTAKE_S, Residency
from .wanted import DEFAULT_KEY, Key, Said, adapter_key, is_same, model_key
from .wanted_record import ANY, WantedRecord

Reply = dict[str, Any]  # what was begun, and when by this worker's clock; or an error


class Changes:
    """What commands change, and that it is written down."""

    def __init__(
        self,
        manager: ModelManager,
        consumer: Any,
        residency: Residency,
        record: WantedRecord,
        num_waiting: Callable[[str], int],
    ) -> None:
        """`num_waiting` counts the jobs of a queue that have no slot."""
        self._manager = manager
        self._consumer = consumer
        self._residency = residency
        self._record = record
        self._num_waiting = num_waiting

    def load(self, model: ModelSettings, *, whole_pool: bool = True) -> None:
        """Begins to load a model, unless it is there, as this very one; its queue is taken from once it is there.

        Raises IdTaken if the pool, or this worker, shall have another one of that id.
        """
        key = model_key(model.id)
        there, said = self._residency.loaded_as.get(model.id), self._record.spoken.of(key)[0]
        told = said.model if said is not None else None
        before = self._record.before(key, whole_pool=whole_pool)
        if key in self._residency.busy and told is not None and is_same(told, model):
            return
        if self._manager.is_loaded(model.id) and there is not None and is_same(told or there, model):
            self._note_loaded(model, key, whole_pool, before)
            return
        if told is not None and whole_pool and not is_same(told, model):
            raise IdTaken(
                f"model {model.id!r} was loaded by command from {told.source!r}; choose another id, or unload it first"
            )
        self._residency.begin(key, lambda: self._load_as_told(model, key, whole_pool, before))

    def _load_as_told(self, model: ModelSettings, key: Key, whole_pool: bool, before: str) -> None:
        self._residency.load_model(model)
        self._note_loaded(model, key, whole_pool, before)
        self._record.end_trial(key)

    def _note_loaded(self, model: ModelSettings, key: Key, whole_pool: bool, before: str) -> None:
        said, by = self._record.spoken.of(key)
        over = said is not None and (said.gone or said.over)
        if self._residency.loaded_as.get(model.id) is model or by != "settings":
            self._record.say(key, Said(model=model, over=over), whole_pool=whole_pool, before=before)
        if model.default:
            self._record.say(DEFAULT_KEY, Said(default=model.id), whole_pool=whole_pool)
            self._manager.set_default(model.id)

    def unload(self, model_id: str, timeout_s: float, *, whole_pool: bool = True) -> None:
        """Takes no more jobs of a model; when the last one has ended, it goes. Main thread only.

        One that is lacking here is wanted no more, although its load may be tried just now: it goes once it is there.
        One that was unloaded stays so. Raises UnknownModel.
        """
        key, spoken = model_key(model_id), self._record.spoken
        said = spoken.of(key)[0]
        if not self._manager.is_loaded(model_id):
            if said is not None and said.gone:
                return
            if key in spoken.unreadable or (said is not None and not self._manager.is_leaving(model_id)):
                self._note_unloaded(key, whole_pool, ANY)
                return
        self._manager.get(model_id)  # raises UnknownModel, at once
        before = self._record.before(key, whole_pool=whole_pool)
        queues = self._residency.queues_of(model_id)
        for queue in queues:
            self._consumer.cancel_task_queue(queue)
        self._residency.begin(key, lambda: self._unload_as_told(key, queues, timeout_s, whole_pool, before))

    def _unload_as_told(self, key: Key, queues: Sequence[str], timeout_s: float, whole_pool: bool, before: str) -> None:
        self._residency.drain(key[1], queues, timeout_s)
        self._note_unloaded(key, whole_pool, before)

    def _note_unloaded(self, key: Key, whole_pool: bool, before: str) -> None:
        self._residency.forget_failure(key)
        self._record.say(key, Said(gone=True), whole_pool=whole_pool, before=before)
        for other in self._record.spoken.keys("adapter"):
            if other[1] == key[1]:
                self._record.say(other, Said(), whole_pool=whole_pool)

    def evict(self, model_id: str) -> None:
        """Unloads an idle model to make room, on the thread of the load that needs it. Raises ModelBusy."""
        if self._num_waiting(queue_name(model_id)):
            raise ModelBusy(f"jobs wait for model {model_id!r}")
        key = model_key(model_id)
        self._residency.busy.add(key)
        try:
            self._residency.unload_model(model_id, STOP_INTAKE_S)
            self._record.say(key, Said(gone=True), whole_pool=False)
        finally:
            self._residency.busy.discard(key)
        self._residency.on_change()

    def empty_cache(self, model_id: str) -> None:
        """Begins to empty the cache of a model. Raises UnknownModel, WrongCapability."""
        self._residency.evict(model_id)

    def set_default(self, model_id: str, *, whole_pool: bool = True) -> None:
        """Serves jobs for `:default` from this model. Raises UnknownModel."""
        self._manager.get(model_id)
        self._record.say(DEFAULT_KEY, Said(default=model_id), whole_pool=whole_pool)  # or a look takes it back
        self._manager.set_default(model_id)
        self._consumer.add_task_queue(queue_name(DEFAULT_MODEL))
        self._residency.on_change()

    def load_adapter(self, model_id: str, name: str, source: str, scale: float, *, whole_pool: bool = True) -> None:
        """Begins to load a LoRA adapter. Raises UnknownModel, WrongCapability, IdTaken, InvalidRequest at once."""
        model, key = self._manager.get(model_id), adapter_key(model_id, name)
        said, adapter = self._record.spoken.of(key)[0], AdapterSettings(source=source, scale=scale)
        is_coming = key in self._residency.busy or self._residency.adapters().get(key) == adapter
        if said is not None and said.adapter == adapter and is_coming:
            return
        model.engine.adapters.check_new(name, scale)
        before = self._record.before(key, whole_pool=whole_pool)

        def load() -> None:
            model.load_adapter(name, source, scale)
            self._record.say(key, Said(adapter=adapter), whole_pool=whole_pool, before=before)
            self._record.end_trial(key)

        self._residency.begin(key, load)

    def set_adapter_scale(self, model_id: str, name: str, scale: float, *, whole_pool: bool = True) -> None:
        """Jobs that do not choose have the adapter with this scale. Raises UnknownModel, UnknownAdapter, …"""
        model, key = self._manager.get(model_id), adapter_key(model_id, name)
        model.engine.adapters.check_scale(name, scale)
        said = Said(adapter=AdapterSettings(source=self._residency.adapters()[key].source, scale=scale))
        self._record.say(key, said, whole_pool=whole_pool)  # or a look takes it back
        model.set_adapter_scale(name, scale)
        self._residency.on_change()

    def unload_adapter(self, model_id: str, name: str, timeout_s: float, *, whole_pool: bool = True) -> None:
        """Begins to drain an adapter, which goes with the last job that has it.

        One that is lacking here is wanted no more; one that was unloaded stays so. Raises UnknownModel, UnknownAdapter.
        """
        model, key = self._manager.get(model_id), adapter_key(model_id, name)
        said = self._record.spoken.of(key)[0]
        if said is not None and key not in self._residency.adapters():
            if said.adapter is not None:
                self._record.say(key, Said(gone=True), whole_pool=whole_pool)
            return
        model.engine.adapters.check_unload(name)
        before = self._record.before(key, whole_pool=whole_pool)

        def unload() -> None:
            model.unload_adapter(name, timeout_s)
            self._record.say(key, Said(gone=True), whole_pool=whole_pool, before=before)

        self._residency.begin(key, unload)


def _answer(state: Any, done: str, action: Callable[[Changes], None]) -> Reply:
    try:
        action(state.app.runtime.changes)
    except EngineError as error:
        return {"error": str(error), "code": error.code}
    except ValidationError as error:
        problems = "; ".join(explain(problem) for problem in error.errors())
        return {"error": problems, "code": "invalid_request"}
    return {"ok": done, "at": time.time()}


@control_command(args=[("model", dict)])  # type: ignore[untyped-decorator]
def cellama_load(state: Any, model: dict[str, Any], whole_pool: bool = True, **_: Any) -> Reply:
    """Begins to load a model; `model` is what a `[[models]]` table has."""

    def load(changes: Changes) -> None:
        changes.load(ModelSettings(**model), whole_pool=whole_pool)

    return _answer(state, f"loading {model.get('id')}", load)


@control_command(args=[("model_id", str), ("timeout_s", float)])  # type: ignore[untyped-decorator]
def cellama_unload(state: Any, model_id: str, timeout_s: float, whole_pool: bool = True, **_: Any) -> Reply:
    """Takes no more jobs of a model, and begins to drain it."""
    return _answer(state, f"unloading {model_id}", lambda c: c.unload(model_id, timeout_s, whole_pool=whole_pool))


@control_command(args=[("model_id", str)])  # type: ignore[untyped-decorator]
def cellama_evict(state: Any, model_id: str, **_: Any) -> Reply:
    """Begins to empty the cache of a model."""
    return _answer(state, f"emptying the cache of {model_id}", lambda changes: changes.empty_cache(model_id))


@control_command(args=[("model_id", str)])  # type: ignore[untyped-decorator]
def cellama_default(state: Any, model_id: str, whole_pool: bool = True, **_: Any) -> Reply:
    """Serves `:default` from a model."""
    return _answer(state, f"{model_id} is the default", lambda c: c.set_default(model_id, whole_pool=whole_pool))


@control_command(args=[("model_id", str), ("name", str), ("source", str), ("scale", float)])  # type: ignore[untyped-decorator]
def cellama_load_adapter(
    state: Any, model_id: str, name: str, source: str, scale: float, whole_pool: bool = True, **_: Any
) -> Reply:
    """Begins to load a LoRA adapter for a model."""

    def load(changes: Changes) -> None:
        changes.load_adapter(model_id, name, source, scale, whole_pool=whole_pool)

    return _answer(state, f"loading {name}", load)


@control_command(args=[("model_id", str), ("name", str), ("scale", float)])  # type: ignore[untyped-decorator]
def cellama_scale_adapter(
    state: Any, model_id: str, name: str, scale: float, whole_pool: bool = True, **_: Any
) -> Reply:
    """Sets the scale of an adapter for jobs that do not choose."""

    def set_scale(changes: Changes) -> None:
        changes.set_adapter_scale(model_id, name, scale, whole_pool=whole_pool)

    return _answer(state, f"{name} has scale {scale:g}", set_scale)


@control_command(args=[("model_id", str), ("name", str), ("timeout_s", float)])  # type: ignore[untyped-decorator]
def cellama_unload_adapter(
    state: Any, model_id: str, name: str, timeout_s: float, whole_pool: bool = True, **_: Any
) -> Reply:
    """Gives an adapter to no more jobs, and begins to drain it."""

    def unload(changes: Changes) -> None:
        changes.unload_adapter(model_id, name, timeout_s, whole_pool=whole_pool)

    return _answer(state, f"unloading {name}", unload)
