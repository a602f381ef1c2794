"""If a worker dies between the end of a job and its next step, nothing is lost, and little is repeated."""

from __future__ import annotations

import json
import uuid
from functools import partial
from typing import Any

import pytest
from celery import Signature, chord
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from redis import Redis

from cellama.tasks import app, generate
from cellama.tasks.broker.result_backend import CHORD_CLAIM_S, ChordClaimed, end_without_worker, request_of
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.keys import chord_key, due_key, job_key, leases_key, result_key
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, queue_key, queue_name
from cellama.tasks.state.ledger import Ending, Entry, Ledger, Taken
from cellama.tasks.worker.reaper import Reaper

from ..conftest import wait_until
from .ledgers import LEASE_S, begin, take

RESULT: dict[str, Any] = {"text": "x", "model": "m", "finish_reason": "stop", "stop_sequence": None, "usage": {}}


def step(name: str, unserved: str) -> Signature:
    """Return a signature of a user's task."""
    return app.signature(f"users.{name}", queue=f"users-{unserved}")


def sent(redis: Redis, unserved: str) -> list[str]:
    """Return the names of the user's tasks that have been sent, in order."""
    found: Any = redis.lrange(f"users-{unserved}", 0, -1)
    return [json.loads(message)["headers"]["task"] for message in reversed(found)]


def end(redis: Redis, unserved: str, job_id: str, event: events.TerminalEvent, result: Any = None) -> Taken:
    """Take the message, run the job and write its end, as a worker does."""
    ledger = Ledger(redis)
    redis.rpop(queue_key(queue_name(unserved), PRIORITY_INTERACTIVE))
    taken = take(ledger, job_id)
    attempt = begin(ledger, job_id, token=taken.token)
    assert attempt.verdict == "run"
    ledger.write([Entry(job_id=job_id, run=attempt.run, event={"seq": 0, **event}, result=result)])
    return taken


def recover(redis: Redis, job_id: str) -> None:
    """Let the dead worker's lease expire, and wait until this reaper, or another worker's reaper, settles the job."""
    ledger = Ledger(redis)
    ledger.restore(LEASE_S)  # after a gap between two checks, leases are extended
    redis.zadd(leases_key(), {job_id: 1})
    reaper = Reaper(redis, ledger, partial(end_without_worker, app), LEASE_S)
    wait_until(lambda: ledger.restore(LEASE_S) or redis.zscore(leases_key(), job_id) is None, "the lease to end")
    wait_until(lambda: reaper.settle_due() or redis.hexists(job_key(job_id), "settled"), "the end to be settled")
    assert redis.zscore(due_key(), job_id) is None


def test_next_step_is_sent_once_regardless_of_when_the_worker_died(unserved: str, redis_client: Redis) -> None:
    for has_sent in (False, True):
        link, following = step("link", unserved), step("next", unserved)
        result = (generate.s(unserved, "Hi").set(link=link) | following).apply_async()
        job_id = result.parent.id
        end(redis_client, unserved, job_id, events.done("stop", {}), RESULT)
        if has_sent:  # the worker died after Celery had stored the success, which happens after it sent the next steps
            app.backend.store_result(job_id, RESULT, "SUCCESS")
        recover(redis_client, job_id)
        assert AsyncResult(job_id, app=app).get(timeout=1) == RESULT
        assert sorted(sent(redis_client, unserved)) == ["users.link", "users.next"]
        redis_client.hdel(job_key(job_id), "settled")


@pytest.mark.parametrize("is_stored", [False, True])
def test_errback_is_sent_regardless_of_when_the_worker_died(
    unserved: str, redis_client: Redis, is_stored: bool
) -> None:
    job = generate.apply_async((unserved, "Hi"), link_error=step("failed", unserved))
    end(redis_client, unserved, job.id, events.error("x", "y", False))
    if is_stored:
        app.backend.store_result(job.id, JobFailed("x", "y"), "FAILURE")
    recover(redis_client, job.id)
    assert sent(redis_client, unserved) == ["users.failed"]
    assert job.state == "FAILURE"


@pytest.mark.parametrize("has_stored", [False, True])
def test_chord_completes_when_the_worker_that_ran_its_last_part_died(
    unserved: str, redis_client: Redis, has_stored: bool
) -> None:
    parts = [generate.s(unserved, text).set(task_id=str(uuid.uuid4())) for text in ("Hi", "Ho")]
    chord(parts)(step("collect", unserved))
    first, last = (part.options["task_id"] for part in parts)
    end(redis_client, unserved, first, events.done("stop", {}), RESULT)
    app.backend.mark_as_done(first, RESULT, request=request_of(redis_client.hget(job_key(first), "message")))
    end(redis_client, unserved, last, events.done("stop", {}), RESULT)
    assert sent(redis_client, unserved) == []
    if has_stored:  # and the part is not counted
        app.backend.store_result(last, RESULT, "SUCCESS")
    recover(redis_client, last)
    assert sent(redis_client, unserved) == ["users.collect"]


