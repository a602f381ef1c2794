"""Revokes and purges are permanent, and a canvas is notified of jobs that ended before a worker took them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from celery import Celery, chain, chord
from celery.exceptions import ChordError, TimeLimitExceeded
from celery.result import AsyncResult
from celery.worker.state import REVOKE_EXPIRES
from kombu.message import Message
from redis import Redis

from cellama.tasks import app, embed, generate
from cellama.tasks.broker.control import REVOKED_TTL_S, purge_queue
from cellama.tasks.broker.message import JobRequest
from cellama.tasks.broker.result_backend import end_without_worker
from cellama.tasks.contract.keys import cancel_key, job_key
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, queue_key, queue_name
from cellama.tasks.state.ledger import Ledger, new_run
from cellama.tasks.worker.reaper import Reaper

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until
from .conftest import LONG
from .ledgers import STARTED, TOKEN, begin, submit, take, write

EventsOf = Callable[..., list[dict[str, Any]]]


def test_celery_revoke_cancels_a_waiting_job(
    worker: WorkerProcess, plain: Celery, unserved: str, events_of: EventsOf
) -> None:
    job = generate.delay(unserved, "Hi")
    plain.control.revoke(job.id)
    assert events_of(job.id)[-1]["finish_reason"] == "cancelled"
    wait_until(lambda: job.state == "REVOKED", "the result of a revoked job")


def test_celery_revoke_with_terminate_cancels_a_running_job(
    worker: WorkerProcess, plain: Celery, events_of: EventsOf, redis_client: Redis
) -> None:
    with worker.slowed():
        job = generate.delay("tiny", "Once upon a time", **LONG)
        wait_until(lambda: Ledger(redis_client).state(job.id) == "running", "the start of the job")
        plain.control.revoke(job.id)
        plain.control.terminate(job.id)
        assert events_of(job.id)[-1]["finish_reason"] == "cancelled"


def test_celery_revoke_is_stored_for_jobs_sent_by_plain_celery(
    worker: WorkerProcess, plain: Celery, unserved: str, redis_client: Redis
) -> None:
    job = plain.send_task("cellama.generate", [unserved, "Hi"], queue=queue_name(unserved))
    plain.control.revoke(job.id)
    wait_until(lambda: redis_client.get(cancel_key(job.id)), "the cancel key")
    assert 0 < redis_client.ttl(cancel_key(job.id)) <= REVOKED_TTL_S == REVOKE_EXPIRES
    submit(Ledger(redis_client), queue_name(unserved), job_id=job.id)  # as a worker does later
    attempt = Ledger(redis_client).begin(job.id, new_run(), "a later worker")
    assert attempt.verdict == "cancelled"


def purge_with_celery(unserved: str) -> None:
    argv = [sys.executable, "-m", "celery", "-A", "cellama.tasks.app", "purge", "-f", "-Q", queue_name(unserved)]
    done = subprocess.run(argv, env=clean_environment(CELLAMA_REDIS_URL=app.conf.broker_url), capture_output=True)
    assert b"Purged 3 messages" in done.stdout, done


@pytest.mark.parametrize("purge", [purge_with_celery, lambda _: app.control.purge()])
def test_purged_jobs_are_not_queued_again(unserved: str, redis_client: Redis, events_of: EventsOf, purge: Any) -> None:
    jobs = [generate.apply_async((unserved, "Hi"), {"priority": priority}) for priority in (0, 3, 3)]
    purge(unserved)
    reaper = Reaper(redis_client, Ledger(redis_client), lambda *_: None, lease_s=0.0)
    for _ in range(3):
        reaper.find_missing()
    assert [events_of(job.id)[-1]["finish_reason"] for job in jobs] == ["cancelled"] * 3
    assert [job.state for job in jobs] == ["REVOKED"] * 3
    assert not redis_client.exists(queue_key(queue_name(unserved), 0), queue_key(queue_name(unserved), 3))
    assert Ledger(redis_client).num_waiting(queue_name(unserved)) == 0


def test_purge_counts_waiting_jobs_and_keeps_running_jobs(unserved: str, redis_client: Redis) -> None:
    ledger, queue = Ledger(redis_client), queue_name(unserved)
    cancelled, resumed, fresh, in_hands, waiting = (generate.delay(unserved, "Hi").id for _ in range(5))
    app.control.revoke(cancelled)
    redis_client.delete(queue_key(queue, PRIORITY_INTERACTIVE))
    taken = take(ledger, resumed)
    first = begin(ledger, resumed, token=taken.token)
    write(ledger, first, STARTED, TOKEN)
    ledger.hand_back(first)
    ledger.requeue(taken)
    redis_client.rpop(queue_key(queue, PRIORITY_INTERACTIVE))
    attempt = begin(ledger, resumed, token=take(ledger, resumed).token)
    write(ledger, attempt, TOKEN, seq=2)
    begin(ledger, fresh, token=take(ledger, fresh).token)  # the job has no slot yet
    take(ledger, in_hands)
    redis_client.rpush(queue_key(queue, PRIORITY_INTERACTIVE), redis_client.hget(job_key(waiting), "message") or b"")
    assert purge_queue(app, queue) == 2
    states = {job_id: ledger.state(job_id) for job_id in (resumed, fresh, in_hands, waiting)}
    assert states == {resumed: "running", fresh: "running", in_hands: "done", waiting: "done"}
    assert not redis_client.exists(cancel_key(resumed), cancel_key(fresh))
    assert write(ledger, attempt, TOKEN, seq=3) == set()


def test_purge_stores_results_for_chord_parts_and_plain_celery_jobs(unserved: str, plain: Celery) -> None:
    own = [generate.s(unserved, text) for text in ("Hi", "Ho")]
    body = chord(own)(app.signature("users.collect", queue=f"users-{unserved}"))
    sent = plain.send_task("cellama.generate", [unserved, "Hi"], queue=queue_name(unserved))
    assert purge_queue(app, queue_name(unserved)) == 3
    with pytest.raises(ChordError, match="cancelled"):
        AsyncResult(body.id, app=app).get(timeout=PATIENCE_S)
    wait_until(lambda: plain.AsyncResult(sent.id).state == "REVOKED", "the result of the plain job")


def test_purge_deletes_malformed_messages(unserved: str, redis_client: Redis) -> None:
    for text in ("no JSON", "[]", '{"headers": {}}'):
        redis_client.lpush(queue_key(queue_name(unserved), PRIORITY_INTERACTIVE), text)
    assert purge_queue(app, queue_name(unserved)) == 0
    assert not redis_client.exists(queue_key(queue_name(unserved), PRIORITY_INTERACTIVE))


def test_purge_of_another_apps_queue_counts_its_messages(redis_client: Redis) -> None:
    redis_client.lpush("others", "message")
    with app.connection_for_write() as connection:
        assert connection.default_channel.queue_purge("others") == 1


def request_of(job_id: str, **headers: Any) -> JobRequest:
    headers = {"id": job_id, "task": generate.name, **headers}
    body: Any = ((), {}, {})
    return JobRequest(Message(body=body, headers=headers), app=app, body=body, headers=headers, decoded=True)


def test_started_job_does_not_expire(unserved: str, redis_client: Redis) -> None:
    job, over = generate.delay(unserved, "Hi"), {"expires": (datetime.now(UTC) - timedelta(seconds=9)).isoformat()}
    assert request_of(job.id, **over).maybe_expire()
    Ledger(redis_client).begin(job.id, new_run(), "a worker that died")
    assert not request_of(job.id, **over).maybe_expire()


def test_job_fails_with_time_limit_exceeded_before_and_after_its_start(
    unserved: str, redis_client: Redis, events_of: EventsOf
) -> None:
    waiting, running = (generate.delay(unserved, "Hi") for _ in range(2))
    Ledger(redis_client).begin(running.id, new_run(), "a worker")
    for job in (waiting, running):
        request_of(job.id).on_timeout(False, 0.3)
        with pytest.raises(TimeLimitExceeded):
            job.get(timeout=PATIENCE_S)
    assert events_of(waiting.id)[-1]["finish_reason"] == "timeout"
    assert Ledger(redis_client).state(running.id) == "running"  # its attempt decides how it ends


def followers(redis: Redis, queue: str) -> list[tuple[str, Any]]:
    """Return the ids and first arguments of the tasks that wait in a user's queue."""
    found: Any = redis.lrange(queue, 0, -1)
    stored = [json.loads(message) for message in found]
    return [(message["headers"]["id"], json.loads(base64.b64decode(message["body"]))[0][0]) for message in stored]


