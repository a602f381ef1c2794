"""In a worker that holds more jobs than it has slots, the tenants share the slots."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import app, generate
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, queue_key, queue_name
from cellama.tasks.state.ledger import Ledger

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import MEDIUM, STORY

HELD = 12


@pytest.fixture(scope="module")
def model() -> str:
    return f"slots-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer, model: str) -> Iterator[WorkerProcess]:
    models = json.dumps([{"id": model, "source": "bundled://tiny", "n_parallel": 1, "threads": 1}])
    folder = tmp_path_factory.mktemp("worker")
    process = WorkerProcess(
        folder, redis_server.url, name=model, CELLAMA_MODELS=models, CELLAMA_LOOK_AHEAD=str(2 * HELD)
    )
    yield process.wait_ready()
    process.stop()


def test_job_of_another_tenant_gets_the_next_slot_of_a_worker_that_holds_older_jobs(
    worker: WorkerProcess, model: str, redis_client: Redis
) -> None:
    tickets = queue_key(queue_name(model), PRIORITY_INTERACTIVE)
    with worker.slowed():
        backlog = [generate.apply_async((model, STORY), MEDIUM, fairness_key="large").id for _ in range(HELD)]
        wait_until(lambda: worker.engine()["slots_decoding"] == 1, "a busy slot")
        wait_until(lambda: redis_client.llen(tickets) == 0, "the worker to hold all jobs")
        small = generate.apply_async((model, STORY), {**MEDIUM, "max_tokens": 2}, fairness_key="small")
        wait_until(lambda: redis_client.llen(tickets) == 0, "the worker to hold all jobs")
        small.get(timeout=PATIENCE_S)
        waiting = Ledger(redis_client).num_waiting(queue_name(model))
        app.control.revoke(backlog, terminate=True)
    assert waiting >= HELD - 2, f"{HELD - waiting} jobs of the large tenant went first"
