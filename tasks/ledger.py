"""The ledger of jobs in Redis: who runs which attempt, and what has ended (docs/delivery.md).

Every step is one Lua script, so that a worker that dies, or two that run the same job, leave nothing half done.
Times are those of Redis: one clock for all machines.
"""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.commands.core import Script

from .connecting import database_of
from .contract.events import EVENT_FIELD, Event
from .contract.keys import (
    DEAD_KEY,
    DEADLINES_KEY,
    PRIORITY_WEIGHT,
    QUEUES_KEY,
    RUNNING_KEY,
    cancel_key,
    events_channel,
    job_key,
    journal_key,
    stream_id,
    waiting_key,
)
from .contract.names import queue_key
from .records import Attempt, Call, Entry, Submission

PLACE_STEP_S = 2e-4  # between jobs that are queued at once: as near as scores of `waiting_score` can be told apart
MAX_ATTEMPTS = 3  # in a row that end without a token and without an end
UNENDED_TTL_S = 7 * 86400  # of what belongs to a job that never ends

# Shared by the scripts: notes a job that nobody has noted yet.
_NOTE = """
local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end
local function note(job, id, queue, priority, timeout, call, waited)
  local now = clock() - tonumber(waited)
  redis.call('HSET', job, 'state', 'queued', 'queue', queue, 'priority', priority,
             'submitted_at', string.format('%.6f', now), 'call', call)
  redis.call('ZADD', 'cellama:waiting:' .. queue, string.format('%.6f', priority * WEIGHT + now), id)
  redis.call('SADD', QUEUES, queue)
  if timeout ~= '' then redis.call('ZADD', DEADLINES, string.format('%.6f', now + timeout), id) end
end
"""

# KEYS: job, message list for each job; ARGV: ttl, step, how many jobs follow in other calls, then eight values for each
# job, and topic and event for each of its events. A job that stands there already is left as it is.
_SUBMIT = """
local ttl, step, following, next, new = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), 4, {}
for i = 1, #KEYS / 2 do
  local job, list = KEYS[2*i-1], KEYS[2*i]
  local id, queue, priority, timeout, call, idempotent, message, events = unpack(ARGV, next, next + 7)
  local first = next + 8
  next = first + 2 * events
  new[i] = 1 - redis.call('EXISTS', job)
  if new[i] == 1 then
    note(job, id, queue, priority, timeout, call, math.min(1, (#KEYS / 2 - i + following) * step))
    if idempotent == '1' then redis.call('HSET', job, 'idempotent', 1) end
    redis.call('EXPIRE', job, ttl)
    if message ~= '' then redis.call('LPUSH', list, message) end
    for at = first, next - 2, 2 do redis.call('PUBLISH', ARGV[at], ARGV[at+1]) end
  end
end
return new
"""

_BEGIN = """
local job, cancel = KEYS[1], KEYS[2]
local id, run, worker, limit, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local queue, priority, timeout, call, waited, alone = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local state = redis.call('HGET', job, 'state')
if state == 'done' then return {'done', 0, 0} end
if not state then note(job, id, queue, priority, timeout, call, waited) end
if alone ~= '1' and tonumber(redis.call('HGET', job, 'failures') or 0) > 0 then return {'suspect', 0, 0} end
if redis.call('HGET', job, 'run') ~= run then -- else the reply was lost, and this is the second question
  redis.call('HINCRBY', job, 'attempt', 1)
  redis.call('HINCRBY', job, 'failures', 1) -- until this attempt shows a token
end
redis.call('HSET', job, 'state', 'running', 'run', run, 'worker', worker)
redis.call('EXPIRE', job, ttl)
local attempt, failures = tonumber(redis.call('HGET', job, 'attempt')), tonumber(redis.call('HGET', job, 'failures'))
if redis.call('EXISTS', cancel) == 1 then return {'cancelled', attempt, failures} end
if failures > limit then return {'dead', attempt, failures} end
return {'run', attempt, failures}
"""

