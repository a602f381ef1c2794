"""Read what Redis stores about one job: its ledger entry, its attempts, its output so far, and its parameters."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from cellama.tasks.contract.events import Event, is_terminal
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import ended_key, job_key, journal_key, result_key, running_key
from cellama.tasks.contract.names import model_of

from .job_list import REASONS, FoundState

MAX_SHOWN_BYTES = 256 << 10  # size of a message or result above which it is not read
EVENTS_PER_PAGE = 500  # which take some milliseconds of the event loop
FIELDS = (
    "state", "task", "queue", "priority", "submitted_at", "delay", "tenant", "attempt", "worker", "began_at", "left_at",
    "lost", "attempts", "end",
)  # fmt: skip


DETAILS = ("usage", "timings", "warnings", "tool_calls")  # of a job's end, which its result also contains


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt at a job. Times are in Unix seconds. `ended_at` is None while the attempt is running."""

    worker: str
    began_at: float
    ended_at: float | None
    is_lost: bool  # True if its worker did not report an end


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job in any state. Times are in Unix seconds, by Redis' clock, and None if they are unknown."""

    job_id: str
    state: FoundState
    kind: str  # name of the task without `cellama.`
    model: str
    priority: int
    tenant: str  # "" if no tenant's request created the job
    submitted_at: float
    may_start_at: float | None  # start of a job with an ETA, in Unix seconds
    num_attempts: int
    attempts: list[AttemptRecord]  # the last attempts, oldest first
    started_at: float | None  # when a running job got its slot
    ended_at: float | None
    end: Mapping[str, Any] | None  # its last event
    parameters: Mapping[str, Any] | None  # deleted when the job ends, and None if they are too large
    result: Any  # result of an ended job without output events; None if missing or too large

    @property
    def is_open(self) -> bool:
        return self.state in ("waiting", "running")


@dataclass(slots=True)
class JobOutput:
    """The output of a job up to its event `last_seq`: the text and the reasoning of each completion.

    `last_seq` is -1 if there are no events.
    """

    texts: dict[int, str] = field(default_factory=dict)
    reasoning: dict[int, str] = field(default_factory=dict)
    started: Mapping[str, Any] | None = None
    num_lines: int = 0  # finished lines of a bulk run
    last_seq: int = -1
    has_ended: bool = False
    is_trimmed: bool = False  # True if the first events have expired


async def read_job(redis: Redis, job_id: str) -> JobRecord | None:
    """Return a job, or None if the job is unknown or has expired. Raises RedisError."""
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hmget(job_key(job_id), FIELDS)
        pipe.zscore(running_key(), job_id)
        pipe.zscore(ended_key(), job_id)
        pipe.hstrlen(job_key(job_id), "message")
        pipe.strlen(result_key(job_id))
        pipe.xrevrange(journal_key(job_id), count=1)
        values, started_at, ended_at, message_bytes, result_bytes, last = await pipe.execute()
    found = {name: "" if value is None else value.decode() for name, value in zip(FIELDS, values, strict=True)}
    if not found["state"] or not found["task"]:
        return None
    end = json.loads(found["end"]) if found["end"] else None
    submitted_at, delay_s = float(found["submitted_at"]), float(found["delay"] or 0)
    message: Any = None
    if 0 < message_bytes <= MAX_SHOWN_BYTES:
        message = await redis.hget(job_key(job_id), "message")
    result: Any = None
    if end is not None and 0 < result_bytes <= MAX_SHOWN_BYTES:
        stored: Any = await redis.get(result_key(job_id))
        result = _result(stored)
    if end is not None and last:
        end |= events_in(last)[-1]
    elif end is not None and isinstance(result, dict):  # the journal has expired before the result
        end |= {name: result[name] for name in DETAILS if name in result}
    return JobRecord(
        job_id=job_id,
        state=_state(found["state"], started_at, end),
        kind=found["task"].removeprefix("cellama."),
        model=model_of(found["queue"]),
        priority=int(found["priority"] or 0),
        tenant=found["tenant"],
        submitted_at=submitted_at,
        may_start_at=submitted_at + delay_s if delay_s else None,
        num_attempts=int(found["attempt"] or 0),
        attempts=_attempts(found, ended_at),
        started_at=started_at,
        ended_at=ended_at,
        end=end,
        parameters=_parameters(message),
        result=result,
    )


def _state(state: str, started_at: float | None, end: Mapping[str, Any] | None) -> FoundState:
    """Return the job's state. A job that a worker holds counts as waiting until the job gets a slot."""
    if state != "done":
        return "waiting" if started_at is None else "running"
    if end is None or end["type"] == "error":
        return "failed"
    return REASONS.get(end["finish_reason"], "succeeded")


def _attempts(found: Mapping[str, str], ended_at: float | None) -> list[AttemptRecord]:
    attempts = []
    for line in found["attempts"].splitlines():
        _, began_at, left_at, lost, worker = line.split(" ", 4)
        attempts.append(AttemptRecord(_name(worker), float(began_at), float(left_at), lost == "1"))
    if found["began_at"]:
        until = float(found["left_at"]) if found["left_at"] else ended_at
        attempts.append(AttemptRecord(_name(found["worker"]), float(found["began_at"]), until, found["lost"] == "1"))
    return attempts


def _name(worker: str) -> str:
    return worker.partition(" ")[0]


def _parameters(message: bytes | None) -> Mapping[str, Any] | None:
    """Return the parameters in a queued message, or None if the message is malformed or compressed."""
    if not message:
        return None
    try:
        args, kwargs, _ = json.loads(base64.b64decode(json.loads(message)["body"]))
        return {**({"args": args} if args else {}), **kwargs}
    except (KeyError, TypeError, ValueError):
        return None


def _result(stored: bytes | None) -> Any:
    """Return the result from the JSON that Celery stored, or None if the job has no result."""
    try:
        value = json.loads(stored or b"null")
        return value["result"] if value and value["status"] == "SUCCESS" else None
    except (KeyError, TypeError, ValueError):
        return None


async def read_output(redis: Redis, job_id: str) -> JobOutput:
    """Return the output of a job so far.

    The journal is read in pages, so that other asyncio tasks can run in between.
    """
    output, after = JobOutput(), "-"
    while True:
        entries: Any = await redis.xrange(journal_key(job_id), min=after, count=EVENTS_PER_PAGE)
        for event in events_in(entries):
            _add(output, event)
        if len(entries) < EVENTS_PER_PAGE:
            return output
        after = f"({entries[-1][0].decode()}"


def _add(output: JobOutput, event: Event) -> None:
    output.is_trimmed |= event["seq"] != output.last_seq + 1
    output.last_seq = event["seq"]
    output.has_ended = is_terminal(event)
    if event["type"] == "started":
        output.started = event
    elif event["type"] == "token":
        index = event.get("index", 0)
        output.texts[index] = output.texts.get(index, "") + event["text"]
    elif event["type"] == "reasoning":
        index = event.get("index", 0)
        output.reasoning[index] = output.reasoning.get(index, "") + event["text"]
    elif event["type"] == "line":
        output.num_lines += 1
