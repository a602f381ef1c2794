"""The console's first page, which shows queues, models, workers and Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cellama.api.client.registry_views import ClassStats, Stats
from cellama.api.http.auth import Caller
from cellama.api.http.gateway import Gateway, gateway_of
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import RedisRefused
from cellama.tasks.contract.names import CLASSES, DEFAULT_MODEL
from cellama.tasks.contract.shapes.workers import WorkerModel
from cellama.tasks.state.registry import WorkerEntry

from .rendering import age_text, bytes_text, count_text, duration_text, fragment, page
from .session import console_caller, is_admin

STALE_S = 4.0  # two heartbeats: a worker that is silent for longer hangs or has lost Redis


async def overview(request: Request) -> Response:
    """Handle `GET /console`."""
    caller = await console_caller(request)
    return page(request, "overview.html", **await _context(gateway_of(request), caller))


async def figures(request: Request) -> Response:
    """Handle `GET /console/overview`, the part of the page that is updated every few seconds."""
    caller = await console_caller(request)
    return fragment(request, "_overview.html", **await _context(gateway_of(request), caller))


async def _context(gateway: Gateway, caller: Caller) -> dict[str, Any]:
    """Return the page's data, formatted as text, and limited to the data that the visitor may see.

    Only administrators see figures for jobs, workers and Redis.
    """
    stats, workers = await gateway.stats(), await gateway.workers()
    return {
        "models": _models(stats, workers, caller),
        "class_names": tuple(CLASSES),
        "totals": _totals(stats) if is_admin(caller) else {},
        "workers": [_worker(worker) for worker in workers] if is_admin(caller) else [],
        "num_workers": len(workers),
        "redis": await _redis(gateway) if is_admin(caller) else None,
    }


def _totals(stats: Stats) -> dict[str, str]:
    totals = stats["totals"]
    return {
        "waiting": count_text(sum(stats["waiting"].values())),
        "busy": str(totals["slots_busy"]),
        "slots": str(totals["slots_total"]),
        "generated": count_text(totals["generation_rate"]),
        "prefilled": count_text(totals["prompt_rate"]),
    }


def _models(stats: Stats, workers: Sequence[WorkerEntry], caller: Caller) -> list[dict[str, Any]]:
    """Return a row for each model that the visitor may use. Models without a worker come first."""
    rows = []
    for model_id, classes in stats["classes"].items():
        if not caller.may_use_model(model_id):
            continue
        entries = [entry for worker in workers for entry in worker.models if _serves(entry, model_id)]
        is_default_queue = model_id == DEFAULT_MODEL
        is_unserved = model_id in stats["unserved"]
        if (is_default_queue or (not entries and not is_admin(caller))) and not _num_waiting(classes):
            continue
        rows.append(
            {
                "id": model_id,
                "name": "default model" if is_default_queue else model_id,
                "status": "unserved" if is_unserved or not entries else _status(entries),
                "slots": None if is_default_queue else _slots(entries),
                "classes": [_class(classes[name]) for name in CLASSES],
                "rate": count_text(None if is_default_queue else _rate(entries)),
                "errors": _errors(workers, model_id) if is_admin(caller) else [],
            }
        )
    return sorted(rows, key=lambda row: (row["status"] != "unserved", row["id"] == DEFAULT_MODEL, row["id"]))


def _class(found: ClassStats) -> dict[str, str]:
    return {
        "waiting": count_text(found["waiting"]),
        "oldest": duration_text(found["oldest_s"] if found["waiting"] else None),
        "wait": "none" if found["eta_s"] == 0 else duration_text(found["eta_s"]),
    }


def _serves(entry: WorkerModel, model_id: str) -> bool:
    return entry["id"] == model_id or (model_id == DEFAULT_MODEL and entry["default"])


def _num_waiting(classes: Mapping[str, ClassStats]) -> int:
    return sum(found["waiting"] for found in classes.values())


def _status(entries: Sequence[WorkerModel]) -> str:
    return "ready" if any(entry["status"] == "ready" for entry in entries) else entries[0]["status"]


def _slots(entries: Sequence[WorkerModel]) -> tuple[int, int] | None:
    """Return the number of busy slots and the total number of slots, or None for a model without slots."""
    engines = [entry["engine"] for entry in entries if entry["engine"] is not None]
    if not engines:
        return None
    busy = sum(engine["slots_prefilling"] + engine["slots_decoding"] for engine in engines)
    return busy, sum(engine["slots_total"] for engine in engines)


def _rate(entries: Sequence[WorkerModel]) -> float | None:
    """Return the generation rate in tokens per second, or the prefill rate if the model only embeds or reranks."""
    engines = [entry["engine"] for entry in entries if entry["engine"] is not None]
    if engines:
        return sum(engine["generation_rate"] for engine in engines)
    others = [part for entry in entries for part in (entry["embedder"], entry["reranker"]) if part is not None]
    return sum(part["prompt_rate"] for part in others) if others else None


def _errors(workers: Sequence[WorkerEntry], model_id: str) -> list[str]:
    """Return the errors of workers that should serve the model but failed to load it or one of its adapters."""
    return [
        f"{worker.name}: {thing['why']['message']}"
        for worker in workers
        for thing in worker.wanted
        if thing["model"] == model_id and thing["state"] == "lacking" and thing["why"] is not None
    ]


def _worker(worker: WorkerEntry) -> dict[str, Any]:
    return {
        "name": worker.name,
        "host": worker.host,
        "pool": worker.pool,
        "version": worker.cellama,
        "late": age_text(worker.age_s) if worker.age_s > STALE_S else "",
        "slots": (worker.totals["slots_busy"], worker.totals["slots_total"]),
        "num_running": worker.totals["requests_running"],
        "num_waiting": worker.totals["requests_waiting"],
        "rate": count_text(worker.totals["generation_rate"]),
        "uptime": duration_text(max(0.0, worker.at - worker.started_at)),
        "models": [(entry["id"], entry["status"]) for entry in worker.models],
    }


async def _redis(gateway: Gateway) -> dict[str, Any] | None:
    """Return the state of Redis, or None if cellama's Redis user may not run INFO. Raises RedisUnreachable."""
    try:
        with reaching_redis():
            facts: Any = await gateway.redis.info()
    except RedisRefused:
        return None
    max_bytes = int(facts.get("maxmemory", 0))
    policy = str(facts.get("maxmemory_policy", ""))
    return {
        "name": "Valkey" if "valkey_version" in facts else "Redis",
        "version": facts.get("valkey_version") or facts.get("redis_version"),
        "used": bytes_text(int(facts.get("used_memory", 0))),
        "limit": bytes_text(max_bytes) if max_bytes else "",
        "num_clients": int(facts.get("connected_clients", 0)),
        "uptime": duration_text(float(facts.get("uptime_in_seconds", 0))),
        "may_evict": policy not in ("", "noeviction") and max_bytes > 0,
        "policy": policy,
    }


ROUTES = (
    Route("/console", overview, methods=["GET"]),
    Route("/console/overview", figures, methods=["GET"]),
)
