"""Workers load models when jobs need them, and unload idle models."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.keys import loading_key, waiting_key, waiting_score
from cellama.tasks.contract.names import DEFAULT_MODEL, PRIORITY_SEPARATOR, queue_key, queue_name
from cellama.tasks.state.scripts import run_script

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from ..gateways import GatewayProcess
from .conftest import GREEDY, LONG

STORY = "Once upon a time"
SMALL: dict[str, Any] = {"n_parallel": 2, "ctx_per_slot": 1024, "threads": 1, "cache_ram_bytes": 0}
SMALL |= {"source": "bundled://tiny", "capabilities": ["generate"], "on_demand": True}
ONE_MODEL = "20MiB"  # a budget for one of these models, but not for two
Start = Callable[..., WorkerProcess]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Return a server without other workers, which would also serve jobs for the default model."""
    with RedisServer.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def name() -> str:
    """Return a name for the workers, which is also the prefix of the models' ids."""
    return f"d{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(redis_server: RedisServer, tmp_path: Path, name: str) -> Iterator[Start]:
    """Return a function that starts a worker whose catalogue contains these models."""
    workers = []

    def start(*models: str, budget: str = "auto", options: dict[str, Any] | None = None) -> WorkerProcess:
        folder = tmp_path / str(len(workers))
        folder.mkdir()
        entries = [{"id": f"{name}-{model}", **SMALL, **(options or {})} for model in models]
        settings = {"CELLAMA_MODELS": json.dumps(entries), "CELLAMA_MEMORY_BUDGET": budget}
        settings |= {"CELLAMA_POOL": name, "CELLAMA_SWAP_AFTER_S": "1", "CELLAMA_LEASE_S": "3"}
        workers.append(WorkerProcess(folder, redis_server.url, name=f"{name}{len(workers)}", **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Client]:
    with Client(redis_server.url) as client:
        yield client


def view_of(client: Client, name: str, model: str) -> Any:
    return next(view for view in client.models() if view["id"] == f"{name}-{model}")


def statuses(client: Client, name: str) -> dict[str, str]:
    return {model["id"].removeprefix(f"{name}-"): model["status"] for model in client.models()}


def max_loaded(log: str) -> int:
    """Return the largest number of models that were loaded at the same time, according to a worker's log."""
    changes = [("model loaded" in line) - ("model unloaded" in line) for line in log.splitlines()]
    return max(accumulate(changes))


def wait_for_statuses(client: Client, name: str, **expected: str) -> None:
    wait_until(lambda: {**statuses(client, name), **expected} == statuses(client, name), f"statuses {expected}")


def test_demand_is_the_number_and_the_oldest_of_the_waiting_jobs(redis_client: Redis, name: str) -> None:
    busy, plain, idle = (queue_name(f"{name}-{model}") for model in ("busy", "plain", "idle"))
    scores = {"urgent": waiting_score(3, 1_800_000_020.5), "bulk": waiting_score(9, 1_800_000_010.25)}
    redis_client.zadd(waiting_key(busy), scores)
    redis_client.lpush(queue_key(plain, 3), "a message of plain Celery")
    now, *found = run_script(redis_client, "demand", [], [PRIORITY_SEPARATOR, busy, plain, idle])
    redis_client.delete(waiting_key(busy), queue_key(plain, 3))
    assert float(now) > 0
    assert found == [2, b"1800000010.250000", 1, b"", 0, b""]


def test_worker_loads_a_model_when_a_job_needs_it_and_unloads_it_when_it_is_idle(
    start: Start, client: Client, name: str
) -> None:
    start("one", "two", options={"keep_alive_s": 1}).wait_ready()
    wait_for_statuses(client, name, one="available", two="available")
    job = client.generate(f"{name}-one", STORY, max_tokens=4, **GREEDY)
    assert job.result(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
    wait_for_statuses(client, name, one="available", two="available")
    again = client.generate(f"{name}-one", STORY, max_tokens=4, **GREEDY)
    assert again.result(timeout=PATIENCE_S)["text"] == job.result()["text"]
    wait_until(lambda: "load_s" in view_of(client, name, "one"), "a report after the load")
    assert view_of(client, name, "one")["load_s"] > 0


def test_both_models_finish_their_jobs_when_only_one_fits(start: Start, client: Client, name: str) -> None:
    worker = start("one", "two", budget=ONE_MODEL)
    worker.wait_ready()
    jobs = [
        client.generate(f"{name}-{model}", f"{STORY} {number}", max_tokens=16, wait=True, **GREEDY)
        for number in range(6)
        for model in ("one", "two")
    ]
    for job in jobs:
        assert job.result(timeout=PATIENCE_S)["finish_reason"] == "length"
    assert max_loaded(worker.log()) == 1
    assert f"victims={name}" in worker.log()
    assert "insufficient_memory" not in worker.log()


def test_waiting_model_stops_a_busy_model_that_finishes_its_running_job(
    start: Start, client: Client, name: str
) -> None:
    worker = start("one", "two", budget=ONE_MODEL)
    worker.wait_ready()
    with worker.slowed(0.02):
        running = client.generate(f"{name}-one", STORY, wait=True, **{**LONG, "max_tokens": 200})
        next(event for event in running.stream() if event["type"] == "token")
        other = client.generate(f"{name}-two", STORY, max_tokens=4, **GREEDY)
        assert running.position().state == "running"
        result = running.result(timeout=PATIENCE_S)
    assert result["usage"]["completion_tokens"] == 200
    assert other.result(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
    assert [event["type"] for event in running.stream()].count("resumed") == 0


def test_another_worker_loads_the_model_when_a_worker_dies_during_the_load(
    start: Start, client: Client, name: str, redis_client: Redis
) -> None:
    first = start("one", options={"n_parallel": 64, "ctx_per_slot": 2048})
    first.wait_ready()
    model = f"{name}-one"
    job = client.generate(model, STORY, max_tokens=4, wait=True, **GREEDY)
    wait_until(lambda: redis_client.exists(loading_key(model)), "the start of the load")
    first.process.kill()
    first.process.wait()
    start("one").wait_ready()
    assert job.result(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4


def test_default_model_is_loaded_for_jobs_that_name_no_model(start: Start, client: Client, name: str) -> None:
    start("one", "two").wait_ready()
    client.generate(f"{name}-two", STORY, max_tokens=1, **GREEDY).result(timeout=PATIENCE_S)
    wait_for_statuses(client, name, two="ready")
    job = client.generate(DEFAULT_MODEL, STORY, max_tokens=4, wait=True, **GREEDY)
    assert job.result(timeout=PATIENCE_S)["model"] == f"{name}-one"


def test_load_command_adds_a_model_to_the_catalogue(start: Start, client: Client, name: str) -> None:
    start("one").wait_ready()
    added = f"{name}-added"
    assert client.load_model(added, pool=name, **SMALL) == added
    wait_for_statuses(client, name, added="available")
    job = client.generate(added, STORY, max_tokens=4, **GREEDY)
    assert job.result(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
    client.unload_model(added, pool=name)
    assert "added" not in statuses(client, name)


def test_job_sets_the_keep_alive_time_of_its_model(start: Start, client: Client, name: str) -> None:
    start("one").wait_ready()
    model = f"{name}-one"
    client.generate(model, STORY, max_tokens=1, **GREEDY).result(timeout=PATIENCE_S)
    wait_for_statuses(client, name, one="ready")
    client.generate(model, STORY, max_tokens=1, keep_alive_s=0, **GREEDY).result(timeout=PATIENCE_S)
    wait_for_statuses(client, name, one="available")


def test_preloaded_model_is_ready_without_a_job(start: Start, client: Client, name: str) -> None:
    start("one", options={"preload": True}).wait_ready()
    wait_for_statuses(client, name, one="ready")


def test_model_that_can_not_fit_is_reported(start: Start, client: Client, name: str) -> None:
    start("one", budget="2MiB").wait_ready()
    client.generate(f"{name}-one", STORY, max_tokens=4, wait=True, **GREEDY)
    wait_for_statuses(client, name, one="lacking")
    (failure,) = next(model["lacks"] for model in client.models() if model["id"] == f"{name}-one").values()
    assert failure["code"] == "insufficient_memory"


def test_ollama_requests_without_a_prompt_load_and_unload_the_model(
    start: Start, client: Client, name: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    start("one").wait_ready()
    gateway = GatewayProcess(tmp_path, redis_server.url).wait_ready()
    try:
        body = {"model": f"{name}-one", "keep_alive": "5m", "stream": False}
        assert gateway.post("/api/generate", json=body).json()["done_reason"] == "load"
        wait_for_statuses(client, name, one="ready")
        assert gateway.post("/api/generate", json={**body, "keep_alive": 0}).json()["done_reason"] == "unload"
        wait_for_statuses(client, name, one="available")
    finally:
        assert gateway.stop() == 0
