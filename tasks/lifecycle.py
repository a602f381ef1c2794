"""Start and stop a worker process: load models before the first job, and unload them after the last job.

Only workers import this module. Celery finds these steps by their names in app.py.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from celery import bootsteps, signals

from cellama.config import get_settings
from cellama.config.logging import event_logger
from cellama.engine import EngineError
from cellama.tasks.attempt import probe  # noqa: F401  (importing it registers its command in Celery)
from cellama.tasks.attempt.attempt import attempt_job, end_revoked
from cellama.tasks.broker.result_backend import end_without_worker, queues_read
from cellama.tasks.connection.connections import SOCKET_OPTIONS, connect
from cellama.tasks.connection.redis_errors import ServerCheck, UnfitRedis
from cellama.tasks.contract.codes import Exit
from cellama.tasks.state.registry import describe
from cellama.tasks.worker import commands  # noqa: F401  (registers commands as well)
from cellama.tasks.worker.runtime import Runtime

from .app import CellamaApp

log = event_logger(__name__)

# Sending the next step of a canvas is retried until Redis is back, so that a job never fails after its work is done.
NEXT_STEP_RETRIES = {"max_retries": 10_000, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 2.0}


class LoadModels(bootsteps.StartStopStep):  # type: ignore[misc]
    """Loads the models before the consumer takes a job, and shows them in `inspect stats`."""

    requires = ("celery.worker.components:Pool",)

    def start(self, worker: Any) -> None:
        """Create the runtime. Exit with Exit.CONFIG if the settings or a model file are not valid."""
        worker.app.conf.task_publish_retry_policy = NEXT_STEP_RETRIES
        signals.task_revoked.connect(_end_stream_of_revoked, weak=False)
        signals.worker_shutdown.connect(_close, weak=False)
        num_signals = itertools.count(1)

        def hurry_at_the_second_signal(**_: Any) -> None:
            """Hand back running jobs at the second signal. After the first signal, they may finish."""
            if next(num_signals) > 1:
                worker.pool.hurry()

        signals.worker_shutting_down.connect(hurry_at_the_second_signal, weak=False)
        worker.app.server_check = ServerCheck()
        _check_server(worker.app)
        try:
            runtime = Runtime(
                get_settings(),
                worker.hostname,
                store=partial(end_without_worker, worker.app),
                queues_read=partial(queues_read, worker.app),
            )
        except EngineError as error:
            log.critical("worker can't start", detail=str(error))
            raise SystemExit(Exit.CONFIG) from None
        worker.app.runtime, worker.app.attempt = runtime, partial(attempt_job, runtime)

    def info(self, worker: Any) -> dict[str, Any]:
        runtime = worker.app.runtime
        if runtime is None:
            return {}
        manager = runtime.manager
        return {"models": [describe(entry, entry.id == manager.default) for entry in manager.entries()]}


class Attach(bootsteps.StartStopStep):  # type: ignore[misc]
    """Attaches the runtime to the consumer. Leases are renewed even while the consumer reconnects or drains."""

    requires = ("cellama.tasks.broker.consumer:Intake",)

    def start(self, consumer: Any) -> None:
        """Attach the runtime when the consumer first connects.

        The runtime remains attached when the consumer reconnects.
        """
        _check_server(consumer.app)  # Redis may have been unreachable when the worker started
        consumer.app.runtime.attach(consumer)

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Announce the worker after the event loop's first iteration, when the worker can receive commands."""
        hub.call_soon(consumer.app.runtime.announce)


def _check_server(app: CellamaApp) -> None:
    with connect(**SOCKET_OPTIONS) as redis:
        try:
            app.server_check.run(redis)
        except UnfitRedis as error:
            log.critical("worker can't start", detail=str(error))
            raise SystemExit(Exit.CONFIG) from None


def _end_stream_of_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **_: Any) -> None:
    """End the stream of a job that was revoked before a thread ran it. A running job ends its own stream."""
    runtime = getattr(sender.app, "runtime", None)
    if runtime is not None and not terminated:
        end_revoked(runtime, request.id)


def _close(sender: Any = None, **_: Any) -> None:
    app = getattr(sender, "app", None)
    if isinstance(app, CellamaApp) and app.runtime is not None:
        pool = sender.pool
        app.runtime.close(save_until=0.0 if pool is None or pool.in_a_hurry else pool.drained_at)
        app.runtime = None
