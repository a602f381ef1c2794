"""Wrap the private names of Celery, kombu and redis-py that cellama uses.

Other files use private names only in subclasses.

`INHERITED` lists the private names that cellama's subclasses override or use. `require_parts` checks that each part
exists in the installed libraries with the expected signature. A worker calls `require_parts` when it starts, and a
producer calls `require_parts` before it sends its first job. A test checks all parts. Another test fails if other files
use private names. pyproject.toml limits the versions of these libraries. Before you raise such a limit, update this
file.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from queue import Empty
from typing import Any

import kombu
import redis
from celery import VERSION, Celery

ATTRIBUTE = "an attribute"

# The signature of each part that the functions below use.
PARTS: Mapping[str, str] = {
    "celery._state:_get_active_apps": "()",
    "celery._state:connect_on_app_finalize": "(callback)",
    "celery.app.amqp:AMQP._retry_publish": "(self, publish, *args, **kwargs)",
    "celery.app.amqp:_callback_publish_retry": ATTRIBUTE,
    "celery.app.base:Celery._tasks": ATTRIBUTE,
    "celery.concurrency.prefork:_run_ready_callbacks": "(hub)",
    "kombu.transport.redis:Channel._brpop_read": "(self, **options)",
    "kombu.transport.redis:Channel._brpop_sent_at": ATTRIBUTE,
    "kombu.transport.redis:Channel._brpop_start": "(self, timeout=None)",
    "kombu.transport.redis:Channel._create_client": "(self, asynchronous=False)",
    "kombu.transport.redis:Channel._in_poll": ATTRIBUTE,
    "kombu.transport.redis:Channel._queue_cycle": ATTRIBUTE,
    "kombu.transport.virtual:Channel._qos": ATTRIBUTE,
    "kombu.transport.virtual.base:Transport._deliver": "(self, message, queue)",
    "redis.asyncio.connection:AbstractConnection._reader": ATTRIBUTE,
    "redis.asyncio.connection:AbstractConnection._writer": ATTRIBUTE,
    "redis.connection:AbstractConnection._sock": ATTRIBUTE,
}

# By file with a subclass: the private names of its parent that the subclass overrides or uses.
INHERITED: Mapping[str, Mapping[str, str]] = {
    "connection/redis_errors.py": {"kombu.transport.redis:Channel._get_pool": "(self, asynchronous=False)"},
    "broker/consumer.py": {"celery.worker.consumer:Consumer._flush_events": "(self)"},
    "broker/control.py": {"kombu.transport.redis:Channel._purge": "(self, queue)"},
    "broker/message.py": {
        **{f"kombu.transport.virtual:QoS.{name}": ATTRIBUTE for name in ("_delivered", "_dirty", "_quick_ack")},
        "celery.worker.request:Request._announce_revoked": "(self, reason, terminated, signum, expired)",
        **{f"celery.worker.request:Request.{name}": ATTRIBUTE for name in ("_apply_result", "_message")},
    },
    "broker/pool.py": {"celery.concurrency.base:BasePool._get_info": "(self) -> Dict[str, Any]"},
    "broker/result_backend.py": {
        "celery.backends.redis:RedisBackend._MAX_STR_VALUE_SIZE": ATTRIBUTE,
        "celery.backends.redis:RedisBackend._chord_publish_claim_expires": "(self, initial_expires, callback)",
        "celery.backends.redis:RedisBackend._create_client": "(self, **params)",
        "celery.backends.redis:RedisBackend._ensure_retryable": (
            "(self, func, *args, fallback_exc=None, fallback_msg=None, max_retries=None, **kwargs)"
        ),
        "celery.backends.redis:RedisBackend._get_result_meta": (
            "(self, result, state, traceback, request, format_date=True, encode=False)"
        ),
        "celery.backends.redis:RedisBackend._params_from_url": "(self, url, defaults)",
        "celery.backends.redis:RedisBackend._store_result": (
            "(self, task_id, result, state, traceback=None, request=None, **kwargs)"
        ),
    },
    "calls/enqueue.py": {
        "kombu.messaging:Producer._publish": (
            "(self, body, priority, content_type, content_encoding, headers, properties, routing_key, mandatory, "
            "immediate, exchange, declare, timeout=None, confirm_timeout=None, retry=False, retry_policy=None)"
        ),
    },
}


# Public names that cellama overrides, or calls in the same way as Celery.
OVERRIDDEN: Mapping[str, str] = {
    "celery.app.base:Celery.connection_for_write": "(self, url=None, **kwargs)",
    "celery.app.task:Task.apply": (
        "(self, args=None, kwargs=None, link=None, link_error=None, task_id=None, retries=None, throw=None, "
        "logfile=None, loglevel=None, headers=None, **options)"
    ),
    "celery.app.task:Task.signature": "(self, args=None, *starargs, **starkwargs)",
    "celery.concurrency.base:apply_target": "(target, args=(), kwargs=None, callback=None, accept_callback=None, pid=",
    "celery.worker.consumer:Consumer.call_soon_ack": "(self, p, *args, **kwargs)",
    "celery.worker.consumer:Consumer.on_connection_error_after_connected": "(self, exc)",
    "celery.worker.control:revoke": "(state, task_id, terminate=False, signal=None, **kwargs)",
    "celery.worker.request:Request.maybe_expire": "(self)",
    "celery.worker.request:Request.on_timeout": "(self, soft, timeout)",
    "celery.worker.request:Request.terminate": "(self, pool, signal=None)",
    "celery.worker.strategy:default": "(task, app, consumer, ",
    "kombu.transport.redis:Channel._put": "(self, queue, message, **kwargs)",
    "kombu.transport.redis:QoS.can_consume": "(self)",
    "kombu.transport.virtual:QoS.ack": "(self, delivery_tag)",
    "kombu.transport.redis:QoS.restore_unacked": "(self, client=None)",
    "kombu.transport.redis:QoS.restore_visible": "(self, start=0, num=10, interval=10)",
    "kombu.transport.virtual:QoS.append": "(self, message, delivery_tag)",
    "kombu.transport.virtual:QoS.reject": "(self, delivery_tag, requeue=False)",
}

ALL_PARTS: Mapping[str, str] = {
    path: expected for parts in (PARTS, *INHERITED.values(), OVERRIDDEN) for path, expected in parts.items()
}
# The parts that a process needs if it imports the tasks, sends jobs, or reads many streams at once.
SHARING_PARTS = (
    "celery._state:_get_active_apps",
    "celery._state:connect_on_app_finalize",
    "celery.app.base:Celery._tasks",
)
# Celery 5.7 has these parts, and cellama replaces them in older versions.
PUBLISH_RETRY_PARTS = ("celery.app.amqp:AMQP._retry_publish", "celery.app.amqp:_callback_publish_retry")
HAS_PUBLISH_RETRY = VERSION[:2] >= (5, 7)
CONNECTION_ARGS = () if redis.VERSION[:2] >= (5, 3) else ("PING",)  # the command was required, and is not used
HAS_PUBLISH_BATCH = kombu.VERSION[:2] >= (5, 7)
PRODUCER_PARTS = (
    *SHARING_PARTS,
    *(PUBLISH_RETRY_PARTS if HAS_PUBLISH_RETRY else ()),
    "celery.app.base:Celery.connection_for_write",
    "celery.app.task:Task.signature",
    "kombu.messaging:Producer._publish",
    "kombu.transport.redis:Channel._put",
)
READER_PARTS = (
    "redis.asyncio.connection:AbstractConnection._reader",
    "redis.asyncio.connection:AbstractConnection._writer",
)


class UnfitLibraries(RuntimeError):
    """The installed Celery, kombu or redis-py lacks parts that cellama needs. The error message lists these parts."""


@functools.cache
def require_parts(*paths: str) -> None:
    """Raise UnfitLibraries unless these parts, by default all of ALL_PARTS, exist with the expected signatures."""
    missing = [path for path in paths or ALL_PARTS if not _exists(path, ALL_PARTS[path])]
    if missing:
        installed = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
        raise UnfitLibraries(
            f"{installed}: cellama uses parts that are missing or have changed: {', '.join(missing)}; "
            "install the versions in constraints.txt, or a newer cellama"
        )


def _exists(path: str, expected: str) -> bool:
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        if expected is not ATTRIBUTE:
            return str(inspect.signature(getattr(owner, name))).startswith(expected)
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    return hasattr(owner, name) or (isinstance(owner, type) and _mentions(owner, name))


def _mentions(owner: type, name: str) -> bool:
    """Return whether a method of the class uses this attribute, which may exist only on instances."""
    for member in [member for kind in owner.__mro__ for member in vars(kind).values()]:
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if name in getattr(getattr(function, "__code__", None), "co_names", ()):
            return True
    return False


def tasks_before_finalizing(app: Celery) -> dict[str, Any]:
    """Return an app's registry of tasks. Unlike `app.tasks`, this function does not finalize the app."""
    registry: dict[str, Any] = app._tasks
    return registry


