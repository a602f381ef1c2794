"""In a worker with two models, the backlog of one model does not delay the other."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import app, generate
from cellama.tasks.contract.names import queue_name
from cellama.tasks.state.ledger import Ledger

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import LONG

BACKLOG = 120
SLOTS = 4


@pytest.fixture(scope="module")
def models() -> tuple[str, str]:
    name = uuid.uuid4().hex[:8]
    return f"a{name}", f"b{name}"


@pytest.fixture(scope="module")
def worker(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer, models: tuple[str, str]
) -> Iterator[WorkerProcess]:
    entries = [{"id": model, "source": "bundled://tiny", "n_parallel": SLOTS, "threads": 1} for model in models]
    folder = tmp_path_factory.mktemp("worker")
    process = WorkerProcess(folder, redis_server.url, name=models[0], CELLAMA_MODELS=json.dumps(entries))
    yield process.wait_ready()
    process.stop()


@pytest.mark.parametrize("priority", [3, 9])
def test_job_of_an_idle_model_overtakes_the_backlog_of_another_model(
    worker: WorkerProcess, models: tuple[str, str], redis_client: Redis, priority: int
) -> None:
    busy, idle = models
    with worker.slowed():
        backlog = generate.queue_many(
            generate.check_many([((busy, "Once upon a time"), {**LONG, "priority": priority})] * BACKLOG)
        )
        wait_until(lambda: worker.engine()["slots_decoding"] == SLOTS, "a busy model")
        generate.delay(idle, "Once", max_tokens=2, priority=priority).get(timeout=PATIENCE_S)
        waiting = Ledger(redis_client).num_waiting(queue_name(busy))
        app.control.revoke(backlog, terminate=True)
    assert waiting > BACKLOG / 2, f"of {BACKLOG} jobs of the busy model {BACKLOG - waiting} went first"
