"""Turn task calls into messages, and queue the messages.

Queueing takes three steps. First, Celery's options are resolved for a job, or rejected with an error that suggests a
remedy (docs/canvas.md). Next, Celery and kombu build the message, so that any Celery worker can read it. Alternatively,
the message is built from an earlier message's text, which is much faster. Finally, a script pushes the message together
with the job's ledger entry, so that neither exists without the other. Up to `PAGE_JOBS` jobs share one round trip to
Redis.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Connection, Exchange, Producer, Queue
from redis.exceptions import ResponseError

from cellama.config import get_settings, limits
from cellama.tasks.connection.kombu_internals import publish_into
from cellama.tasks.contract.errors import InvalidJob, LimitReached
from cellama.tasks.contract.names import (
    BULK_PRIORITIES,
    PRIORITIES,
    PRIORITY_INTERACTIVE,
    SUBMITTED_AT_HEADER,
    is_model_queue,
    model_of,
    queue_name,
)
from cellama.tasks.state.ledger import Ledger, Message, Submission, TaskCall
from cellama.tasks.state.scripts import SentScript
from cellama.tasks.traces.gate import sending

# The maximum per script: Redis serves no other client while it runs, which takes a few milliseconds.
PAGE_JOBS = 100
PAGE_BYTES = 4 * 2**20
IN_WORKERS_ONLY = (
    "cellama's tasks run only in its workers, which have the models; use delay, apply_async or a signature, and "
    "start a worker (`cellama up`)"
)
ONE_AFTER_ANOTHER = (
    "chunks runs many calls one after another within one job; use group(...), or {task}_many of a client, so that a "
    "worker's slots run them at the same time"
)


# Options of a call


def refuse_eager(app: Celery) -> None:
    """Raise InvalidJob if Celery is configured to run tasks in the calling process."""
    if app.conf.task_always_eager:
        raise InvalidJob(f"task_always_eager is enabled, but {IN_WORKERS_ONLY}")


def settle_options(app: Celery, options: dict[str, Any], model: str, payload_priority: int | None) -> None:
    """Set the queue and the priority in `options`, and remove options that have no effect on a job.

    A priority in the payload takes precedence over Celery's. Raises InvalidJob.
    """
    if not options:  # the usual case
        options |= {"queue": queue_name(model), "priority": payload_priority}
        return
    _check_connection(app, options.pop("connection", None))
    for name in ("producer", "publisher"):  # set by canvas; the ledger's script publishes the message
        options.pop(name, None)
    if options.get("serializer") not in (None, "json"):
        raise InvalidJob(
            f"serializer: {options['serializer']!r} is not supported; use json, because other formats could make "
            "workers run code from messages"
        )
    if options.get("task_id") is None:
        options.pop("task_id", None)
    elif not isinstance(options["task_id"], str) or not options["task_id"]:
        raise InvalidJob(f"task_id: {options['task_id']!r} is not valid; use a non-empty string")
    options["queue"] = _queue_of(options, queue_name(model))
    options["priority"] = _priority_of(options.get("priority"), payload_priority)


def _queue_of(options: dict[str, Any], model_queue: str) -> str:
    """Return the name of the queue: `model_queue`, unless the options name a queue that does not belong to a model.

    The queue of another model is ignored, because it comes from a signature whose model was changed later.
    """
    queue, exchange, routing_key = (options.pop(name, None) for name in ("queue", "exchange", "routing_key"))
    kinds = {options.pop("exchange_type", None) or "direct"}
    if isinstance(queue, Queue):
        kinds.add(queue.exchange.type if queue.exchange else "direct")
        queue = queue.name
    if isinstance(exchange, Exchange):
        kinds.add(exchange.type)
        exchange = exchange.name
    if queue is not None and (not isinstance(queue, str) or not queue):
        raise InvalidJob(f"queue: {queue!r} is not valid; pass a name, or a kombu.Queue with a name")
    queue = model_queue if queue is None or is_model_queue(queue) else queue
    for name, value in (("exchange", exchange), ("routing_key", routing_key)):
        if value not in (None, "", queue):
            raise InvalidJob(
                f"{name}: {value!r} is not supported; jobs are sent directly to a queue, here {queue!r}, so omit {name}"
            )
    if kinds != {"direct"}:
        others = ", ".join(sorted(kinds - {"direct"}))
        raise InvalidJob(
            f"queue: {queue!r} has an exchange of type {others}; jobs are sent directly to a queue, so omit the "
            "exchange"
        )
    return queue


def _priority_of(given: Any, payload_priority: int | None) -> int | None:
    if payload_priority is not None or given is None:
        return payload_priority
    if isinstance(given, bool) or not isinstance(given, int) or given not in PRIORITIES:
        raise InvalidJob(f"priority: {given!r} is not valid; use a whole number from 0 (most urgent) to 9")
    return given


def _check_connection(app: Celery, connection: Connection | None) -> None:
    """Raise InvalidJob if a connection leads to a Redis server other than the app's."""
    if connection is None:
        return
    expected = app.connection_for_write()
    addresses = [(c.transport_cls, c.hostname, c.port, str(c.virtual_host or 0)) for c in (connection, expected)]
    if addresses[0] != addresses[1]:
        raise InvalidJob(
            f"connection: {connection.as_uri()} is not the Redis server in the settings; omit connection, or set "
            "CELLAMA_REDIS_URL"
        )