# KEYS: job, journal, cancel for each entry; ARGV: five values, then seven for each entry.
_WRITE = """
local field, max_events, event_ttl, journal_ttl, result_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local void = {}
for i = 0, (#ARGV - 5) / 7 - 1 do
  local job, journal, cancel = KEYS[3*i+1], KEYS[3*i+2], KEYS[3*i+3]
  local id, attempt, kind = ARGV[7*i+6], ARGV[7*i+7], ARGV[7*i+8]
  local entry, channel, data, result = ARGV[7*i+9], ARGV[7*i+10], ARGV[7*i+11], ARGV[7*i+12]
  local ends = kind == 'end' or kind == 'dead'
  local found = redis.call('HMGET', job, 'attempt', 'state', 'queue', 'ended_by', 'failures')
  local mine
  if attempt == '' then mine = found[2] == 'queued' else mine = found[2] == 'running' and found[1] == attempt end
  if not mine then
    -- what is written a second time after a lost reply is not void
    if not (found[2] == 'done' and found[4] == attempt) then void[#void+1] = tostring(i) end
  else
    local reply = redis.pcall('XADD', journal, 'MAXLEN', '~', max_events, entry, field, data)
    if type(reply) ~= 'table' or not reply.err then
      redis.call('PUBLISH', channel, data)
    elseif not string.find(reply.err, 'equal or smaller') then -- that it says of an entry which stands there
      return redis.error_reply(reply.err)
    end
    if kind == 'started' or ends then redis.call('ZREM', 'cellama:waiting:' .. found[3], id) end
    if ends then
      redis.call('HSET', job, 'state', 'done', 'ended_by', attempt)
      if result ~= '' then redis.call('HSET', job, 'result', result) end
      redis.call('ZREM', RUNNING, id)
      redis.call('ZREM', DEADLINES, id)
      redis.call('DEL', cancel)
      redis.call('EXPIRE', journal, event_ttl)
      if kind == 'dead' then
        redis.call('ZADD', DEAD, clock(), id) -- with its call, so that it can be queued again
      else
        redis.call('HDEL', job, 'call')
        redis.call('EXPIRE', job, redis.call('HEXISTS', job, 'idempotent') == 1 and result_ttl or event_ttl)
      end
    elseif kind == 'token' then
      if found[5] ~= '0' then redis.call('HSET', job, 'failures', 0) end
    else
      redis.call('EXPIRE', journal, journal_ttl)
      redis.call('ZADD', RUNNING, clock(), id)
    end
  end
end
return void
"""

_HAND_BACK = """
local job, id, attempt = KEYS[1], ARGV[1], ARGV[2]
local found = redis.call('HMGET', job, 'attempt', 'state', 'queue', 'priority', 'submitted_at')
if found[1] ~= attempt or found[2] ~= 'running' then return 0 end
redis.call('HSET', job, 'state', 'handed_back')
redis.call('HINCRBY', job, 'failures', -1)
redis.call('ZREM', RUNNING, id)
redis.call('ZADD', 'cellama:waiting:' .. found[3], string.format('%.6f', found[4] * WEIGHT + found[5]), id)
return 1
"""

# What was queued last becomes what is taken next, if it is this job.
_TO_THE_FRONT = """
local key, id = KEYS[1], ARGV[1]
local last = redis.call('LINDEX', key, 0)
if not last or not string.find(last, id, 1, true) then return 0 end
redis.call('LPOP', key)
return redis.call('RPUSH', key, last)
"""


@functools.cache
def _script(source: str) -> Script:
    names = {"WEIGHT": PRIORITY_WEIGHT, "QUEUES": QUEUES_KEY, "DEADLINES": DEADLINES_KEY}
    names |= {"RUNNING": RUNNING_KEY, "DEAD": DEAD_KEY}
    constants = "".join(f"local {name} = {value!r}\n" for name, value in names.items())
    text = (constants + _NOTE + source).encode()
    return Script(None, text)  # type: ignore[arg-type]  # each call names its client


