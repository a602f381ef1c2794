"""Celery's options of a call (docs/canvas.md): settle them for a job, or refuse them with a remedy."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Connection, Exchange, Queue

from cellama.config import get_settings, limits
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.names import BULK_PRIORITIES, PRIORITIES, PRIORITY_INTERACTIVE, is_model_queue, queue_name

IN_WORKERS_ONLY = (
    "cellama's tasks run where the models are, in its workers: use delay, apply_async or a signature, and start a "
    "worker (`cellama up`)"
)
ONE_AFTER_ANOTHER = (
    "chunks calls a task again and again within one job, one call after another; use group(...), or {task}_many of a "
    "client: the slots of a worker work on such jobs side by side"
)


def refuse_eager(app: Celery) -> None:
    """Raise InvalidJob if Celery would run calls in this process."""
    if app.conf.task_always_eager:
        raise InvalidJob(f"task_always_eager is on, but {IN_WORKERS_ONLY}")


def settle_options(app: Celery, options: dict[str, Any], model: str, payload_priority: int | None) -> None:
    """Set the queue and the priority in `options`, and remove options that have no effect on a job.

    A priority in the payload takes precedence over Celery's. Raises InvalidJob.
    """
    if not options:  # as most calls are
        options |= {"queue": queue_name(model), "priority": payload_priority}
        return
    _check_connection(app, options.pop("connection", None))
    for name in ("producer", "publisher"):  # canvas gives one; the ledger's script publishes
        options.pop(name, None)
    if options.get("serializer") not in (None, "json"):
        raise InvalidJob(
            f"serializer is {options['serializer']!r}: jobs are JSON, so that a worker never runs code of others"
        )
    if options.get("task_id") is None:
        options.pop("task_id", None)
    elif not isinstance(options["task_id"], str) or not options["task_id"]:
        raise InvalidJob(f"task_id is {options['task_id']!r}: it must be a text, and not empty")
    options["queue"] = _queue_of(options, queue_name(model))
    options["priority"] = _priority_of(options.get("priority"), payload_priority)


def _queue_of(options: dict[str, Any], own: str) -> str:
    """Return the name of the queue. A queue of another model comes from a signature that got its model later."""
    queue, exchange, routing_key = (options.pop(name, None) for name in ("queue", "exchange", "routing_key"))
    kinds = {options.pop("exchange_type", None) or "direct"}
    if isinstance(queue, Queue):
        kinds.add(queue.exchange.type if queue.exchange else "direct")
        queue = queue.name
    if isinstance(exchange, Exchange):
        kinds.add(exchange.type)
        exchange = exchange.name
    if queue is not None and (not isinstance(queue, str) or not queue):
        raise InvalidJob(f"queue is {queue!r}: give a name, or a kombu.Queue with one")
    queue = own if queue is None or is_model_queue(queue) else queue
    for name, value in (("exchange", exchange), ("routing_key", routing_key)):
        if value not in (None, "", queue):
            raise InvalidJob(
                f"{name} is {value!r}, and jobs go straight into a queue, here {queue!r}: leave {name} out"
            )
    if kinds != {"direct"}:
        others = ", ".join(sorted(kinds - {"direct"}))
        raise InvalidJob(
            f"queue {queue!r} has an exchange of type {others}, and jobs go straight into a queue: leave it out"
        )
    return queue


def _priority_of(given: Any, payload_priority: int | None) -> int | None:
    if payload_priority is not None or given is None:
        return payload_priority
    if isinstance(given, bool) or not isinstance(given, int) or given not in PRIORITIES:
        raise InvalidJob(f"priority is {given!r}: give a whole number from 0, the most urgent, to 9")
    return given


def _check_connection(app: Celery, connection: Connection | None) -> None:
    """Raise InvalidJob if a connection does not lead to the Redis of the app."""
    if connection is None:
        return
    ours = app.connection_for_write()
    places = [(c.transport_cls, c.hostname, c.port, str(c.virtual_host or 0)) for c in (connection, ours)]
    if places[0] != places[1]:
        raise InvalidJob(
            f"connection leads to {connection.as_uri()}, and jobs go to the Redis of the settings: leave it out, or "
            "set CELLAMA_REDIS_URL"
        )


def delay_s(app: Celery, options: dict[str, Any]) -> float:
    """Return the seconds until the job may start, by `countdown` or `eta`."""
    countdown, eta = options.get("countdown"), options.get("eta")
    if countdown:
        return max(0.0, float(countdown))
    if not eta:
        return 0.0
    at: datetime = maybe_make_aware(maybe_iso8601(eta), app.timezone)
    return max(0.0, float((at - app.now()).total_seconds()))


def timeout_of(kwargs: Any, priority: int) -> float | None:
    """Return a job's timeout in seconds: its own one (also None), or that of the settings unless it is bulk work.

    None for an invalid timeout of plain Celery, which checks nothing: a worker refuses the job.
    """
    if "timeout" in kwargs:
        own = kwargs["timeout"]
        return float(own) if isinstance(own, int | float) and 0 < own <= limits.MAX_TIMEOUT_S else None
    return None if priority in BULK_PRIORITIES else get_settings().default_timeout_s or None


def plain_priority(kwargs: Any, given: Any) -> int:
    """Return the priority of a job from plain Celery: that of its payload, else of its message (0: none was set)."""
    wanted = kwargs.get("priority") if isinstance(kwargs, dict) else None
    if isinstance(wanted, int) and wanted in PRIORITIES:
        return int(wanted)
    return min(given, PRIORITIES[-1]) if isinstance(given, int) and given > 0 else PRIORITY_INTERACTIVE


def plain_queue(kwargs: Any, args: Any, routing_key: str) -> str:
    """Return the queue of a message from plain Celery: that of its model if it was sent to another queue."""
    if is_model_queue(routing_key):
        return routing_key
    model = kwargs.get("model") if isinstance(kwargs, dict) else None
    return queue_name(str(model if model is not None else next(iter(args), "")))
