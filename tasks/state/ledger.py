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
    DeadJob,
    Ending,
    Entry,
    Fetched,
    Purged,
    Room,
    State,
    Stored,
    Submission,
    Taken,
    renamed,
    told_of,
)
from .scripts import SentScript, run_script

RunScript = Callable[[str, Sequence[str], Sequence[Any]], Any]
PLACE_STEP_S = 2e-4  # between jobs that are queued at once: as near as scores of `waiting_score` can be told apart
MAX_ATTEMPTS = 3  # in a row that end without a token and without an end
DEAD_TTL_S = 7 * 86400  # of a dead job: so long it can be queued again
CANCEL_TTL_S = 7 * 86400  # of the wish to cancel a job that no worker has told the ledger of
REFUSED_S = 3  # after Celery has refused a message, its job gets an end
# Until the reaper gives Celery the end of a job; at least CHORD_CLAIM_S, the life of a claim on the body of a chord.
SETTLE_S = 30
MAX_RESTORED = 200  # messages per script, of either sort; Redis serves no one meanwhile
PAGE_PART = 8  # of what waits in a list a page takes an eighth, so that other workers get their part
PAGE_MESSAGE_BYTES = 1 << 16  # a larger message comes alone


class Ledger:
    """Reads and writes the ledger. Safe from any thread. Every method may raise RedisError."""

    def __init__(
        self,
        redis: Redis,
        *,
        settings: Settings | None = None,
        gathers: bool = False,
    ) -> None:
        """Take maximum lengths and times of life from these settings, or from those of the process (`get_settings`).

        With `gathers`, the attempts that threads begin at the same time take one round trip.
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
        """Raises RedisError at once if Redis does not answer."""
        self._redis.ping()

    def submit(self, jobs: Sequence[Submission], following: int = 0) -> list[int]:
        """Notes jobs and queues their messages, all at once; tells of each: 1 new, 0 there already, -1 there already
        with another digest.

        So many are `following` in later calls: their places are behind these, although Redis' clock hardly moves.
        """
        if not jobs:
            return []
        told: list[int] = run_script(self._redis, "submit", *told_of(jobs, following, PLACE_STEP_S))[0]
        return told

    def send(self, jobs: Sequence[Submission], following: int) -> SentScript:
        """`submit`, on its way: its reply tells what that does, and how many heard the events (-1: there were none)."""
        return SentScript(self._redis, "submit", *told_of(jobs, following, PLACE_STEP_S))

    def cancel(self, job_id: str, *, running: bool) -> bool:
        """Wants a job to end. True if that ended it, because no worker runs it.

        With `running`, a worker that runs it, or will, ends it too.
        """
        keys = [job_key(job_id), cancel_key(job_id)]
        state: Any = run_script(self._redis, "cancel", keys, [job_id, int(running), CANCEL_TTL_S])
        if state.decode() not in ("queued", "handed_back"):
            return False
        return self.end_waiting(job_id, done("cancelled", read_past(self._redis, job_id).usage))

    def end_waiting(self, job_id: str, event: TerminalEvent, result: Result | None = None) -> bool:
        """Ends a job with this event, as long as no worker runs it."""
        superseded, _ = self.write([Entry(job_id=job_id, event=numbered(event, 0), result=result)])
        return not superseded

    def state(self, job_id: str) -> State | None:
        """Where the job is; None if there is no such job, or not any more."""
        found: Any = self._redis.hget(job_key(job_id), "state")
        state: State | None = found.decode() if found else None
        return state

    # For workers: messages

    def now(self) -> float:
        """Unix seconds by the clock of everything here: Redis' own."""
        return redis_time(self._redis)

    def take(
        self, job_id: str, lease_s: float, room: Room = (), token: str | None = None
    ) -> tuple[Taken, list[Fetched]]:
        """This worker holds the job's message for `lease_s`; with an empty token if it does not, because the job has
        ended, or another worker holds a copy. So it does with a page of those that wait in the lists of `room`.

        With the `token` of an earlier call, which may or may not have reached Redis, the message is not taken for a
        copy of itself.
        """
        token = token or new_run()
        keys, args = [job_key(job_id)], [job_id, token, lease_s, PAGE_PART, PAGE_MESSAGE_BYTES]
        for num_messages, lists in room:
            keys += lists
            args += [num_messages, len(lists)]
        verdict, waited, *page = run_script(self._redis, "take", keys, args)
        fetched = [
            Fetched(key.decode(), message, _taken("", of.decode(), how, since))
            for key, message, of, how, since in zip(*(page[part::5] for part in range(5)), strict=True)
        ]
        return _taken(job_id, token, verdict, waited), fetched

    def renew(self, held: Sequence[Taken], lease_s: float) -> list[Taken]:
        """Goes on holding messages; gives those back that this worker does not hold any more."""
        if not held:
            return []
        args: list[Any] = [lease_s, *(part for taken in held for part in (taken.job_id, taken.token))]
        lost: Any = run_script(self._redis, "renew", [job_key(taken.job_id) for taken in held], args)
        return [held[place] for place in lost]

    def release(self, taken: Taken) -> None:
        """Give up a message that Celery needs no more, if this worker still holds it."""
        run_script(self._redis, "release", [job_key(taken.job_id)], [taken.job_id, taken.token, REFUSED_S, SETTLE_S])

    def requeue(self, taken: Taken) -> None:
        """Put a message back at the head of its queue, if this worker still holds it."""
        keys = [job_key(taken.job_id), cancel_key(taken.job_id)]
        run_script(self._redis, "requeue", keys, [taken.job_id, taken.token])

    def set_aside(self, taken: Taken, seconds: float) -> None:
        """Keep a message out of all workers' hands for this time; then `restore` puts it at the head of its queue."""
        run_script(self._redis, "set_aside", [job_key(taken.job_id)], [taken.job_id, taken.token, seconds])

    def restore(self, lease_s: float) -> int:
        """Put messages back into their queues whose lease has ended, or whose ETA has come.

        If this has not been called for a third of a lease, leases get half a lease more: perhaps no worker could renew.
        Returns how many leases had ended.
        """
        num_lost, num_delayed = MAX_RESTORED, MAX_RESTORED
        total = 0
        while MAX_RESTORED in (num_lost, num_delayed):  # each script is short, because Redis serves no one meanwhile
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
        started: Stored | None = None,
    ) -> Attempt:
        """This worker runs the job from now on, unless the verdict says otherwise.

        `run` tells this attempt from all others, so that it may be asked for again. `token` is that of the message:
        only its holder may begin (None is not checked). The verdict is "suspect", and nothing has begun, if the last
        attempt ended without a token and without an end, because that may have ended its worker, and this one would
        not be `alone`. `started` is what Celery is told if it has begun.
        """
        args = [run, worker, MAX_ATTEMPTS, int(alone), "any" if token is None else token, *_parts(started)]
        keys = [job_key(job_id), cancel_key(job_id), result_key(job_id)]
        reply: Any = self._run_begin("begin", keys, args)
        verdict, number, failures, waited_s, *more = reply
        attempt = Attempt(job_id, run, int(number), int(failures), verdict.decode(), float(waited_s))
        if not more:
            return attempt
        before, now, next_seq = more
        return replace(attempt, before=earlier_of(before, now), next_seq=int(next_seq))

    def write(self, entries: Sequence[Entry]) -> tuple[set[int], set[int]]:
        """Journals and publishes events, in order.

        Returns the places of those that were not written: because their run is superseded, and because Redis has
        lost events before them, so that the stream would have a gap.
        """
        args: list[Any] = [*self._write_options]
        for entry in entries:
            args += entry.values
        superseded, gaps = run_script(self._redis, "write", [], args)
        return set(superseded), set(gaps)

    def end_unknown(self, job_id: str, event: TerminalEvent) -> None:
        """Ends the stream of a job that is not in the ledger with this event, unless it has an end."""
        data = encode(numbered(event, 0)).partition(b",")[2]  # the script knows the seq
        args = [EVENT_FIELD, self._event_ttl_s, events_channel(job_id, self._database), data]
        run_script(self._redis, "end_unknown", [job_key(job_id), journal_key(job_id)], args)

    def hand_back(self, attempt: Attempt) -> None:
        """Another worker may go on with the job; this attempt was no failure."""
        run_script(self._redis, "hand_back", [job_key(attempt.job_id)], [attempt.job_id, attempt.run])

    def ending(self, job_id: str) -> Ending | None:
        """How a job ended; None if it has not, or that is not known any more."""
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
        """The events of an ended job stay as long as results do."""
        self._redis.expire(journal_key(job_id), self._result_ttl_s)

    # For people

    def place(self, job_id: str) -> int | None:
        """How many jobs are before this one in its queue; None if it does not wait."""
        queue = self.queue(job_id)
        if queue is None:
            return None
        rank: Any = self._redis.zrank(waiting_key(queue), job_id)
        return None if rank is None else int(rank)

    def queue(self, job_id: str) -> str | None:
        """The Celery queue that a job was put into."""
        found: Any = self._redis.hget(job_key(job_id), "queue")
        return found.decode() if found else None

    def num_waiting(self, queue: str) -> int:
        """Jobs of a queue that have no slot yet."""
        return int(self._redis.zcard(waiting_key(queue)))

    def dead(self) -> list[DeadJob]:
        """The jobs that ended their workers again and again, the last one first: id, at, task, queue, attempts."""
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
        """Queues a dead job again as a new one, with all that its message held; its id, or None if it is not dead."""
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


def _parts(stored: Stored | None) -> tuple[bytes, int | str]:
    return (b"", "") if stored is None else (stored.value, stored.expires_s or "")


def _ending(event: bytes, result: bytes | None, task: bytes) -> Ending:
    kind = KINDS.get(task.decode())
    return Ending(json.loads(event), kind.shape(json.loads(result)) if kind and result else None)


def new_run() -> str:
    """A token that tells one question of the ledger from all others."""
    return os.urandom(16).hex()