class Ledger:
    """Reads and writes the ledger. Safe from any thread."""

    def __init__(
        self,
        redis: Redis,
        *,
        max_events: int = 100_000,
        event_ttl_s: int = 3600,
        journal_ttl_s: int = 86400,
        result_ttl_s: int = 86400,
    ) -> None:
        self._redis = redis
        self._database = database_of(redis)
        self._limits = (EVENT_FIELD, max_events, event_ttl_s, journal_ttl_s, result_ttl_s)

    def _run(self, source: str, keys: list[str], args: list[Any]) -> Any:
        return _script(source)(keys=keys, args=args, client=self._redis)

    # For producers

    def submit(self, job_id: str, call: Call, *, idempotent: bool = False) -> bool:
        """Notes a job without a message; False if it stands there already."""
        return self.submit_all([Submission(job_id, call, idempotent)])[0]

    def submit_all(self, jobs: Sequence[Submission], following: int = 0) -> list[bool]:
        """Notes jobs and queues their messages, all at once; tells which ones did not stand there already.

        So many are `following` in later calls: their places are behind these, although Redis' clock hardly moves.
        """
        if not jobs:
            return []
        keys: list[str] = []
        args: list[Any] = [UNENDED_TTL_S, PLACE_STEP_S, following]
        for job in jobs:
            call, message = job.call, job.message
            keys += [job_key(job.job_id), message.key]
            timeout = "" if call.timeout_s is None else call.timeout_s
            args += [job.job_id, call.queue, call.priority, timeout, call.to_json(), int(job.idempotent)]
            args += [message.payload, len(message.events), *(part for event in message.events for part in event)]
        return [bool(new) for new in self._run(_SUBMIT, keys, args)]

    def cancel(self, job_id: str, *, running: bool) -> bool:
        """Wants a job to end. True if that ended it, because nobody had begun it.

        With `running`, a worker that runs it, or will, ends it too.
        """
        if running:  # first: who begins it from now on sees the key
            self._redis.set(cancel_key(job_id), "1", ex=UNENDED_TTL_S)
        no_usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        ended = self.end_waiting(job_id, {"type": "done", "finish_reason": "cancelled", "usage": no_usage})
        if self.state(job_id) == "done":
            self._redis.delete(cancel_key(job_id))
        return ended

    def end_waiting(self, job_id: str, event: Event, result: dict[str, Any] | None = None) -> bool:
        """Ends a job with this event if no worker has begun it yet."""
        if self.state(job_id) != "queued":
            return False
        return not self.write([Entry(job_id, None, {"seq": 0, **event}, result)])

    def state(self, job_id: str) -> str | None:
        """queued, running, handed_back or done; None if there is no such job, or not any more."""
        found: Any = self._redis.hget(job_key(job_id), "state")
        return found.decode() if found else None

    # For workers

    def begin(
        self,
        job_id: str,
        run: str,
        worker: str,
        *,
        alone: bool = False,
        call: Call | None = None,
        waited_s: float = 0.0,
    ) -> Attempt:
        """This worker runs the job from now on, unless the verdict says otherwise.

        `run` tells this question from others, so that it may be asked again. The verdict is "suspect", and nothing
        has begun, if the last attempt ended without a token and without an end, because that may have ended its
        worker, and this one would not be `alone`. `call` is noted if the producer did not: it was plain Celery.
        """
        known = call or Call("", [], {}, "", 0, None, {})
        timeout = "" if known.timeout_s is None else known.timeout_s
        noted = [known.queue, known.priority, timeout, known.to_json(), waited_s, int(alone)]
        args = [job_id, run, worker, MAX_ATTEMPTS, UNENDED_TTL_S, *noted]
        reply: Any = self._run(_BEGIN, [job_key(job_id), cancel_key(job_id)], args)
        return Attempt(job_id, int(reply[1]), int(reply[2]), reply[0].decode())

    def write(self, entries: Sequence[Entry]) -> set[int]:
        """Journals and publishes events, in order; returns the places of those whose attempt is void."""
        keys: list[str] = []
        args: list[Any] = list(self._limits)
        for entry in entries:
            job_id, seq = entry.job_id, entry.event["seq"]
            keys += [job_key(job_id), journal_key(job_id), cancel_key(job_id)]
            attempt = "" if entry.attempt is None else entry.attempt
            place = [entry.kind, stream_id(seq), events_channel(job_id, self._database)]
            args += [job_id, attempt, *place, entry.event_json, entry.result_json]
        reply: Any = self._run(_WRITE, keys, args)
        return {int(place) for place in reply}

    def hand_back(self, attempt: Attempt) -> None:
        """Another worker may go on with the job; this attempt was no failure."""
        self._run(_HAND_BACK, [job_key(attempt.job_id)], [attempt.job_id, attempt.number])

    def result(self, job_id: str) -> dict[str, Any] | None:
        """The result of a job that has ended well, until Celery has stored it (result_backend.py)."""
        stored: Any = self._redis.hget(job_key(job_id), "result")
        found: dict[str, Any] | None = json.loads(stored) if stored else None
        return found

    def keep_journal(self, job_id: str) -> None:
        """The events of an ended job stay as long as results do."""
        self._redis.expire(journal_key(job_id), self._limits[-1])

    def to_the_front(self, job_id: str, queue: str, priority: int) -> None:
        """A job that was just queued again is the next to be taken, as its place among the waiting ones says."""
        self._run(_TO_THE_FRONT, [queue_key(queue, priority)], [job_id])

    def drop(self, job_id: str) -> None:
        """Notes no more that a job has not ended."""
        queue = self.queue(job_id)
        if queue is not None:
            self._redis.zrem(waiting_key(queue), job_id)
        for key in (RUNNING_KEY, DEADLINES_KEY):
            self._redis.zrem(key, job_id)

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

    def dead(self) -> list[dict[str, Any]]:
        """The jobs that ended their workers again and again, the last one first: id, at, task, queue, attempts."""
        entries: Any = self._redis.zrevrange(DEAD_KEY, 0, -1, withscores=True)
        found = []
        for raw, at in entries:
            job_id = raw.decode()
            stored: Any = self._redis.hmget(job_key(job_id), "call", "attempt", "worker", "queue")
            if stored[0] is None:  # its entry has expired
                self._redis.zrem(DEAD_KEY, job_id)
                continue
            call = json.loads(stored[0])
            attempts, worker, queue = int(stored[1]), stored[2].decode(), stored[3].decode()
            dead = {"id": job_id, "at": at, "task": call["task"], "queue": queue, "attempts": attempts}
            found.append({**dead, "last_worker": worker, "error": "dead"})
        return found

    def take_dead(self, job_id: str) -> dict[str, Any] | None:
        """The call of a dead job, which leaves the list; None if it is not there."""
        stored: Any = self._redis.hget(job_key(job_id), "call")
        if stored is None or not self._redis.zrem(DEAD_KEY, job_id):
            return None
        call: dict[str, Any] = json.loads(stored)
        return call


def new_run() -> str:
    """A token that tells one question of `begin` from all others."""
    return uuid.uuid4().hex
