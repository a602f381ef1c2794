"""How jobs get into Redis: what Celery would publish is collected, and pushed together with the ledger's entries.

Celery and kombu make the messages, or the one that a message is like, so any Celery worker reads them. The script that
writes a job's entry pushes its message as well: there is never one without the other, and up to `PAGE_JOBS` jobs take
one round trip to Redis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu import Producer

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Call, Message, Submission
from cellama.tasks.state.scripts import SentScript
from cellama.tasks.traces.gate import sending

PAGE_JOBS = 100  # per script: Redis serves no other client meanwhile
PAGE_BYTES = 4 * 2**20


class Collector(Producer):  # type: ignore[misc]
    """A producer that keeps what is published through it, in kombu's form, instead of sending it."""

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
        """Declares the exchange of events, once; a list of Redis needs no declaration."""
        channel = self.channel
        if exchange and exchange not in channel.state.exchanges:
            for entity in declare:
                self.maybe_declare(entity)
        message = channel.prepare_message(body, priority, content_type, content_encoding, headers, properties)
        channel.basic_publish(message, exchange=exchange, routing_key=routing_key, _publish_batch=self)

    def add(self, *command: Any) -> None:
        """What kombu's channel calls instead of Redis (kombu.transport.redis: Channel._put)."""
        self._commands.append(command)

    def take(self) -> Message:
        """The message that was published since the last time, and the event that tells of it."""
        commands, self._commands = self._commands, []
        ((_, key, payload),) = (command for command in commands if command[0] == "lpush")
        events = tuple((topic, event) for name, topic, event in commands if name == "publish")
        return Message(key, payload, events)


@dataclass(frozen=True, slots=True)
class Checked:
    """A job that may be queued, with what Celery is told of it beside its call."""

    call: Call
    options: dict[str, Any]
    payload_json: str  # args and kwargs
    digest: str = ""  # of an idempotent one
    is_usual: bool = False  # its message is like that of others with the same task, queue and priority; but for a trace

    @property
    def job_id(self) -> str:
        return str(self.options["task_id"])


Publish = Callable[[Producer, Checked], Any]
Alike = tuple[Any, ...] | None  # what the usual ones of some jobs have in common; None: each is built by Celery


class _Messages(contextlib.ExitStack):
    """Makes the messages of jobs: like one that was made before, or by Celery and kombu."""

    def __init__(self, app: Any, ledger: Ledger, publish: Publish, alike: Alike) -> None:
        super().__init__()
        self._app = app
        self._ledger = ledger
        self._publish = publish
        self._alike = alike
        self._collector: Collector | None = None
        self.is_heard = True  # a program listens to Celery's events, as far as it is known

    def message(self, job: Checked, tells: bool) -> Message:
        """`tells`: with its event, also where it is not heard."""
        options, common, template = job.options, None, None
        more: dict[str, str] = {}
        if self._alike is not None and job.is_usual:
            more = {name: text for name, text in options["headers"].items() if name != SUBMITTED_AT_HEADER}
            common = (*self._alike, options["queue"], options["priority"], *more)
            template = self._app.templates.get(common)
        if template is not None:
            shown = (options["argsrepr"], options["kwargsrepr"])
            at = options["headers"][SUBMITTED_AT_HEADER]
            clock = self._app.clock.forward() if tells or self.is_heard else None
            made: Message = template.message(job.job_id, job.payload_json, shown, at, clock, more)
            return made
        if self._collector is None:
            producer = self.enter_context(self._app.producer_pool.acquire(block=True))
            if not producer.connection.connected:
                self._ledger.reach()  # kombu itself tries to connect for a long time
            self._collector = Collector(producer.channel)
        self._publish(self._collector, job)
        message = self._collector.take()
        if common is not None:
            self._app.templates.learn(common, message, job.payload_json, more)
        return message


def enqueue(
    app: Celery, ledger: Ledger, jobs: Sequence[Checked], publish: Publish, alike: Alike = None
) -> Iterator[bool]:
    """Queues jobs in their order, and tells of each whether it is new.

    While Redis notes a page, the next one is made. If no program has heard the events of a page, only the first jobs of
    those that follow have one, until one is heard.

    Raises what Redis raises, and InvalidJob if an idempotency key stands for something else. The jobs told of by then
    are queued, and those of the next page perhaps.
    """
    before: list[Submission] = []
    sent: SentScript | None = None
    try:
        with sending([job.options for job in jobs]), _Messages(app, ledger, publish, alike) as messages:
            for page, following in _pages(jobs, messages):
                if sent is not None:
                    told, num_heard = sent.reply()
                    messages.is_heard = num_heard != 0
                    yield from _told(before, told)
                    sent = None
                if following:
                    before, sent = page, ledger.send(page, following)
                else:
                    yield from _told(page, ledger.submit(page))
    finally:
        if sent is not None:
            sent.close()


def _pages(jobs: Sequence[Checked], messages: _Messages) -> Iterator[tuple[list[Submission], int]]:
    """Jobs with their messages, as many as a script takes, and how many follow."""
    page: list[Submission] = []
    num_bytes = 0
    for number, job in enumerate(jobs, start=1):
        page.append(Submission(job.job_id, job.call, messages.message(job, tells=not page), job.digest))
        num_bytes += page[-1].num_bytes
        if len(page) == PAGE_JOBS or num_bytes > PAGE_BYTES or number == len(jobs):
            yield page, len(jobs) - number
            page, num_bytes = [], 0


def _told(page: Sequence[Submission], told: Sequence[int]) -> Iterator[bool]:
    for job, how in zip(page, told, strict=True):
        if how < 0:
            raise InvalidJob(
                f"the idempotency key of job {job.job_id} was used for a {job.call.task} with other parameters; "
                "give each its own key, or ask for the first one's result"
            )
        yield bool(how)


def ranges(places: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    parts: list[list[int]] = []
    for place in places:
        if parts and place == parts[-1][1] + 1:
            parts[-1][1] = place
        else:
            parts.append([place, place])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
