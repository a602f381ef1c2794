"""Bring a worker to its desired state, and report what it has and lacks. A chore of the registry thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from cellama.config import Settings
from cellama.engine import ModelManager
from cellama.tasks.contract.shapes.workers import WantedState, WantedThing

from .desired_state import (
    Correction,
    DesiredState,
    DesiredStateRecord,
    Key,
    Origin,
    Overrides,
    corrections,
    desired_state,
    key_text,
    model_key,
)
from .model_loading import ModelLoader

log = logging.getLogger(__name__)

DRAIN_S = 60.0  # for jobs of what is to be unloaded; if they take longer, it is retried later


class Reconciler:
    """Compares what is loaded with what is desired, and starts the actions that are missing."""

    def __init__(
        self, settings: Settings, manager: ModelManager, loader: ModelLoader, record: DesiredStateRecord
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._loader = loader
        self._record = record
        self._desired = desired_state(settings, {})

    def reconcile(self) -> None:
        """Read the desired state, and start what leads to it. Raises RedisError."""
        self.start_corrections(self._record.read())

    def start_corrections(self, overrides: Overrides, *, adapters_first: bool = False) -> None:
        """Start what leads to the desired state.

        With `adapters_first`, the adapters of models that are loaded are there when it returns.
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
        log.info("desired state: %s %s", correction.action, key_text(key))
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
        self._record.begin_load(key)
        try:
            load()
        finally:
            self._record.end_load(key)

    # For the worker's registry entry

    def report(self) -> list[WantedThing]:
        """Return what is desired, and what is loaded and not desired, with their states."""
        return list(self._report())

    def _report(self) -> Iterator[WantedThing]:
        desired, models, adapters = self._desired, self._loader.models(), self._loader.adapters()
        for model_id, model in desired.models.items():
            key = model_key(model_id)
            of_model = self._thing(key, model.source, desired.origins[key], is_loaded=model_id in models)
            yield of_model
            for key, adapter in desired.adapters.items():
                if key[1] == model_id:
                    thing = self._thing(key, adapter.source, desired.origins[key], is_loaded=key in adapters)
                    # without its model an adapter is as its model is, and has no reason of its own
                    yield thing if of_model["state"] == "ready" else {**thing, "state": of_model["state"], "why": None}
        for model_id, model in models.items():
            if model_id not in desired.models:
                yield self._thing(model_key(model_id), model.source, "settings", state="leaving")
        for key, adapter in adapters.items():
            if key not in desired.adapters and key[1] in desired.models:
                yield self._thing(key, adapter.source, "settings", state="leaving")

    def _thing(
        self, key: Key, source: str, origin: Origin, *, is_loaded: bool = False, state: WantedState | None = None
    ) -> WantedThing:
        name = key_text(key)
        failed = self._loader.failed.get(name)
        if state is None:
            is_coming = failed is None or name in self._loader.busy
            state = "ready" if is_loaded else "loading" if is_coming else "lacking"
        why = failed.failure if failed is not None and state != "ready" else None
        adapter = key[2] if key[0] == "adapter" else None
        return {"model": key[1], "adapter": adapter, "source": source, "by": origin, "state": state, "why": why}
