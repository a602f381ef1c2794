"""Brings a worker to what it shall have, and says what it has and lacks. A chore of the registry thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from cellama.config import ModelSettings, Settings
from cellama.config.settings import AdapterSettings
from cellama.engine import ModelLoadFailed, ModelManager
from cellama.tasks.contract.shapes.workers import LoadFailure, WantedState, WantedThing

from .model_loading import Residency
from .wanted import By, Key, Spoken, Step, adapter_key, model_key, steps, wanted_by
from .wanted_record import WantedRecord

log = logging.getLogger(__name__)

DRAIN_S = 60.0  # for jobs of what is wanted no more
MAX_TRIALS = 3  # loads of one thing in a row in which the process ended


class Reconciler:
    """`look` compares what is there with what is wanted, and begins what is missing to that."""

    def __init__(self, settings: Settings, manager: ModelManager, residency: Residency, record: WantedRecord) -> None:
        self._settings = settings
        self._manager = manager
        self._residency = residency
        self._record = record
        self._wanted = wanted_by(settings, Spoken())
        self._unreadable: dict[Key, str] = {}

    def restore(self) -> None:
        """The first look, before a job comes: adapters of the models that are there are loaded at once."""
        self._begin(at_once=True)

    def look(self) -> None:
        """Reads what was said, and begins what it asks for. Raises RedisError."""
        self._record.look()
        self._begin(at_once=False)

    def _begin(self, *, at_once: bool) -> None:
        residency, spoken = self._residency, self._record.spoken
        self._wanted, self._unreadable = wanted_by(self._settings, spoken), dict(spoken.unreadable)
        for key in [key for key in residency.missed if key not in self._concerned()]:
            residency.missed.pop(key, None)
        there = {id_: model for id_, model in dict(residency.loaded_as).items() if self._manager.is_loaded(id_)}
        for step in steps(self._wanted, there, residency.adapters()):
            missed = residency.missed.get(step.key)
            if step.key in residency.busy or model_key(step.key[1]) in residency.busy:
                continue
            if missed is not None and time.monotonic() < missed.next_at:
                continue
            action = partial(self._do, step)
            if at_once and step.key[0] == "adapter":
                residency.attempt(step.key, action)
            else:
                residency.in_background(step.key, action)
        default = self._wanted.default
        if default is not None and default != self._manager.default and self._manager.is_loaded(default):
            self._manager.set_default(default)

    def _concerned(self) -> set[Key]:
        """What is there or wanted: of all else nothing is remembered."""
        known = {model_key(id_) for id_ in (*self._wanted.models, *self._residency.loaded_as)}
        return known | set(self._wanted.adapters) | set(self._residency.adapters())

    def _do(self, step: Step) -> None:
        log.info("%s %s: it is what was said at run time, or in the settings", step.what, ", ".join(step.key[1:]))
        if step.key[0] == "model":
            self._do_model(step)
            return
        model, name = self._manager.get(step.key[1]), step.key[2]
        if step.what == "unload":
            model.unload_adapter(name, DRAIN_S)
            return
        adapter, _ = self._wanted.adapters[step.key]
        if step.what == "scale":
            model.set_adapter_scale(name, adapter.scale)
        else:
            self._on_trial(step.key, partial(model.load_adapter, name, adapter.source, adapter.scale))

    def _do_model(self, step: Step) -> None:
        if step.what == "unload":
            self._residency.unload_model(step.key[1], DRAIN_S)
        else:
            model, _ = self._wanted.models[step.key[1]]
            self._on_trial(step.key, partial(self._residency.load_model, model))

    def _on_trial(self, key: Key, load: Callable[[], object]) -> None:
        """A load that ends the process again and again is not begun once more. Raises ModelLoadFailed then."""
        if not self._record.begin_trial(key, MAX_TRIALS):
            raise ModelLoadFailed(
                f"{MAX_TRIALS} times in a row its load did not end before the worker did: it is not tried again for a "
                "day; see the workers' logs, and load it by command to try at once"
            )
        try:
            load()
        finally:
            self._record.end_trial(key)

    def told(self) -> list[WantedThing]:
        """What the worker shall have, has and lacks, and what it has and shall not, for its registry entry."""
        return list(self._told())

    def _told(self) -> Iterator[WantedThing]:
        wanted, adapters = self._wanted, self._residency.adapters()
        for model_id, (model, by) in wanted.models.items():
            thing = self._thing(model_key(model_id), model, by, is_there=self._manager.is_loaded(model_id))
            yield thing
            for key, (adapter, by_whom) in wanted.adapters.items():
                if key[1] == model_id and thing["state"] == "ready":
                    yield self._thing(key, adapter, by_whom, is_there=key in adapters)
                elif key[1] == model_id:  # it comes with its model
                    yield _thing(key, adapter.source, by_whom, thing["state"], None)
        for model_id, (model, by) in wanted.clashes.items():
            why = f"the settings of this worker have another model {model_id!r}; choose another id"
            yield _thing(model_key(model_id), model.source, by, "lacking", {"code": "id_taken", "message": why})
        for key, message in self._unreadable.items():
            failure: LoadFailure = {
                "code": "invalid_request",
                "message": f"what was said of it can't be read: {message}",
            }
            if len(key) > 1:
                yield _thing(key, "", "pool", "lacking", failure)
        for model_id, model in dict(self._residency.loaded_as).items():
            if model_id not in wanted.models:
                yield self._thing(model_key(model_id), model, "settings", leaves=True)
        for key, adapter in adapters.items():
            if key not in wanted.adapters and key[1] in wanted.models:
                yield self._thing(adapter_key(*key[1:]), adapter, "settings", leaves=True)

    def _thing(
        self, key: Key, what: ModelSettings | AdapterSettings, by: By, *, is_there: bool = False, leaves: bool = False
    ) -> WantedThing:
        missed = self._residency.missed.get(key)
        state: WantedState = "leaving" if leaves else "ready" if is_there else "lacking"
        if state == "lacking" and (missed is None or key in self._residency.busy):
            state = "loading"
        return _thing(key, what.source, by, state, None if missed is None or state == "ready" else missed.failure)


def _thing(key: Key, source: str, by: By, state: WantedState, why: LoadFailure | None) -> WantedThing:
    adapter = key[2] if key[0] == "adapter" else None
    return {"model": key[1], "adapter": adapter, "source": source, "by": by, "state": state, "why": why}
