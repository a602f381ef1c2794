"""The Celery application. It reads the settings only when something needs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from celery import Celery, Task, signals
from celery.exceptions import Reject
from kombu import Connection, Exchange, Queue

from cellama.config import DEFAULT_KEY_PREFIX, ModelSettings, Settings, get_settings
from cellama.config.logging import configure_logging
from cellama.config.settings import DEFAULT_SLOTS
from cellama.tasks.calls.message_templates import Templates
from cellama.tasks.connection.connections import SOCKET_OPTIONS, broker_options, transport_options
from cellama.tasks.connection.kombu_internals import UnfitLibraries, require_parts
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.keys import unacked_index_key, unacked_key, unacked_mutex_key
from cellama.tasks.contract.names import DEFAULT_MODEL, PRIORITIES, PRIORITY_SEPARATOR, queue_name

if TYPE_CHECKING:
    from cellama.tasks.connection.server_check import ServerCheck
    from cellama.tasks.contract.all_kinds import Result
    from cellama.tasks.state.ledger import Ledger

log = logging.getLogger(__name__)

EMBEDDING_JOBS = 16  # of a model that only embeds or reranks: they fill its batches


class Worker(Protocol):
    """The worker process, as far as the app and its tasks use it (worker/runtime.py)."""

    @property
    def ledger(self) -> Ledger: ...

    def close(self, save_until: float = 0.0) -> None:
        """Close models and threads. KV states are saved until `save_until` (monotonic)."""
        ...


class CellamaApp(Celery):  # type: ignore[misc]
    """A Celery app. In a worker it also has the worker's runtime."""

    amqp_cls = "cellama.tasks.broker.amqp:PatientAMQP"
    control_cls = "cellama.tasks.broker.control:LastingControl"
    events_cls = "cellama.tasks.broker.task_events:SteadyEvents"
    redis_url: str | None = None  # None: that of the settings
    templates: Templates  # of messages (enqueue.py)
    runtime: Worker | None = None  # set by the worker's lifecycle
    attempt: Callable[[Task, bool, Callable[[], Any]], Result]  # too: makes one attempt at a job (attempt.py)
    server_check: ServerCheck  # too

    def connection_for_write(self, url: str | None = None, **options: Any) -> Connection:
        """Return a connection as Celery does. A purge through it cancels the jobs whose messages it removes."""
        from cellama.tasks.broker.control import purge_queue, purging_with

        return purging_with(partial(purge_queue, self), super().connection_for_write(url, **options))


def make_app(redis_url: str | None = None) -> CellamaApp:
    """Return an app whose jobs go to this Redis, or to that of the settings. The current app stays what it is."""
    new = CellamaApp("cellama", set_as_current=False, include=["cellama.tasks.jobs"])
    new.redis_url = redis_url
    new.templates = Templates()
    new.add_defaults(lambda: celery_config(_settings_for(redis_url)))
    new.steps["worker"].add("cellama.tasks.lifecycle:LoadModels")  # by name: only a worker has these modules
    new.steps["consumer"] |= {"cellama.tasks.broker.consumer:Intake", "cellama.tasks.lifecycle:Attach"}
    signals.worker_init.connect(_check_libraries, weak=False)
    signals.setup_logging.connect(_set_up_logging, weak=False)
    return new


def _check_libraries(sender: Any = None, **_: Any) -> None:
    """Exit with Exit.CONFIG at the start of a worker if the installed libraries lack what it needs."""
    if isinstance(sender.app, CellamaApp):
        try:
            require_parts()
        except UnfitLibraries as error:
            log.critical("the worker can't start: %s", error)
            raise SystemExit(Exit.CONFIG) from None


def _settings_for(redis_url: str | None) -> Settings:
    settings = get_settings()
    return settings if redis_url is None else settings.model_copy(update={"redis_url": redis_url})


