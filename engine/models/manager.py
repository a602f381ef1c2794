"""Load a process's models, route calls to them by id, and unload them.

(nothing) ── load ──► loading ──► ready ── unload ──► unloading ──► (nothing)
                         │                                │
                         └─ failed ──► (nothing)          └─ still in use at the timeout ──► ready
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from cellama.config.logging import event_logger
from cellama.engine.core.engine import Prompt
from cellama.engine.errors import IdTaken, ManagerExists, ModelBusy, ModelNotLoaded, nearest
from cellama.engine.events import Completion
from cellama.engine.memory.budget import AvailableMemory, Footprint, MemoryBudget, OnFull, readable
from cellama.engine.memory.free_memory import give_memory_back
from cellama.engine.options import Capability, EngineOptions
from cellama.engine.snapshots import ManagerSnapshot
from cellama.engine.system.core_sharing import Claim, CoreSharing
from cellama.engine.system.processors import available_cores
from cellama.engine.system.threads import at_low_priority, in_background
from cellama.engine.text.chat_template import Message

from .memory_admission import MemoryAdmission
from .model import DEFAULT_MODEL, SAVE_AT_CLOSE_S, Model, TextOrTokens, Vector
from .sources import HubOptions, resolve, with_draft_file

if TYPE_CHECKING:
    from cellama.engine.llama import LoadPlan

log = event_logger(__name__)

Status = Literal["loading", "ready", "unloading"]

UNLOAD_TIMEOUT_S = 30.0  # seconds for requests in progress to finish; half of GENERATE_TIMEOUT_S
EVICT_TIMEOUT_S = 10.0  # seconds; an evicted model was idle, so only a request that has just arrived can keep it busy


@dataclass(slots=True)
class ModelEntry:
    """A model with its id and status.

    While the model is loading, `model` is None and `capabilities` contains the requested capabilities.
    """

    id: str
    source: str
    capabilities: frozenset[Capability]
    status: Status = "loading"
    model: Model | None = None
    since: float = 0.0  # time at which it became ready, in Unix seconds
    num_holds: int = 0  # `hold` blocks that are open
    num_uses: int = 0  # `hold` blocks since the load
    may_be_default: bool = True


class ModelManager:
    """Loads models, routes calls to them by id, and unloads them. Any thread may use it.

    A process can have only one manager, because all of its models share the same memory.
    """

    _open: ModelManager | None = None
    _class_lock = threading.Lock()

    def __init__(self, memory_budget: MemoryBudget = "auto", on_full: OnFull = "refuse") -> None:
        """Limit the total memory of all models to `memory_budget` bytes, or to the free memory with "auto".

        If `on_full` is "refuse", loads that don't fit are refused. If `on_full` is "evict", the least recently used
        idle models are unloaded first, provided that this frees enough memory. Raises InvalidRequest, and ManagerExists
        if another manager is open in this process.
        """
        unload = partial(self.unload, timeout_s=EVICT_TIMEOUT_S)
        self._admission = MemoryAdmission(memory_budget, on_full, self._idle, unload, self._num_saved)
        with ModelManager._class_lock:
            if ModelManager._open is not None:
                raise ManagerExists("this process already has a ModelManager; use it, or close it first")
            ModelManager._open = self
        self._entries: dict[str, ModelEntry] = {}
        self._default: str | None = None
        self._lock = threading.Condition()  # notified when a hold ends
        self.cores = CoreSharing(self._claims)
        self.cores.start()

    def load(
        self,
        model_id: str | None,
        source: str,
        *,
        options: EngineOptions | None = None,
        capabilities: Iterable[Capability] | None = None,
        default: bool | None = None,
        hub: HubOptions | None = None,
        adapters: Mapping[str, tuple[str, float]] | None = None,
    ) -> Model:
        """Load a model and return it. Without `model_id`, the id is derived from the source.

        The first model is the default until another model is loaded with `default`. A model that is loaded with
        `default=False` becomes the default only through `set_default`. During the load, other models continue to serve
        requests, and other threads can load models. After a failed load, no part of the model stays
        in memory. Without `capabilities`, the capabilities are chosen based on the model's file. `adapters` maps each
        name to a source and a scale (see Model.load_adapter). Raises IdTaken, InsufficientMemory, ModelLoadFailed,
        AdapterLoadFailed, WrongCapability, InvalidRequest.
        """
        requested = None if capabilities is None else frozenset(capabilities)
        entry = self._reserve(model_id, source, requested or frozenset())
        hub = hub or HubOptions()
        try:
            path, chosen = at_low_priority(
                lambda: (resolve(source, hub), with_draft_file(options or EngineOptions(), hub))
            )
            plan = self._admission.admit(entry.id, path, chosen, requested)
            model = Model(
                entry.id,
                source,
                path=path,
                options=plan.options,
                uses=plan.uses,
                hub=hub,
                adapters=adapters,
                tuned=plan.tuned,
            )
        except BaseException:
            self._admission.budget.release(entry.id)
            with self._lock:
                del self._entries[entry.id]
            give_memory_back()
            raise
        entry.may_be_default = default is not False
        self._start_serving(entry, model, default=bool(default))
        if plan.tuned:
            log.info("tuned options applied", model=entry.id, options=model.tuned_text)
        return model

    def _start_serving(self, entry: ModelEntry, model: Model, *, default: bool) -> None:
        self._admission.budget.settle(entry.id, model.memory)
        with self._lock:
            entry.model, entry.status, entry.since = model, "ready", time.time()
            entry.capabilities = model.capabilities
            if default or (self._default is None and entry.may_be_default):
                self._default = entry.id
        taken = readable(model.memory.total_bytes)
        log.info(
            "model loaded",
            model=entry.id,
            description=model.info.description,
            memory=taken,
            load_s=round(model.load_s, 2),
        )

    def load_in_background(self, model_id: str | None, source: str, **options: Any) -> Future[Model]:
        """Run `load` in a new thread. The future returns the model, or raises the same errors as `load`."""
        return in_background(lambda: self.load(model_id, source, **options), f"cellama-load-{model_id or source}")

    def _reserve(self, model_id: str | None, source: str, capabilities: frozenset[Capability]) -> ModelEntry:
        with self._lock:
            if model_id is None:
                model_id = new_id(source, self._entries)
            elif model_id in self._entries:
                status = self._entries[model_id].status
                raise IdTaken(
                    f"a model with the id {model_id!r} already exists ({status}); choose another id, or unload it first"
                )
            entry = self._entries[model_id] = ModelEntry(model_id, source, capabilities)
        return entry

    def unload(self, model_id: str, timeout_s: float = UNLOAD_TIMEOUT_S) -> None:
        """Stop accepting requests for a model, wait until it is neither held nor in use, and free its memory.

        If the unloaded model was the default, another ready model becomes the default. Raises ModelNotLoaded, and
        ModelBusy if the model is still in use after `timeout_s`. If ModelBusy is raised, the model accepts requests
        again. A former default model also becomes the default again.
        """
        with self._lock:
            entry = self._ready(model_id)
            entry.status = "unloading"
            was_default, self._default = self._default == entry.id, self.default_without(entry.id)
        model = entry.model
        assert model is not None
        deadline = time.monotonic() + timeout_s
        with self._lock:  # new holds are impossible, because the model is not ready
            is_free = self._lock.wait_for(lambda: not entry.num_holds, timeout_s)
        if not (is_free and model.wait_until_idle(deadline)):
            with self._lock:
                entry.status = "ready"
                self._default = entry.id if was_default else self._default
            raise ModelBusy(
                f"model {entry.id!r} is still in use after {timeout_s:g} s, so it was not unloaded and accepts "
                "requests again; cancel its requests, or raise the timeout"
            )
        if not model.close():
            threading.Thread(target=self._remove_when_closed, args=(entry,), daemon=True).start()
            raise ModelBusy(
                f"model {entry.id!r} is draining, but its current step has not finished; it will be unloaded afterwards"
            )
        self._remove(entry)

    def default_without(self, model_id: str) -> str | None:
        """Return the model that becomes the default when this model is unloaded, or None."""
        if self._default != model_id:
            return self._default
        others = [other for other in self._entries.values() if other.id != model_id and other.may_be_default]
        return next((other.id for other in others if other.status == "ready"), None)

    def _remove_when_closed(self, entry: ModelEntry) -> None:
        while entry.model is not None and not entry.model.close():
            pass  # each call waits for its own timeout
        self._remove(entry)

    def _remove(self, entry: ModelEntry) -> None:
        entry.model = None
        give_memory_back()
        self._admission.budget.release(entry.id)
        with self._lock:
            self._entries.pop(entry.id, None)
        log.info("model unloaded", model=entry.id)

    def get(self, model_id: str) -> Model:
        """Return the model with this id, or the default model if the id is ":default". Raises ModelNotLoaded.

        Once the model has been unloaded, all of its methods raise EngineStopped. To keep the model loaded while you are
        using it, call `hold`.
        """
        with self._lock:
            model = self._ready(model_id).model
        assert model is not None
        return model

    @contextlib.contextmanager
    def hold(self, model_id: str) -> Iterator[Model]:
        """Return the model like `get`, and keep it loaded until the end of the `with` block."""
        with self._lock:
            entry = self._ready(model_id)
            entry.num_holds += 1
            entry.num_uses += 1
        assert entry.model is not None
        try:
            yield entry.model
        finally:
            with self._lock:
                entry.num_holds -= 1
                self._lock.notify_all()

    def _ready(self, model_id: str) -> ModelEntry:
        """Return a ready model's entry. Raises ModelNotLoaded. The caller must hold the lock."""
        entry = self._entries.get(self._default or "" if model_id == DEFAULT_MODEL else model_id)
        if entry is None or entry.status != "ready" or entry.model is None:
            raise self._not_loaded(model_id)
        return entry

    def _not_loaded(self, model_id: str) -> ModelNotLoaded:
        entry = self._entries.get(model_id)
        if entry is not None:
            return ModelNotLoaded(f"model {model_id!r} is {entry.status}; retry when it has finished {entry.status}")
        if model_id == DEFAULT_MODEL:
            return ModelNotLoaded("no default model is set; load a model, or choose one with set_default")
        return ModelNotLoaded(f"model {model_id!r} is not loaded; {nearest(model_id, self._entries)}")

    # Calls of a model by id, which keep the model loaded until they return

    def generate(self, model_id: str, prompt: Prompt, **params: Any) -> str:
        """Call Model.generate. Also raises ModelNotLoaded."""
        with self.hold(model_id) as model:
            return model.generate(prompt, **params)

    def prefill(self, model_id: str, prompt: Prompt, **params: Any) -> Completion:
        """Call Model.prefill. Also raises ModelNotLoaded."""
        with self.hold(model_id) as model:
            return model.prefill(prompt, **params)

    def stream(self, model_id: str, prompt: Prompt, **params: Any) -> Iterator[str]:
        """Call Model.stream. Raises ModelNotLoaded immediately, not when the first chunk is read."""
        chosen = self.get(model_id).id
        return self._stream(chosen, prompt, params)

    def _stream(self, model_id: str, prompt: Prompt, params: dict[str, Any]) -> Iterator[str]:
        with self.hold(model_id) as model:
            yield from model.stream(prompt, **params)

    def chat(self, model_id: str, messages: Sequence[Message], **params: Any) -> Completion:
        """Call Model.chat. Also raises ModelNotLoaded."""
        with self.hold(model_id) as model:
            return model.chat(messages, **params)

    def embed(self, model_id: str, texts: TextOrTokens | Sequence[TextOrTokens], **params: Any) -> list[Vector]:
        """Call Model.embed. Also raises ModelNotLoaded."""
        with self.hold(model_id) as model:
            return model.embed(texts, **params)

    # Status

    def is_loaded(self, model_id: str) -> bool:
        """Return whether the model accepts requests."""
        with self._lock:
            entry = self._entries.get(model_id)
            return entry is not None and entry.status == "ready"

    def is_leaving(self, model_id: str) -> bool:
        """Return whether the model is unloading.

        If there is no default model, ":default" counts as unloading while any model is unloading.
        """
        with self._lock:
            if model_id == DEFAULT_MODEL and self._default is None:
                return any(entry.status == "unloading" for entry in self._entries.values())
            entry = self._entries.get(model_id)
            return entry is not None and entry.status == "unloading"

    def set_default(self, model_id: str) -> None:
        """Make this model the default. Raises ModelNotLoaded."""
        self.get(model_id)
        self._default = model_id

    @property
    def default(self) -> str | None:
        """The id of the default model, or None if no model is the default."""
        return self._default

    def models(self) -> Mapping[str, Model]:
        """Return all models that are currently accepting requests, keyed by id."""
        with self._lock:
            return {id_: entry.model for id_, entry in self._entries.items() if entry.model and entry.status == "ready"}

    def entries(self) -> list[ModelEntry]:
        """Return all models with their status, including models that are loading or unloading."""
        with self._lock:
            return list(self._entries.values())

    def plan(
        self,
        model_id: str,
        source: str,
        *,
        options: EngineOptions,
        capabilities: Iterable[Capability] | None = None,
        hub: HubOptions | None = None,
        evictable: Collection[str] = (),
    ) -> LoadPlan:
        """Return the plan for a load in the memory that is available without the `evictable` models.

        A later `load` with the same arguments reuses the plan. Raises the same errors as `load`, except
        InsufficientMemory.
        """
        hub = hub or HubOptions()
        path, chosen = at_low_priority(lambda: (resolve(source, hub), with_draft_file(options, hub)))
        requested = None if capabilities is None else frozenset(capabilities)
        return self._admission.plan(model_id, path, chosen, requested, evictable)

    def available_memory(self) -> AvailableMemory:
        """Return the memory that is available for further models."""
        return self._admission.budget.available()

    def footprints(self) -> dict[str, Footprint]:
        """Return the memory that is reserved for each model, including models that are loading."""
        return self._admission.budget.taken()

    def evict_through(self, evict: Callable[[str], None]) -> None:
        """Use `evict` to unload idle models when memory is needed.

        `evict` must return only after the model has been unloaded.
        """
        self._admission.evict, self._admission.on_full = evict, "evict"

    def _claims(self) -> list[Claim]:
        """Return the engines and embedders of all models, each with its requested number of threads."""
        return [
            Claim(part, model.options.threads or available_cores(), model.threads_are_chosen)
            for model in self.models().values()
            for part in model.parts
        ]

    def snapshot(self) -> ManagerSnapshot:
        """Return totals over all models, such as the number of requests, without waiting for the models' threads."""
        return ManagerSnapshot.sum_of([entry.model.snapshot() for entry in self.entries() if entry.model])

    def memory(self) -> dict[str, Any]:
        """Return the memory budget, the action to take when the budget is full, and the memory of each device."""
        return self._admission.report()

    def _idle(self) -> list[str]:
        """Return the ids of all idle models except the default, least recently used first."""
        with self._lock:
            others = [entry for entry in self._entries.values() if entry.id != self._default]
            ready = [entry.model for entry in others if entry.status == "ready" and not entry.num_holds]
        idle = [model for model in ready if model is not None and not model.is_busy]
        return [model.id for model in sorted(idle, key=lambda model: model.last_used)]

    def _num_saved(self, model_id: str) -> int:
        model = self.models().get(model_id)
        return 0 if model is None else model.num_saved_bytes

    def close(self, save_until: float | None = None) -> None:
        """Close all models. Running requests fail with EngineStopped. Repeated calls have no effect.

        If `cache_dir` is set, KV states are saved first. Saving stops at `save_until` (time.monotonic()). By default,
        saving stops after the time that `Model.close` allows.
        """
        self.cores.close()
        with self._lock:
            models = [entry.model for entry in self._entries.values() if entry.model is not None]
            self._entries, self._default = {}, None
        for model in models:
            model.close(SAVE_AT_CLOSE_S if save_until is None else save_until - time.monotonic())
        with ModelManager._class_lock:
            if ModelManager._open is self:
                ModelManager._open = None


def new_id(source: str, taken: Mapping[str, ModelEntry]) -> str:
    """Return an id derived from the source's name. If the id is taken, a number is appended."""
    name = PurePosixPath(source.partition("://")[2] or source).name.removesuffix(".gguf") or "model"  # as id_of_source
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate
