"""Define cellama's Celery app.

The app reads the settings when they are first needed, not when this module is imported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from celery import Celery, Task, signals
from celery.app.amqp import AMQP
from celery.app.events import Events
from celery.app.log import Logging
from celery.events.dispatcher import EventDispatcher
from celery.exceptions import Reject
from kombu import Connection, Exchange, Queue

from cellama.config import DEFAULT_KEY_PREFIX, ModelSettings, Settings, get_settings
from cellama.config.logging import configure_logging, event_logger
from cellama.config.settings import DEFAULT_SLOTS
from cellama.tasks.calls.enqueue import Templates
from cellama.tasks.connection.connections import SOCKET_OPTIONS, broker_options, transport_options
from cellama.tasks.connection.kombu_internals import UnfitLibraries, counting_receivers, require_parts
from cellama.tasks.connection.redis_errors import convert_refusals_in_channels, local_password
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.keys import unacked_index_key, unacked_key, unacked_mutex_key
from cellama.tasks.contract.names import DEFAULT_MODEL, PRIORITIES, PRIORITY_SEPARATOR, queues_of_model

if TYPE_CHECKING:
    from cellama.tasks.connection.redis_errors import ServerCheck
    from cellama.tasks.contract.all_kinds import Result
    from cellama.tasks.state.ledger import Ledger

log = event_logger(__name__)

EMBEDDING_JOBS = 16  # jobs in progress for a model that only embeds or reranks, so that its batches are full


class RefusalAwareConnection(Connection):  # type: ignore[misc]
    """A connection whose channels raise RefusedForNow and use the password of the Redis that `cellama up` runs."""

    credential_provider: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Kombu has the attribute since version 5.6, and its pools copy it. Before, only the channels use the password.
        has_credentials = getattr(self, "credential_provider", None) is not None or self.userid or self.password
        if self.transport_cls == "redis" and not has_credentials:
            self.credential_provider = local_password(self.hostname, self.port)

    def create_transport(self) -> Any:
        return convert_refusals_in_channels(super().create_transport())


class RefusalAwareAMQP(AMQP):  # type: ignore[misc]
    """Celery's AMQP class, modified to create connections of the class RefusalAwareConnection."""

    Connection = RefusalAwareConnection


class JobEvents(EventDispatcher):  # type: ignore[misc]
    """Celery's event dispatcher, which saves the work for task events that nobody receives, and limits retries.

    If Redis delivers a batch of task events to no subscriber, later ones are dropped until the next heartbeat, which is
    due after two seconds. Then the next batch is tried. A monitor such as Flower misses nothing, because it asks for a
    heartbeat when it starts.

    Events that Redis does not accept are kept for the next connection. Celery retries a worker's heartbeat until Redis
    answers. If a heartbeat were due before the worker detects that its connection is lost, these retries would block
    the event loop. A worker that receives SIGTERM during that time would not stop.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._is_received = True
        self._flushing = threading.Lock()
        super().__init__(*args, **options)

    def send(self, type: str, *args: Any, retry: bool = False, retry_policy: Any = None, **fields: Any) -> None:
        if not type.startswith("task-"):
            self._is_received = True
        elif not self._is_received:
            return
        bounded = retry and retry_policy is not None
        super().send(type, *args, retry=bounded, retry_policy=retry_policy, **fields)

    def flush(self, *args: Any, **options: Any) -> None:
        producer = self.producer
        if producer is None:  # closed
            return
        with self._flushing, counting_receivers(producer.channel) as counts:
            super().flush(*args, **options)
        if counts:
            self._is_received = any(counts)


class EventsOfJobs(Events):  # type: ignore[misc]
    """Celery's Events class, modified to send events with JobEvents."""

    dispatcher_cls = JobEvents


class WorkerLogging(Logging):  # type: ignore[misc]
    """Logs Celery's messages in cellama's format. Other apps' workers in the same process keep Celery's own format."""

    def setup_logging_subsystem(self, *args: Any, **options: Any) -> Any:
        signals.setup_logging.connect(_set_up_logging)
        try:
            return super().setup_logging_subsystem(*args, **options)
        finally:
            signals.setup_logging.disconnect(_set_up_logging)


class Worker(Protocol):
    """The interface to the worker's runtime (worker/runtime.py) that the app and its tasks use."""

    @property
    def ledger(self) -> Ledger: ...

    def close(self, save_until: float = 0.0) -> None:
        """Close models and stop threads. KV states are saved until `save_until`, a monotonic time in seconds."""
        ...


