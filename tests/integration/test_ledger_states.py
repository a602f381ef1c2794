"""The ledger has the right state of a job in every index and after every loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from cellama.tasks.contract import events
from cellama.tasks.contract.keys import (
    due_key,
    job_key,
    journal_key,
    last_restore_key,
    leases_key,
    running_key,
    waiting_key,
)
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, queue_key
from cellama.tasks.estimates.position import position_of
from cellama.tasks.state.ledger import Entry, Ledger

from .ledgers import DONE, LEASE_S, STARTED, TOKEN, begin, ids_in, num_ahead, submission, submit, take, write


def resumed(ledger: Ledger, job_id: str) -> Any:
    """Begin a second attempt at a job whose first attempt wrote two events and was handed back."""
    taken = take(ledger, job_id)
    first = begin(ledger, job_id, token=taken.token)
    write(ledger, first, STARTED, TOKEN)
    ledger.hand_back(first)
    ledger.requeue(taken)
    return begin(ledger, job_id, token=take(ledger, job_id).token)


def test_resumed_job_counts_as_running_from_its_first_event(
    ledger: Ledger, job_id: str, queue: str, redis_client: Redis
) -> None:
    attempt = resumed(ledger, job_id)
    assert num_ahead(ledger, job_id) is not None
    assert write(ledger, attempt, TOKEN, seq=2) == set()
    assert num_ahead(ledger, job_id) is None
    assert not redis_client.exists(waiting_key(queue))
    assert redis_client.zscore(running_key(), job_id)
    assert position_of(redis_client, job_id).state == "running"


def test_handing_a_job_back_after_a_token_does_not_count_as_a_failure(
    ledger: Ledger, job_id: str, redis_client: Redis
) -> None:
    attempt = resumed(ledger, job_id)
    write(ledger, attempt, TOKEN, seq=2)
    ledger.hand_back(attempt)
    assert redis_client.hget(job_key(job_id), "failures") == b"0"


def test_journal_of_an_unfinished_job_does_not_expire(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    write(ledger, resumed(ledger, job_id), TOKEN, seq=2)
    assert redis_client.ttl(journal_key(job_id)) == -1


def test_attempt_continues_the_event_sequence_when_its_journal_is_lost(
    ledger: Ledger, job_id: str, redis_client: Redis
) -> None:
    taken = take(ledger, job_id)
    write(ledger, begin(ledger, job_id, token=taken.token), STARTED, TOKEN)
    redis_client.delete(journal_key(job_id))
    attempt = begin(ledger, job_id, token=taken.token)
    assert attempt.next_seq == 2
    early = Entry(job_id=job_id, run=attempt.run, event={"seq": 0, **DONE})
    assert ledger.write([early]) == (set(), {0})  # never silently: it is not the next event
    assert write(ledger, attempt, events.error("stream_trimmed", "…", False), seq=2) == set()
    assert ledger.state(job_id) == "done"


@pytest.mark.parametrize("header", [{"correlation_id": "another"}, {"properties": {"correlation_id": "another"}}])
def test_user_header_is_not_mistaken_for_a_job_id(
    ledger: Ledger, queue: str, redis_client: Redis, header: dict[str, Any]
) -> None:
    first, second = submission(queue), submission(queue)
    stored = json.loads(second.message.payload)
    stored["headers"] = {**header, **stored["headers"], **header}
    changed = json.dumps(stored)
    ledger.submit([first, type(second)(second.job_id, second.call, type(second.message)(second.message.key, changed))])
    key = queue_key(queue, PRIORITY_INTERACTIVE)
    redis_client.rpop(key)
    _, page = ledger.take(key, first.job_id, LEASE_S, [(8, [key])])
    assert page.taken.job_id == second.job_id
    assert redis_client.hget(job_key(second.job_id), "holder") == page.taken.token.encode()
    assert not redis_client.exists(job_key("another"))


def test_cancelled_job_leaves_neither_a_message_nor_a_queue_entry(
    ledger: Ledger, queue: str, redis_client: Redis
) -> None:
    first, second, third = (submit(ledger, queue) for _ in range(3))
    assert ledger.cancel(second, running=True)
    ledger.settle(second)
    assert redis_client.llen(queue_key(queue, PRIORITY_INTERACTIVE)) == 2
    assert [take(ledger, job_id).job_id for job_id in (first, third)] == [first, third]
    assert redis_client.hmget(job_key(second), "message", "result") == [None, None]
    assert redis_client.ttl(job_key(second)) > 0


def test_all_keys_expire_after_the_configured_times(
    job_id: str, redis_client: Redis, settings_environment: Callable[..., None]
) -> None:
    settings_environment(event_ttl_s="77")
    ledger = Ledger(redis_client)
    ledger.cancel(job_id, running=True)
    ledger.settle(job_id)
    assert 0 < int(str(redis_client.ttl(job_key(job_id)))) <= 77
    assert 0 < int(str(redis_client.ttl(journal_key(job_id)))) <= 77


def test_finished_job_is_kept_until_celery_has_its_result(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    taken = take(ledger, job_id)
    write(ledger, begin(ledger, job_id, token=taken.token), events.error("x", "y", False))
    assert redis_client.ttl(job_key(job_id)) == -1
    assert redis_client.hexists(job_key(job_id), "message")
    ledger.release(taken)  # Celery was not able to store the failure
    assert (job_id, "done") in ledger.claim_due(1000, 60)
    assert redis_client.hexists(job_key(job_id), "message")


def test_settled_entry_is_compact_and_expires_when_it_is_settled_twice(
    ledger: Ledger, job_id: str, redis_client: Redis
) -> None:
    attempt = begin(ledger, job_id)
    write(ledger, attempt, events.done("stop", DONE["usage"]))
    for _ in range(2):
        ledger.settle(job_id)
        assert redis_client.ttl(job_key(job_id)) > 0
    assert redis_client.hmget(job_key(job_id), "state", "message", "run") == [b"done", None, None]
    assert redis_client.object("encoding", job_key(job_id)) == b"listpack"


def test_reaper_settles_the_outcome_of_a_job_whose_worker_died(
    ledger: Ledger, job_id: str, queue: str, redis_client: Redis
) -> None:
    redis_client.rpop(queue_key(queue, PRIORITY_INTERACTIVE))
    taken = take(ledger, job_id)
    write(ledger, begin(ledger, job_id, token=taken.token), events.error("x", "y", False))
    redis_client.zadd(leases_key(), {job_id: 1})
    redis_client.set(last_restore_key(), redis_client.time()[0])  # type: ignore[index]
    ledger.restore(LEASE_S)
    assert ids_in(redis_client, queue) == []  # the job has ended, and does not run again
    assert float(redis_client.zscore(due_key(), job_id) or 0) <= float(redis_client.time()[0] + 1)  # type: ignore[index]


def test_dead_job_keeps_its_message_for_a_requeue(ledger: Ledger, queue: str, redis_client: Redis) -> None:
    job_id = submit(ledger, queue)
    write(ledger, begin(ledger, job_id), events.error("dead", "…", False))
    ledger.settle(job_id)
    assert ledger.requeue_dead(job_id)
    assert ledger.dead() == [] or job_id not in {job["id"] for job in ledger.dead()}


def test_settlement_of_job_outcomes_is_retried_with_backoff(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    write(ledger, begin(ledger, job_id), events.error("x", "y", False))
    waits = []
    for _ in range(4):
        redis_client.zadd(due_key(), {job_id: 1})
        assert (job_id, "done") in ledger.claim_due(1000, 60)
        waits.append(round(float(redis_client.zscore(due_key(), job_id) or 0) - ledger.now(), -1))
    assert waits == [60, 120, 240, 480]