def _set_up_logging(loglevel: int | None = None, **_: Any) -> None:
    settings = get_settings()
    if loglevel is None or loglevel == logging.WARNING:  # WARNING is what Celery says where it was left open
        configure_logging(settings.log_level, settings.log_format)
    else:
        configure_logging(logging.getLevelName(loglevel), settings.log_format)
    for name in ("celery.worker.strategy", "celery.app.trace"):  # attempts tell of themselves, in one line
        if not logging.getLogger(name).isEnabledFor(logging.DEBUG):
            logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("celery.app.trace").addFilter(_without_trace_of_hand_backs)


def _without_trace_of_hand_backs(record: logging.LogRecord) -> bool:
    """Remove the trace of a Reject from a log record: it is an orderly end of an attempt."""
    if record.exc_info and isinstance(record.exc_info[1], Reject):
        record.exc_info = None
    return True


def celery_config(settings: Settings) -> dict[str, Any]:
    """Return Celery's configuration for our settings."""
    return {
        **broker_options(settings.redis_url),
        **_exchanges(settings.key_prefix),
        "result_backend": "cellama.tasks.broker.result_backend:ResultBackend",  # no URL: this is shown to people
        "result_expires": settings.result_ttl_s,
        "result_backend_always_retry": True,
        "result_backend_thread_safe": True,
        "result_backend_transport_options": {"retry_policy": {"timeout": 5.0}},
        "broker_transport_options": _transport_options(settings),
        "broker_connection_timeout": SOCKET_OPTIONS["socket_connect_timeout"],
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "task_queues": [_queue(model) for model in (*_model_ids(settings), DEFAULT_MODEL)],
        "task_default_queue": "celery",  # of tasks that are not ours: what follows a job in a user's canvas
        "task_acks_late": True,
        "task_track_started": True,
        "task_send_sent_event": True,
        "worker_pool": "cellama.tasks.broker.pool:TaskPool",
        "worker_consumer": "cellama.tasks.broker.consumer:SteadyConsumer",
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_prefetch_count_reduction": False,
        "worker_concurrency": concurrency(settings),
        "worker_prefetch_multiplier": 1,
        "worker_deduplicate_successful_tasks": True,
        "worker_send_task_events": True,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }


def _exchanges(prefix: str) -> dict[str, str]:
    """Return the names of Celery's exchanges for remote control and events.

    With the default prefix they are Celery's own, so that Flower and plain producers need no configuration.
    """
    return {} if prefix == DEFAULT_KEY_PREFIX else {"control_exchange": prefix, "event_exchange": f"{prefix}.events"}


def _transport_options(settings: Settings) -> dict[str, Any]:
    return {
        **SOCKET_OPTIONS,
        **transport_options(settings.redis_url),
        "health_check_interval": 10,
        "unacked_key": unacked_key(),
        "unacked_index_key": unacked_index_key(),
        "unacked_mutex_key": unacked_mutex_key(),
        "priority_steps": list(PRIORITIES),
        "sep": PRIORITY_SEPARATOR,
        "queue_order_strategy": "round_robin",  # within the limits of tasks/broker/channels.py
    }


def _queue(model_id: str) -> Queue:
    """Return a queue with an exchange of its own. Celery's default exchange could deliver messages of other apps."""
    name = queue_name(model_id)
    return Queue(name, Exchange(name), name)


def _model_ids(settings: Settings) -> list[str]:
    return [model.id for model in settings.models]


def concurrency(settings: Settings) -> int:
    """Return the number of jobs that a worker holds at the same time: those of its models, and the look-ahead.

    Once they are loaded, it is corrected for those whose number of slots was tuned (Runtime.attach).
    """
    return sum(num_jobs_of(model) + settings.look_ahead for model in settings.models)


def num_jobs_of(model: ModelSettings, slots: int | None = None, able: Collection[str] = ()) -> int:
    """Return the number of jobs of a model in progress: one per slot, or EMBEDDING_JOBS if it does not generate.

    `slots` and `able` are those of the loaded model; without them it is what the settings say, or the default, and one
    that gets its capabilities from its file counts as one that generates.
    """
    if not {"generate", "chat"} & set(able or model.capabilities or ("generate",)):
        return EMBEDDING_JOBS
    return slots or model.n_parallel or DEFAULT_SLOTS


app = make_app()