class CellamaApp(Celery):  # type: ignore[misc]
    """A Celery app. In a worker process, the app also holds the worker's runtime."""

    amqp_cls = RefusalAwareAMQP
    control_cls = "cellama.tasks.broker.control:PersistentControl"
    events_cls = EventsOfJobs
    log_cls = WorkerLogging
    redis_url: str | None = None  # None: the URL of the settings
    templates: Templates  # message templates (calls/enqueue.py)
    # lifecycle.py sets these in a worker.
    runtime: Worker | None = None
    attempt: Callable[[Task, bool, Callable[[], Any]], Result]  # makes one attempt at a job (attempt/attempt.py)
    server_check: ServerCheck

    def connection_for_write(self, url: str | None = None, **options: Any) -> Connection:
        """Return a connection as Celery does.

        A purge over this connection also cancels the jobs whose messages are removed.
        """
        from cellama.tasks.broker.control import purge_queue, purging_with

        return purging_with(partial(purge_queue, self), super().connection_for_write(url, **options))


def make_app(redis_url: str | None = None) -> CellamaApp:
    """Return an app that sends its jobs to this URL (default: `redis_url`). Celery's current app doesn't change."""
    new = CellamaApp("cellama", set_as_current=False, include=["cellama.tasks.jobs"])
    new.redis_url = redis_url
    new.templates = Templates()
    new.add_defaults(lambda: celery_config(_settings_for(redis_url)))
    new.steps["worker"].add("cellama.tasks.lifecycle:LoadModels")  # by name: producers don't import it
    new.steps["consumer"] |= {"cellama.tasks.broker.consumer:Intake", "cellama.tasks.lifecycle:Attach"}
    signals.worker_init.connect(_check_libraries, weak=False)
    return new


def _check_libraries(sender: Any = None, **_: Any) -> None:
    """Exit with Exit.CONFIG when a worker starts, if the installed libraries lack a part that cellama needs."""
    if isinstance(sender.app, CellamaApp):
        try:
            require_parts()
        except UnfitLibraries as error:
            log.critical("worker can't start", detail=str(error))
            raise SystemExit(Exit.CONFIG) from None


def _settings_for(redis_url: str | None) -> Settings:
    settings = get_settings()
    return settings if redis_url is None else settings.model_copy(update={"redis_url": redis_url})


def _set_up_logging(loglevel: int | None = None, **_: Any) -> None:
    settings = get_settings()
    if loglevel is None or loglevel == logging.WARNING:  # WARNING is Celery's default
        configure_logging(settings.log_level, settings.log_format)
    else:
        configure_logging(logging.getLevelName(loglevel), settings.log_format)
    for name in ("celery.worker.strategy", "celery.app.trace"):  # each attempt logs a line of its own
        if not logging.getLogger(name).isEnabledFor(logging.DEBUG):
            logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("celery.app.trace").addFilter(_remove_traceback_of_reject)


def _remove_traceback_of_reject(record: logging.LogRecord) -> bool:
    """Remove a Reject's traceback from a log record, because returning a job to its queue is not a failure."""
    if record.exc_info and isinstance(record.exc_info[1], Reject):
        record.exc_info = None
    return True


def celery_config(settings: Settings) -> dict[str, Any]:
    """Return Celery's configuration for these settings."""
    return {
        **broker_options(settings.redis_url),
        **_exchanges(settings.key_prefix),
        "result_backend": "cellama.tasks.broker.result_backend:ResultBackend",  # not a URL, which Celery would show
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
        "task_queues": [
            _queue(name)
            for model in (*(model.id for model in settings.models), DEFAULT_MODEL)
            for name in queues_of_model(model)
        ],
        "task_default_queue": "celery",  # queue of the user's own tasks that follow a job in a canvas
        "task_acks_late": True,
        "task_track_started": True,
        "task_send_sent_event": True,
        "worker_pool": "cellama.tasks.broker.pool:TaskPool",
        "worker_consumer": "cellama.tasks.broker.consumer:ReconnectingConsumer",
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

    With the default key prefix, these are Celery's own names, so Flower and producers with plain Celery don't need any
    configuration.
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
        "queue_order_strategy": "round_robin",  # within the limits of tasks/broker/consumer.py
    }


def _queue(name: str) -> Queue:
    """Return a queue with its own exchange, because Celery's default exchange could deliver other apps' messages."""
    return Queue(name, Exchange(name), name)


def concurrency(settings: Settings) -> int:
    """Return how many jobs a worker can hold: each model's jobs in progress, plus `look_ahead` jobs per model.

    After the models have been loaded, `Runtime.attach` corrects this number, because tuning may have changed their
    number of slots.
    """
    return sum(num_jobs_of(model) + settings.look_ahead for model in settings.models)


def num_jobs_of(model: ModelSettings, slots: int | None = None, capabilities: Collection[str] = ()) -> int:
    """Return how many jobs of a model can be in progress.

    A model that generates text can run one job per slot, and any other model can run EMBEDDING_JOBS jobs. `slots` and
    `capabilities` describe the loaded model. By default, they are taken from the settings. A model without capabilities
    in the settings counts as a generating model.
    """
    if not {"generate", "chat"} & set(capabilities or model.capabilities or ("generate",)):
        return EMBEDDING_JOBS
    return slots or model.n_parallel or DEFAULT_SLOTS


app = make_app()
