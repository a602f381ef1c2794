"""The ledger of jobs in Redis: who holds which message, who runs which attempt, what has ended (docs/delivery.md).

Every step is one Lua script (tasks/state/lua), so that a worker that dies, or two that run the same job, leave
nothing half done. Times are those of Redis: one clock for all machines.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from redis import Redis

from cellama.config import Settings, get_settings
from cellama.tasks.connection.connections import database_of
from cellama.tasks.connection.redis_clock import redis_time
from cellama.tasks.contract.all_kinds import KINDS, Result
from cellama.tasks.contract.events import EVENT_FIELD, TerminalEvent, done, numbered
from cellama.tasks.contract.keys import (
    cancel_key,
    dead_key,
    events_channel,
    job_key,
    journal_key,
    looked_key,
    result_key,
    waiting_key,
)
from cellama.tasks.contract.names import queue_key
from cellama.tasks.contract.shapes.results import usage_of

from .encoding import encode
from .gathering import Gathered
from .history import earlier_of, read_past
from .records import (
    Attempt,
    CeleryState,
    DeadJob,
    Ending,
    Entry,
    Fetched,
    PageLimits,
    Purged,
    State,
    Submission,
    Taken,
    renamed,
    submit_arguments,
)
from .scripts import SentScript, run_script

RunScript = Callable[[str, Sequence[str], Sequence[Any]], Any]
PLACE_STEP_S = 2e-4  # between jobs that are queued in one call: the least that scores of `waiting_score` resolve
MAX_ATTEMPTS = 3  # in a row that neither show a token nor end their job: the job is dead after them
DEAD_TTL_S = 7 * 86400  # a dead job can be queued again for a week
CANCEL_TTL_S = 7 * 86400  # how long a cancellation waits for the worker that runs the job to come back
REFUSED_S = 3  # from Celery's refusal of a message to the end of its job: Celery may end it first
# Until the reaper gives Celery the end of a job; at least CHORD_CLAIM_S, the life of a claim on the body of a chord.
SETTLE_S = 30
MAX_RESTORED = 200  # messages per script and kind: a few milliseconds, in which Redis serves no one else
PAGE_PART = 8  # a page takes an eighth of a list, so that other workers get their share
PAGE_MESSAGE_BYTES = 1 << 16  # a larger message comes alone, because a page is in memory at once


class Ledger:
    """Reads and writes the ledger. Safe from any thread. Every method may raise RedisError."""

    def __init__(
        self,
        redis: Redis,
        *,
        settings: Settings | None = None,
        gathers: bool = False,
    ) -> None:
        """Take maximum lengths and times to live from these settings, or from those of the process (`get_settings`).

        With `gathers`, attempts that several threads start at the same time share one round trip.
        """
        settings = settings or get_settings()
        self._redis = redis
        self._run_begin: RunScript = Gathered(redis).run if gathers else partial(run_script, redis)
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

    def reach(self) -> None:
        """Raise RedisError at once if Redis does not answer."""
        self._redis.ping()

    def submit(self, jobs: Sequence[Submission], following: int = 0) -> list[int]:
        """Note jobs and queue their messages, all in one step.

        Returns for each job 1 if it is new, 0 if it was there already, and -1 if it was there with another digest.
        `following` jobs come in later calls: their places are behind these, although Redis' clock hardly moves.
        """
        if not jobs:
            return []
        verdicts: list[int] = run_script(self._redis, "submit", *submit_arguments(jobs, following, PLACE_STEP_S))[0]
        return verdicts

    def send(self, jobs: Sequence[Submission], following: int) -> SentScript:
        """Send `submit` without waiting. Its reply is the result of `submit`, and how many subscribers got an event."""
        return SentScript(self._redis, "submit", *submit_arguments(jobs, following, PLACE_STEP_S))

    def cancel(self, job_id: str, *, running: bool) -> bool:
        """Cancel a job. Returns True if that ended it, because no worker runs it.

        With `running`, the worker that runs the job, or the next one that starts it, ends it.
        """
        keys = [job_key(job_id), cancel_key(job_id)]
        state: Any = run_script(self._redis, "cancel", keys, [job_id, int(running), CANCEL_TTL_S])
        if state.decode() not in ("queued", "handed_back"):
            return False
        return self.end_waiting(job_id, done("cancelled", read_past(self._redis, job_id).usage))

    def end_waiting(self, job_id: str, event: TerminalEvent, result: Result | None = None) -> bool:
        """End a job with this event, unless a worker runs it. Returns whether it did."""
        superseded, _ = self.write([Entry(job_id=job_id, event=numbered(event, 0), result=result)])
        return not superseded

    def state(self, job_id: str) -> State | None:
        """Return the state of a job; None if there is no entry of it."""
        found: Any = self._redis.hget(job_key(job_id), "state")
        state: State | None = found.decode() if found else None
        return state

    # For workers: messages

    def now(self) -> float:
        """Return the time by Redis' clock (unix s)."""
        return redis_time(self._redis)

    def take(
        self, job_id: str, lease_s: float, limits: PageLimits = (), token: str | None = None
    ) -> tuple[Taken, list[Fetched]]:
        """Hold a job's message for `lease_s`, and take a page of others that wait, within the `limits`.

        The token of a message is empty if this worker does not hold it, because its job has ended, or because another
        worker holds a copy. A call that is repeated, because it may not have reached Redis, passes its `token` again.
        """
        token = token or new_run()
        keys, args = [job_key(job_id)], [job_id, token, lease_s, PAGE_PART, PAGE_MESSAGE_BYTES]
        for num_messages, lists in limits:
            keys += lists
            args += [num_messages, len(lists)]
        verdict, waited, *page = run_script(self._redis, "take", keys, args)
        fetched = []
        for start in range(0, len(page), 5):
            key, message, own_token, own_verdict, own_waited = page[start : start + 5]
            fetched.append(Fetched(key.decode(), message, _taken("", own_token.decode(), own_verdict, own_waited)))
        return _taken(job_id, token, verdict, waited), fetched

    def renew(self, held: Sequence[Taken], lease_s: float) -> list[Taken]:
        """Renew the leases of messages. Returns those that this worker does not hold any more."""
        if not held:
            return []
        args: list[Any] = [lease_s, *(part for taken in held for part in (taken.job_id, taken.token))]
        lost: Any = run_script(self._redis, "renew", [job_key(taken.job_id) for taken in held], args)
        return [held[place] for place in lost]

    def release(self, taken: Taken) -> None:
        """Drop a message that Celery does not need any more, if this worker still holds it."""
        run_script(self._redis, "release", [job_key(taken.job_id)], [taken.job_id, taken.token, REFUSED_S, SETTLE_S])

    def requeue(self, taken: Taken) -> None:
        """Return a message to the head of its queue, if this worker still holds it."""
        keys = [job_key(taken.job_id), cancel_key(taken.job_id)]
        run_script(self._redis, "requeue", keys, [taken.job_id, taken.token])

    def set_aside(self, taken: Taken, seconds: float) -> None:
        """Let no worker take a message for this time. Then `restore` puts it at the head of its queue."""
        run_script(self._redis, "set_aside", [job_key(taken.job_id)], [taken.job_id, taken.token, seconds])

    def restore(self, lease_s: float) -> int:
        """Return messages to their queues whose lease has ended, or whose ETA has come.

        If this has not been called for a third of a lease, leases get half a lease more, because perhaps no worker
        could renew them. Returns how many leases had ended.
        """
        num_lost, num_delayed = MAX_RESTORED, MAX_RESTORED
        total = 0
        while MAX_RESTORED in (num_lost, num_delayed):
            num_lost, num_delayed = run_script(self._redis, "restore", [looked_key()], [lease_s, MAX_RESTORED])
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
        """Start an attempt of this worker at a job, unless the verdict says otherwise.

        `run` identifies the attempt, so that the call can be repeated. `token` is that of the message, because only its
        holder may start the job (None is not checked). The verdict is "suspect", and nothing has started, if the last
        attempt neither showed a token nor ended the job, so that it perhaps crashed its worker, and this attempt would
        not run `alone`. `started` is stored for Celery if the attempt has started.
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
        before, now, next_seq = more
        return replace(attempt, before=earlier_of(before, now), next_seq=int(next_seq))

    def write(self, entries: Sequence[Entry]) -> tuple[set[int], set[int]]:
        """Write events to the journals of their jobs and publish them, in order.

        Returns the indices of those that were not written: first because their attempt is superseded, second because
        Redis has lost events before them, so that the stream would have a gap.
        """
        args: list[Any] = [*self._write_options]
        for entry in entries:
            args += entry.values
        superseded, gaps = run_script(self._redis, "write", [], args)
        return set(superseded), set(gaps)

    def end_unknown(self, job_id: str, event: TerminalEvent) -> None:
        """End the stream of a job that is not in the ledger with this event, unless it has ended."""
        data = encode(numbered(event, 0)).partition(b",")[2]  # the script knows the seq
        args = [EVENT_FIELD, self._event_ttl_s, events_channel(job_id, self._database), data]
        run_script(self._redis, "end_unknown", [job_key(job_id), journal_key(job_id)], args)

    def hand_back(self, attempt: Attempt) -> None:
        """End an attempt so that another worker continues the job. It does not count as a failure."""
        run_script(self._redis, "hand_back", [job_key(attempt.job_id)], [attempt.job_id, attempt.run])

    def ending(self, job_id: str) -> Ending | None:
        """Return how a job ended; None if it has not ended, or its entry has expired."""
        found: Any = self._redis.hmget(job_key(job_id), "end", "result", "task")
        return _ending(*found) if found[0] else None

    def settle(self, job_id: str) -> None:
        """Note that Celery has the end of a job and that what follows the job has been sent."""
        run_script(self._redis, "settle", [job_key(job_id)], [job_id])

    def claim_due(self, most: int, seconds: float) -> list[tuple[str, str]]:
        """Claim up to `most` jobs that are due, for this time; no other reaper gets them meanwhile.

        Returns each id with the job's state; "held" is an ended job whose message a worker still holds.
        """
        found: Any = run_script(self._redis, "claim_due", [], [most, seconds])
        values = [raw.decode() for raw in found]
        return list(zip(values[::2], values[1::2], strict=True))

    def purge_page(
        self, queue: str, priority: int, most: int, revoked: tuple[bytes, bytes], expires_s: int | None
    ) -> Purged:
        """End up to `most` jobs whose messages wait in the queue, as cancelled; jobs that a worker has stay.

        `revoked` is what Celery stores for them for `expires_s` seconds (None: for ever), before and behind the id.
        """
        event = encode(numbered(done("cancelled", usage_of()), 0)).partition(b",")[2]
        keys = [queue_key(queue, priority), waiting_key(queue)]
        args = [*self._write_options, most, event, *revoked, expires_s or ""]
        num_messages, num_ended, others = run_script(self._redis, "purge", keys, args)
        return Purged(num_messages, num_ended, others)

    def keep_journal(self, job_id: str) -> None:
        """Keep the events of an ended job as long as results."""
        self._redis.expire(journal_key(job_id), self._result_ttl_s)

    # For people

    def place(self, job_id: str) -> int | None:
        """Return how many jobs are before this one in its queue; None if it does not wait."""
        queue = self.queue(job_id)
        if queue is None:
            return None
        rank: Any = self._redis.zrank(waiting_key(queue), job_id)
        return None if rank is None else int(rank)

    def queue(self, job_id: str) -> str | None:
        """Return the Celery queue of a job; None if there is no entry of it."""
        found: Any = self._redis.hget(job_key(job_id), "queue")
        return found.decode() if found else None

    def num_waiting(self, queue: str) -> int:
        """Return how many jobs of a queue have no slot yet."""
        return int(self._redis.zcard(waiting_key(queue)))

    def dead(self) -> list[DeadJob]:
        """Return the jobs whose attempts crashed their workers MAX_ATTEMPTS times, the last one first."""
        entries: Any = self._redis.zrevrange(dead_key(), 0, -1, withscores=True)
        found: list[DeadJob] = []
        for raw, at in entries:
            job_id = raw.decode()
            stored: Any = self._redis.hmget(job_key(job_id), "task", "attempt", "worker", "queue")
            if stored[0] is None:  # its entry has expired
                self._redis.zrem(dead_key(), job_id)
                continue
            task, attempts, worker, queue = (value.decode() for value in stored)
            about: DeadJob = {
                "id": job_id,
                "at": at,
                "task": task,
                "queue": queue,
                "attempts": int(attempts),
                "last_worker": worker,
                "error": "dead",
            }
            found.append(about)
        return found

    def requeue_dead(self, job_id: str) -> str | None:
        """Queue a dead job again as a new one, with its whole message. Returns its id, or None if it is not dead."""
        stored: Any = self._redis.hmget(job_key(job_id), "message", "list")
        if stored[0] is None:
            return None
        new_id = str(uuid.uuid4())
        message = renamed(json.loads(stored[0]), job_id, new_id)
        keys = [job_key(job_id), job_key(new_id), stored[1].decode()]
        done = run_script(self._redis, "requeue_dead", keys, [job_id, new_id, json.dumps(message)])
        return new_id if done else None


def _taken(job_id: str, token: str, verdict: bytes, waited: bytes) -> Taken:
    return Taken(job_id, token if verdict == b"held" else "", float(waited) if waited else None)


def _parts(stored: CeleryState | None) -> tuple[bytes, int | str]:
    return (b"", "") if stored is None else (stored.value, stored.expires_s or "")


def _ending(event: bytes, result: bytes | None, task: bytes) -> Ending:
    kind = KINDS.get(task.decode())
    return Ending(json.loads(event), kind.shape(json.loads(result)) if kind and result else None)


def new_run() -> str:
    """Return a new token of an attempt, or of a taking of a message."""
    return os.urandom(16).hex()
