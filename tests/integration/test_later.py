"""Jobs with an ETA use no capacity of workers while they wait, and run when they are due."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import generate
from cellama.tasks.broker.message import SOON_S
from cellama.tasks.contract.keys import delayed_key, last_restore_key, leases_key, waiting_key
from cellama.tasks.contract.names import queue_name
from cellama.tasks.estimates.position import position_of
from cellama.tasks.state.ledger import Ledger

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY
from .ledgers import take

HOUR_S = 3600


@pytest.fixture
def worker(tmp_path: Path, redis_server: RedisServer, model: str) -> Iterator[WorkerProcess]:
    """Return a worker with little capacity: two slots and no look-ahead."""
    models = [{"id": model, "source": "bundled://tiny", "n_parallel": 2, "threads": 1, "capabilities": ["generate"]}]
    process = WorkerProcess(
        tmp_path, redis_server.url, name=model, CELLAMA_MODELS=json.dumps(models), CELLAMA_LOOK_AHEAD="0"
    )
    yield process.wait_ready()
    process.stop()


def test_message_with_an_eta_is_delivered_when_it_is_due(redis_client: Redis, model: str) -> None:
    job = generate.delay(model, "Once", **GREEDY)
    ledger, waiting = Ledger(redis_client), waiting_key(queue_name(model))
    taken = take(ledger, job.id, 5)
    ledger.set_aside(taken, HOUR_S)
    assert not redis_client.exists(waiting)
    assert position_of(redis_client, job.id).state == "waiting"
    assert redis_client.zscore(leases_key(), job.id) is None
    # As after an outage, or a failover to a server with another clock: no reaper has checked for a long time.
    redis_client.delete(last_restore_key())
    ledger.restore(5)
    assert redis_client.zscore(delayed_key(), job.id) > time.time() + HOUR_S / 2  # type: ignore[operator]
    redis_client.zadd(delayed_key(), {job.id: time.time() - 1})
    ledger.restore(5)
    assert redis_client.zscore(waiting, job.id)
    assert redis_client.zscore(delayed_key(), job.id) is None
    job.revoke()


def test_jobs_with_an_eta_do_not_occupy_capacity(worker: WorkerProcess, model: str, redis_client: Redis) -> None:
    args, params = (model, "Once upon a time"), {"max_tokens": 2, **GREEDY}
    for priority in (3, 9):
        late = [generate.apply_async(args, params, countdown=HOUR_S, priority=priority) for _ in range(10)]
        assert generate.apply_async(args, params, priority=priority).get(timeout=PATIENCE_S)["text"]
        wait_until(lambda: not redis_client.exists(waiting_key(queue_name(model))), "all set aside")
        for job in late:
            job.revoke()
            assert position_of(redis_client, job.id).state == "done"
    not_before = time.time() + SOON_S + 2
    soon = generate.apply_async(args, params, countdown=SOON_S + 2)
    assert soon.get(timeout=PATIENCE_S)["text"]
    assert time.time() >= not_before - 0.5