@pytest.mark.parametrize("body_has_run", [False, True])
def test_chord_completes_once_when_the_worker_died_while_sending_the_chord_body(
    unserved: str, redis_client: Redis, body_has_run: bool
) -> None:
    """The dead worker has claimed the body, so no other worker may send it until the claim expires."""
    body = step("collect", unserved).set(task_id=str(uuid.uuid4()))
    last = generate.s(unserved, "Hi").set(task_id=str(uuid.uuid4()))
    chord([last])(body)
    job_id = last.options["task_id"]
    end(redis_client, unserved, job_id, events.done("stop", {}), RESULT)
    request = request_of(redis_client.hget(job_key(job_id), "message"))
    assert request is not None
    claim = app.backend.get_key_for_group(request.group, ".c")
    if body_has_run:
        app.backend.store_result(body.id, "collected", "SUCCESS")
    redis_client.set(claim, "a worker that died", ex=app.backend._chord_publish_claim_expires(6, body))
    assert redis_client.ttl(claim) <= CHORD_CLAIM_S
    ending = Ledger(redis_client).ending(job_id)
    assert ending is not None
    if body_has_run:
        end_without_worker(app, job_id, ending)
    else:
        with pytest.raises(ChordClaimed):  # the reaper retries later
            end_without_worker(app, job_id, ending)
        assert sent(redis_client, unserved) == []
        redis_client.delete(claim)  # it expires
        end_without_worker(app, job_id, ending)
    assert sent(redis_client, unserved) == ["users.collect"] * (not body_has_run)


def test_chord_completes_when_the_reply_to_its_last_part_was_lost(unserved: str, redis_client: Redis) -> None:
    """Redis has counted the part and reserved the body for its worker, which acknowledges without noticing this."""
    part = generate.s(unserved, "Hi").set(task_id=str(uuid.uuid4()))
    chord([part])(step("collect", unserved))
    job_id = part.options["task_id"]
    taken = end(redis_client, unserved, job_id, events.done("stop", {}), RESULT)
    app.backend.store_result(job_id, RESULT, "SUCCESS")
    group = json.loads(redis_client.hget(job_key(job_id), "message") or b"")["headers"]["group"]
    redis_client.set(f"{chord_key(group)}.c", "a token that no worker has")
    Ledger(redis_client).release(taken)
    assert not redis_client.hexists(job_key(job_id), "settled")
    redis_client.delete(f"{chord_key(group)}.c")  # it has expired
    redis_client.zadd(due_key(), {job_id: 1})
    recover(redis_client, job_id)
    assert sent(redis_client, unserved) == ["users.collect"]


def test_celery_result_is_stored_later_when_the_worker_could_not_store_it(unserved: str, redis_client: Redis) -> None:
    job = generate.apply_async((unserved, "Hi"), link_error=step("failed", unserved))
    taken = end(redis_client, unserved, job.id, events.error("x", "y", False))
    Ledger(redis_client).release(taken)  # Celery acknowledges even if Redis refused the result
    reaper = Reaper(redis_client, Ledger(redis_client), partial(end_without_worker, app), LEASE_S)
    wait_until(lambda: reaper.settle_due() or job.state == "FAILURE", "the failure")
    wait_until(lambda: sent(redis_client, unserved) == ["users.failed"], "the errback")


def test_late_revoke_does_not_replace_the_result_of_a_failed_job(unserved: str, redis_client: Redis) -> None:
    job = generate.delay(unserved, "Hi")
    end(redis_client, unserved, job.id, events.error("x", "y", False))
    app.backend.mark_as_failure(job.id, ValueError("y"))
    app.backend.mark_as_revoked(job.id, "terminated")
    assert job.state == "FAILURE"


def test_failing_settlement_does_not_delay_other_settlements(unserved: str, redis_client: Redis) -> None:
    wrong, right = (generate.delay(unserved, "Hi").id for _ in range(2))
    for job_id in (wrong, right):
        end(redis_client, unserved, job_id, events.error("x", "y", False))

    def store(job_id: str, ending: Ending) -> None:
        if job_id == wrong:
            raise ValueError("a broker of the user's that has no such queue")
        end_without_worker(app, job_id, ending)

    reaper = Reaper(redis_client, Ledger(redis_client), store, LEASE_S)
    for job_id in (wrong, right):
        reaper._settle_or_log(job_id, "done")
    assert not redis_client.hexists(job_key(wrong), "settled")
    assert AsyncResult(right, app=app).state == "FAILURE"
    assert redis_client.hexists(job_key(right), "settled")
    redis_client.zrem(due_key(), wrong)


def test_purged_jobs_have_the_same_result_that_celery_stores(unserved: str, redis_client: Redis) -> None:
    before, behind = app.backend.value_around_id(TaskRevokedError("cancelled"), "REVOKED")
    job = generate.delay(unserved, "Hi")
    app.control.revoke(job.id)
    own = json.loads(redis_client.get(result_key(job.id)) or b"")
    assert {**json.loads(before + job.id.encode() + behind), "date_done": own["date_done"], "children": []} == own
