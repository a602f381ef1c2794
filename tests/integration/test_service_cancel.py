"""After a cancellation or a time limit, the slot is free, the stream ends once, and the worker lives."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from redis import Redis

from cellama.api import Client
from cellama.tasks import generate
from cellama.tasks.contract.errors import JobCancelled
from cellama.tasks.contract.keys import result_key
from cellama.tasks.state.reader import stream_events

from ..conftest import PATIENCE_S, SLOTS, WorkerProcess, wait_until
from .conftest import GREEDY, LONG

EventsOf = Callable[..., list[dict[str, Any]]]


def terminal(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last event, and check that no other event is terminal."""
    assert [e["type"] for e in events if e["type"] in ("done", "error")] == [events[-1]["type"]]
    return events[-1]


def wait_until_idle(worker: WorkerProcess) -> None:
    wait_until(lambda: worker.engine()["phase"] == "idle", "an idle engine")


def run_after_first_token(redis: Redis, job_id: str) -> list[dict[str, Any]]:
    stream = stream_events(redis, job_id, timeout_s=PATIENCE_S)
    return [next(stream), next(stream)]


def test_revoking_a_running_job_frees_its_slot(worker: WorkerProcess, redis_client: Redis, events_of: EventsOf) -> None:
    with worker.slowed():
        job = generate.delay("tiny", "Once upon a time", **LONG)
        run_after_first_token(redis_client, job.id)
        job.revoke(terminate=True)
        end = terminal(events_of(job.id))
    assert (end["type"], end["finish_reason"]) == ("done", "cancelled")
    assert 0 < end["usage"]["completion_tokens"] < 1900
    with pytest.raises(TaskRevokedError):
        job.get(timeout=PATIENCE_S)
    wait_until_idle(worker)


def test_state_of_a_revoked_job_is_stored_once(worker: WorkerProcess, redis_client: Redis, events_of: EventsOf) -> None:
    """A response can be deleted as soon as its job has ended, so no state may be stored afterwards."""
    with worker.slowed(), redis_client.pubsub() as pubsub:
        task_id = str(uuid.uuid4())
        pubsub.subscribe(result_key(task_id))  # before the job exists, so that no state is missed
        job = generate.apply_async(("tiny", "Once upon a time"), LONG, task_id=task_id)
        run_after_first_token(redis_client, job.id)
        job.revoke(terminate=True)
        assert terminal(events_of(job.id))["finish_reason"] == "cancelled"
        generate.delay("tiny", "Once upon a time", max_tokens=1).get(timeout=PATIENCE_S)
        stored = []
        while (message := pubsub.get_message(timeout=1.0)) is not None:
            stored.append(message["data"])
    assert [b'"REVOKED"' in value for value in stored if isinstance(value, bytes)] == [False, True]  # STARTED first
    wait_until_idle(worker)


def test_revoking_a_waiting_job_ends_its_stream(
    worker: WorkerProcess, redis_client: Redis, events_of: EventsOf
) -> None:
    with worker.slowed():
        running = [generate.delay("tiny", "Once upon a time", **LONG) for _ in range(2 * SLOTS)]
        run_after_first_token(redis_client, running[0].id)
        waiting = generate.delay("tiny", "Once upon a time", **LONG)
        for job in [waiting, *running]:
            job.revoke(terminate=True)
        end = terminal(events_of(waiting.id))
        assert {terminal(events_of(job.id))["finish_reason"] for job in running} == {"cancelled"}
    assert (end["type"], end["finish_reason"], end["usage"]["completion_tokens"]) == ("done", "cancelled", 0)
    wait_until_idle(worker)


def test_cancellation_raises_job_cancelled_in_waiting_callers(worker: WorkerProcess, client: Client) -> None:
    with worker.slowed():
        job = client.generate("tiny", "Once upon a time", **LONG)
        stream = job.stream(timeout=PATIENCE_S)
        next(stream)
        job.cancel()
        assert list(stream)[-1]["finish_reason"] == "cancelled"
    with pytest.raises(JobCancelled, match=job.id):
        job.result(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("limit", "error"), [({"soft_time_limit": 0.3}, SoftTimeLimitExceeded), ({"time_limit": 0.3}, TimeLimitExceeded)]
)
def test_celery_time_limits_stop_the_job(
    worker: WorkerProcess, events_of: EventsOf, limit: dict[str, float], error: type[Exception]
) -> None:
    with worker.slowed():
        jobs = [generate.apply_async(("tiny", "Once upon a time"), LONG, **limit) for _ in range(4)]
        for job in jobs:
            with pytest.raises(error):
                job.get(timeout=PATIENCE_S)
            assert terminal(events_of(job.id))["finish_reason"] == "timeout"
    wait_until_idle(worker)
    assert generate.delay("tiny", "Once upon a time", max_tokens=4, **GREEDY).get(timeout=PATIENCE_S)["text"]
