"""The models that one process holds, by id: loading, routing, unloading.

(nothing) ── load ──► loading ──► ready ── unload ──► unloading ──► (nothing)
                         │                                │
                         └── failed: (nothing)            └── still in use at the timeout: ready again
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from .errors import IdTaken, ManagerExists, ModelBusy, UnknownModel, nearest
from .hub import HubOptions
from .models import DEFAULT_MODEL, Capability, Model
from .params import EngineOptions

log = logging.getLogger(__name__)

UNLOAD_TIMEOUT_S = 30.0
DRAIN_POLL_S = 0.02
Status = Literal["loading", "ready", "unloading"]


@dataclass(slots=True)
class ModelEntry:
    """A model by its id. While it is loading `model` is None, and `capabilities` are those that were asked for."""

    id: str
    source: str
    capabilities: frozenset[Capability]
    status: Status = "loading"
    model: Model | None = None
    since: float = 0.0  # unix seconds at which it became ready


class ModelManager:
    """Holds models by id and routes to them. Safe from any thread; one per process, because memory is one."""

    _open: ModelManager | None = None
    _class_lock = threading.Lock()

    def __init__(self) -> None:
        """Raises ManagerExists if another one is open in this process."""
        with ModelManager._class_lock:
            if ModelManager._open is not None:
                raise ManagerExists("this process has a ModelManager already; use that one, or close it first")
            ModelManager._open = self
        self._entries: dict[str, ModelEntry] = {}
        self._default: str | None = None
        self._lock = threading.Lock()

    def load(
        self,
        model_id: str | None,
        source: str,
        *,
        options: EngineOptions | None = None,
        capabilities: Iterable[Capability] | None = None,
        default: bool = False,
        hub: HubOptions | None = None,
        adapters: Mapping[str, tuple[str, float]] | None = None,
    ) -> Model:
        """Loads a model under an id, or one made from its source; the first one is the default until another says so.

        Other models serve meanwhile, and other threads may load theirs. A failure leaves nothing behind.
        Without capabilities it gets those that suit its file (see choose_uses).
        `adapters` are loaded with it: name → source and scale (see Model.load_adapter).
        Raises IdTaken, ModelLoadFailed, AdapterLoadFailed, WrongCapability, InvalidRequest.
        """
        wanted = None if capabilities is None else frozenset(capabilities)
        entry = self._reserve(model_id, source, wanted or frozenset())
        started = time.monotonic()
        try:
            model = Model(entry.id, source, options or EngineOptions(), wanted, hub, adapters)
        except BaseException:
            with self._lock:
                del self._entries[entry.id]
            raise
        with self._lock:
            entry.model, entry.status, entry.since = model, "ready", time.time()
            entry.capabilities = model.capabilities
            if default or self._default is None:
                self._default = entry.id
        info, seconds = model.info, time.monotonic() - started
        log.info("model %s: %s, %.1f MB, loaded in %.2f s", entry.id, info.description, info.size_bytes / 1e6, seconds)
        return model

    def load_in_background(self, model_id: str | None, source: str, **options: Any) -> Future[Model]:
        """`load`, with its options, in a thread of its own; the future gives the model, or raises what `load` does."""
        future: Future[Model] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                loaded = self.load(model_id, source, **options)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(loaded)

        threading.Thread(target=run, name=f"cellama-load-{model_id or source}", daemon=True).start()
        return future

    def _reserve(self, model_id: str | None, source: str, capabilities: frozenset[Capability]) -> ModelEntry:
        with self._lock:
            if model_id is None:
                model_id = _new_id(source, self._entries)
            elif model_id in self._entries:
                status = self._entries[model_id].status
                raise IdTaken(
                    f"there is a model {model_id!r} already ({status}); choose another id, or unload it first"
                )
            entry = self._entries[model_id] = ModelEntry(model_id, source, capabilities)
        return entry

    def unload(self, model_id: str, timeout_s: float = UNLOAD_TIMEOUT_S) -> None:
        """Takes no more requests for a model, waits until its last one has ended, then frees its memory.

        Raises UnknownModel, and ModelBusy if it is still in use after `timeout_s`: it serves again, then.
        """
        with self._lock:
            entry = self._entries.get(model_id)
            if entry is None or entry.status != "ready":
                raise self._unknown(model_id)
            entry.status = "unloading"
        model = entry.model
        assert model is not None
        deadline = time.monotonic() + timeout_s
        while model.is_busy:
            if time.monotonic() >= deadline:
                entry.status = "ready"
                raise ModelBusy(
                    f"model {model_id!r} is still in use after {timeout_s:g} s; it stays loaded and serves again: "
                    "cancel what runs, or allow more time"
                )
            time.sleep(DRAIN_POLL_S)
        if not model.close():
            raise ModelBusy(
                f"model {model_id!r} takes no more requests, but a step of it does not end; restart the worker"
            )
        with self._lock:
            del self._entries[model_id]
            if self._default == model_id:
                self._default = next((id_ for id_, other in self._entries.items() if other.status == "ready"), None)
        entry.model = None
        del model
        _give_memory_back()
        log.info("model %s is unloaded", model_id)

    def get(self, model_id: str) -> Model:
        """The model of that id, or the default one for ":default". Raises UnknownModel."""
        with self._lock:
            entry = self._entries.get(self._default or "" if model_id == DEFAULT_MODEL else model_id)
            if entry is None or entry.status != "ready" or entry.model is None:
                raise self._unknown(model_id)
            return entry.model

    def _unknown(self, model_id: str) -> UnknownModel:
        entry = self._entries.get(model_id)
        if entry is not None:
            return UnknownModel(f"model {model_id!r} is {entry.status}; wait until that is over")
        if model_id == DEFAULT_MODEL:
            return UnknownModel("no model is the default here; load one, or name one with set_default")
        return UnknownModel(f"no model {model_id!r} is loaded here; {nearest(model_id, self._entries)}")

    def is_loaded(self, model_id: str) -> bool:
        """True when the model takes requests."""
        with self._lock:
            entry = self._entries.get(model_id)
            return entry is not None and entry.status == "ready"

    def is_leaving(self, model_id: str) -> bool:
        """True while the model is unloading."""
        with self._lock:
            entry = self._entries.get(model_id)
            return entry is not None and entry.status == "unloading"

    def set_default(self, model_id: str) -> None:
        """Serves ":default" from this model. Raises UnknownModel."""
        self.get(model_id)
        self._default = model_id

    @property
    def default(self) -> str | None:
        """The id of the default model."""
        return self._default

    def models(self) -> Mapping[str, Model]:
        """All models that take requests, by id, as they are now."""
        with self._lock:
            return {id_: entry.model for id_, entry in self._entries.items() if entry.model and entry.status == "ready"}

    def entries(self) -> list[ModelEntry]:
        """All models with their status, those that are on their way, too."""
        with self._lock:
            return list(self._entries.values())

    def close(self) -> None:
        """Closes every model; what runs fails with EngineStopped. Idempotent."""
        with self._lock:
            models = [entry.model for entry in self._entries.values() if entry.model is not None]
            self._entries, self._default = {}, None
        for model in models:
            model.close()
        with ModelManager._class_lock:
            if ModelManager._open is self:
                ModelManager._open = None


def _give_memory_back() -> None:
    """Frees what hangs on reference cycles, and gives freed pages back to the system (glibc keeps them otherwise)."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


def _new_id(source: str, taken: Mapping[str, ModelEntry]) -> str:
    """The name of the source, with a number if another model has it."""
    name = PurePosixPath(source.partition("://")[2] or source).name.removesuffix(".gguf") or "model"
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate
