"""Start the middlewares that a worker's settings enable, and sample service times for estimates."""

from __future__ import annotations

import time

from cellama.config import Settings, SettingsError
from cellama.engine import InvalidRequest, ModelManager
from cellama.tasks.estimates.samples import SampleWriter, class_of
from cellama.tasks.middleware import AttemptContext, Middleware, Middlewares, load_middleware
from cellama.tasks.state.ledger import work_of
from cellama.tasks.traces.gate import tracing

from .signing import Signer, SignReasoning
from .telemetry import TelemetryRelay, telemetry_middlewares


def start_middlewares(
    settings: Settings, worker: str, *, manager: ModelManager, signer: Signer, samples: SampleWriter
) -> Middlewares:
    """Start the middlewares that the settings enable, in the order in which their hooks are called.

    Raises InvalidRequest if a port, a package or an import path can't be used, after closing all middlewares.
    """
    relay = TelemetryRelay(worker)
    made: list[Middleware] = [relay, ServiceTimes(samples, manager)]
    try:
        if signer.has_key:
            made.append(SignReasoning(signer))
        made += telemetry_middlewares(settings.telemetry_hook, settings.telemetry_log)
        if settings.metrics_port is not None:
            made.append(_metrics(settings.metrics_host, settings.metrics_port, relay, manager))
        if (traces := _traces(worker)) is not None:
            made.append(traces)
        made += [load_middleware(path) for path in settings.middleware]
    except InvalidRequest:
        Middlewares(made).close()
        raise
    middlewares = Middlewares(made)
    relay.start(middlewares)
    return middlewares


def _metrics(host: str, port: int, relay: TelemetryRelay, manager: ModelManager) -> Middleware:
    try:
        from .metrics import Metrics  # needs an extra
    except ImportError as error:
        raise InvalidRequest(
            f"metrics_port: a package is missing ({error}); run `pip install 'cellama[metrics]'`"
        ) from None
    return Metrics(host, port, relay, manager.models)


def _traces(worker: str) -> Middleware | None:
    """Return the tracing middleware, or None if the setting `traces` is false."""
    try:
        if (made := tracing()) is None:
            return None
    except SettingsError as error:
        raise InvalidRequest(str(error)) from None
    from .traces import Traces  # needs an extra

    return Traces(made, worker)


class ServiceTimes(Middleware):
    """Records the work of each job that succeeded in its first attempt (docs/adr/013-estimates.md)."""

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
            num_slots = min(work.num_parts, self._num_slots(str(result.get("model"))))
            self._samples.note(kind, size=work.num_units, amount=seconds * num_slots)
        elif result["finish_reason"] in ("stop", "length"):
            generated, timings = result["usage"]["completion_tokens"], result["timings"]
            slot_s = (timings["duration_ms"] - timings["queue_ms"]) / 1e3
            if work.num_parts == 1 and (rate := timings.get("generation_rate")):
                self._samples.note(kind, size=work.num_units, amount=slot_s * rate, speed=rate)
            elif slot_s > 0:  # several completions or a single token, for which the timings give no rate
                amount = max(1, generated)
                self._samples.note(kind, size=work.num_units, amount=amount, speed=amount / work.num_parts / slot_s)

    def _num_slots(self, model_id: str) -> int:
        """Return the number of slots of a model that generates text, or 1 for other models."""
        model = self._manager.models().get(model_id)
        if model is None or not {"generate", "chat"} & model.capabilities:
            return 1
        return model.engine.snapshot().slots_total
