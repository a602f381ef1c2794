"""Note what jobs really took, for the estimates of jobs that wait (docs/adr/013-estimates.md)."""

from __future__ import annotations

import time

from cellama.engine import ModelManager
from cellama.tasks.estimates.samples import SampleWriter, class_of
from cellama.tasks.middleware import AttemptContext, Middleware
from cellama.tasks.state.records import work_of


class ServiceTimes(Middleware):
    """Notes the work of each job that ended well after a single attempt."""

    def __init__(self, samples: SampleWriter, manager: ModelManager) -> None:
        self._samples = samples
        self._manager = manager

    def after_attempt(self, attempt: AttemptContext) -> None:
        result = attempt.result
        if result is None or attempt.end != "success" or attempt.number > 1:
            return
        work = work_of(attempt.task, (), attempt.parameters)
        kind = class_of(attempt.queue, work, attempt.priority)
        if not work.counts_tokens:
            seconds = time.monotonic() - attempt.began_at
            num_slots = min(work.pieces, self._num_slots(str(result.get("model"))))
            self._samples.note(kind, asked=work.asked, amount=seconds * num_slots)
        elif result["finish_reason"] in ("stop", "length"):
            generated, timings = result["usage"]["completion_tokens"], result["timings"]
            slot_s = (timings["duration_ms"] - timings["queue_ms"]) / 1e3
            if work.pieces == 1 and (rate := timings.get("generation_rate")):
                self._samples.note(kind, asked=work.asked, amount=slot_s * rate, speed=rate)
            elif slot_s > 0:  # several completions, or one token: their speed is not known from their timings
                amount = max(1, generated)
                self._samples.note(kind, asked=work.asked, amount=amount, speed=amount / work.pieces / slot_s)

    def _num_slots(self, model_id: str) -> int:
        """Of a model that generates; 1 of any other."""
        model = self._manager.models().get(model_id)
        if model is None or not {"generate", "chat"} & model.capabilities:
            return 1
        return model.engine.snapshot().slots_total
