"""The start and the end of a worker process: models are loaded before the first job, and unloaded after the last one.

Imported in workers only: Celery finds the steps by the names that app.py gives it.
"""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import Any

from celery import bootsteps, signals

from cellama.config import get_settings
from cellama.engine import EngineError
from cellama.tasks.attempt import probe  # noqa: F401  (being imported makes its command known to Celery)
from cellama.tasks.attempt.attempt import attempt_job, end_revoked
from cellama.tasks.broker import revokes  # noqa: F401  (being imported makes it known to Celery)
from cellama.tasks.broker.celery_ends import end_without_worker
from cellama.tasks.connection.connections import SOCKET_OPTIONS, connect
from cellama.tasks.connection.server_check import ServerCheck, UnfitRedis
from cellama.tasks.contract.codes import Exit
from cellama.tasks.state.registry import describe
from cellama.tasks.worker import commands  # noqa: F401  (too)
from cellama.tasks.worker.runtime import Runtime

from .app import CellamaApp

log = logging.getLogger(__name__)

# What follows a job is sent again until Redis is back: a job that is done does not fail because Redis is away.
NEXT_STEP_RETRIES = {"max_retries": 10_000, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 2.0}


class LoadModels(bootsteps.StartStopStep):  # type: ignore[misc]
    """Loads the models before the consumer takes a job, and shows their slots in `inspect stats`."""

    requires = ("celery.worker.components:Pool",)

    def start(self, worker: Any) -> None:
        """Make the runtime. An error in the settings or in a model file ends the process with Exit.CONFIG."""
        worker.app.conf.task_publish_retry_policy = NEXT_STEP_RETRIES
        signals.task_revoked.connect(_tell_revoked, weak=False)
        signals.worker_shutdown.connect(_close, weak=False)
        num_signals = itertools.count(1)

        def hurry_at_the_second_signal(**_: Any) -> None:
            """The first signal lets running jobs finish, the second one hands them back."""
            if next(num_signals) > 1:
                worker.pool.hurry()

        signals.worker_shutting_down.connect(hurry_at_the_second_signal, weak=False)
        worker.app.server_check = ServerCheck()
        _check_server(worker.app)
        try:
            runtime = Runtime(get_settings(), worker.hostname, store=partial(end_without_worker, worker.app))
        except EngineError as error:
            log.critical("the worker can't start: %s", error)
            raise SystemExit(Exit.CONFIG) from None
        worker.app.runtime, worker.app.attempt = runtime, partial(attempt_job, runtime)

    def info(self, worker: Any) -> dict[str, Any]:
        runtime = worker.app.runtime
        if runtime is None:
            return {}
        manager = runtime.manager
        return {"models": [describe(entry, entry.id == manager.default) for entry in manager.entries()]}


class Attach(bootsteps.StartStopStep):  # type: ignore[misc]
    """Attaches the runtime to the consumer, whose leases are also renewed while it reconnects or drains."""

    requires = ("cellama.tasks.broker.consumer:Intake",)

    def start(self, consumer: Any) -> None:
        """Attach the runtime with the first connection. It stays attached through all others."""
        _check_server(consumer.app)  # Redis was perhaps away when the worker started
        consumer.app.runtime.attach(consumer)

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Announce the worker after the first turn of the loop, in which it starts to receive commands."""
        hub.call_soon(consumer.app.runtime.announce)


def _check_server(app: CellamaApp) -> None:
    with connect(**SOCKET_OPTIONS) as redis:
        try:
            app.server_check.run(redis)
        except UnfitRedis as error:
            log.critical("the worker can't start: %s", error)
            raise SystemExit(Exit.CONFIG) from None


def _tell_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **_: Any) -> None:
    """End the stream of a job that was revoked before a thread had it. A running job ends its own stream."""
    runtime = getattr(sender.app, "runtime", None)
    if runtime is not None and not terminated:
        end_revoked(runtime, request.id)


def _close(sender: Any = None, **_: Any) -> None:
    app = getattr(sender, "app", None)
    if isinstance(app, CellamaApp) and app.runtime is not None:
        pool = sender.pool
        app.runtime.close(save_until=0.0 if pool is None or pool.in_a_hurry else pool.drained_at)
        app.runtime = None
