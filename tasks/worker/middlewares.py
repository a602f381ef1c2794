"""The middlewares of a worker: those that its settings ask for, in the order in which their hooks are called."""

from __future__ import annotations

from cellama.config import Settings, SettingsError
from cellama.engine import InvalidRequest, ModelManager
from cellama.tasks.estimates.samples import SampleWriter
from cellama.tasks.middleware import Middleware, Middlewares, load_middleware
from cellama.tasks.publishing.signing import Signer
from cellama.tasks.traces.gate import tracing

from .service_times import ServiceTimes
from .sign_reasoning import SignReasoning
from .telemetry import TelemetryRelay, telemetry_middlewares


def start_middlewares(
    settings: Settings, worker: str, *, manager: ModelManager, signer: Signer, samples: SampleWriter
) -> Middlewares:
    """Raises InvalidRequest for a port, a package or an import path that can't be used; nothing is left then."""
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
        raise InvalidRequest(f"metrics_port needs `pip install 'cellama[metrics]'`: {error}") from None
    return Metrics(host, port, relay, manager.models)


def _traces(worker: str) -> Middleware | None:
    """None without the setting `traces`."""
    try:
        if (made := tracing()) is None:
            return None
    except SettingsError as error:
        raise InvalidRequest(str(error)) from None
    from .traces import Traces  # needs an extra

    return Traces(made, worker)
