"""Messages of producers with plain Celery get the same priorities and ledger entries as other jobs."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from cellama.tasks import app, generate
from cellama.tasks.broker.message import adopt
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.keys import due_key, job_key
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, queue_key, queue_name
from cellama.tasks.state.ledger import Ledger

from ..conftest import PATIENCE_S, WorkerProcess
from .conftest import GREEDY
from .ledgers import num_ahead

EventsOf = Callable[..., list[dict[str, Any]]]


def take(model: str) -> tuple[Any, Any]:
    """Take a model's next message, as a worker does, and return it with the connection that holds it."""
    connection = app.connection_for_read()
    return connection.default_channel.basic_get(queue_name(model)), connection


def lengths(redis: Redis, model: str) -> dict[int, int]:
    return {p: n for p in range(10) if (n := int(redis.llen(queue_key(queue_name(model), p))))}  # type: ignore[arg-type]


def test_plain_message_without_priority_waits_for_jobs_of_default_priority(
    unserved: str, plain: Celery, redis_client: Redis
) -> None:
    before = generate.delay(unserved, "first come")
    job = plain.send_task("cellama.generate", [unserved, "a secret"], queue=queue_name(unserved))
    assert lengths(redis_client, unserved) == {0: 1, 3: 1}
    message, connection = take(unserved)
    adopt(Ledger(redis_client), generate, message)
    message.ack()
    assert lengths(redis_client, unserved) == {3: 2}
    last = json.loads(redis_client.lindex(queue_key(queue_name(unserved), 3), 0))  # type: ignore[arg-type]
    assert last["headers"]["id"] == job.id
    assert json.loads(base64.b64decode(last["body"]))[:2] == [[unserved, "a secret"], {}]
    assert "a secret" not in json.dumps(last["headers"])
    assert [num_ahead(Ledger(redis_client), job_id) for job_id in (before.id, job.id)] == [0, 1]
    connection.release()


def test_plain_message_is_requeued_once_when_adopted_twice(unserved: str, plain: Celery, redis_client: Redis) -> None:
    plain.send_task("cellama.generate", [unserved, "Hi"], queue=queue_name(unserved))
    message, connection = take(unserved)
    for _ in range(2):  # the worker exited before it acknowledged the message
        adopt(Ledger(redis_client), generate, message)
    message.ack()
    assert lengths(redis_client, unserved) == {3: 1}
    connection.release()


@pytest.mark.parametrize(
    ("payload", "options", "expected"),
    [({}, {"priority": 6}, 6), ({"priority": 0}, {}, 0), ({"priority": 9}, {"priority": 9}, 9)],
)
def test_plain_message_keeps_its_priority(
    unserved: str, plain: Celery, redis_client: Redis, payload: Any, options: Any, expected: int
) -> None:
    job = plain.send_task("cellama.generate", [unserved, "Hi"], payload, queue=queue_name(unserved), **options)
    message, connection = take(unserved)
    adopt(Ledger(redis_client), generate, message)
    assert lengths(redis_client, unserved) == {expected: 1}
    assert Ledger(redis_client).state(job.id) == "queued"
    assert int(redis_client.hget(job_key(job.id), "priority") or -1) == expected  # type: ignore[arg-type]
    message.ack()
    connection.release()


@pytest.mark.parametrize("timeout", [math.nan, math.inf, 1e300, 10**400, -1, 0, "1"])
def test_plain_message_with_an_invalid_timeout_is_rejected_by_a_worker(
    unserved: str, plain: Celery, redis_client: Redis, timeout: Any
) -> None:
    options = {"queue": queue_name(unserved)}
    job = plain.send_task("cellama.generate", [unserved, "Hi"], {"timeout": timeout}, **options)
    message, connection = take(unserved)
    adopt(Ledger(redis_client), generate, message)
    assert sum(lengths(redis_client, unserved).values()) == 1
    assert redis_client.zscore(due_key(), job.id) is None
    message.ack()
    connection.release()


@pytest.mark.parametrize("options", [{}, {"priority": 5, "compression": "gzip"}, {"countdown": 0.1}])
def test_plain_job_runs_and_streams(
    worker: WorkerProcess, plain: Celery, events_of: EventsOf, redis_client: Redis, options: dict[str, Any]
) -> None:
    job = plain.send_task(
        "cellama.generate", ["tiny", "Hi"], {"max_tokens": 4, **GREEDY}, queue=queue_name("tiny"), **options
    )
    text = job.get(timeout=PATIENCE_S)["text"]
    assert "".join(event.get("text", "") for event in events_of(job.id)) == text
    assert redis_client.hget(job_key(job.id), "priority") == str(options.get("priority", 3)).encode()


@pytest.mark.parametrize(
    ("payload", "headers", "code"),
    [
        ({}, {SUBMITTED_AT_HEADER: "soon"}, "unknown_job"),
        ({}, {SUBMITTED_AT_HEADER: 1e308}, "unknown_job"),
        ({"self": 1, "args": 2, "task_id": 3}, {}, "invalid_request"),
    ],
)
def test_plain_message_with_reserved_headers_fails_with_a_clear_error(
    worker: WorkerProcess, plain: Celery, events_of: EventsOf, payload: Any, headers: dict[str, Any], code: str
) -> None:
    job = plain.send_task("cellama.generate", ["tiny", "Hi"], payload, queue=queue_name("tiny"), headers=headers)
    with pytest.raises(JobFailed) as failure:
        job.get(timeout=PATIENCE_S)
    assert failure.value.code == code
    assert [event["code"] for event in events_of(job.id)] == [code]


def test_signature_is_sent_by_an_app_without_the_task(worker: WorkerProcess, plain: Celery) -> None:
    step = generate.s("tiny", "Hi", max_tokens=4, **GREEDY)
    assert plain.send_task(step.task, step.args, step.kwargs, **step.options).get(timeout=PATIENCE_S)["text"]
