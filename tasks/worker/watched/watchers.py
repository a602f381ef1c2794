"""Metrics and traces of a worker: each is there if a setting asks for it, and costs nothing otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from celery import Task

from cellama.config import Settings, SettingsError
from cellama.config.logging import logging_about
from cellama.engine import Engine, Event, InvalidRequest, ModelManager
from cellama.tasks.broker.pool import JobControl
from cellama.tasks.traces.gate import tracing
from cellama.tasks.worker.telemetry import Relay

if TYPE_CHECKING:
    from cellama.tasks.state.records import Attempt
    from cellama.tasks.worker.metrics.worker_metrics import WorkerMetrics

    from .attempts import AttemptTraces

Tell = Callable[[Any], None]  # of the result of an attempt
Watch = Callable[[str, Event], None]  # of a model's event


class Watchers:
    """What watches a worker."""

    def __init__(self, settings: Settings, worker: str, manager: ModelManager, relay: Relay) -> None:
        """Raises InvalidRequest for a port or a package that can't be had; nothing is left then."""
        self._traces = _traces(worker)
        self.metrics = _metrics(settings, manager, relay)
        self._on_event: list[Watch] = [] if self.metrics is None else [self.metrics.requests]
        if self._traces is not None:
            self._on_event.append(self._traces.requests)

    def watch_model(self, model_id: str, engine: Engine) -> None:
        if self.metrics is not None:
            self.metrics.watch(model_id, engine)

    def event(self, model_id: str, event: Event) -> None:
        """Hears of each event of an engine. Publisher's thread."""
        for watch in self._on_event:
            watch(model_id, event)

    @contextlib.contextmanager
    def watching(self, task: Task, attempt: Attempt, control: JobControl, submitted_at: float) -> Iterator[Tell]:
        """Watches the attempt that runs in there, and is told its result. `submitted_at` is monotonic."""
        with contextlib.ExitStack() as watching:
            tell: Tell = _tell_no_one
            if self.metrics is not None:
                watching.enter_context(self.metrics.attempts.watching(task, attempt, control))
            if self._traces is None:
                watching.enter_context(logging_about(attempt.job_id))
            else:
                tell = watching.enter_context(self._traces.watching(task, attempt, control, submitted_at))
            yield tell

    def lines_from(self, run_id: str, began_at: float) -> None:
        """The requests of a slice of a bulk run count their times from there on (monotonic)."""
        if self._traces is not None:
            self._traces.requests.base(run_id, began_at)

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        if self._traces is not None:
            self._traces.close()


def _tell_no_one(result: Any) -> None:
    """Nothing wants it."""


def _traces(worker: str) -> AttemptTraces | None:
    try:
        if (tracer := tracing()) is None:
            return None
    except SettingsError as error:
        raise InvalidRequest(str(error)) from None
    from .attempts import AttemptTraces  # needs an extra

    return AttemptTraces(tracer, worker)


def _metrics(settings: Settings, manager: ModelManager, relay: Relay) -> WorkerMetrics | None:
    """None without a port."""
    if settings.metrics_port is None:
        return None
    try:
        from cellama.tasks.worker.metrics.worker_metrics import WorkerMetrics  # needs an extra
    except ImportError as error:
        raise InvalidRequest(f"metrics_port needs `pip install 'cellama[metrics]'`: {error}") from None
    return WorkerMetrics(settings.metrics_host, settings.metrics_port, relay, manager.models)
