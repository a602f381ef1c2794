"""The ledger of jobs in Redis (docs/delivery.md).

The ledger records which worker holds which message, which attempt is running, and which jobs have ended. Each step is
one Lua script (tasks/state/lua/ledger.lua), so no step is left half done when a worker dies or two workers run the same
job. All times come from Redis' clock, which all machines share.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from redis import Redis
from typing_extensions import TypedDict

from cellama.config import Settings, get_settings
from cellama.tasks.connection.connections import database_of, redis_time
from cellama.tasks.contract.all_kinds import KINDS, Result
from cellama.tasks.contract.events import EVENT_CLASSES, Event, EventClass, TerminalEvent, done, numbered
from cellama.tasks.contract.fairness import cost_of, fairness_key_of, limit_name
from cellama.tasks.contract.journal import EVENT_FIELD
from cellama.tasks.contract.json_values import encode
from cellama.tasks.contract.keys import (
    cancel_key,
    dead_key,
    events_channel,
    held_prefixes_key,
    job_key,
    journal_key,
    last_restore_key,
    result_key,
    terms_key,
    waiting_key,
)
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.names import SCOPE_SEPARATOR, queue_key
from cellama.tasks.contract.payloads import free_of
from cellama.tasks.contract.prefixes import prefixes_of
from cellama.tasks.contract.shapes.results import usage_of

from .history import Earlier, earlier_of, read_past
from .scripts import CACHE_TTL_S, Gathered, SentScript, run_script

SUBMISSION_STEP_S = 2e-4  # seconds between jobs queued in one call: the smallest step of `waiting_score`
MAX_ATTEMPTS = 3  # consecutive attempts without a token or an end; then the job is a dead-letter job
DEAD_TTL_S = 7 * 86400  # how long a dead-letter job can be queued again
CANCEL_TTL_S = 7 * 86400  # how long a cancellation waits for the job's worker to return
REFUSED_S = 3  # how long Celery may take to end a job whose message it has refused; then the reaper ends it.
# How long a worker may take to report the end of a job to Celery; then the reaper reports it. At least CHORD_CLAIM_S.
SETTLE_S = 30
MAX_RESTORED = 200  # messages per script and kind, which block Redis for a few milliseconds
PAGE_PART = 8  # a page is at most 1/8 of a list, so that other workers get messages as well
PAGE_MESSAGE_BYTES = 1 << 16  # larger messages are taken alone, because a page is in memory as a whole
MAX_KEYS_AHEAD = 100  # fairness keys that an estimate of a position reads, which takes about a millisecond
MAX_WORK_UNITS = 10**9
MAX_ENTRY_BYTES = 480 << 20  # a value in Redis has up to 512 MiB, and Celery adds a few fields
DEAD = "dead"  # error code of jobs that crashed their workers repeatedly
# What the worker must do. The attempt has started only with "run", "cancelled" and "dead". Otherwise the job has ended
# ("done"), its entry has expired ("gone"), another worker holds its message ("superseded"), or the job may have crashed
# a worker ("suspect").
Verdict = Literal["run", "cancelled", "dead", "done", "gone", "superseded", "suspect"]
State = Literal["queued", "running", "handed_back", "done"]
Contexts = tuple[tuple[str, bytes], ...]  # pairs of a Redis key and a value (contexts.py, replies.py)
# For each model: how many messages a page may have, and the keys of the lists to take them from, in this order.
PageLimits = Sequence[tuple[int, Sequence[str]]]
RunScript = Callable[[str, Sequence[str], Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class JobWork:
    """The amount of work that a job requests.

    `num_units` is the number of tokens for completions, and the number of texts for other jobs. The work consists of
    `num_parts` parts, which can be computed concurrently.
    """

    kind: str  # the name of the task without prefix, such as "generate"
    num_units: int = 1
    num_parts: int = 1
    is_exact: bool = False  # True for a completion that can only end at max_tokens

    @classmethod
    def of_kind(cls, sample_kind: str, num_units: int = 1, num_parts: int = 1) -> JobWork:
        """Create a job's work from a `sample_kind`, such as "generate" or "generate!"."""
        return cls(sample_kind.rstrip("!"), num_units, num_parts, is_exact=sample_kind.endswith("!"))

    @property
    def counts_tokens(self) -> bool:
        """Return whether the work is measured in tokens. Other work is measured in seconds."""
        return self.kind in ("generate", "chat")

    @property
    def sample_kind(self) -> str:
        """Return the kind as written in sample keys and in the ledger. A trailing "!" means that `is_exact` is true."""
        return f"{self.kind}!" if self.is_exact else self.kind

    @property
    def text(self) -> str:
        """Return the work in the format that the ledger stores."""
        return f"{self.sample_kind} {self.num_units} {self.num_parts}"


