"""Models that come and go on a running worker, under load, through Celery's remote control."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellama.api import Client
from cellama.api.redis_server import RedisServer
from cellama.tasks import generate
from cellama.tasks.contract.errors import JobFailed, UnknownModel, UnknownWorker

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY

STORY = "Once upon a time"
OPTIONS: dict[str, Any] = {"n_parallel": 2, "threads": 1, "capabilities": ["generate"]}


@pytest.fixture
def name() -> str:
    """Of the worker, and the beginning of the ids of its models."""
    return f"m{uuid.uuid4().hex[:8]}"


@pytest.fixture
def own_worker(redis_server: RedisServer, tmp_path: Path, name: str) -> Iterator[WorkerProcess]:
    models = [{"id": f"{name}-first", "source": "bundled://tiny", "default": True, **OPTIONS}]
    worker = WorkerProcess(tmp_path, redis_server.url, name=name, CELLAMA_MODELS=json.dumps(models))
    yield worker.wait_ready()
    worker.stop()


@pytest.fixture
def client(own_worker: WorkerProcess) -> Iterator[Client]:
    with Client() as client:
        yield client


def test_models_are_loaded_and_unloaded_under_load_without_a_failed_job(client: Client, name: str) -> None:
    first, second = f"{name}-first", f"{name}-second"
    stop, failed, texts = threading.Event(), [], []

    def keep_busy(model: str) -> None:
        while not stop.is_set():
            try:
                job = client.generate(model, STORY, max_tokens=60, wait=True, **GREEDY)
                texts.append(job.result(timeout=PATIENCE_S)["text"])
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=keep_busy, args=(model,)) for model in (first, first, second)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        client.load_model(second, "bundled://tiny", worker=name, timeout=PATIENCE_S, **OPTIONS)
        count = len(texts)
        wait_until(lambda count=count: len(texts) > count + 5, "jobs of both models")
        client.unload_model(second, worker=name, timeout=PATIENCE_S)
        with pytest.raises(UnknownModel, match=f"no live worker serves a model '{second}'"):
            client.generate(second, STORY)
    client.load_model(second, "bundled://tiny", worker=name, timeout=PATIENCE_S, **OPTIONS)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failed == []
    assert len(set(texts)) == 1
    assert len(texts) > 20


def test_default_model_changes_at_run_time(client: Client, name: str) -> None:
    other = f"{name}-other"
    client.load_model(other, "bundled://tiny", worker=name, timeout=PATIENCE_S, **OPTIONS)
    client.set_default_model(other, worker=name)
    entry = wait_until(lambda: next((m for m in client.models() if m["id"] == other and m["default"]), None), "default")
    assert entry["status"] == "ready"
    assert entry["workers"] == [worker.name for worker in client.workers() if worker.name.startswith(name)]


def test_mistakes_are_told_and_leave_the_worker_as_it_was(client: Client, name: str, tmp_path: Path) -> None:
    first = f"{name}-first"
    (tmp_path / "text.gguf").write_text("I am no model")
    for arguments, message in (
        ({"model_id": "x", "source": "/nowhere.gguf"}, r"there is no model file at '/nowhere\.gguf'"),
        ({"model_id": "x", "source": str(tmp_path / "text.gguf")}, r"is no GGUF file"),
        ({"model_id": first, "source": "bundled://tiny"}, f"there is a model '{first}' already"),
        ({"model_id": "x", "source": "bundled://tiny", "n_paralel": 3}, "did you mean n_parallel"),
        ({"model_id": "x", "source": "bundled://tiny", "n_parallel": 0}, "n_parallel is 0"),
    ):
        with pytest.raises(JobFailed, match=message):
            client.load_model(worker=name, timeout=PATIENCE_S, **arguments)
    with pytest.raises(JobFailed, match="no model 'x' is loaded here"):
        client.unload_model("x", worker=name)
    with pytest.raises(UnknownWorker, match="no live worker 'nobody'"):
        client.load_model("x", "bundled://tiny", worker="nobody")
    assert generate.delay(first, STORY, max_tokens=4, **GREEDY).get(timeout=PATIENCE_S)["text"] == ", there was a"


def test_model_that_stays_in_use_is_not_unloaded_and_serves_on(client: Client, name: str) -> None:
    first = f"{name}-first"
    job = client.generate(first, STORY, max_tokens=1900, ignore_eos=True, **GREEDY)
    next(event for event in job.stream() if event["type"] == "token")
    with pytest.raises(JobFailed, match="is still in use"):
        client.unload_model(first, worker=name, timeout=0.2)
    again = client.generate(first, STORY, max_tokens=4, wait=True, **GREEDY)
    assert again.result(timeout=PATIENCE_S)["text"] == ", there was a"
    job.cancel()