def for_each_app(action: Callable[[Celery], None]) -> None:
    """Call `action` with each finalized Celery app in this process, and with the other apps when they are finalized."""
    from celery._state import _get_active_apps, connect_on_app_finalize

    connect_on_app_finalize(action)
    for app in list(_get_active_apps()):
        if app.finalized:
            action(app)


def active_apps() -> list[Celery]:
    """Return the Celery apps in this process."""
    from celery._state import _get_active_apps

    return list(_get_active_apps())


def is_sending_next_step() -> bool:
    """Return whether Celery is currently sending the next step of a canvas, in a worker of any app."""
    if not HAS_PUBLISH_RETRY:
        return _is_called_by_tracer()
    from celery.app.amqp import _callback_publish_retry

    return bool(_callback_publish_retry.get())


def _is_called_by_tracer() -> bool:
    """Return whether the Celery code that runs tasks has called cellama directly instead of through a user's task."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "celery.app.trace":
            return True
        if module.partition(".")[0] not in ("celery", "cellama"):
            return False
        frame = frame.f_back
    return False


def send_next_step(app: Celery, publish: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Publish a step as Celery does after a task, with retries while Redis is unreachable.

    Celery has supported these retries since version 5.7. With older versions, the step is published without retries.
    """
    if HAS_PUBLISH_RETRY:
        app.amqp._retry_publish(publish, *args, **options)
    else:
        publish(*args, **options)


