"""The records that go into the ledger, and those that it returns."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict

from cellama.tasks.contract.all_kinds import KINDS, Result
from cellama.tasks.contract.events import EVENT_CLASSES, Event, EventClass, TerminalEvent
from cellama.tasks.contract.keys import job_key
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.payloads import free_of

from .encoding import encode
from .history import Earlier

MAX_ASKED = 10**9
MAX_ENTRY_BYTES = 480 << 20  # Redis keeps up to 512 MiB under a key, and Celery adds some words
DEAD = "dead"  # error code of jobs that crashed their workers repeatedly
# What to do with an attempt. Nothing has started with the last four: the job has ended; it has ended and its entry has
# expired; another worker holds its message; it may have crashed a worker.
Verdict = Literal["run", "cancelled", "dead", "done", "gone", "superseded", "suspect"]
State = Literal["queued", "running", "handed_back", "done"]


@dataclass(frozen=True, slots=True)
class JobWork:
    """How much a job asks for: tokens of completions, else texts; its `pieces` can be computed at the same time."""

    kind: str  # of its task, such as "generate"
    asked: int = 1
    pieces: int = 1
    is_exact: bool = False  # a completion that ends by its length only

    @classmethod
    def of_kind(cls, sample_kind: str, asked: int = 1, pieces: int = 1) -> JobWork:
        """The work of a job whose `sample_kind` is this one."""
        return cls(sample_kind.rstrip("!"), asked, pieces, is_exact=sample_kind.endswith("!"))

    @property
    def counts_tokens(self) -> bool:
        """Whether it is counted in tokens; else in seconds."""
        return self.kind in ("generate", "chat")

    @property
    def sample_kind(self) -> str:
        """The kind as keys of samples and the ledger have it."""
        return f"{self.kind}!" if self.is_exact else self.kind

    @property
    def text(self) -> str:
        """As it stands in the ledger."""
        return f"{self.sample_kind} {self.asked} {self.pieces}"


def work_of_text(text: str) -> JobWork:
    """The work as it stands in the ledger; that of a usual job if the text is not one."""
    try:
        kind, asked, pieces = text.split()
        return JobWork.of_kind(kind, max(1, int(asked)), max(1, int(pieces)))
    except ValueError:
        return JobWork("generate", GenerateJob.model_fields["max_tokens"].default)


def work_of(task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JobWork:
    """What a call asks for. It need not be validated: nonsense counts as a usual job."""
    kind = KINDS.get(task)
    name = task.removeprefix("cellama.")
    given = {**dict(zip(kind.positional if kind else (), args, strict=False)), **kwargs}
    if kind is not None and kind.completes:
        pieces = _count(given.get("n"), 1)
        asked = pieces * _count(given.get("max_tokens"), GenerateJob.model_fields["max_tokens"].default)
        return JobWork(name, asked, pieces, is_exact=given.get("ignore_eos") is True and not given.get("stop"))
    many = next(
        (given[part] for part in ("lines", "texts", "documents") if isinstance(given.get(part), list | tuple)), ()
    )
    return JobWork(name, max(1, len(many)), max(1, len(many)) if name == "chunk" else 1)


def _count(given: Any, default: int) -> int:
    return given if type(given) is int and 0 < given <= MAX_ASKED else default


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCall:
    """A call of a task as its producer made it. `priority` and `timeout_s` are those of its payload."""

    task: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    queue: str
    priority: int = 0
    timeout_s: float | None = None
    headers: dict[str, Any] = field(default_factory=dict)
    delay_s: float = 0.0  # before it may run at all

    @property
    def work(self) -> JobWork:
        """What it asks for."""
        return work_of(self.task, self.args, self.kwargs)

    def digest(self, positional: Sequence[str]) -> str:
        """The same for the same parameters, however they were given."""
        free = free_of(KINDS[self.task].payload, positional, self.kwargs)
        names = free if len(self.args) <= len(free) else positional
        parameters = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return hashlib.sha256(json.dumps([self.task, parameters], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Message:
    """A message in kombu's form: the list that it is pushed to, and Celery's events of it as (topic, event).

    It is the job's only one: what is queued again is this text.
    """

    key: str
    payload: str
    events: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to note and to queue.

    With a `digest` of what was asked the job is idempotent, and remembered as long as its result.
    """

    job_id: str
    call: TaskCall
    message: Message
    digest: str = ""

    @property
    def num_bytes(self) -> int:
        """About what it sends to Redis."""
        return 2 * len(self.message.payload)


def submit_arguments(jobs: Sequence[Submission], following: int, step_s: float) -> tuple[list[str], list[Any]]:
    """Return the keys and arguments of the script that notes jobs, `step_s` apart."""
    keys: list[str] = []
    args: list[Any] = [step_s, following]
    for job in jobs:
        call, message = job.call, job.message
        keys += [job_key(job.job_id), message.key]
        timeout = "" if call.timeout_s is None else call.timeout_s
        args += [job.job_id, call.task, call.queue, call.priority, timeout, call.delay_s, job.digest]
        parts = [part for event in message.events for part in event]
        args += [call.work.text, message.payload, len(message.events), *parts]
    return keys, args


