"""Queue jobs: collect the messages that Celery would publish, and push them together with the ledger's entries.

Celery and kombu build the messages, or the one from which a template is made, so any Celery worker can read them. The
script that writes a job's entry pushes its message as well: neither exists without the other, and up to `PAGE_JOBS`
jobs take one round trip to Redis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery import Celery
from kombu import Producer

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Message, Submission, TaskCall
from cellama.tasks.state.scripts import SentScript
from cellama.tasks.traces.gate import sending

from .message_templates import Template

PAGE_JOBS = 100  # per script: a few milliseconds, in which Redis serves no other client
PAGE_BYTES = 4 * 2**20  # per script, for large jobs: for the same reason


class Collector(Producer):  # type: ignore[misc]
    """A producer that keeps the messages that are published through it, in kombu's form, instead of sending them."""

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
        """Declare the exchange of events, once; a Redis list needs no declaration."""
        channel = self.channel
        if exchange and exchange not in channel.state.exchanges:
            for entity in declare:
                self.maybe_declare(entity)
        message = channel.prepare_message(body, priority, content_type, content_encoding, headers, properties)
        channel.basic_publish(message, exchange=exchange, routing_key=routing_key, _publish_batch=self)

    def add(self, *command: Any) -> None:
        """Keep a command. kombu's channel calls this instead of Redis (kombu.transport.redis: Channel._put)."""
        self._commands.append(command)

    def take(self) -> Message:
        """Return the message that was published since the last call, with its event."""
        commands, self._commands = self._commands, []
        ((_, key, payload),) = (command for command in commands if command[0] == "lpush")
        events = tuple((topic, event) for name, topic, event in commands if name == "publish")
        return Message(key, payload, events)


class Alike(NamedTuple):
    """What messages need in common, besides queue and priority, so that one can be made from the text of another."""

    task: str
    is_bulk: bool  # the two ways of publishing in `JobTask` write different headers
    pid: int  # and thread: replies to a producer name them
    thread_id: str


@dataclass(frozen=True, slots=True)
class Checked:
    """A valid job, with the options for Celery."""

    call: TaskCall
    options: dict[str, Any]
    payload_json: str  # args and kwargs
    digest: str = ""  # with an idempotency key
    is_usual: bool = False  # its message may be made from another one's: nothing but the trace is its own

    @property
    def job_id(self) -> str:
        return str(self.options["task_id"])


Publish = Callable[[Producer, Checked], Any]


class _Messages(contextlib.ExitStack):
    """Makes the messages of jobs, from templates or by Celery and kombu."""

    def __init__(self, app: Any, ledger: Ledger, publish: Publish, alike: Alike | None) -> None:
        super().__init__()
        self._app = app
        self._ledger = ledger
        self._publish = publish
        self._alike = alike
        self._collector: Collector | None = None
        self.has_listeners = True  # a program listens to Celery's events, as far as is known

    def message(self, job: Checked, with_event: bool) -> Message:
        """Return the message of a job. `with_event`: with its `task-sent` event, even if no program listens."""
        if self._alike is None or not job.is_usual:
            return self._built(job)
        options = job.options
        trace = {name: text for name, text in options["headers"].items() if name != SUBMITTED_AT_HEADER}
        common = (self._alike, options["queue"], options["priority"], *trace)
        template: Template | None = self._app.templates.get(common)
        if template is None:
            message = self._built(job)
            self._app.templates.learn(common, message, job.payload_json, trace)
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
                self._ledger.reach()  # kombu itself tries to connect for a long time
            self._collector = Collector(producer.channel)
        self._publish(self._collector, job)
        return self._collector.take()


def enqueue(
    app: Celery, ledger: Ledger, jobs: Sequence[Checked], publish: Publish, alike: Alike | None = None
) -> Iterator[bool]:
    """Queue jobs in their order, and yield for each whether it is new: False if its idempotency key was known.

    While Redis runs the script for a page of jobs, the next page is made. If no program received the events of a page,
    only the first job of each later page has an event, until a program receives one. With `alike`, messages are made
    from templates.

    Raises what Redis raises, and InvalidJob if an idempotency key stands for another job. The jobs yielded by then are
    queued, and perhaps those of the next page.
    """
    before: list[Submission] = []
    sent: SentScript | None = None
    try:
        with sending([job.options for job in jobs]), _Messages(app, ledger, publish, alike) as messages:
            for page, num_left in _pages(jobs, messages):
                if sent is not None:
                    replies, num_listeners = sent.reply()
                    messages.has_listeners = num_listeners != 0
                    yield from _are_new(before, replies)
                    sent = None
                if num_left:
                    before, sent = page, ledger.send(page, num_left)
                else:
                    yield from _are_new(page, ledger.submit(page))
    finally:
        if sent is not None:
            sent.close()


def _pages(jobs: Sequence[Checked], messages: _Messages) -> Iterator[tuple[list[Submission], int]]:
    """Yield the jobs with their messages in pages for one script each, and how many jobs are left after the page."""
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
                f"the idempotency key of job {job.job_id} was used for a {job.call.task} with other parameters; "
                "give each job its own key, or ask for the result of the first one"
            )
        yield bool(reply)


def ranges(places: Sequence[int]) -> str:
    """Return 0, 1, 2, 5 as "0-2, 5"."""
    parts: list[list[int]] = []
    for place in places:
        if parts and place == parts[-1][1] + 1:
            parts[-1][1] = place
        else:
            parts.append([place, place])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