def delay_s(app: Celery, options: dict[str, Any]) -> float:
    """Return how many seconds the job must wait before it may start, according to `countdown` or `eta`."""
    countdown, eta = options.get("countdown"), options.get("eta")
    if countdown:
        return max(0.0, float(countdown))
    if not eta:
        return 0.0
    at: datetime = maybe_make_aware(maybe_iso8601(eta), app.timezone)
    return max(0.0, float((at - app.now()).total_seconds()))


def timeout_of(kwargs: Any, priority: int) -> float | None:
    """Return a job's timeout in seconds, or None if it has no timeout.

    If the call does not set a timeout, the default timeout from the settings applies, except to bulk jobs. An invalid
    value also yields None. Only plain Celery can send an invalid value, and a worker then refuses the job.
    """
    if "timeout" in kwargs:
        timeout = kwargs["timeout"]
        return float(timeout) if isinstance(timeout, int | float) and 0 < timeout <= limits.MAX_TIMEOUT_S else None
    return None if priority in BULK_PRIORITIES else get_settings().default_timeout_s or None


def plain_priority(kwargs: Any, given: Any) -> int:
    """Return the priority of a job from plain Celery.

    The priority in the payload takes precedence over the message's priority, where 0 means that no priority was set.
    """
    requested = kwargs.get("priority") if isinstance(kwargs, dict) else None
    if isinstance(requested, int) and requested in PRIORITIES:
        return int(requested)
    return min(given, PRIORITIES[-1]) if isinstance(given, int) and given > 0 else PRIORITY_INTERACTIVE


def plain_queue(kwargs: Any, args: Any, routing_key: str) -> str:
    """Return the queue for a message from plain Celery.

    If the message was sent to a model's queue, it stays in this queue. Otherwise, it is sent to the queue of the job's
    model.
    """
    if is_model_queue(routing_key):
        return routing_key
    model = kwargs.get("model") if isinstance(kwargs, dict) else None
    return queue_name(str(model if model is not None else next(iter(args), "")))


# Messages from templates
#
# Jobs of one queue differ in few values of their message and of its `task-sent` event. A template is the text between
# these values. A message that its template would not reproduce letter by letter gets no template.

Path = tuple[str, ...]  # the keys that lead to a value in a JSON object

ID, TAG, BODY, AT, ARGS, KWARGS, NOW, CLOCK = "id", "tag", "body", "at", "args", "kwargs", "now", "clock"
MESSAGE: Mapping[Path, str] = {
    ("body",): BODY,
    ("headers", "id"): ID,
    ("headers", "root_id"): ID,
    ("headers", "argsrepr"): ARGS,
    ("headers", "kwargsrepr"): KWARGS,
    ("headers", SUBMITTED_AT_HEADER): AT,
    ("properties", "correlation_id"): ID,
    ("properties", "delivery_tag"): TAG,
}
EVENT_FRAME: Mapping[Path, str] = {("body",): BODY, ("properties", "delivery_tag"): TAG}
EVENT: Mapping[Path, str] = {
    ("uuid",): ID,
    ("root_id",): ID,
    ("args",): ARGS,
    ("kwargs",): KWARGS,
    ("timestamp",): NOW,
    ("clock",): CLOCK,
}


