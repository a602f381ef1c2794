"""Load and unload models on a busy worker through Celery's remote control."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import generate
from cellama.tasks.contract.errors import JobFailed, UnknownModel, UnknownWorker

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY, LONG

STORY = "Once upon a time"
SMALL: dict[str, Any] = {"n_parallel": 8, "ctx_per_slot": 1024, "threads": 1, "capabilities": ["generate"]}
SMALL["cache_ram_bytes"] = 0
OPTIONS: dict[str, Any] = {"n_parallel": 2, "threads": 1, "capabilities": ["generate"]}


def new_name() -> str:
    """Return a name for a worker, which is also the prefix of its models' ids."""
    return f"m{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def shared_name() -> str:
    return new_name()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of the shared worker, or of a separate one."""
    if "shared_worker" in request.fixturenames:
        name: str = request.getfixturevalue("shared_name")
        return name
    return new_name()


def models_of(name: str) -> str:
    return json.dumps([{"id": f"{name}-first", "source": "bundled://tiny", "default": True, **OPTIONS}])


@pytest.fixture(scope="module")
def shared_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, shared_name: str
) -> Iterator[WorkerProcess]:
    """Return a worker for tests that restore its first model, which is the default."""
    folder = tmp_path_factory.mktemp("worker")
    worker = WorkerProcess(folder, redis_server.url, name=shared_name, CELLAMA_MODELS=models_of(shared_name))
    yield worker.wait_ready()
    assert worker.stop() == 0, worker.log()


@pytest.fixture
def own_worker(redis_server: RedisServer, tmp_path: Path, name: str) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(tmp_path, redis_server.url, name=name, CELLAMA_MODELS=models_of(name))
    yield worker.wait_ready()
    worker.stop()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Client]:
    with Client() as client:
        yield client


@pytest.mark.usefixtures("shared_worker")
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
        wait_until(lambda count=count: len(texts) > count + 6, "jobs of both models")
        client.unload_model(second, worker=name, timeout=PATIENCE_S)
        with pytest.raises(UnknownModel, match=f"no running worker serves the model '{second}'"):
            client.generate(second, STORY)
    client.load_model(second, "bundled://tiny", worker=name, timeout=PATIENCE_S, **OPTIONS)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    client.unload_model(second, worker=name, timeout=PATIENCE_S)
    assert failed == []
    assert len(set(texts)) == 1
    assert len(texts) > 20


@pytest.mark.usefixtures("shared_worker")
def test_default_model_can_be_changed_at_run_time(client: Client, name: str) -> None:
    other = f"{name}-other"
    client.load_model(other, "bundled://tiny", worker=name, timeout=PATIENCE_S, **OPTIONS)
    client.set_default_model(other, worker=name)
    entry = wait_until(lambda: next((m for m in client.models() if m["id"] == other and m["default"]), None), "default")
    assert entry["status"] == "ready"
    assert entry["workers"] == [worker.name for worker in client.workers() if worker.name.startswith(name)]
    jobs = [client.generate(":default", f"{STORY} " * 60, max_tokens=30, **GREEDY) for _ in range(10)]
    client.unload_model(other, worker=name, timeout=PATIENCE_S)  # while jobs run; further jobs go to the first model
    assert len({job.result(timeout=PATIENCE_S)["text"] for job in jobs}) == 1


@pytest.mark.usefixtures("shared_worker")
def test_invalid_commands_are_reported_and_leave_the_worker_unchanged(
    client: Client, name: str, tmp_path: Path
) -> None:
    first = f"{name}-first"
    (tmp_path / "text.gguf").write_text("I am no model")
    for arguments, message in (
        ({"model_id": "x", "source": "/nowhere.gguf"}, r"'/nowhere\.gguf' does not exist"),
        ({"model_id": "x", "source": str(tmp_path / "text.gguf")}, r"is not a GGUF file"),
        ({"model_id": first, "source": "bundled://tiny"}, f"a model with the id '{first}' already exists"),
        ({"model_id": "x", "source": "bundled://tiny", "n_paralel": 3}, "did you mean n_parallel"),
        ({"model_id": "x", "source": "bundled://tiny", "n_parallel": 0}, "n_parallel is 0"),
    ):
        with pytest.raises(JobFailed, match=message):
            client.load_model(worker=name, timeout=PATIENCE_S, **arguments)
    with pytest.raises(JobFailed, match="model 'x' is not loaded"):
        client.unload_model("x", worker=name)
    with pytest.raises(UnknownWorker, match="no worker 'nobody' is running"):
        client.load_model("x", "bundled://tiny", worker="nobody")
    assert generate.delay(first, STORY, max_tokens=4, **GREEDY).get(timeout=PATIENCE_S)["text"] == ", there was a"


def test_busy_model_is_not_unloaded_and_keeps_serving(shared_worker: WorkerProcess, client: Client, name: str) -> None:
    first = f"{name}-first"
    with shared_worker.slowed():
        job = client.generate(first, STORY, **LONG)
        next(event for event in job.stream() if event["type"] == "token")
        with pytest.raises(JobFailed, match="is still in use"):
            client.unload_model(first, worker=name, timeout=0.2)
        again = client.generate(first, STORY, max_tokens=4, wait=True, **GREEDY)
        assert again.result(timeout=PATIENCE_S)["text"] == ", there was a"
        assert client.position(job.id).state == "running"
        job.cancel()


@pytest.fixture
def tight_worker(redis_server: RedisServer, tmp_path: Path, name: str) -> Iterator[WorkerProcess]:
    """Return a worker whose memory holds three models and that unloads idle ones."""
    models = [{"id": f"{name}-first", "source": "bundled://tiny", "default": True, **SMALL}]
    settings = {"CELLAMA_MEMORY_BUDGET": "70MiB", "CELLAMA_ON_FULL": "evict"}
    worker = WorkerProcess(tmp_path, redis_server.url, name=name, CELLAMA_MODELS=json.dumps(models), **settings)
    yield worker.wait_ready()
    worker.stop()


def test_idle_model_is_unloaded_to_free_memory(tight_worker: WorkerProcess, name: str) -> None:
    first, used, idle, new = (f"{name}-{which}" for which in ("first", "used", "idle", "new"))
    with Client() as client:

        def loaded() -> list[str]:
            return sorted(model["id"] for model in client.models() if model["id"].startswith(name))

        for model in (used, idle):
            client.load_model(model, "bundled://tiny", worker=name, timeout=PATIENCE_S, **SMALL)
        taken = client.memory(name)[0]["models"][0]["memory_bytes"]
        assert 3 * taken < 70 << 20 < 4 * taken  # a precondition of this test
        assert generate.delay(used, STORY, max_tokens=4, **GREEDY).get(timeout=PATIENCE_S)["text"] == ", there was a"
        client.load_model(new, "bundled://tiny", worker=name, timeout=PATIENCE_S, **SMALL)
        wait_until(lambda: loaded() == sorted([first, used, new]), "a registry without the idle model")
        with pytest.raises(UnknownModel):
            client.generate(idle, STORY)
        for model in (first, used, new):
            job = client.generate(model, STORY, max_tokens=4, wait=True, **GREEDY)
            assert job.result(timeout=PATIENCE_S)["text"] == ", there was a"
        client.load_model(idle, "bundled://tiny", worker=name, timeout=PATIENCE_S, **SMALL)  # and takes jobs again
        assert generate.delay(idle, STORY, max_tokens=4, **GREEDY).get(timeout=PATIENCE_S)["text"] == ", there was a"


def test_load_error_contains_the_device_and_its_required_and_available_bytes(
    tight_worker: WorkerProcess, name: str
) -> None:
    first = f"{name}-first"
    with Client() as client:
        with pytest.raises(JobFailed, match=r"needs .* MiB on all devices .* only .* MiB are available") as refused:
            client.load_model("x", "bundled://tiny", worker=name, timeout=PATIENCE_S, **{**SMALL, "n_parallel": 64})
        assert refused.value.code == "insufficient_memory"
        assert generate.delay(first, STORY, max_tokens=4, **GREEDY).get(timeout=PATIENCE_S)["text"] == ", there was a"
        memory = client.memory(name)[0]
        assert (memory["budget"], memory["on_full"]) == (70 << 20, "evict")
        assert [device["name"] for device in memory["devices"]][:1] == ["CPU"]
        info = next(model for model in client.models() if model["id"] == first)
        assert (info["backend"], info["file_type"], info["slots"]) == ("CPU", "F16", SMALL["n_parallel"])
        assert len(info["fingerprint"]) == 64
        assert info["memory_bytes"] == sum(model["memory_bytes"] for model in memory["models"])


def test_restarted_worker_loads_the_models_of_its_killed_predecessor(
    redis_server: RedisServer, own_worker: WorkerProcess, client: Client, tmp_path: Path, name: str
) -> None:
    first, second = f"{name}-first", f"{name}-second"
    client.load_model(second, "bundled://tiny", worker=name, timeout=PATIENCE_S, **OPTIONS)
    client.load_adapter(second, "pirate", "bundled://pirate", scale=0.1, worker=name, timeout=PATIENCE_S)
    client.set_adapter_scale(second, "pirate", 1)
    client.load_adapter(first, "asked", "bundled://pirate", scale=0, worker=name, timeout=PATIENCE_S)
    client.set_default_model(second, worker=name)
    params: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, **GREEDY}
    with own_worker.slowed():
        job = client.generate(second, STORY, **params)
        next(event for event in job.stream() if event["type"] == "token")
        own_worker.process.kill()
        own_worker.process.wait()
    worker = WorkerProcess(tmp_path, redis_server.url, name=name, CELLAMA_MODELS=models_of(name))
    try:
        worker.wait_ready()
        text = job.result(timeout=PATIENCE_S)["text"]
        again = client.generate(second, STORY, wait=True, **params)  # the registry may list the model a moment later
        assert text == again.result(PATIENCE_S)["text"]
        assert text != client.generate(second, STORY, adapters={}, **params).result(PATIENCE_S)["text"]
        adapters, default = {first: [("asked", 0)], second: [("pirate", 1)]}, [second]
        wait_until(lambda: {model: scales(client, model) for model in adapters} == adapters, "the adapters")
        wait_until(
            lambda: [m["id"] for m in client.models() if m["default"] and m["id"] in adapters] == default, "the default"
        )
        client.unload_model(second, worker=name, timeout=PATIENCE_S)
        client.unload_adapter(first, "asked", worker=name, timeout=PATIENCE_S)
        wanted = wait_until(lambda: not_of_settings(client, name), "a desired state without changes")
        assert wanted == [[]]
    finally:
        worker.stop()


def scales(client: Client, model: str) -> list[tuple[str, float]]:
    return [(adapter["name"], adapter["scale"]) for adapter in client.adapters(model)]


def not_of_settings(client: Client, name: str) -> list[list[str]]:
    """Return an empty list per worker, or [] while any worker's desired state differs from its settings."""
    found = [entry.wanted for entry in client.workers() if entry.name.startswith(name)]
    wanted = [[thing["model"] for thing in things if thing["by"] != "settings"] for things in found]
    return [] if any(wanted) else wanted