def work_of_text(text: str) -> JobWork:
    """Parse the work that the ledger stores.

    If the text is malformed, return the work of a `generate` job with default parameters.
    """
    try:
        kind, num_units, num_parts = text.split()
        return JobWork.of_kind(kind, max(1, int(num_units)), max(1, int(num_parts)))
    except ValueError:
        return JobWork("generate", GenerateJob.model_fields["max_tokens"].default)


def work_of(task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JobWork:
    """Return the work that a call requests. If the call is invalid, defaults replace the invalid values."""
    kind = KINDS.get(task)
    name = task.removeprefix("cellama.")
    given = {**dict(zip(kind.positional if kind else (), args, strict=False)), **kwargs}
    if kind is not None and kind.completes:
        num_parts = _count(given.get("n"), 1)
        num_units = num_parts * _count(given.get("max_tokens"), GenerateJob.model_fields["max_tokens"].default)
        is_exact = given.get("ignore_eos") is True and not given.get("stop") and not given.get("stop_token_ids")
        return JobWork(name, num_units, num_parts, is_exact=is_exact)
    items = next(
        (given[part] for part in ("lines", "texts", "documents") if isinstance(given.get(part), list | tuple)), ()
    )
    return JobWork(name, max(1, len(items)), max(1, len(items)) if name == "chunk" else 1)


def _count(given: Any, default: int) -> int:
    return given if type(given) is int and 0 < given <= MAX_WORK_UNITS else default


def tenant_of(task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the tenant whose request creates a job, or "" if it is unknown. The call may be invalid.

    The tenant is the `cache_scope` without the salt. A chunk of a bulk run has a tenant if all its lines have the same
    tenant.
    """
    kind = KINDS.get(task)
    given = {**dict(zip(kind.positional if kind else (), args, strict=False)), **kwargs}
    lines = given.get("lines")
    if not isinstance(lines, list | tuple):
        return _tenant_in(given)
    tenants = {_tenant_in(line.get("params")) if isinstance(line, Mapping) else "" for line in lines}
    return tenants.pop() if len(tenants) == 1 else ""


def _tenant_in(params: Any) -> str:
    scope = params.get("cache_scope") if isinstance(params, Mapping) else None
    return scope.partition(SCOPE_SEPARATOR)[0] if isinstance(scope, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCall:
    """A task call whose queue, priority and timeout have been settled."""

    task: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    queue: str
    priority: int = 0
    timeout_s: float | None = None
    headers: dict[str, Any] = field(default_factory=dict)
    delay_s: float = 0.0  # until the job may start
    given_fairness_key: str | None = None  # None if the call sets no key

    @property
    def work(self) -> JobWork:
        """Return the work that the call requests."""
        return work_of(self.task, self.args, self.kwargs)

    @property
    def tenant(self) -> str:
        """Return the tenant whose request creates the job, or "" if it is unknown."""
        return tenant_of(self.task, self.args, self.kwargs)

    @property
    def fairness_key(self) -> str:
        """Return the fairness key, by which waiting jobs share the workers.

        The fairness key is the key that the call sets, or else the tenant, or else the setting `default_fairness_key`.
        """
        if self.given_fairness_key is not None:
            return self.given_fairness_key
        return fairness_key_of(self.tenant or get_settings().default_fairness_key)

    @property
    def prefixes(self) -> str:
        """Return the hashes of the prompt's prefixes, or "" if the prompt is short or the setting `affinity` is off."""
        return prefixes_of(self.task, self.queue, self.args, self.kwargs) if get_settings().affinity else ""

    def digest(self, positional: Sequence[str]) -> str:
        """Return a digest of the parameters, which is the same whether parameters are passed by position or by name."""
        free = free_of(KINDS[self.task].payload, positional, self.kwargs)
        names = free if len(self.args) <= len(free) else positional
        parameters = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return hashlib.sha256(json.dumps([self.task, parameters], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Message:
    """The message of a job in kombu's format: the key of its list, its text, and Celery's events as (topic, event).

    A requeued job keeps the text of its message.
    """

    key: str
    payload: str
    events: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to record in the ledger and to queue.

    A job with a `digest` of its parameters is idempotent, and its entry is kept for as long as its result.
    """

    job_id: str
    call: TaskCall
    message: Message
    digest: str = ""

    @property
    def num_bytes(self) -> int:
        """Return the approximate number of bytes that submitting the job sends to Redis."""
        return 2 * len(self.message.payload)


def submit_arguments(
    jobs: Sequence[Submission], num_following: int, step_s: float, limits: str = ""
) -> tuple[list[str], list[Any]]:
    """Return the keys and arguments of the script `submit`.

    The jobs get submission times that are `step_s` seconds apart. If `limits` (weights and limits as JSON) is given,
    jobs above a limit are rejected.
    """
    keys: list[str] = []
    args: list[Any] = [step_s, num_following, limits]
    for job in jobs:
        call, message = job.call, job.message
        keys += [job_key(job.job_id), message.key]
        timeout = "" if call.timeout_s is None else call.timeout_s
        args += [job.job_id, call.task, call.queue, call.priority, timeout, call.delay_s, job.digest]
        parts = [part for event in message.events for part in event]
        args += [call.work.text, call.tenant, call.fairness_key, call.prefixes]
        args += [message.payload, len(message.events), *parts]
    return keys, args


@dataclass(frozen=True, slots=True)
class JobsAhead:
    """The jobs that get a slot before a waiting job."""

    num_jobs: int
    num_first: int  # jobs at the start of the queue
    of_keys: tuple[tuple[str, int], ...] = ()  # the other jobs by fairness key: one of them, and their number


def arguments_of_ahead(job_id: str) -> tuple[list[str], list[Any]]:
    """Return the keys and arguments of the script `ahead`, which starts its reply with the number of jobs."""
    return [terms_key()], [job_id, json.dumps(get_settings().fairness_weights), MAX_KEYS_AHEAD]


@dataclass(frozen=True, slots=True)
class Taken:
    """A message that a worker has taken. The token proves that the worker holds the message.

    The token is empty if the job has no entry.
    """

    job_id: str
    token: str
    waited_s: float | None = field(default=None, compare=False)  # since submission, by Redis' clock; None if unknown


@dataclass(frozen=True, slots=True)
class Fetched:
    """A taken message, and the key of the list that it was taken from."""

    key: str
    payload: bytes  # empty if it is the ticket itself
    taken: Taken


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """The prefix cache of a worker. The worker prefers jobs whose prefixes are in its cache (docs/affinity.md)."""

    worker: str  # the name of its process
    bytes: float  # size, in bytes of prompts
    bytes_per_s: float  # of prompts that the worker can prefill


class JobsLeft(Exception):
    """Other workers hold the prefixes of a list's next jobs, so this worker must leave the list to those workers."""

    def __init__(self, wait_s: float) -> None:
        """Create the error. The worker must leave the list for `wait_s` seconds."""
        super().__init__(f"leave the list to other workers for {wait_s:g} s")
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of one page of a purge. `others` contains messages whose jobs must be ended individually."""

    num_messages: int
    num_ended: int
    others: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Ending:
    """The outcome of a job: its last event, and its result if the job succeeded and Celery must still store it."""

    event: TerminalEvent
    result: Result | None


@dataclass(frozen=True, slots=True)
class CeleryState:
    """A job's state as the JSON that Celery stores. The state never expires if `expires_s` is None."""

    value: bytes
    expires_s: int | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a job.

    `run` is the fencing token, because Redis can assign the same `number` twice if it loses its last writes.
    `num_failures` is the number of consecutive attempts without a token, including this attempt.
    """

    job_id: str
    run: str
    number: int
    num_failures: int
    verdict: Verdict
    waited_s: float = field(default=0.0, compare=False)  # since the job was submitted, by Redis' clock
    next_seq: int = 0  # the seq of its first event
    before: tuple[Earlier, ...] = field(default=(), compare=False)  # earlier attempts, the previous one last
    fairness_key: str = field(default="", compare=False)
    fairness_weights: tuple[float, ...] = field(default=(), compare=False)  # of the levels of the key

    @property
    def run_id(self) -> str:
        """Return an id that is unique among the attempts at all jobs."""
        return f"{self.job_id}#{self.run}"


def renamed(message: dict[str, Any], job_id: str, new_id: str) -> dict[str, Any]:
    """Return a job's message, rewritten for a new job with the id `new_id`."""
    headers, properties = message["headers"], message["properties"]
    headers["id"] = properties["correlation_id"] = new_id
    headers["eta"] = None  # this time has passed
    if headers.get("root_id") == job_id:
        headers["root_id"] = new_id
    properties["delivery_tag"] = str(uuid.uuid4())
    return message


class DeadJob(TypedDict):
    """A dead-letter job, which ended because it crashed its workers repeatedly."""

    id: str
    at: float  # Unix seconds
    task: str
    queue: str
    attempts: int
    last_worker: str
    error: str  # the error code


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event to write to a job's stream.

    An event without a `run` does not belong to an attempt, and is written only while no attempt is running.

    Raises ValueError, TypeError or RecursionError if the event can't be written, so that the content of an event never
    makes `Ledger.write` fail.
    """

    job_id: str
    run: str | None = None
    event: Event  # with its seq
    result: Result | None = None  # result of a successful job, if Celery stores it later
    stored: CeleryState | None = None  # state of a successful job, if the script stores the result for Celery
    token: str = ""  # token of the message that the script releases, together with `stored`
    contexts: Contexts = ()  # stored with the end of a job
    cost_of_lines: float = 0.0  # of a part of a bulk run, in tokens (contract/fairness.py)
    packed: bytes = b""  # all earlier events of a job that ends (contract/journal.py), if they can be packed
    event_json: bytes = field(init=False, repr=False)
    result_json: bytes = field(init=False, repr=False)  # empty without a result

    def __post_init__(self) -> None:
        if self.event["type"] not in EVENT_CLASSES:
            raise ValueError(f"event type: {self.event['type']!r} is unknown; add it to EVENT_CLASSES")
        object.__setattr__(self, "event_json", encode(self.event))
        object.__setattr__(self, "result_json", b"" if self.result is None else encode(self.result))
        if self.num_bytes > MAX_ENTRY_BYTES:
            raise ValueError(f"the event and its result total {self.num_bytes} bytes; the limit is {MAX_ENTRY_BYTES}")

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes to send to Redis."""
        context_bytes = sum(len(context) for _, context in self.contexts)
        return (
            len(self.event_json)
            + len(self.result_json)
            + (len(self.stored.value) if self.stored else 0)
            + len(self.packed)
            + context_bytes
        )

    @property
    def values(self) -> list[Any]:
        """Return the arguments that describe this entry to the script `write`."""
        values = [self.job_id, self.run or "", self.event_class, self.event["seq"]]
        values.append(self.event_json.partition(b",")[2])  # the script adds the seq
        if self.event_class == "terminal":
            stored, expires_s = (self.stored.value, self.stored.expires_s or "") if self.stored else (b"", "")
            is_dead = self.event.get("code") == DEAD
            values += [int(is_dead), self.result_json, stored, expires_s, self.token, self.cost, self.packed]
            values.append(len(self.contexts))
            values += [part for context in self.contexts for part in context]
        return values

    @property
    def cost(self) -> float | str:
        """Return the cost in tokens of a job that ends with this event, or "" if the event doesn't report usage."""
        usage: Any = self.event.get("usage")
        return cost_of(usage) + self.cost_of_lines if usage else ""

    @property
    def event_class(self) -> EventClass:
        return EVENT_CLASSES[self.event["type"]]


class Ledger:
    """Reads and writes the ledger. All methods are thread-safe, and can raise RedisError."""

    def __init__(
        self,
        redis: Redis,
        *,
        settings: Settings | None = None,
        gathers: bool = False,
        rejects: bool = False,
    ) -> None:
        """Use the limits and lifetimes from these settings (default: `get_settings()`).

        With `gathers`, attempts that several threads start at the same time share one round trip. With `rejects`, the
        setting `over_limit` applies to submissions.
        """
        settings = settings or get_settings()
        self._redis = redis
        self._run_begin: RunScript = Gathered(redis).run if gathers else partial(run_script, redis)
        limits = {limit_name(model=model): limit for model, limit in settings.model_limits.items()}
        self._terms = json.dumps(
            {"weights": settings.fairness_weights, "limits": {**settings.fairness_limits, **limits}}
        )
        self._rejecting_limits = self._terms if rejects and settings.over_limit == "reject" else ""
        self._database = database_of(redis)
        self._result_ttl_s = settings.result_ttl_s
        self._event_ttl_s = settings.event_ttl_s
        self._write_options = (
            EVENT_FIELD,
            settings.journal_max_events,
            settings.event_ttl_s,
            settings.result_ttl_s,
            DEAD_TTL_S,
            SETTLE_S,
            events_channel("", self._database),
        )

    # For producers

    def ping(self) -> None:
        """Raise RedisError immediately if Redis does not answer."""
        self._redis.ping()

    def submit(self, jobs: Sequence[Submission], num_following: int = 0) -> list[int]:
        """Record jobs and queue their messages in one step.

        For each job, return 1 if it is new, 0 if it exists, or -1 if it exists with a different digest. `num_following`
        is the number of jobs that later calls will submit for the same request. These jobs must be placed after the
        jobs in this call. Raises ResponseError with OVERLIMIT if jobs are rejected. In this case, no job is queued.
        """
        if not jobs:
            return []
        verdicts: list[int] = run_script(self._redis, "submit", *self._submission(jobs, num_following))[0]
        return verdicts

    def _submission(self, jobs: Sequence[Submission], num_following: int) -> tuple[list[str], list[Any]]:
        return submit_arguments(jobs, num_following, SUBMISSION_STEP_S, self._rejecting_limits)

    def send(self, jobs: Sequence[Submission], num_following: int) -> SentScript:
        """Start `submit` without waiting for the script's reply.

        This reply contains the return value of `submit`, and the number of subscribers that received an event.
        """
        return SentScript(self._redis, "submit", *self._submission(jobs, num_following))

    def cancel(self, job_id: str, *, running: bool) -> bool:
        """Cancel a job. Return True if this call ended the job, because no worker was running it.

        With `running`, a running job is ended by its worker, or by the next worker that starts it.
        """
        keys = [job_key(job_id), cancel_key(job_id)]
        state: Any = run_script(self._redis, "cancel", keys, [job_id, int(running), CANCEL_TTL_S])
        if state.decode() not in ("queued", "handed_back"):
            return False
        return self.end_waiting(job_id, done("cancelled", read_past(self._redis, job_id).usage))

    def end_waiting(self, job_id: str, event: TerminalEvent, result: Result | None = None) -> bool:
        """End a job with this event, unless a worker is running it. Return whether this call ended the job."""
        superseded, _ = self.write([Entry(job_id=job_id, event=numbered(event, 0), result=result)])
        return not superseded

    def state(self, job_id: str) -> State | None:
        """Return the state of a job, or None if it has no entry."""
        found: Any = self._redis.hget(job_key(job_id), "state")
        state: State | None = found.decode() if found else None
        return state

    # For workers: messages

    def now(self) -> float:
        """Return the time in Unix seconds by Redis' clock."""
        return redis_time(self._redis)

    def take(
        self,
        key: str,
        ticket_id: str,
        lease_s: float,
        limits: PageLimits = (),
        *,
        cache: WorkerCache | None = None,
        token: str | None = None,
        is_repeated: bool = False,
    ) -> list[Fetched]:
        """Lease the job that a ticket stands for, and a page of further jobs within `limits`, for `lease_s` seconds.

        The ticket is a cellama message with the id `ticket_id`, which was popped from the list `key`. The first job in
        the result is the next job in this list. The result is empty if the list has no job for this ticket. If the
        ticket's own job has no ledger entry, the result contains the ticket's message with an empty token. If the first
        call may not have reached Redis, repeat the call with the same `token` and `is_repeated`.

        A worker with a `cache` gets jobs whose prefixes it holds, among the first jobs of the tenant whose turn it is.
        Raises JobsLeft if the worker must leave these jobs to other workers. In this case, the ticket is returned to
        the list.
        """
        token = token or new_run()
        keys, args = [key], [ticket_id, token, int(is_repeated), lease_s, PAGE_PART, PAGE_MESSAGE_BYTES, self._terms]
        args.append("" if cache is None else json.dumps(asdict(cache)))
        for num_messages, lists in limits:
            keys += lists
            args += [num_messages, len(lists)]
        reply = run_script(self._redis, "take", keys, args)
        fetched = []
        for start in range(0, len(reply), 5):
            list_key, job_id, message, own_token, waited = reply[start : start + 5]
            if not job_id:
                raise JobsLeft(float(waited))
            taken = Taken(job_id.decode(), own_token.decode(), float(waited) if waited else None)
            fetched.append(Fetched(list_key.decode(), message, taken))
        return fetched

    def keep_cache(self, worker: str) -> None:
        """Keep the record of a worker's cache for another CACHE_TTL_S seconds.

        Once the record expires, other workers ignore the cache.
        """
        self._redis.expire(held_prefixes_key(worker), CACHE_TTL_S)

    def forget_cache(self, worker: str) -> None:
        """Remove the record of a worker's cache."""
        self._redis.delete(held_prefixes_key(worker))

    def renew(self, held: Sequence[Taken], lease_s: float) -> list[Taken]:
        """Renew the leases of messages. Return the messages that this worker no longer holds."""
        if not held:
            return []
        args: list[Any] = [lease_s, *(part for taken in held for part in (taken.job_id, taken.token))]
        lost: Any = run_script(self._redis, "renew", [job_key(taken.job_id) for taken in held], args)
        return [held[index] for index in lost]

    def release(self, taken: Taken) -> None:
        """Release a message that Celery no longer needs, if this worker still holds it."""
        run_script(self._redis, "release", [job_key(taken.job_id)], [taken.job_id, taken.token, REFUSED_S, SETTLE_S])

    def requeue(self, taken: Taken) -> None:
        """Return a message to its queue, if this worker still holds it."""
        keys = [job_key(taken.job_id), cancel_key(taken.job_id)]
        run_script(self._redis, "requeue", keys, [taken.job_id, taken.token])

    def set_aside(self, taken: Taken, seconds: float) -> None:
        """Withhold a message from all workers for `seconds`. Afterwards, `restore` returns the message to its queue."""
        run_script(self._redis, "set_aside", [job_key(taken.job_id)], [taken.job_id, taken.token, seconds])

    def restore(self, lease_s: float) -> int:
        """Return messages to their queues if their leases have expired or their ETAs have passed.

        If no worker has called this method for a third of the lease duration, workers may have been unable to renew
        their leases. In this case, the method extends all leases by half their duration instead. Return the number of
        expired leases.
        """
        num_lost, num_delayed = MAX_RESTORED, MAX_RESTORED
        total = 0
        while MAX_RESTORED in (num_lost, num_delayed):
            num_lost, num_delayed = run_script(self._redis, "restore", [last_restore_key()], [lease_s, MAX_RESTORED])
            total += num_lost
        return total

    # For workers: attempts

    def begin(
        self,
        job_id: str,
        run: str,
        worker: str,
        *,
        token: str | None = None,
        alone: bool = False,
        started: CeleryState | None = None,
    ) -> Attempt:
        """Start an attempt at a job on this worker.

        Return the attempt, whose `verdict` determines what the worker must do.

        `run` identifies the attempt, so the call can be repeated. `token` must be the message's current token, because
        only the worker that holds the message may start the job. If `token` is None, this check is skipped. If the last
        attempt neither generated a token nor ended the job, that attempt may have crashed its worker. The verdict is
        then "suspect", unless this attempt runs `alone`. If the attempt starts, `started` is stored as Celery's state
        of the job.
        """
        args = [run, worker, MAX_ATTEMPTS, int(alone), "any" if token is None else token, *_parts(started)]
        keys = [job_key(job_id), cancel_key(job_id), result_key(job_id)]
        reply: Any = self._run_begin("begin", keys, args)
        verdict, number, failures, waited_s, *more = reply
        attempt = Attempt(
            job_id=job_id,
            run=run,
            number=int(number),
            num_failures=int(failures),
            verdict=verdict.decode(),
            waited_s=float(waited_s),
        )
        if not more:
            return attempt
        before, now, next_seq, fairness_key, charge = more
        return replace(
            attempt,
            before=earlier_of(before, now),
            next_seq=int(next_seq),
            fairness_key=fairness_key.decode(),
            fairness_weights=tuple(float(weight) for weight in charge.split()[1:]),
        )

    def write(self, entries: Sequence[Entry]) -> tuple[set[int], set[int]]:
        """Write events to the journals of their jobs and publish them, in order.

        Return two sets of indices of entries whose events were not written. The first set contains the events of
        superseded attempts. The second set contains the events that would follow a gap in the stream, because Redis has
        lost earlier events.
        """
        args: list[Any] = [*self._write_options]
        for entry in entries:
            args += entry.values
        superseded, gaps = run_script(self._redis, "write", [], args)
        return set(superseded), set(gaps)

    def end_unknown(self, job_id: str, event: TerminalEvent) -> None:
        """Write the last event of a job that is not in the ledger, unless the job's stream has already ended."""
        data = encode(numbered(event, 0)).partition(b",")[2]  # the script adds the seq
        args = [EVENT_FIELD, self._event_ttl_s, events_channel(job_id, self._database), data]
        run_script(self._redis, "end_unknown", [job_key(job_id), journal_key(job_id)], args)

    def hand_back(self, attempt: Attempt) -> None:
        """End an attempt so that another worker continues the job. The attempt does not count as a failure."""
        run_script(self._redis, "hand_back", [job_key(attempt.job_id)], [attempt.job_id, attempt.run])

    def ending(self, job_id: str) -> Ending | None:
        """Return the outcome of a job, or None if the job has not ended or its entry has expired."""
        found: Any = self._redis.hmget(job_key(job_id), "end", "result", "task")
        return _ending(*found) if found[0] else None

    def settle(self, job_id: str) -> None:
        """Record that Celery has received a job's outcome, and that the canvas' next steps have been sent."""
        run_script(self._redis, "settle", [job_key(job_id)], [job_id])

    def add_tickets(self, key: str, max_tickets: int) -> int:
        """Push up to `max_tickets` tickets that the list `key` lacked at the last call and still lacks.

        Return the number of pushed tickets.
        """
        num_tickets: int = run_script(self._redis, "add_tickets", [key], [max_tickets, self._terms])
        return num_tickets

    def claim_due(self, max_jobs: int, seconds: float) -> list[tuple[str, str]]:
        """Claim up to `max_jobs` due jobs, which other reapers then can't claim for `seconds`.

        Return the id and the state of each claimed job. The state is "held" if the job has ended and a worker holds its
        message.
        """
        found: Any = run_script(self._redis, "claim_due", [], [max_jobs, seconds])
        values = [raw.decode() for raw in found]
        return list(zip(values[::2], values[1::2], strict=True))

    def purge_page(
        self, queue: str, priority: int, max_messages: int, revoked: tuple[bytes, bytes], expires_s: int | None
    ) -> Purged:
        """Cancel up to `max_messages` jobs that are waiting in the queue. Jobs that a worker holds are not affected.

        `revoked` is the value that Celery stores, split into the parts before and after the job's id. The value expires
        after `expires_s` seconds, or never if `expires_s` is None.
        """
        event = encode(numbered(done("cancelled", usage_of()), 0)).partition(b",")[2]
        keys = [queue_key(queue, priority), waiting_key(queue)]
        args = [*self._write_options, max_messages, event, *revoked, expires_s or ""]
        num_messages, num_ended, others = run_script(self._redis, "purge", keys, args)
        return Purged(num_messages, num_ended, others)

    def keep_journal(self, job_id: str) -> None:
        """Extend the lifetime of an ended job's events to the lifetime of results."""
        self._redis.expire(journal_key(job_id), self._result_ttl_s)

    # For clients

    def ahead(self, job_id: str) -> JobsAhead | None:
        """Return the jobs that get a slot before this job, or None if this job is not waiting.

        The result is an estimate if jobs with several fairness keys are waiting.
        """
        found: Any = run_script(self._redis, "ahead", *arguments_of_ahead(job_id))
        if found is None:
            return None
        num_jobs, num_first, *rest = found
        return JobsAhead(
            num_jobs, num_first, tuple((raw.decode(), count) for raw, count in zip(rest[::2], rest[1::2], strict=True))
        )

    def queue(self, job_id: str) -> str | None:
        """Return the Celery queue of a job, or None if it has no entry."""
        found: Any = self._redis.hget(job_key(job_id), "queue")
        return found.decode() if found else None

    def num_waiting(self, queue: str) -> int:
        """Return how many of a queue's jobs are waiting for a slot."""
        return int(self._redis.zcard(waiting_key(queue)))

    def dead(self) -> list[DeadJob]:
        """Return the dead-letter jobs, which crashed their workers MAX_ATTEMPTS times, latest first."""
        entries: Any = self._redis.zrevrange(dead_key(), 0, -1, withscores=True)
        found: list[DeadJob] = []
        for raw, at in entries:
            job_id = raw.decode()
            stored: Any = self._redis.hmget(job_key(job_id), "task", "attempt", "worker", "queue")
            if stored[0] is None:  # its entry has expired
                self._redis.zrem(dead_key(), job_id)
                continue
            task, attempts, worker, queue = (value.decode() for value in stored)
            job: DeadJob = {
                "id": job_id,
                "at": at,
                "task": task,
                "queue": queue,
                "attempts": int(attempts),
                "last_worker": worker,
                "error": "dead",
            }
            found.append(job)
        return found

    def requeue_dead(self, job_id: str) -> str | None:
        """Requeue a dead-letter job as a new job with the same message.

        Return the new id, or None if the job is not a dead-letter job.
        """
        stored: Any = self._redis.hmget(job_key(job_id), "message", "list")
        if stored[0] is None:
            return None
        new_id = str(uuid.uuid4())
        message = renamed(json.loads(stored[0]), job_id, new_id)
        keys = [job_key(job_id), job_key(new_id), stored[1].decode()]
        done = run_script(self._redis, "requeue_dead", keys, [job_id, new_id, json.dumps(message)])
        return new_id if done else None


def _parts(stored: CeleryState | None) -> tuple[bytes, int | str]:
    return (b"", "") if stored is None else (stored.value, stored.expires_s or "")


def _ending(event: bytes, result: bytes | None, task: bytes) -> Ending:
    kind = KINDS.get(task.decode())
    return Ending(json.loads(event), kind.shape(json.loads(result)) if kind and result else None)


def new_run() -> str:
    """Return a new unique token, which identifies an attempt, or the worker that has taken a message."""
    return os.urandom(16).hex()
