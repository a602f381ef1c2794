"""Note what a job really took, for the estimates of jobs that wait (docs/adr/013-estimates.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Task

from cellama.tasks.estimates.samples import class_of
from cellama.tasks.state.records import work_of

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime


def note_took(runtime: Runtime, task: Task, result: Any, seconds: float) -> None:
    """Note the work of a job that ended well after a single attempt that took so many seconds."""
    request, delivery = task.request, task.request.delivery_info or {}
    work = work_of(task.name, request.args or (), request.kwargs or {})
    kind = class_of(str(delivery.get("routing_key")), work, delivery.get("priority") or 0)
    if not work.counts_tokens:
        model = runtime.manager.models().get(str(result.get("model")))
        engine = model.engine.snapshot() if model is not None and {"generate", "chat"} & model.capabilities else None
        num_slots = min(work.pieces, engine.slots_total) if engine is not None else 1
        runtime.samples.note(kind, asked=work.asked, amount=seconds * num_slots)
    elif result["finish_reason"] in ("stop", "length"):
        generated, timings = result["usage"]["completion_tokens"], result["timings"]
        slot_s = (timings["duration_ms"] - timings["queue_ms"]) / 1e3
        if work.pieces == 1 and (rate := timings.get("generation_rate")):
            runtime.samples.note(kind, asked=work.asked, amount=slot_s * rate, speed=rate)
        elif slot_s > 0:  # several completions, or one token: their speed is not known from their timings
            amount = max(1, generated)
            runtime.samples.note(kind, asked=work.asked, amount=amount, speed=amount / work.pieces / slot_s)
