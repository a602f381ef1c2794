"""LoRA adapters of models on running workers: what both clients can do with them."""

from __future__ import annotations

import asyncio
from typing import Any

from cellama.tasks.contract.errors import UnknownModel
from cellama.tasks.contract.names import failure_key
from cellama.tasks.state.registry import WorkerEntry

from .core import REPLY_S, Core

ADAPTER_LOAD_TIMEOUT_S = 120.0
ADAPTER_UNLOAD_TIMEOUT_S = 60.0


class AdapterControl:
    """Adapters, for `Client`. Each method is for every live worker that has the model, or for one."""

    _core: Core

    def adapters(self, model_id: str) -> list[dict[str, Any]]:
        """A model's adapters: name, source, status, scale, fingerprint, size_bytes, in_use (requests), workers.

        A name stands there more than once if workers have different files or scales. Raises UnknownModel.
        """
        return _list(self._core, model_id)

    def load_adapter(
        self,
        model_id: str,
        name: str,
        source: str,
        *,
        scale: float = 1.0,
        worker: str | None = None,
        timeout: float = ADAPTER_LOAD_TIMEOUT_S,
    ) -> None:
        """Loads a LoRA adapter, and returns when jobs can have it.

        Jobs that do not choose have it with this scale from then on; 0 = only those that ask for it have it.
        Raises UnknownModel, UnknownWorker, JobTimeout, JobFailed (what the worker said).
        """
        _load(self._core, model_id, name, source, scale, worker, timeout)

    def set_adapter_scale(self, model_id: str, name: str, scale: float, *, worker: str | None = None) -> None:
        """Jobs that do not choose have the adapter with this scale from now on. Raises as `load_adapter`."""
        _set_scale(self._core, model_id, name, scale, worker)

    def unload_adapter(
        self, model_id: str, name: str, *, worker: str | None = None, timeout: float = ADAPTER_UNLOAD_TIMEOUT_S
    ) -> None:
        """Unloads an adapter after the jobs that have it. Raises as `load_adapter`; it serves on if they are slow."""
        _unload(self._core, model_id, name, worker, timeout)


class AsyncAdapterControl:
    """AdapterControl for `AsyncClient`."""

    _core: Core

    async def adapters(self, model_id: str) -> list[dict[str, Any]]:
        return await asyncio.to_thread(_list, self._core, model_id)

    async def load_adapter(
        self,
        model_id: str,
        name: str,
        source: str,
        *,
        scale: float = 1.0,
        worker: str | None = None,
        timeout: float = ADAPTER_LOAD_TIMEOUT_S,
    ) -> None:
        await asyncio.to_thread(_load, self._core, model_id, name, source, scale, worker, timeout)

    async def set_adapter_scale(self, model_id: str, name: str, scale: float, *, worker: str | None = None) -> None:
        await asyncio.to_thread(_set_scale, self._core, model_id, name, scale, worker)

    async def unload_adapter(
        self, model_id: str, name: str, *, worker: str | None = None, timeout: float = ADAPTER_UNLOAD_TIMEOUT_S
    ) -> None:
        await asyncio.to_thread(_unload, self._core, model_id, name, worker, timeout)


def _list(core: Core, model_id: str) -> list[dict[str, Any]]:
    workers = core.workers()
    known = {model["id"] for worker in workers for model in worker.models}
    if model_id not in known:
        raise UnknownModel(f"no live worker has a model {model_id!r}; there are: {', '.join(sorted(known)) or 'none'}")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for worker in workers:
        for adapter in _adapters(worker, model_id):
            kind = tuple(adapter[name] for name in ("name", "fingerprint", "scale", "status"))
            entry = found.setdefault(kind, {**adapter, "in_use": 0, "workers": []})
            entry["in_use"] += adapter["in_use"]
            entry["workers"].append(worker.name)
    return [found[kind] for kind in sorted(found)]


def _load(
    core: Core, model_id: str, name: str, source: str, scale: float, worker: str | None, timeout_s: float
) -> None:
    arguments = {"model_id": model_id, "name": name, "source": source, "scale": scale}
    begun = core.command("cellama_load_adapter", arguments, worker, model_id)
    _wait(core, begun, model_id, name, "ready", timeout_s)


def _set_scale(core: Core, model_id: str, name: str, scale: float, worker: str | None) -> None:
    core.command("cellama_scale_adapter", {"model_id": model_id, "name": name, "scale": scale}, worker, model_id)


def _unload(core: Core, model_id: str, name: str, worker: str | None, timeout_s: float) -> None:
    arguments = {"model_id": model_id, "name": name, "timeout_s": timeout_s}
    begun = core.command("cellama_unload_adapter", arguments, worker, model_id)
    _wait(core, begun, model_id, name, None, timeout_s + REPLY_S)


def _wait(core: Core, begun: dict[str, float], model_id: str, name: str, wanted: str | None, timeout_s: float) -> None:
    def status(worker: WorkerEntry) -> str | None:
        return next((str(a["status"]) for a in _adapters(worker, model_id) if a["name"] == name), None)

    core.wait_for_status(begun, failure_key(model_id, name), status, wanted, timeout_s)


def _adapters(worker: WorkerEntry, model_id: str) -> list[dict[str, Any]]:
    return [adapter for m in worker.models if m["id"] == model_id for adapter in m.get("adapters", [])]
