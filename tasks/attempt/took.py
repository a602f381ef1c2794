"""What a job really took, noted for the estimates of those that wait (docs/adr/013-estimates.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Task

from cellama.tasks.estimates.samples import class_of
from cellama.tasks.state.records import work_of

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime


def note_took(runtime: Runtime, task: Task, result: Any, seconds: float) -> None:
    """A job ended well after one whole attempt of so many seconds."""
    request, delivery = task.request, task.request.delivery_info or {}
    work = work_of(task.name, request.args or (), request.kwargs or {})
    kind = class_of(str(delivery.get("routing_key")), work, delivery.get("priority") or 0)
    model = runtime.manager.models().get(str(result.get("model")))
    engine = model.engine.snapshot() if model is not None and {"generate", "chat"} & model.capabilities else None
    if not work.counts_tokens:
        side_by_side = min(work.pieces, engine.slots_total) if engine is not None else 1
        runtime.took.note(kind, work.asked, seconds * side_by_side)
    elif result["finish_reason"] in ("stop", "length"):
        made, timings = result["usage"]["completion_tokens"], result["timings"]
        rate = timings.get("generation_rate") if work.pieces == 1 else None
        if not rate:  # several completions, or one token: no speed can be told
            runtime.took.note(kind, work.asked, max(1, made))
            return
        slot_s = (timings["duration_ms"] - timings["queue_ms"]) / 1e3
        crowd = engine.slots_busy / engine.slots_total if engine is not None else 1.0
        runtime.took.note(kind, work.asked, slot_s * rate, rate, max(crowd, 0.01))