@dataclass(frozen=True, slots=True)
class _Recorder:
    """A Redis client that passes published messages to `add` instead of Redis."""

    client: Any
    add: Callable[[str, str, str], object]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def lpush(self, key: str, payload: str) -> None:
        self.add("lpush", key, payload)

    def publish(self, topic: str, payload: str) -> None:
        self.add("publish", topic, payload)


@dataclass(frozen=True, slots=True)
class _Counter:
    """A Redis client that appends the number of receivers of each published message to a list."""

    client: Any
    counts: list[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def publish(self, topic: str, payload: str) -> None:
        self.counts.append(self.client.publish(topic, payload))


@contextmanager
def _wrapping_clients(channel: Any, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Within this context, the channel sends its commands through `wrap` of a Redis client."""
    acquire = channel.conn_or_acquire

    @contextmanager
    def acquire_wrapped(client: Any = None) -> Iterator[Any]:
        with acquire(client) as acquired:
            yield wrap(acquired)

    channel.conn_or_acquire = acquire_wrapped
    try:
        yield
    finally:
        del channel.conn_or_acquire


def publish_into(batch: Any, channel: Any, message: Mapping[str, Any], exchange: str, routing_key: str) -> None:
    """Publish a message. The channel passes its commands to `batch.add` instead of Redis.

    Channels have supported this since kombu 5.7. With older versions, the channel gets another client for this call.
    """
    if HAS_PUBLISH_BATCH:
        channel.basic_publish(message, exchange=exchange, routing_key=routing_key, _publish_batch=batch)
        return
    with _wrapping_clients(channel, lambda client: _Recorder(client, batch.add)):
        channel.basic_publish(message, exchange=exchange, routing_key=routing_key)


@contextmanager
def counting_receivers(channel: Any) -> Iterator[list[int]]:
    """Yield a list to which the channel appends the number of receivers of each message that it publishes meanwhile.

    Only one thread may use this with the same channel at a time.
    """
    counts: list[int] = []
    with _wrapping_clients(channel, lambda client: _Counter(client, counts)):
        yield counts


def run_ready_callbacks(hub: Any) -> None:
    """Run the callbacks that are due on an event loop that has stopped."""
    from celery.concurrency.prefork import _run_ready_callbacks  # workers only

    _run_ready_callbacks(hub)


def set_qos(channel: Any, qos: Any) -> None:
    """Make a channel record its messages with this QoS object."""
    channel._qos = qos


def waits_for_message(channel: Any) -> bool:
    """Return whether the channel is waiting for a reply to BRPOP."""
    return bool(channel._in_poll)


def read_brpop(channel: Any) -> tuple[str, bytes]:
    """Read the reply to the channel's BRPOP, end its queue's turn, and return the key of the list and the message.

    This works like Channel._brpop_read, but does not deliver the message. Raises queue.Empty if the reply has no
    message, and may raise connection errors.
    """
    connection = channel.client.connection
    try:
        reply = channel.client.parse_response(connection, "BRPOP")
    except channel.connection_errors:
        connection.disconnect()
        raise
    finally:
        channel._in_poll = None
    if not reply:
        raise Empty
    key, payload = reply
    channel._queue_cycle.rotate(key.decode().rsplit(channel.sep, 1)[0])
    return key.decode(), payload


def set_brpop_reader(channel: Any, read: Callable[[], None]) -> None:
    """Make a channel read replies to BRPOP with this function."""
    channel.handlers["BRPOP"] = channel._brpop_read = read  # `close` calls _brpop_read if a reply is pending


def deliver(channel: Any, message: Mapping[str, Any], queue: str) -> None:
    """Deliver a message from this queue to the channel's consumer."""
    channel.connection._deliver(message, queue)


def set_brpop_sender(channel: Any, start: Callable[[float | None], None]) -> None:
    """Make a channel request its next message with this function, which receives the timeout in seconds."""
    channel._brpop_start = lambda timeout=None: start(timeout)


def send_brpop(channel: Any, keys: Iterable[str], timeout_s: float) -> None:
    """Send a BRPOP for these lists."""
    connection = channel.client.connection
    channel._in_poll = connection
    channel._brpop_sent_at = time.monotonic()
    connection.send_command("BRPOP", *keys, timeout_s)


def queues_in_turn(channel: Any) -> list[str]:
    """Return a channel's queues in the order in which they take turns, starting with the next queue."""
    queues: list[str] = channel._queue_cycle.consume(len(channel.active_queues))
    return queues


def take_connection(pool: Any) -> Any:
    """Take a connection out of a redis-py pool. An asyncio pool returns an awaitable."""
    return pool.get_connection(*CONNECTION_ARGS)


def socket_of(connection: Any) -> Any:
    """Return the socket of a redis-py connection, which changes with each reconnect."""
    return connection._sock


def streams_of(connection: Any) -> tuple[StreamReader, StreamWriter]:
    """Return the streams of an open redis.asyncio connection, so that another parser can read replies."""
    require_parts(*READER_PARTS)
    return connection._reader, connection._writer


def make_clients_by(channel: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function that a channel uses to create its Redis clients."""
    channel._create_client = wrap(channel._create_client)