class _JsonTemplate:
    """A JSON document in which values can be replaced with other JSON values."""

    def __init__(self, text: str, paths: Mapping[Path, str]) -> None:
        """Parse a JSON text. Raises KeyError or ValueError if the text is not JSON with values at these paths."""
        parsed, mark = json.loads(text), uuid.uuid4().hex
        self.first_values: dict[str, str] = {}  # the values of this text
        for path, name in paths.items():
            *outer, last = path
            inner = parsed
            for key in outer:
                inner = inner[key]
            if self.first_values.setdefault(name, json.dumps(inner[last])) != json.dumps(inner[last]):
                raise ValueError(f"{name} is specified twice with different values")
            inner[last] = f"{mark} {name} {mark}"
        text = json.dumps(parsed).replace("%", "%%")
        self._format = text.replace(f'"{mark} ', "%(").replace(f' {mark}"', ")s")

    def fill(self, values: Mapping[str, str]) -> str:
        return self._format % values


class Template:
    """A job's message and its `task-sent` event, used as a template into which other jobs' values are inserted."""

    def __init__(self, message: Message, payload_json: str, trace_headers: Iterable[str] = ()) -> None:
        """Create a template from a message that Celery has built.

        `payload_json` is the list of args and kwargs in the message's body. `trace_headers` names headers whose value
        differs from job to job. Raises KeyError or ValueError if the message does not have the expected format.
        """
        self._key = message.key
        self._text = _JsonTemplate(message.payload, {**MESSAGE, **{("headers", name): name for name in trace_headers}})
        body = _decode_body(self._text.first_values[BODY])
        if not body.startswith(payload_json[:-1]):
            raise ValueError("the message body does not start with the task's arguments")
        self._rest_of_body = body[len(payload_json) - 1 :]
        self._events: list[tuple[str, _JsonTemplate, _JsonTemplate]] = []
        for topic, text in message.events:
            frame = _JsonTemplate(text, EVENT_FRAME)
            self._events.append((topic, frame, _JsonTemplate(_decode_body(frame.first_values[BODY]), EVENT)))
        events = [(frame.first_values, event.first_values) for _, frame, event in self._events]
        if self._fill(self._text.first_values, payload_json, events) != message:
            raise ValueError("the template does not reproduce the message that it was created from")

    def message(
        self,
        job_id: str,
        payload_json: str,
        *,
        argsrepr: str,
        kwargsrepr: str,
        submitted_at: float,
        clock: int | None,
        trace: Mapping[str, str] | None = None,
    ) -> Message:
        """Return the message for another job.

        Flower shows `argsrepr` and `kwargsrepr`. `clock` is Celery's logical clock. If `clock` is None, the message has
        no event. `trace` contains the values of the trace headers.
        """
        values = {
            ID: quoted(job_id),
            TAG: _new_tag(),
            ARGS: quoted(argsrepr),
            KWARGS: quoted(kwargsrepr),
            AT: json.dumps(submitted_at),
            **{name: quoted(value) for name, value in (trace or {}).items()},
        }
        if clock is None:
            return self._fill(values, payload_json, [])
        now = {**values, NOW: repr(time.time()), CLOCK: str(clock)}
        return self._fill(values, payload_json, [({TAG: _new_tag()}, now) for _ in self._events])

    def _fill(
        self,
        values: Mapping[str, str],
        payload_json: str,
        values_of_events: Iterable[tuple[Mapping[str, str], Mapping[str, str]]],
    ) -> Message:
        text = self._text.fill({**values, BODY: _encode_body(payload_json[:-1] + self._rest_of_body)})
        events = tuple(
            (topic, frame.fill({**frame_values, BODY: _encode_body(event.fill(event_values))}))
            for (topic, frame, event), (frame_values, event_values) in zip(self._events, values_of_events, strict=False)
        )
        return Message(self._key, text, events)


