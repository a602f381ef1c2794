"""The ledger on a real Redis: who may write, what is counted, what is found again."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from redis import Redis

from cellama.tasks import app
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import (
    DEADLINES_KEY,
    RUNNING_KEY,
    cancel_key,
    events_channel,
    job_key,
    journal_key,
)
from cellama.tasks.ledger import MAX_ATTEMPTS, Ledger, new_run
from cellama.tasks.past import read_past
from cellama.tasks.records import Attempt, Call, Entry, Message, Submission

from ..conftest import PATIENCE_S

QUEUE = "cellama:ledger-test"


def call(priority: int = 3, timeout_s: float | None = None) -> Call:
    return Call("cellama.generate", ["tiny", "Hi"], {}, QUEUE, priority, timeout_s, {})


@pytest.fixture
def ledger(redis_client: Redis) -> Ledger:
    return Ledger(redis_client)


@pytest.fixture
def job_id(ledger: Ledger) -> str:
    new = str(uuid.uuid4())
    assert ledger.submit(new, call())
    return new


def begin(ledger: Ledger, job_id: str, **options: Any) -> Attempt:
    return ledger.begin(job_id, new_run(), "w", **options)


def write(ledger: Ledger, attempt: Attempt, *told: dict[str, Any], seq: int = 0) -> set[int]:
    return ledger.write(
        [Entry(attempt.job_id, attempt.number, {"seq": seq + i, **event}) for i, event in enumerate(told)]
    )


STARTED, TOKEN, DONE = events.started("tiny", 3, "w", 7), events.token("x", [1]), events.done("stop", {})


def test_a_job_goes_from_queued_over_running_to_done(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    assert ledger.state(job_id) == "queued"
    attempt = begin(ledger, job_id)
    assert (attempt.number, attempt.verdict, ledger.state(job_id)) == (1, "run", "running")
    assert ledger.place(job_id) is not None
    assert write(ledger, attempt, STARTED, TOKEN) == set()
    assert ledger.place(job_id) is None
    assert redis_client.zscore(RUNNING_KEY, job_id)
    assert write(ledger, attempt, DONE, seq=2) == set()
    assert ledger.state(job_id) == "done"
    assert redis_client.zscore(RUNNING_KEY, job_id) is None
    assert begin(ledger, job_id).verdict == "done"
    assert 0 < int(str(redis_client.ttl(job_key(job_id)))) <= 3600
    assert read_past(redis_client, job_id).end == {"seq": 2, **DONE}


def test_only_the_youngest_attempt_writes(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    first = begin(ledger, job_id)
    assert write(ledger, first, STARTED, TOKEN) == set()
    second = begin(ledger, job_id)
    assert second.number == 2
    assert write(ledger, first, TOKEN, DONE, seq=2) == {0, 1}
    assert write(ledger, second, TOKEN, DONE, seq=2) == set()
    assert [json.loads(f[b"event"])["seq"] for _, f in redis_client.xrange(journal_key(job_id))] == [0, 1, 2, 3]
    assert write(ledger, first, DONE, seq=4) == {0}


def test_writing_again_after_a_lost_reply_changes_nothing(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    attempt = begin(ledger, job_id)
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(events_channel(job_id, 0))
        for _ in range(2):
            assert write(ledger, attempt, STARTED, TOKEN, DONE) == set()
        told = [pubsub.get_message(timeout=1) for _ in range(5)]
    assert [m["type"] for m in told if m] == ["subscribe", "message", "message", "message"]
    assert redis_client.xlen(journal_key(job_id)) == 3


def test_events_are_heard_in_their_own_database_only(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    known = redis_client.connection_pool.connection_kwargs
    with Redis(host=known["host"], port=known["port"], db=1) as elsewhere, redis_client.pubsub() as pubsub:
        namesake = Ledger(elsewhere)
        assert namesake.submit(job_id, call())
        pubsub.psubscribe(f"*{job_id}")
        write(namesake, begin(namesake, job_id), STARTED, DONE)
        write(ledger, begin(ledger, job_id), STARTED, DONE)
        told = [message for message in (pubsub.get_message(timeout=1) for _ in range(5)) if message]
        elsewhere.flushdb()
    channels = [message["channel"].decode() for message in told if message["type"] == "pmessage"]
    assert channels == [events_channel(job_id, 1)] * 2 + [events_channel(job_id, 0)] * 2


def test_asking_again_whether_to_begin_counts_once(ledger: Ledger, job_id: str) -> None:
    run = new_run()
    first, again = (ledger.begin(job_id, run, "w", alone=True) for _ in range(2))
    assert first == again
    assert first.number == first.num_failures == 1


def test_a_job_without_a_token_is_suspect_and_dead_after_three_attempts(ledger: Ledger, job_id: str) -> None:
    assert begin(ledger, job_id).verdict == "run"
    assert begin(ledger, job_id).verdict == "suspect"
    for _ in range(MAX_ATTEMPTS - 1):
        assert begin(ledger, job_id, alone=True).verdict == "run"
    attempt = begin(ledger, job_id, alone=True)
    assert attempt.verdict == "dead"
    assert write(ledger, attempt, events.error("dead", "…", False)) == set()
    dead = next(entry for entry in ledger.dead() if entry["id"] == job_id)
    assert (dead["attempts"], dead["task"], dead["queue"]) == (4, "cellama.generate", QUEUE)
    taken = ledger.take_dead(job_id)
    assert taken is not None
    assert taken["args"] == ["tiny", "Hi"]
    assert ledger.take_dead(job_id) is None


def test_a_token_clears_a_job_of_suspicion(ledger: Ledger, job_id: str) -> None:
    write(ledger, begin(ledger, job_id), STARTED, TOKEN)
    assert begin(ledger, job_id).verdict == "run"


def test_a_job_that_is_handed_back_is_no_suspect_and_waits_again(ledger: Ledger, job_id: str) -> None:
    attempt = begin(ledger, job_id)
    write(ledger, attempt, STARTED)
    ledger.hand_back(attempt)
    assert ledger.state(job_id) == "handed_back"
    assert ledger.place(job_id) is not None
    assert write(ledger, attempt, TOKEN, seq=1) == {0}
    assert begin(ledger, job_id).verdict == "run"


def test_cancel_ends_a_waiting_job_at_once_and_tells_who_comes_later(ledger: Ledger, redis_client: Redis) -> None:
    waiting, running, unknown = (str(uuid.uuid4()) for _ in range(3))
    ledger.submit(waiting, call())
    ledger.submit(running, call())
    begin(ledger, running)
    assert ledger.cancel(waiting, running=True)
    past = read_past(redis_client, waiting)
    assert past.end is not None
    assert past.end["finish_reason"] == "cancelled"
    assert not redis_client.exists(cancel_key(waiting))
    assert not ledger.cancel(running, running=True)
    assert begin(ledger, running, alone=True).verdict == "cancelled"
    assert not ledger.cancel(unknown, running=True)
    assert begin(ledger, unknown, call=call()).verdict == "cancelled"


def test_nobody_ends_a_job_that_has_begun(ledger: Ledger, job_id: str) -> None:
    begin(ledger, job_id)
    assert not ledger.end_waiting(job_id, DONE)
    assert ledger.write([Entry(job_id, None, {"seq": 0, **DONE})]) == {0}
    assert ledger.state(job_id) == "running"


def test_a_job_is_submitted_once(ledger: Ledger, job_id: str) -> None:
    assert not ledger.submit(job_id, call())


def test_message_is_pushed_with_the_entry_and_not_again(ledger: Ledger, redis_client: Redis) -> None:
    ids = [str(uuid.uuid4()) for _ in range(3)]
    key = f"ledger-test:{ids[0]}"
    jobs = [Submission(job_id, call(timeout_s=5), message=Message(key, job_id)) for job_id in ids]
    assert ledger.submit_all(jobs[:2]) == [True, True]
    assert ledger.submit_all(jobs) == [False, False, True]
    assert redis_client.lrange(key, 0, -1) == [job_id.encode() for job_id in reversed(ids)]
    assert all(redis_client.zscore(DEADLINES_KEY, job_id) for job_id in ids)
    assert sorted(ids, key=lambda job_id: ledger.place(job_id) or 0) == ids


def test_places_go_by_priority_then_by_time(ledger: Ledger, redis_client: Redis) -> None:
    redis_client.delete(f"cellama:waiting:{QUEUE}")
    ids = [str(uuid.uuid4()) for _ in range(4)]
    for job_id, priority in zip(ids, (9, 3, 9, 0), strict=True):
        ledger.submit(job_id, call(priority))
    assert [ledger.place(job_id) for job_id in ids] == [2, 1, 3, 0]


def test_results_are_kept_until_celery_has_them(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    attempt = begin(ledger, job_id)
    ledger.write([Entry(job_id, attempt.number, {"seq": 0, **DONE}, {"text": "x"})])
    assert ledger.result(job_id) == {"text": "x"}
    app.backend.store_result(job_id, {"text": "x"}, "STARTED")
    assert ledger.result(job_id) == {"text": "x"}
    app.backend.store_result(job_id, {"text": "x"}, "SUCCESS")
    assert ledger.result(job_id) is None
    app.backend.store_result(job_id, {"text": "y"}, "STARTED")  # a late copy replaces no success
    assert app.AsyncResult(job_id).get(timeout=PATIENCE_S) == {"text": "x"}
    assert redis_client.ttl(f"celery-task-meta-{job_id}") > 0
