"""What goes into the ledger, and what it answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from .contract.events import PROGRESS_TYPES, Event, is_terminal
from .encoding import encode

MAX_ENTRY_BYTES = 480 << 20  # Redis keeps up to 512 MiB under a key, and Celery adds some words
DEAD = "dead"  # error code of jobs that ended their workers again and again
Verdict = Literal["run", "done", "cancelled", "dead", "suspect"]  # what to do with an attempt


@dataclass(frozen=True, slots=True)
class Call:
    """What it takes to queue a job. `priority` and `timeout_s` are those of its payload."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str
    priority: int
    timeout_s: float | None
    headers: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Message:
    """A message in kombu's form: the list that it is pushed to, and Celery's events of it as (topic, event)."""

    key: str = ""
    payload: str = ""
    events: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to note, and to queue if there is a message. An idempotent one is remembered as long as its result."""

    job_id: str
    call: Call
    idempotent: bool = False
    message: Message = Message()

    @property
    def num_bytes(self) -> int:
        """About what it sends to Redis."""
        return 2 * len(self.message.payload)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a job. `number` is its fence; `num_failures` counts this and those before it without a token."""

    job_id: str
    number: int
    num_failures: int
    verdict: Verdict

    @property
    def run_id(self) -> str:
        """Names this run among all others, also of the same job."""
        return f"{self.job_id}#{self.number}"


@dataclass(frozen=True, slots=True)
class Entry:
    """An event to write. `attempt` None stands for nobody: it counts only as long as no worker has begun the job.

    What can't be written is refused here, with ValueError, TypeError or RecursionError: writing never fails for it.
    """

    job_id: str
    attempt: int | None
    event: Event  # with its seq
    result: dict[str, Any] | None = None  # with the end of a job that ends well, until Celery has it
    event_json: bytes = field(init=False, repr=False)
    result_json: bytes = field(init=False, repr=False)  # empty without one

    def __post_init__(self) -> None:
        object.__setattr__(self, "event_json", encode(self.event))
        object.__setattr__(self, "result_json", b"" if self.result is None else encode(self.result))
        if self.num_bytes > MAX_ENTRY_BYTES:
            raise ValueError(f"it would take {self.num_bytes} bytes, and Redis takes {MAX_ENTRY_BYTES} at most")

    @property
    def num_bytes(self) -> int:
        """What it sends to Redis."""
        return len(self.event_json) + len(self.result_json)

    @property
    def kind(self) -> str:
        if not is_terminal(self.event):
            return "token" if self.event["type"] in PROGRESS_TYPES else str(self.event["type"])
        return "dead" if self.event.get("code") == DEAD else "end"
