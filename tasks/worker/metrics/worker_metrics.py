"""The metrics of a worker, and the port where they are."""

from __future__ import annotations

from cellama.engine import Engine, InvalidRequest
from cellama.tasks.metrics.bounded import Bounded
from cellama.tasks.metrics.exposition import MetricsServer
from cellama.tasks.metrics.families import Figures
from cellama.tasks.metrics.meter import Meter
from cellama.tasks.worker.telemetry import Relay

from .attempts import Attempts
from .engines import Engines, Loaded
from .requests import Requests


class WorkerMetrics:
    """Everything a worker counts. `requests` is for the publisher's thread, `attempts` for those of the pool."""

    def __init__(self, host: str, port: int, relay: Relay, loaded: Loaded) -> None:
        """Serves from now on. Raises InvalidRequest if the port can't be had."""
        self._relay = relay
        self._meter = Meter()
        self._models = Bounded()  # one bound for all: what one thread adds, another one finds
        self.requests = Requests(self._meter, self._models)
        self.attempts = Attempts(self._meter, self._models)
        self._engines = Engines(loaded, self._models)
        try:
            self._server = MetricsServer(host, port, self.figures)
        except OSError as error:
            raise InvalidRequest(
                f"metrics_port {port} on metrics_host {host!r} can't be had: {error}; "
                "each worker of a machine needs a port of its own"
            ) from None

    @property
    def port(self) -> int:
        return self._server.port

    def watch(self, model_id: str, engine: Engine) -> None:
        """Counts what only the thread of this engine sees."""
        self._engines.count_steps(model_id, engine)

    def figures(self) -> Figures:
        """All, as they are now. Any thread."""
        figures = Figures()
        self._meter.add_to(figures)
        self._engines.add_to(figures)
        figures.add("cellama_telemetry_dropped_total", self._relay.num_dropped)
        figures.add("cellama_label_values_dropped_total", self._models.num_dropped, "model")
        return figures

    def close(self) -> None:
        """No client is answered any more."""
        self._server.close()