@dataclass(frozen=True, slots=True)
class Taken:
    """A message in a worker's hands, with the token by which the ledger knows this taking; '' if it holds nothing."""

    job_id: str
    token: str
    waited_s: float | None = field(default=None, compare=False)  # since it was submitted, by Redis' clock, if it knows


@dataclass(frozen=True, slots=True)
class Fetched:
    """A message that came in a page with another one, from the list of this key."""

    key: str
    payload: bytes
    taken: Taken  # without the id, which is in the message


@dataclass(frozen=True, slots=True)
class Purged:
    """What a page of a purge has done. `others` are messages whose jobs have to be ended one by one."""

    num_messages: int
    num_ended: int
    others: Sequence[bytes]


# The messages that a page may have: for each model how many, and from which lists, the first choice first.
PageLimits = Sequence[tuple[int, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended: its last event, and its result if it succeeded and Celery has not stored it yet."""

    event: TerminalEvent
    result: Result | None


@dataclass(frozen=True, slots=True)
class CeleryState:
    """A state of a job as Celery stores it, in JSON. `expires_s` None keeps it forever."""

    value: bytes
    expires_s: int | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a job. `run` is its fence: a Redis that has lost its last writes gives a `number` out a second time.

    `num_failures` counts this attempt and those before it without a token.
    """

    job_id: str
    run: str
    number: int
    num_failures: int
    verdict: Verdict
    waited_s: float = field(default=0.0, compare=False)  # since the job was submitted, by Redis' clock
    next_seq: int = 0  # of its first event
    before: tuple[Earlier, ...] = field(default=(), compare=False)  # the last one is the one before

    @property
    def run_id(self) -> str:
        """Names this run among all others, also of the same job."""
        return f"{self.job_id}#{self.run}"


def renamed(message: dict[str, Any], job_id: str, new_id: str) -> dict[str, Any]:
    """Return a message of kombu for a job with another id."""
    headers, properties = message["headers"], message["properties"]
    headers["id"] = properties["correlation_id"] = new_id
    headers["eta"] = None  # its time has come, long ago
    if headers.get("root_id") == job_id:
        headers["root_id"] = new_id
    properties["delivery_tag"] = str(uuid.uuid4())
    return message


class DeadJob(TypedDict):
    """A job that was set aside because it crashed its workers repeatedly."""

    id: str
    at: float  # Unix seconds
    task: str
    queue: str
    attempts: int
    last_worker: str
    error: str  # its code


Contexts = tuple[tuple[str, bytes], ...]  # by key, as `contexts` packs them


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event to write. Without a `run` it belongs to no attempt, and is written only while no attempt runs.

    Raises ValueError, TypeError or RecursionError for an event that can't be written, so that `Ledger.write` never
    fails because of its content.
    """

    job_id: str
    run: str | None = None
    event: Event  # with its seq
    result: Result | None = None  # with the end of a job that ends well, until Celery has it
    stored: CeleryState | None = None  # instead of a result: Celery has it with this event
    token: str = ""  # with that: of the taking of its message, which is gone then
    contexts: Contexts = ()  # with the end of a job
    event_json: bytes = field(init=False, repr=False)
    result_json: bytes = field(init=False, repr=False)  # empty without one

    def __post_init__(self) -> None:
        if self.event["type"] not in EVENT_CLASSES:
            raise ValueError(f"the event type {self.event['type']!r} has no class; add it to EVENT_CLASSES")
        object.__setattr__(self, "event_json", encode(self.event))
        object.__setattr__(self, "result_json", b"" if self.result is None else encode(self.result))
        if self.num_bytes > MAX_ENTRY_BYTES:
            raise ValueError(f"it would take {self.num_bytes} bytes, and Redis takes {MAX_ENTRY_BYTES} at most")

    @property
    def num_bytes(self) -> int:
        """The bytes that it sends to Redis."""
        kept = sum(len(context) for _, context in self.contexts)
        return len(self.event_json) + len(self.result_json) + (len(self.stored.value) if self.stored else 0) + kept

    @property
    def values(self) -> list[Any]:
        """The arguments of write.lua."""
        values = [self.job_id, self.run or "", self.event_class, self.event["seq"]]
        values.append(self.event_json.partition(b",")[2])  # the script knows the seq
        if self.event_class == "terminal":
            stored, expires_s = (self.stored.value, self.stored.expires_s or "") if self.stored else (b"", "")
            is_dead = self.event.get("code") == DEAD
            values += [int(is_dead), self.result_json, stored, expires_s, self.token, len(self.contexts)]
            values += [part for context in self.contexts for part in context]
        return values

    @property
    def event_class(self) -> EventClass:
        return EVENT_CLASSES[self.event["type"]]
