"""How a worker process begins and ends: the models are there before the first job, and go after the last."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps, signals

from cellama.config import get_settings
from cellama.config.logging import configure_logging

from .app import CellamaApp
from .contract import events

log = logging.getLogger(__name__)

EXIT_CONFIG = 78  # sysexits.h: EX_CONFIG; a supervisor must not start the worker again


class LoadModels(bootsteps.StartStopStep):  # type: ignore[misc]
    """Loads the models before the consumer takes a job, and shows their slots in `inspect stats`."""

    requires = ("celery.worker.components:Pool",)

    def start(self, worker: Any) -> None:
        """Makes the runtime; a mistake in the settings or a model file ends the process with EXIT_CONFIG."""
        from cellama.engine import EngineError

        from .runtime import Runtime

        try:
            worker.app.runtime = Runtime(get_settings(), worker.hostname)
        except EngineError as error:
            log.critical("the worker can't start: %s", error)
            raise SystemExit(EXIT_CONFIG) from None

    def info(self, worker: Any) -> dict[str, Any]:
        from .registry import describe

        runtime = worker.app.runtime
        if runtime is None:
            return {}
        manager = runtime.manager
        return {"models": [describe(m, m.id == manager.default) for m in manager.models().values()]}


def install(app: CellamaApp) -> None:
    """Connects worker and app; called once, when the app is made."""
    app.steps["worker"].add(LoadModels)
    signals.setup_logging.connect(_set_up_logging, weak=False)
    signals.task_revoked.connect(_tell_revoked, weak=False)
    signals.worker_shutdown.connect(_close, weak=False)


def _set_up_logging(loglevel: int | None = None, **_: Any) -> None:
    if loglevel is None or loglevel == logging.WARNING:  # WARNING is what Celery says when nobody chose
        configure_logging(get_settings().log_level)
    else:
        configure_logging(logging.getLevelName(loglevel))


def _tell_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **_: Any) -> None:
    """Ends the stream of a job that was revoked before a thread had it; a running one ends its own."""
    runtime = getattr(sender.app, "runtime", None)
    if runtime is not None and not terminated:
        from .results import NO_USAGE

        runtime.publisher.publish(request.id, events.done("cancelled", NO_USAGE))


def _close(sender: Any = None, **_: Any) -> None:
    app = getattr(sender, "app", None)
    if isinstance(app, CellamaApp) and app.runtime is not None:
        app.runtime.close()
        app.runtime = None
