"""Leases are renewed for as long as a worker lives, regardless of Celery's own connections."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from celery.worker import state
from kombu.message import Message
from redis import Redis

from cellama.tasks import app, generate
from cellama.tasks.broker.message import JobRequest
from cellama.tasks.contract.keys import leases_key
from cellama.tasks.contract.names import TOKEN_HEADER
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.worker.reaper import LeaseKeeper

from .ledgers import LEASE_S, submit, take

NEARLY_OVER_S = 60.0


@pytest.fixture
def running(redis_client: Redis) -> Iterator[JobRequest]:
    """Return Celery's request for a job that runs in a worker."""
    ledger = Ledger(redis_client)
    job_id = submit(ledger, f"cellama:queue:lease-{uuid.uuid4().hex[:8]}")
    taken = take(ledger, job_id, NEARLY_OVER_S)
    headers = {"id": job_id, "task": generate.name, "lang": "py", TOKEN_HEADER: taken.token}
    message = Message(body=json.dumps([[], {}, {}]), headers=headers)
    request = JobRequest(message, app=app, body=((), {}, {}), headers=headers, decoded=True)
    state.requests[job_id] = request
    yield request
    state.requests.pop(job_id, None)


def ends_in_s(redis: Redis, request: JobRequest) -> float:
    return float(redis.zscore(leases_key(), request.id) or 0) - Ledger(redis).now()  # type: ignore[arg-type]


def test_leases_are_renewed_while_celery_has_no_connection(running: JobRequest, redis_client: Redis) -> None:
    keeper = LeaseKeeper(Ledger(redis_client), SimpleNamespace(channels=[]), LEASE_S)
    assert ends_in_s(redis_client, running) <= NEARLY_OVER_S
    keeper.renew()
    assert ends_in_s(redis_client, running) > NEARLY_OVER_S
    running.acknowledged = True  # this worker no longer holds its message
    assert keeper.renew() == 0
    keeper.close()
