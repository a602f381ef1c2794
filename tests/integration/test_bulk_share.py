"""Bulk jobs get their guaranteed share of a worker while more interactive jobs wait than it can run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import app, generate
from cellama.tasks.contract.names import PRIORITY_BULK

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import MEDIUM, STORY

NUM_INTERACTIVE = 12


@pytest.fixture(scope="module")
def model() -> str:
    return f"share-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer, model: str) -> Iterator[WorkerProcess]:
    models = [{"id": model, "source": "bundled://tiny", "n_parallel": 2, "threads": 1, "bulk_share": 0.5}]
    folder = tmp_path_factory.mktemp("worker")
    process = WorkerProcess(folder, redis_server.url, name=model, CELLAMA_MODELS=json.dumps(models))
    yield process.wait_ready()
    process.stop()


def test_bulk_job_finishes_while_interactive_jobs_wait(worker: WorkerProcess, model: str) -> None:
    with worker.slowed():
        interactive = [generate.delay(model, STORY, **MEDIUM) for _ in range(NUM_INTERACTIVE)]
        wait_until(lambda: worker.engine()["slots_decoding"] == 2, "interactive jobs in all slots")
        bulk = generate.delay(model, STORY, **{**MEDIUM, "max_tokens": 2}, priority=PRIORITY_BULK)
        bulk.get(timeout=PATIENCE_S)
        unfinished = [job for job in interactive if not job.ready()]
        app.control.revoke([job.id for job in unfinished], terminate=True)
    assert len(unfinished) >= NUM_INTERACTIVE - 4, f"{NUM_INTERACTIVE - len(unfinished)} interactive jobs went first"
