"""Create jobs in a ledger without Celery, for the tests of the ledger, the reaper and the model check."""

from __future__ import annotations

import json
import uuid
from typing import Any

from redis import Redis

from cellama.tasks.contract import events
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import job_key, journal_key
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, SUBMITTED_AT_HEADER, queue_key
from cellama.tasks.state.ledger import Attempt, Entry, Ledger, Message, Submission, Taken, TaskCall, new_run

LEASE_S = 600.0
STARTED, TOKEN, DONE = events.started("tiny", 3, "w", 7), events.token("x", [1]), events.done("stop", {})


def submission(
    queue: str,
    job_id: str = "",
    *,
    priority: int = PRIORITY_INTERACTIVE,
    timeout_s: float | None = None,
    task: str = "cellama.generate",
    digest: str = "",
    fairness_key: str | None = None,
    max_tokens: int = 256,
    prompt: str = "Hi",
    **parameters: Any,
) -> Submission:
    """Return a job with a message in kombu's format."""
    job_id = job_id or str(uuid.uuid4())
    properties = {"correlation_id": job_id, "priority": priority, "delivery_tag": str(uuid.uuid4())}
    headers = {"id": job_id, "task": task, SUBMITTED_AT_HEADER: 1.0}
    payload = json.dumps({"body": "W10=", "headers": headers, "properties": properties})
    call = TaskCall(
        task=task,
        args=["tiny", prompt],
        kwargs={"max_tokens": max_tokens, **parameters},
        queue=queue,
        priority=priority,
        timeout_s=timeout_s,
        given_fairness_key=fairness_key,
    )
    return Submission(job_id, call, Message(queue_key(queue, priority), payload), digest)


def submit(ledger: Ledger, queue: str, **options: Any) -> str:
    """Submit a new job, and return its id."""
    job = submission(queue, **options)
    assert ledger.submit([job]) == [1]
    return job.job_id


def take(ledger: Ledger, job_id: str, lease_s: float = LEASE_S) -> Taken:
    """Take a job that is the next one of its list, as a worker that has popped its ticket does."""
    key: Any = ledger._redis.hget(job_key(job_id), "list")
    (fetched,) = ledger.take(key.decode(), job_id, lease_s)
    assert (fetched.taken.job_id, fetched.payload) == (job_id, b"")
    return fetched.taken


def begin(ledger: Ledger, job_id: str, **options: Any) -> Attempt:
    return ledger.begin(job_id, new_run(), "w", **options)


def write(ledger: Ledger, attempt: Attempt, *told: dict[str, Any], seq: int = 0) -> set[int]:
    """Write events with numbers from `seq` on, and return the indices of superseded events."""
    entries = [
        Entry(job_id=attempt.job_id, run=attempt.run, event={"seq": seq + i, **event}) for i, event in enumerate(told)
    ]
    superseded, gaps = ledger.write(entries)
    assert not gaps
    return superseded


def num_ahead(ledger: Ledger, job_id: str) -> int | None:
    """Return how many jobs are ahead of a job, or None if it does not wait."""
    ahead = ledger.ahead(job_id)
    return None if ahead is None else ahead.num_jobs


def ids_in(redis: Any, queue: str, priority: int = PRIORITY_INTERACTIVE) -> list[str]:
    """Return the ids in the tickets of a queue, the next one first."""
    messages = redis.lrange(queue_key(queue, priority), 0, -1)
    return [json.loads(message)["headers"]["id"] for message in reversed(messages)]


def kept_result(ledger: Ledger, job_id: str) -> dict[str, object] | None:
    ending = ledger.ending(job_id)
    assert ending is not None
    return ending.result


def journal(redis: Redis, job_id: str) -> list[Any]:
    return list(events_in(redis.xrange(journal_key(job_id))))