def _new_tag() -> str:
    """Return a new delivery tag as JSON. Kombu accepts any tag that no other message has."""
    return f'"{os.urandom(16).hex()}"'


def _decode_body(body: str) -> str:
    return base64.b64decode(json.loads(body)).decode()


def _encode_body(text: str) -> str:
    return f'"{base64.b64encode(text.encode()).decode()}"'


class Templates:
    """Caches the templates of a process, keyed by the values that all messages of a template share."""

    MAX_TEMPLATES = 256  # a few KiB each; more than a producer's combinations of task, queue and priority

    def __init__(self) -> None:
        self._templates: dict[Hashable, Template | None] = {}

    def get(self, key: Hashable) -> Template | None:
        return self._templates.get(key)

    def learn(self, key: Hashable, message: Message, payload_json: str, trace_headers: Iterable[str] = ()) -> None:
        """Create a template from a message.

        If the template can't be created, the failure is cached, so later messages with the same key don't get a
        template either.
        """
        if key in self._templates or len(self._templates) >= self.MAX_TEMPLATES:
            return
        try:
            self._templates[key] = Template(message, payload_json, trace_headers)
        except (KeyError, TypeError, ValueError):
            self._templates[key] = None


# Queueing


class Collector(Producer):  # type: ignore[misc]
    """A producer that stores published messages in kombu's format instead of sending them."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel, auto_declare=False)
        self._commands: list[tuple[Any, ...]] = []

    def _publish(
        self,
        body: Any,
        priority: int,
        content_type: str,
        content_encoding: str,
        headers: Any,
        properties: Any,
        routing_key: str,
        mandatory: bool,
        immediate: bool,
        exchange: str,
        declare: Iterable[Any],
        *_: Any,
    ) -> None:
        """Declare the event exchange once. A Redis list does not have to be declared."""
        channel = self.channel
        if exchange and exchange not in channel.state.exchanges:
            for entity in declare:
                self.maybe_declare(entity)
        message = channel.prepare_message(body, priority, content_type, content_encoding, headers, properties)
        publish_into(self, channel, message, exchange, routing_key)

    def add(self, *command: Any) -> None:
        """Store a Redis command. `publish_into` calls this method instead of sending the command to Redis."""
        self._commands.append(command)

    def take(self) -> Message:
        """Return the message that was published since the last call, and its event."""
        commands, self._commands = self._commands, []
        ((_, key, payload),) = (command for command in commands if command[0] == "lpush")
        events = tuple((topic, event) for name, topic, event in commands if name == "publish")
        return Message(key, payload, events)


class TemplateKey(NamedTuple):
    """The values, in addition to queue and priority, that all messages from one template must have in common."""

    task: str
    is_bulk: bool  # `JobTask` publishes single jobs and bulk jobs in two ways, with different headers
    pid: int  # process and thread of the producer, which the message names for replies
    thread_id: str


@dataclass(frozen=True, slots=True)
class Checked:
    """A validated job and its Celery options."""

    call: TaskCall
    options: dict[str, Any]
    payload_json: str  # args and kwargs
    digest: str = ""  # digest of the parameters, if the job has an idempotency key
    fits_template: bool = False  # its message can be made from a template

    @property
    def job_id(self) -> str:
        return str(self.options["task_id"])


Publish = Callable[[Producer, Checked], Any]


class _Messages(contextlib.ExitStack):
    """Builds the messages of jobs, from templates or through Celery and kombu."""

    def __init__(self, app: Any, ledger: Ledger, publish: Publish, template_key: TemplateKey | None) -> None:
        super().__init__()
        self._app = app
        self._ledger = ledger
        self._publish = publish
        self._template_key = template_key
        self._collector: Collector | None = None
        self.has_listeners = True  # whether a program may be subscribed to Celery's events

    def message(self, job: Checked, with_event: bool) -> Message:
        """Return a job's message. `with_event` adds a `task-sent` event even if no program is subscribed."""
        if self._template_key is None or not job.fits_template:
            return self._built(job)
        options = job.options
        trace = {name: text for name, text in options["headers"].items() if name != SUBMITTED_AT_HEADER}
        key = (self._template_key, options["queue"], options["priority"], *trace)
        template: Template | None = self._app.templates.get(key)
        if template is None:
            message = self._built(job)
            self._app.templates.learn(key, message, job.payload_json, trace)
            return message
        return template.message(
            job.job_id,
            job.payload_json,
            argsrepr=options["argsrepr"],
            kwargsrepr=options["kwargsrepr"],
            submitted_at=options["headers"][SUBMITTED_AT_HEADER],
            clock=self._app.clock.forward() if with_event or self.has_listeners else None,
            trace=trace,
        )

    def _built(self, job: Checked) -> Message:
        if self._collector is None:
            producer = self.enter_context(self._app.producer_pool.acquire(block=True))
            if not producer.connection.connected:
                self._ledger.ping()  # fails at once, whereas kombu retries for a long time
            self._collector = Collector(producer.channel)
        self._publish(self._collector, job)
        return self._collector.take()


