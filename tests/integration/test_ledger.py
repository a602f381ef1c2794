"""The ledger on a real Redis: ownership, counters and recovery."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from cellama.tasks.contract import events
from cellama.tasks.contract.keys import (
    backlog_key,
    due_key,
    events_channel,
    job_key,
    journal_key,
    leases_key,
    running_key,
    waiting_key,
)
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, queue_key
from cellama.tasks.state.ledger import PAGE_MESSAGE_BYTES, Ledger

from ..conftest import PATIENCE_S
from .ledgers import DONE, LEASE_S, STARTED, TOKEN, begin, ids_in, journal, num_ahead, submission, submit, take, write


def test_job_changes_from_queued_to_running_to_done(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    assert ledger.state(job_id) == "queued"
    taken = take(ledger, job_id)
    attempt = begin(ledger, job_id, token=taken.token)
    assert (attempt.number, attempt.verdict, ledger.state(job_id)) == (1, "run", "running")
    assert num_ahead(ledger, job_id) is not None
    assert write(ledger, attempt, STARTED, TOKEN) == set()
    assert num_ahead(ledger, job_id) is None
    assert redis_client.zscore(running_key(), job_id)
    assert write(ledger, attempt, DONE, seq=2) == set()
    ledger.release(taken)
    assert ledger.state(job_id) == "done"
    assert redis_client.zscore(running_key(), job_id) is redis_client.zscore(leases_key(), job_id) is None
    assert begin(ledger, job_id).verdict == "done"
    assert redis_client.ttl(job_key(job_id)) == -1  # Celery does not have the end
    ledger.settle(job_id)
    assert 0 < int(str(redis_client.ttl(job_key(job_id)))) <= 3600


@pytest.mark.parametrize("told", [[], [STARTED, TOKEN]])
def test_stream_of_a_job_without_an_entry_gets_one_last_event(
    ledger: Ledger, job_id: str, redis_client: Redis, told: list[events.Event]
) -> None:
    write(ledger, begin(ledger, job_id), *told)
    end = events.error("unknown_job", "nothing is known", False)
    ledger.end_unknown(job_id, end)
    assert redis_client.xlen(journal_key(job_id)) == len(told)  # the job has an entry
    redis_client.delete(job_key(job_id))
    for _ in range(2):
        ledger.end_unknown(job_id, end)
    entries: list[Any] = redis_client.xrange(journal_key(job_id))  # type: ignore[assignment]
    assert [json.loads(fields[b"event"]) for _, fields in entries[len(told) :]] == [{"seq": len(told), **end}]
    assert 0 < int(str(redis_client.ttl(journal_key(job_id)))) <= 3600


def test_unfinished_job_does_not_expire(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    assert redis_client.ttl(job_key(job_id)) == -1
    write(ledger, begin(ledger, job_id), STARTED)
    assert redis_client.ttl(job_key(job_id)) == -1


def test_only_the_holder_of_the_message_can_start_the_job(
    ledger: Ledger, job_id: str, queue: str, redis_client: Redis
) -> None:
    frozen = take(ledger, job_id)
    ledger.requeue(frozen)  # as the reaper does when the lease has expired
    assert begin(ledger, job_id, token=frozen.token).verdict == "superseded"
    other = take(ledger, job_id)
    assert ledger.renew([frozen, other], LEASE_S) == [frozen]
    ledger.requeue(frozen)
    ledger.release(frozen)
    assert begin(ledger, job_id, token=frozen.token).verdict == "superseded"
    assert begin(ledger, job_id, token=other.token).verdict == "run"
    assert ids_in(redis_client, queue) == [job_id] * 2  # one from `submit`, which was not popped, one from `requeue`


def test_ticket_is_dropped_when_no_job_is_waiting(ledger: Ledger, job_id: str, queue: str) -> None:
    first = take(ledger, job_id)
    assert ledger.take(queue_key(queue, PRIORITY_INTERACTIVE), job_id, LEASE_S) == []
    assert begin(ledger, job_id, token=first.token).verdict == "run"
    assert ledger.renew([first], LEASE_S) == []


def test_ticket_represents_the_oldest_job_that_no_worker_holds(ledger: Ledger, queue: str, redis_client: Redis) -> None:
    first, second, third = (submission(queue) for _ in range(3))
    ledger.submit([first, second, third])
    key = queue_key(queue, PRIORITY_INTERACTIVE)
    taken = []
    for ticket in (third, first):
        redis_client.lrem(key, 1, ticket.message.payload)
        taken += ledger.take(key, ticket.job_id, LEASE_S)
    assert [(each.taken.job_id, each.payload.decode()) for each in taken] == [
        (first.job_id, first.message.payload),
        (second.job_id, second.message.payload),
    ]
    ledger.requeue(taken[0].taken)
    assert ids_in(redis_client, queue) == [first.job_id, second.job_id]
    taken = ledger.take(key, first.job_id, LEASE_S) + ledger.take(key, second.job_id, LEASE_S)
    assert [each.taken.job_id for each in taken] == [first.job_id, third.job_id]


def test_repeated_take_call_returns_the_same_jobs(ledger: Ledger, queue: str, redis_client: Redis) -> None:
    jobs = [submit(ledger, queue) for _ in range(20)]
    key = queue_key(queue, PRIORITY_INTERACTIVE)
    redis_client.rpop(key)
    page = ledger.take(key, jobs[0], LEASE_S, [(2, [key])], token="t")
    again = ledger.take(key, jobs[0], LEASE_S, [(2, [key])], token="t", is_repeated=True)
    assert [each.taken.job_id for each in page] == jobs[:3]
    assert sorted((each.taken.job_id, each.taken.token) for each in again) == sorted(
        (each.taken.job_id, each.taken.token) for each in page
    )
    assert ids_in(redis_client, queue) == jobs[3:]
    assert ledger.take(key, jobs[3], LEASE_S, token="never arrived", is_repeated=True)[0].taken.job_id == jobs[3]


def test_job_queued_by_a_version_without_backlogs_is_taken(ledger: Ledger, queue: str, redis_client: Redis) -> None:
    first, second = (submit(ledger, queue) for _ in range(2))
    key = queue_key(queue, PRIORITY_INTERACTIVE)
    redis_client.delete(backlog_key(key))
    assert [take(ledger, job_id).job_id for job_id in (second, first)] == [second, first]
    assert ledger.take(key, first, LEASE_S) == []


def test_job_held_by_a_worker_of_a_version_without_backlogs_is_not_taken(
    ledger: Ledger, queue: str, redis_client: Redis
) -> None:
    first, second = (submit(ledger, queue) for _ in range(2))
    redis_client.hset(job_key(first), "holder", "a worker")
    assert take(ledger, second).job_id == second


def test_job_that_is_handed_back_is_next_in_its_queue(
    ledger: Ledger, job_id: str, queue: str, redis_client: Redis
) -> None:
    second = submit(ledger, queue)
    redis_client.rpop(queue + "\x06\x163")
    taken = take(ledger, job_id)
    attempt = begin(ledger, job_id, token=taken.token)
    write(ledger, attempt, STARTED, TOKEN)
    ledger.hand_back(attempt)
    ledger.requeue(taken)
    assert ids_in(redis_client, queue) == [job_id, second]
    assert (ledger.state(job_id), num_ahead(ledger, job_id)) == ("handed_back", 0)


def test_message_of_an_expired_job_does_not_start_a_new_job(
    ledger: Ledger, job_id: str, queue: str, redis_client: Redis
) -> None:
    ledger.cancel(job_id, running=True)
    redis_client.delete(job_key(job_id))  # the entry has expired, and the message is still in a long queue
    (fetched,) = ledger.take(queue_key(queue, PRIORITY_INTERACTIVE), job_id, LEASE_S)
    assert (fetched.payload, fetched.taken.token, fetched.taken.waited_s) == (b"", "", None)
    assert begin(ledger, job_id, token="").verdict == "gone"


def test_message_rejected_by_celery_is_not_requeued(
    ledger: Ledger, job_id: str, queue: str, redis_client: Redis
) -> None:
    redis_client.rpop(queue_key(queue, PRIORITY_INTERACTIVE))
    ledger.release(take(ledger, job_id))
    assert redis_client.zscore(due_key(), job_id)  # the reaper ends it unless something else does
    assert ledger.take(queue_key(queue, PRIORITY_INTERACTIVE), job_id, LEASE_S) == []
    assert ledger.cancel(job_id, running=True)


def test_job_finishes_when_its_message_is_acknowledged_while_it_runs(ledger: Ledger, job_id: str) -> None:
    taken = take(ledger, job_id)
    attempt = begin(ledger, job_id, token=taken.token)
    ledger.release(taken)  # as Celery does when it terminates a job
    assert not ledger.cancel(job_id, running=True)  # another worker receives this also, but the job has ended
    assert write(ledger, attempt, events.done("cancelled", {})) == set()


def test_events_are_published_per_database(ledger: Ledger, job_id: str, queue: str, redis_client: Redis) -> None:
    known = redis_client.connection_pool.connection_kwargs
    there = {name: known[name] for name in ("host", "port", "password")}
    with Redis(**there, db=1) as elsewhere, redis_client.pubsub() as pubsub:
        namesake = Ledger(elsewhere)
        submit(namesake, queue, job_id=job_id)
        pubsub.psubscribe(f"*{job_id}")
        write(namesake, begin(namesake, job_id), STARTED, DONE)
        write(ledger, begin(ledger, job_id), STARTED, DONE)
        told = [message for message in (pubsub.get_message(timeout=1) for _ in range(5)) if message]
        elsewhere.flushdb()
    channels = [message["channel"].decode() for message in told if message["type"] == "pmessage"]
    assert channels == [events_channel(job_id, 1)] * 2 + [events_channel(job_id, 0)] * 2


def test_take_returns_the_age_of_the_job(ledger: Ledger, job_id: str, queue: str, redis_client: Redis) -> None:
    earlier = float(redis_client.hget(job_key(job_id), "submitted_at") or 0) - 50  # type: ignore[arg-type]
    redis_client.hset(job_key(job_id), "submitted_at", earlier)
    redis_client.delete(backlog_key(queue_key(queue, PRIORITY_INTERACTIVE)))  # its order has the other time
    assert 50 <= (take(ledger, job_id).waited_s or 0) < 50 + PATIENCE_S


def test_event_with_half_a_surrogate_pair_is_written(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    write(ledger, begin(ledger, job_id), events.error("x", "\ud800 caf\u00e9", False))
    assert journal(redis_client, job_id)[0]["message"] == "? caf\u00e9"


def test_submit_pushes_the_message_once(ledger: Ledger, queue: str, redis_client: Redis) -> None:
    jobs = [submission(queue, timeout_s=5) for _ in range(3)]
    ids = [job.job_id for job in jobs]
    assert ledger.submit(jobs[:2]) == [1, 1]
    assert ledger.submit(jobs) == [0, 0, 1]
    assert ids_in(redis_client, queue) == ids
    assert all(redis_client.zscore(due_key(), job_id) for job_id in ids)
    assert sorted(ids, key=lambda job_id: num_ahead(ledger, job_id) or 0) == ids


def test_submit_reports_a_different_payload_with_the_same_id(ledger: Ledger, queue: str) -> None:
    first = submission(queue, digest="a")
    assert ledger.submit([first]) == [1]
    same, other = (submission(queue, first.job_id, digest=digest) for digest in "ab")
    assert ledger.submit([same, other]) == [0, -1]


def test_job_rank_depends_on_priority_first_and_then_on_time(ledger: Ledger, queue: str, redis_client: Redis) -> None:
    redis_client.delete(waiting_key(queue))
    ids = [submit(ledger, queue, priority=priority) for priority in (9, 3, 9, 0)]
    assert [num_ahead(ledger, job_id) for job_id in ids] == [2, 1, 3, 0]


def test_take_returns_up_to_an_eighth_of_the_queue_within_capacity(
    ledger: Ledger, queue: str, redis_client: Redis
) -> None:
    jobs = [submit(ledger, queue) for _ in range(17)]
    key = queue_key(queue, 3)
    redis_client.rpop(key)
    page = ledger.take(key, jobs[0], LEASE_S, [(9, [queue_key(queue, 0), key])])
    assert [fetched.taken.job_id for fetched in page] == jobs[:3]
    assert [json.loads(fetched.payload)["headers"]["id"] for fetched in page[1:]] == jobs[1:3]
    assert len({fetched.taken.token for fetched in page}) == 3
    assert begin(ledger, jobs[1], token=page[1].taken.token).verdict == "run"
    assert begin(ledger, jobs[2], token=page[1].taken.token).verdict == "superseded"
    redis_client.rpop(key)
    assert len(ledger.take(key, jobs[3], LEASE_S, [(1, [key])])) == 2


@pytest.mark.parametrize("needs", ["capacity", "memory", "adoption"])
def test_page_ends_before_a_message_that_must_be_taken_alone(
    ledger: Ledger, queue: str, redis_client: Redis, needs: str
) -> None:
    first, second, third = [submission(queue) for _ in range(3)]
    message = json.loads(second.message.payload)
    if needs == "capacity":
        message["headers"]["cellama_weight"] = 2
    elif needs == "memory":
        message["body"] = "x" * PAGE_MESSAGE_BYTES
    else:
        message["headers"] = {"id": second.job_id}
    payload, key = json.dumps(message), queue_key(queue, 3)
    alone = replace(second, message=replace(second.message, payload=payload))
    ledger.submit([first])
    if needs == "adoption":
        redis_client.lpush(key, payload)
    else:
        ledger.submit([alone])
    ledger.submit([third])
    redis_client.rpop(key)
    assert [each.taken.job_id for each in ledger.take(key, first.job_id, LEASE_S, [(9, [key])])] == [first.job_id]
    assert redis_client.llen(key) == 2
    if needs == "capacity":
        redis_client.rpop(key)
        page = ledger.take(key, third.job_id, LEASE_S, [(9, [key])])
        assert [each.taken.job_id for each in page] == [second.job_id]