def test_chord_fails_when_its_waiting_parts_are_cancelled(unserved: str) -> None:
    parts = [generate.s(unserved, text).set(task_id=str(uuid.uuid4())) for text in ("Hi", "Ho")]
    body = chord(parts)(app.signature("users.collect", queue=f"users-{unserved}"))
    app.control.revoke([part.options["task_id"] for part in parts])
    with pytest.raises(ChordError, match="cancelled"):
        AsyncResult(body.id, app=app).get(timeout=PATIENCE_S)


def test_next_step_and_callbacks_are_sent_when_a_job_times_out(unserved: str, redis_client: Redis) -> None:
    queue, late = f"users-{unserved}", {"timeout": 0.001}
    next_step, callback, errback = (app.signature(f"users.{name}", queue=queue) for name in ("next", "link", "error"))
    ids = [signature.freeze().id for signature in (next_step, callback)]
    first = generate.s(unserved, "Hi", **late).set(link=callback, compression="gzip")
    done = chain(first, next_step).apply_async().parent
    failed = embed.apply_async((unserved, "Hi"), late, link_error=errback)
    reaper = Reaper(redis_client, Ledger(redis_client), partial(end_without_worker, app), lease_s=6.0)
    wait_until(lambda: reaper.settle_due() or (done.ready() and failed.ready()), "the end of both")
    assert done.result["finish_reason"] == "timeout"

    def is_sent() -> bool:
        """Return whether a reaper has sent all steps. Celery stores a failure before it sends the errback."""
        told = followers(redis_client, queue)
        return failed.id in [what for _, what in told] and all((job_id, done.result) in told for job_id in ids)

    wait_until(is_sent, "the next steps")
