"""Attempts in the ledger on a real Redis: fencing, suspected jobs and ends."""

from __future__ import annotations

import json
import uuid

import pytest
from redis import Redis

from cellama.tasks import app
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import (
    cancel_key,
    due_key,
    events_channel,
    job_key,
    journal_key,
    leases_key,
    result_key,
    running_key,
)
from cellama.tasks.state.ledger import MAX_ATTEMPTS, CeleryState, Entry, Ledger, new_run

from ..conftest import PATIENCE_S
from .ledgers import DONE, STARTED, TOKEN, begin, journal, kept_result, submit, take, write


def test_only_the_latest_attempt_can_write(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    first = begin(ledger, job_id)
    assert write(ledger, first, STARTED, TOKEN) == set()
    second = begin(ledger, job_id)
    assert second.number == 2
    assert write(ledger, first, TOKEN, DONE, seq=2) == {0, 1}
    assert write(ledger, second, TOKEN, DONE, seq=2) == set()
    assert [json.loads(f[b"event"])["seq"] for _, f in redis_client.xrange(journal_key(job_id))] == [0, 1, 2, 3]
    assert write(ledger, first, DONE, seq=4) == {0}


def test_repeated_write_after_a_lost_reply_changes_nothing(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    attempt = begin(ledger, job_id)
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(events_channel(job_id, 0))
        for _ in range(2):
            assert write(ledger, attempt, STARTED, TOKEN, DONE) == set()
        told = [pubsub.get_message(timeout=1) for _ in range(5)]
    assert [m["type"] for m in told if m] == ["subscribe", "message", "message", "message"]
    assert redis_client.xlen(journal_key(job_id)) == 3


def test_repeated_begin_call_counts_once(ledger: Ledger, job_id: str) -> None:
    run = new_run()
    first, again = (ledger.begin(job_id, run, "w", alone=True) for _ in range(2))
    assert first == again
    assert first.number == first.num_failures == 1


def test_job_without_tokens_is_suspected_and_is_dead_after_three_attempts(
    ledger: Ledger, job_id: str, queue: str
) -> None:
    assert begin(ledger, job_id).verdict == "run"
    assert begin(ledger, job_id).verdict == "suspect"
    for _ in range(MAX_ATTEMPTS - 1):
        assert begin(ledger, job_id, alone=True).verdict == "run"
    attempt = begin(ledger, job_id, alone=True)
    assert attempt.verdict == "dead"
    assert write(ledger, attempt, events.error("dead", "…", False)) == set()
    dead = next(entry for entry in ledger.dead() if entry["id"] == job_id)
    assert (dead["attempts"], dead["task"], dead["queue"]) == (4, "cellama.generate", queue)
    new_id = ledger.requeue_dead(job_id)
    assert new_id is not None
    assert ledger.state(new_id) == "queued"
    assert all(entry["id"] != job_id for entry in ledger.dead())  # other tests may leave dead jobs
    assert ledger.requeue_dead(job_id) is None


def test_first_token_clears_suspicion(ledger: Ledger, job_id: str) -> None:
    write(ledger, begin(ledger, job_id), STARTED, TOKEN)
    assert begin(ledger, job_id).verdict == "run"


def test_informational_event_is_published_without_other_effects(
    ledger: Ledger, job_id: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(events.EVENT_CLASSES, "note", "informative")
    attempt = begin(ledger, job_id)
    write(ledger, attempt, STARTED)
    started_at = redis_client.zscore(running_key(), job_id)
    assert write(ledger, attempt, {"type": "note", "text": "half"}, seq=1) == set()
    assert [event["type"] for event in journal(redis_client, job_id)] == ["started", "note"]
    assert redis_client.zscore(running_key(), job_id) == started_at
    assert begin(ledger, job_id).verdict == "suspect"  # the attempt has no token


def test_handed_back_job_is_queued_again_without_suspicion(ledger: Ledger, job_id: str) -> None:
    attempt = begin(ledger, job_id)
    write(ledger, attempt, STARTED)
    ledger.hand_back(attempt)
    assert ledger.state(job_id) == "handed_back"
    assert ledger.ahead(job_id) is not None
    assert write(ledger, attempt, TOKEN, seq=1) == {0}
    assert begin(ledger, job_id).verdict == "run"


def test_cancellation_takes_effect_immediately_and_is_reported_by_later_calls(
    ledger: Ledger, queue: str, redis_client: Redis
) -> None:
    running, waiting, unknown = submit(ledger, queue), submit(ledger, queue), str(uuid.uuid4())
    taken = take(ledger, running)
    begin(ledger, running, token=taken.token)
    assert ledger.cancel(waiting, running=True)
    ending = ledger.ending(waiting)
    assert ending is not None
    assert ending.event["finish_reason"] == "cancelled"
    assert not redis_client.exists(cancel_key(waiting))
    assert not ledger.cancel(running, running=True)
    assert begin(ledger, running, alone=True, token=taken.token).verdict == "cancelled"
    assert not ledger.cancel(unknown, running=True)
    assert redis_client.exists(cancel_key(unknown))


def test_cancellation_finishes_a_job_whose_worker_is_gone(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    attempt = begin(ledger, job_id, token=take(ledger, job_id).token)
    write(ledger, attempt, STARTED, TOKEN)
    redis_client.zadd(leases_key(), {job_id: 0})
    assert ledger.cancel(job_id, running=True)
    assert [event["seq"] for event in journal(redis_client, job_id)] == [0, 1, 2]
    assert write(ledger, attempt, TOKEN, seq=2) == {0}


def test_started_job_cannot_be_ended_by_other_workers(ledger: Ledger, job_id: str) -> None:
    begin(ledger, job_id)
    assert not ledger.end_waiting(job_id, DONE)
    assert ledger.state(job_id) == "running"


def test_write_rejects_events_after_a_gap(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    attempt = begin(ledger, job_id)
    write(ledger, attempt, STARTED, TOKEN)
    assert ledger.write([Entry(job_id=job_id, run=attempt.run, event={"seq": 4, **TOKEN})]) == (set(), {0})
    assert [event["seq"] for event in journal(redis_client, job_id)] == [0, 1]


def test_lost_attempt_cannot_write_into_a_later_attempt_with_the_same_number(
    ledger: Ledger, job_id: str, redis_client: Redis
) -> None:
    snapshot = redis_client.dump(job_key(job_id))
    lost = begin(ledger, job_id)
    write(ledger, lost, STARTED)
    redis_client.delete(journal_key(job_id))
    redis_client.restore(job_key(job_id), 0, snapshot, replace=True)  # type: ignore[arg-type]
    again = begin(ledger, job_id)
    assert (again.number, again.run_id == lost.run_id) == (lost.number, False)
    write(ledger, again, STARTED)
    assert write(ledger, lost, TOKEN, seq=1) == {0}
    ledger.hand_back(lost)
    assert write(ledger, again, TOKEN, DONE, seq=1) == set()


def test_job_results_are_kept_until_celery_has_stored_them(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    attempt = begin(ledger, job_id)
    ledger.write([Entry(job_id=job_id, run=attempt.run, event={"seq": 0, **DONE}, result={"text": "x"})])
    assert kept_result(ledger, job_id) == {"text": "x"}
    app.backend.store_result(job_id, {"text": "x"}, "STARTED")
    assert kept_result(ledger, job_id) == {"text": "x"}
    app.backend.store_result(job_id, {"text": "x"}, "SUCCESS")
    assert redis_client.zscore(due_key(), job_id)  # a chord is counted next
    ledger.settle(job_id)
    assert kept_result(ledger, job_id) is None
    assert redis_client.zscore(due_key(), job_id) is None
    app.backend.store_result(job_id, {"text": "y"}, "STARTED")  # a late copy does not replace a success
    assert app.AsyncResult(job_id).get(timeout=PATIENCE_S) == {"text": "x"}
    assert redis_client.ttl(f"celery-task-meta-{job_id}") > 0


def test_outcome_that_was_reported_to_celery_needs_no_settlement(
    ledger: Ledger, job_id: str, redis_client: Redis
) -> None:
    taken = take(ledger, job_id)
    attempt = begin(ledger, job_id, token=taken.token)
    stored, event = CeleryState(b'{"status": "SUCCESS"}', 100), {"seq": 0, **DONE}
    end = Entry(job_id=job_id, run=attempt.run, event=event, stored=stored, token=taken.token)
    assert ledger.write([end]) == ledger.write([end]) == (set(), set())  # the reply was lost
    assert redis_client.get(result_key(job_id)) == b'{"status": "SUCCESS"}'
    assert 0 < redis_client.ttl(result_key(job_id)) <= 100
    assert redis_client.zscore(due_key(), job_id) is redis_client.zscore(leases_key(), job_id) is None
    assert redis_client.hmget(job_key(job_id), "holder", "message", "result") == [None] * 3
    assert begin(ledger, job_id).verdict == "done"


def test_ending_a_job_does_not_release_the_message_of_another_holder(
    ledger: Ledger, job_id: str, redis_client: Redis
) -> None:
    attempt = begin(ledger, job_id, token=take(ledger, job_id).token)
    redis_client.hset(job_key(job_id), "holder", "another token")
    stored, event = CeleryState(b"{}", None), {"seq": 0, **DONE}
    end = Entry(job_id=job_id, run=attempt.run, event=event, stored=stored, token="token of the frozen one")
    assert ledger.write([end]) == (set(), set())
    assert redis_client.hget(job_key(job_id), "holder") == b"another token"


def test_celery_state_becomes_started_when_the_attempt_starts(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    started = CeleryState(b'{"status": "STARTED"}', 100)
    assert begin(ledger, job_id, token="of somebody else", started=started).verdict == "superseded"
    assert redis_client.get(result_key(job_id)) is None
    begin(ledger, job_id, token=take(ledger, job_id).token, started=started)
    assert redis_client.get(result_key(job_id)) == started.value


def test_attempt_number_includes_earlier_attempts_that_wrote_no_events(ledger: Ledger, job_id: str) -> None:
    attempts = [begin(ledger, job_id)]
    assert attempts[0].before == ()
    for _ in range(2):  # as if its worker had died
        attempts.append(begin(ledger, job_id, alone=True))
    assert [(each.run, each.is_lost, each.worker) for each in attempts[2].before] == [
        (attempts[0].run, True, "w"),
        (attempts[1].run, True, "w"),
    ]
    ledger.hand_back(attempts[2])
    (before,) = begin(ledger, job_id, alone=True).before
    assert (before.run, before.is_lost) == (attempts[2].run, False)
    assert before.began_s >= before.ended_s >= 0
