"""Combine the workers' registry entries into the views that clients return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from typing_extensions import TypedDict

from cellama.tasks.contract.errors import UnknownWorker
from cellama.tasks.contract.names import CLASSES, DEFAULT_MODEL
from cellama.tasks.contract.shapes.snapshots import Phase, Totals
from cellama.tasks.contract.shapes.workers import (
    LoadFailure,
    MemoryView,
    ModelMemory,
    ModelView,
    WorkerModel,
)
from cellama.tasks.estimates.position import Waiting
from cellama.tasks.state.registry import WorkerEntry, is_served

PARTS = {"engine", "embedder", "reranker"}
LEAST_URGENT = tuple(CLASSES)[-1]
COUNTED = tuple(name for name in Totals.__annotations__ if name != "phase")


class ClassStats(TypedDict):
    """The waiting jobs of one priority class in a model's queue."""

    waiting: int  # jobs without a slot
    oldest_s: float  # how long the oldest job has waited
    eta_s: float | None  # seconds until a new job would get a slot; None if unknown, as in `Stats`


class Stats(TypedDict):
    """The totals across all workers, and the queue of each model.

    The queues are read from Redis during the call. The workers' values come from their last heartbeats.
    """

    workers: int  # number of running workers
    age_s: float | None  # age of the oldest heartbeat; None if no worker is running
    totals: Totals
    slots_total: int
    slots_busy: int
    generation_rate: float  # tokens per second
    queues: dict[str, int]  # messages in the queue of each model
    waiting: dict[str, int]  # jobs without a slot, by model
    eta_s: dict[str, float | None]  # seconds until a new job of the lowest priority would get a slot; None if unknown
    classes: dict[str, dict[str, ClassStats]]  # by model, and then by class (`interactive` and `bulk`)
    unserved: list[str]  # models with waiting jobs that no worker serves


def models_of(workers: list[WorkerEntry]) -> list[ModelView]:
    """Return one entry per model, with the names of its workers.

    The `status` is `ready` if any worker serves the model. The `status` is `available` if workers load the model when a
    job needs it. The `status` is `lacking` if workers should have the model
    but no worker does.
    """
    models: dict[str, tuple[WorkerModel, list[str]]] = {}
    for worker in workers:
        for entry in worker.models:
            best, names = models.get(entry["id"], (entry, []))
            if best["status"] != "ready" and entry["status"] == "ready":
                best = entry
            models[entry["id"]] = (best, [*names, worker.name])
    lacking = {thing["model"]: thing for worker in workers for thing in worker.wanted if thing["state"] == "lacking"}
    for model_id in lacking.keys() - models.keys():
        known = {"id": model_id, "status": "lacking", "source": lacking[model_id]["source"], "default": False}
        models[model_id] = (cast(WorkerModel, {**known, "capabilities": []}), [])
    return [_view(*models[model_id], lacks_of(workers, model_id)) for model_id in sorted(models)]


def lacks_of(workers: list[WorkerEntry], model_id: str) -> dict[str, LoadFailure]:
    """Return the errors of workers that could not load the model or one of its adapters, keyed by worker name."""
    return {
        worker.name: thing["why"]
        for worker in workers
        for thing in worker.wanted
        if thing["model"] == model_id and thing["state"] == "lacking" and thing["why"] is not None
    }


def _view(model: WorkerModel, workers: list[str], lacks: dict[str, LoadFailure]) -> ModelView:
    return cast(ModelView, {**{k: v for k, v in model.items() if k not in PARTS}, "workers": workers, "lacks": lacks})


def memory_of(workers: list[WorkerEntry], name: str | None) -> list[MemoryView]:
    """Return the memory budget, devices and models of all workers, or of the worker `name`. Raises UnknownWorker."""
    chosen = workers if name is None else [w for w in workers if name in (w.name, w.name.partition("@")[0])]
    if name is not None and not chosen:
        raise UnknownWorker(
            f"no worker {name!r} is running; running workers: {', '.join(w.name for w in workers) or 'none'}"
        )
    return [
        {"worker": worker.name, **worker.memory, "models": [_memory(model) for model in worker.models]}
        for worker in chosen
    ]


def _memory(model: WorkerModel) -> ModelMemory:
    known: ModelMemory = {"id": model["id"], "status": model["status"], "default": model["default"]}
    if "memory" in model:
        known = {**known, "memory": model["memory"], "memory_bytes": model["memory_bytes"]}
    return known


def stats(
    workers: list[WorkerEntry],
    depths: dict[str, int],
    waiting: Mapping[str, Mapping[str, Waiting]],
    eta_s: Callable[[str, Mapping[str, Waiting]], Mapping[str, float | None]],
) -> Stats:
    """Return the totals across all workers, and the queues keyed by model.

    `depths` contains the number of messages in each queue, and `waiting` contains the jobs that are waiting for a slot,
    grouped by model and priority class. `eta_s` contains the estimated wait of a new job in each class, in seconds.
    """
    counts = {model: sum(found.num_jobs for found in classes.values()) for model, classes in waiting.items()}
    totals = _totals(workers)
    serving = [entry for worker in workers for entry in worker.models if is_served(entry)]
    served = {entry["id"] for entry in serving} | {DEFAULT_MODEL for entry in serving if entry["default"]}
    known = {entry["id"] for worker in workers for entry in worker.models} | {DEFAULT_MODEL}
    unserved = sorted(model for model in counts if model not in served and (counts[model] or depths[model]))
    shown = [model for model in counts if model in known or model in unserved]
    classes = {model: _classes(waiting[model], eta_s(model, waiting[model])) for model in shown}
    return {
        "workers": len(workers),
        "age_s": max((worker.age_s for worker in workers), default=None),
        "totals": totals,
        "slots_total": totals["slots_total"],
        "slots_busy": totals["slots_busy"],
        "generation_rate": round(totals["generation_rate"], 1),
        "queues": {model: depths[model] for model in shown},
        "waiting": {model: counts[model] for model in shown},
        "unserved": unserved,
        "eta_s": {model: classes[model][LEAST_URGENT]["eta_s"] for model in shown},
        "classes": classes,
    }


def _classes(waiting: Mapping[str, Waiting], eta_s: Mapping[str, float | None]) -> dict[str, ClassStats]:
    return {
        name: {"waiting": found.num_jobs, "oldest_s": round(found.oldest_s, 3), "eta_s": _rounded(eta_s[name])}
        for name, found in waiting.items()
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _totals(workers: list[WorkerEntry]) -> Totals:
    phases = [worker.totals["phase"] for worker in workers]
    order: tuple[Phase, ...] = ("stopped", "generating", "prefilling")
    totals: list[Any] = [worker.totals for worker in workers]
    sums: Any = {name: sum(each[name] for each in totals) for name in COUNTED}
    return cast(Totals, {**sums, "phase": next((phase for phase in order if phase in phases), "idle")})


def queues(workers: list[WorkerEntry], queued: list[str]) -> list[str]:
    """Return `:default`, and all models that a worker is serving or a job is waiting for."""
    served = {entry["id"] for worker in workers for entry in worker.models}
    return [*sorted(served | set(queued) - {DEFAULT_MODEL}), DEFAULT_MODEL]
