"""LoRA adapters of models on running workers: what clients can do with them."""

from __future__ import annotations

from cellama.tasks.contract.errors import UnknownModel
from cellama.tasks.contract.names import failure_key
from cellama.tasks.contract.shapes.workers import AdapterView, WorkerAdapter
from cellama.tasks.state.registry import WorkerEntry

from .commands import REPLY_S, Begun, Whom
from .core import Core

ADAPTER_LOAD_TIMEOUT_S = 120.0
ADAPTER_UNLOAD_TIMEOUT_S = 60.0


class AdapterControl:
    """Each method is for every worker that has the model, or those of a pool, also those that join it; or for one."""

    _core: Core

    def adapters(self, model_id: str) -> list[AdapterView]:
        """A model's adapters on all live workers.

        A name stands there more than once if workers have different files or scales. Raises UnknownModel.
        """
        workers = self._core.workers()
        known = {model["id"] for worker in workers for model in worker.models}
        if model_id not in known:
            raise UnknownModel(
                f"no live worker has a model {model_id!r}; there are: {', '.join(sorted(known)) or 'none'}"
            )
        found: dict[tuple[str, str, float, str], AdapterView] = {}
        for worker in workers:
            for adapter in _adapters(worker, model_id):
                kind = (adapter["name"], adapter["fingerprint"], adapter["scale"], adapter["status"])
                entry = found.setdefault(kind, {**adapter, "in_use": 0, "workers": []})
                entry["in_use"] += adapter["in_use"]
                entry["workers"].append(worker.name)
        return [found[kind] for kind in sorted(found)]

    def load_adapter(
        self,
        model_id: str,
        name: str,
        source: str,
        *,
        scale: float = 1.0,
        worker: str | None = None,
        pool: str | None = None,
        timeout: float = ADAPTER_LOAD_TIMEOUT_S,
    ) -> None:
        """Loads a LoRA adapter, and returns when jobs can have it. Which workers lack it, and why, `models()` tells.

        Jobs that do not choose have it with this scale from then on; 0 = only those that ask for it have it.
        Raises UnknownModel, UnknownWorker, JobTimeout, JobFailed (what a worker said, if none has it).
        """
        arguments = {"model_id": model_id, "name": name, "source": source, "scale": scale}
        begun = self._core.commands.send("cellama_load_adapter", arguments, Whom(worker, pool), model_id)
        _wait(self._core, begun, model_id, name, "ready", timeout)

    def set_adapter_scale(
        self, model_id: str, name: str, scale: float, *, worker: str | None = None, pool: str | None = None
    ) -> None:
        """Jobs that do not choose have the adapter with this scale from now on. Raises as `load_adapter`."""
        arguments = {"model_id": model_id, "name": name, "scale": scale}
        self._core.commands.send("cellama_scale_adapter", arguments, Whom(worker, pool), model_id)

    def unload_adapter(
        self,
        model_id: str,
        name: str,
        *,
        worker: str | None = None,
        pool: str | None = None,
        timeout: float = ADAPTER_UNLOAD_TIMEOUT_S,
    ) -> None:
        """Unloads an adapter after the jobs that have it.

        Raises as `load_adapter`, if no worker could; it serves on then. If some could, the others try again.
        """
        arguments = {"model_id": model_id, "name": name, "timeout_s": timeout}
        begun = self._core.commands.send("cellama_unload_adapter", arguments, Whom(worker, pool), model_id)
        _wait(self._core, begun, model_id, name, None, timeout + REPLY_S)


def _wait(core: Core, begun: Begun, model_id: str, name: str, wanted: str | None, timeout_s: float) -> None:
    def status(worker: WorkerEntry) -> str | None:
        return next((str(a["status"]) for a in _adapters(worker, model_id) if a["name"] == name), None)

    core.commands.wait_for_status(begun, failure_key(model_id, name), status, wanted, timeout_s)


def _adapters(worker: WorkerEntry, model_id: str) -> list[WorkerAdapter]:
    return [adapter for m in worker.models if m["id"] == model_id for adapter in m.get("adapters", [])]