def enqueue(
    app: Celery, ledger: Ledger, jobs: Sequence[Checked], publish: Publish, template_key: TemplateKey | None = None
) -> Iterator[bool]:
    """Queue jobs in order. For each job, yield True if it is new, or False if its idempotency key was used before.

    While Redis runs the script for a page of jobs, the messages of the next page are built. If no program received the
    events of a page, only the first job of each later page has an event, until a program receives one. With
    `template_key`, messages are built from templates.

    Raises RedisError, LimitReached, and InvalidJob if an idempotency key belongs to another job. The jobs that were
    yielded before the error are queued, and the jobs of the next page may be queued.
    """
    before: list[Submission] = []
    sent: SentScript | None = None
    try:
        with sending([job.options for job in jobs]), _Messages(app, ledger, publish, template_key) as messages:
            for page, num_following in _pages(jobs, messages):
                if sent is not None:
                    with _rejecting():
                        replies, num_listeners = sent.reply()
                    messages.has_listeners = num_listeners != 0
                    yield from _are_new(before, replies)
                    sent = None
                if num_following:
                    before, sent = page, ledger.send(page, num_following)
                else:
                    with _rejecting():
                        replies = ledger.submit(page)
                    yield from _are_new(page, replies)
    finally:
        if sent is not None:
            sent.close()


def _pages(jobs: Sequence[Checked], messages: _Messages) -> Iterator[tuple[list[Submission], int]]:
    """Yield pages of jobs with their messages, one page per script call, and how many jobs follow each page."""
    page: list[Submission] = []
    num_bytes = 0
    for number, job in enumerate(jobs, start=1):
        page.append(Submission(job.job_id, job.call, messages.message(job, with_event=not page), job.digest))
        num_bytes += page[-1].num_bytes
        if len(page) == PAGE_JOBS or num_bytes > PAGE_BYTES or number == len(jobs):
            yield page, len(jobs) - number
            page, num_bytes = [], 0


def _are_new(page: Sequence[Submission], replies: Sequence[int]) -> Iterator[bool]:
    for job, reply in zip(page, replies, strict=True):
        if reply < 0:
            raise InvalidJob(
                f"idempotency_key: the key of job {job.job_id} was used for a {job.call.task} job with different "
                "parameters; use another key, or read the result of that job"
            )
        yield bool(reply)


@contextlib.contextmanager
def _rejecting() -> Iterator[None]:
    """Raise LimitReached if the script `submit` has rejected jobs because of a limit."""
    try:
        yield
    except ResponseError as error:
        if not str(error).startswith("OVERLIMIT "):
            raise
        _, num_jobs, limit, name = str(error).split(" ", 3)
        setting, key = ("model_limits", model_of(name[1:])) if name.startswith("/") else ("fairness_limits", name)
        raise LimitReached(
            f"{setting}: with this call, {key!r} would have {num_jobs} waiting or running jobs, and its limit is "
            f"{limit}; retry later, or raise the limit"
        ) from None


def ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers as ranges: 0, 1, 2, 5 become "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
