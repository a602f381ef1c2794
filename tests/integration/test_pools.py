"""Workers of a pool have the same models and adapters when workers die, join or can't load one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from cellama.api import Client
from cellama.api.cli import app
from cellama.api.machine.redis_server import RedisServer
from cellama.config import ModelSettings
from cellama.tasks.contract.errors import JobFailed, UnknownModel, UnknownWorker
from cellama.tasks.contract.keys import desired_state_key
from cellama.tasks.contract.shapes.workers import WantedThing
from cellama.tasks.worker.desired_state import DesiredStateRecord, Override, field_of, model_key

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY

STORY = "Once upon a time"
OPTIONS: dict[str, Any] = {"n_parallel": 2, "threads": 1, "capabilities": ["generate"]}
LARGE: dict[str, Any] = {**OPTIONS, "n_parallel": 64, "ctx_per_slot": 1024}
Start = Callable[..., WorkerProcess]


@pytest.fixture
def name() -> str:
    """Return the name of the pool, with which the names of its workers and models start."""
    return f"p{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(redis_server: RedisServer, tmp_path: Path, name: str) -> Iterator[Start]:
    """Return a function that starts a worker without waiting until it is ready."""
    workers = []

    def start(which: str, pool: str = name, **settings: str) -> WorkerProcess:
        folder = tmp_path / f"{which}{len(workers)}"
        folder.mkdir()
        models = json.dumps([{"id": f"{name}-own", "source": "bundled://tiny", **OPTIONS}])
        names = {"name": f"{name}-{which}", "CELLAMA_POOL": pool, "CELLAMA_MODELS": models}
        workers.append(WorkerProcess(folder, redis_server.url, **{**names, **settings}))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Client]:
    with Client() as client:
        yield client


def things(client: Client, worker: str) -> list[WantedThing]:
    """Return the desired state in the registry that is not in the worker's settings."""
    found = [entry.wanted for entry in client.workers() if entry.name.startswith(f"{worker}@")]
    return [thing for thing in (found or [[]])[0] if thing["by"] != "settings"]


def states(client: Client, worker: str) -> dict[str, str]:
    return {thing["adapter"] or thing["model"]: thing["state"] for thing in things(client, worker)}


def workers_of(client: Client, model_id: str) -> list[str]:
    return next((model["workers"] for model in client.models() if model["id"] == model_id), [])


def defaults(client: Client, name: str) -> list[str]:
    return [model["id"] for model in client.models() if model["default"] and model["id"].startswith(name)]


def test_pool_keeps_loaded_models_and_texts_when_workers_die_and_join(start: Start, client: Client, name: str) -> None:
    own, big, one, two, other = (f"{name}-{which}" for which in ("own", "big", "one", "two", "other"))
    first = start("one")
    for worker in (first, start("two", CELLAMA_MEMORY_BUDGET="70MiB"), start("other", pool=f"{name}-q")):
        worker.wait_ready()
    assert client.load_model(big, "bundled://tiny", pool=name, timeout=PATIENCE_S, **LARGE) == big
    client.load_adapter(big, "pirate", "bundled://pirate", pool=name, timeout=PATIENCE_S)
    for worker, state in ((one, "ready"), (two, "lacking")):
        expected = {big: state, "pirate": state}
        wait_until(lambda w=worker, e=expected: states(client, w) == e, f"{worker}: {expected}")
    assert things(client, other) == []
    lacking = next(model["lacks"] for model in client.models() if model["id"] == big)
    assert [(worker.partition("@")[0], why["code"]) for worker, why in lacking.items()] == [
        (two, "insufficient_memory")
    ]
    shown = CliRunner().invoke(app, ["status"], catch_exceptions=False, env={"COLUMNS": "300"}).output
    assert f"missing model {big}: " in shown
    client.load_adapter(own, "asked", "bundled://pirate", scale=0, worker=one, timeout=PATIENCE_S)
    asking = [client.generate(own, STORY, max_tokens=4, adapters={"asked": 1}, **GREEDY) for _ in range(6)]
    assert len({job.result(PATIENCE_S)["text"] for job in asking}) == 1  # the other workers hand the jobs over
    params: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, **GREEDY}
    with first.slowed():
        job = client.generate(big, STORY, **params)
        next(event for event in job.stream() if event["type"] == "token")
        first.process.kill()
        first.process.wait()
    start("three").wait_ready()  # a new name, as in a container
    text = job.result(timeout=PATIENCE_S)["text"]
    again = client.generate(big, STORY, wait=True, **params)  # the registry may list the model a moment later
    assert text == again.result(PATIENCE_S)["text"]
    assert text != client.generate(big, STORY, wait=True, adapters={}, **params).result(PATIENCE_S)["text"]
    holders = [f"{name}-three"]
    wait_until(
        lambda: [w.partition("@")[0] for w in workers_of(client, big)] == holders, "a registry without the dead worker"
    )
    client.unload_model(big, pool=name, timeout=PATIENCE_S)
    wait_until(
        lambda: all(not things(client, worker) for worker in (two, f"{name}-three")), "a desired state without changes"
    )
    with pytest.raises(UnknownModel, match=f"no running worker serves the model '{big}'"):
        client.generate(big, STORY)
    with pytest.raises(UnknownWorker, match="no worker is running in pool 'nowhere'"):
        client.load_model(big, "bundled://tiny", pool="nowhere")


def test_worker_applies_commands_sent_while_it_was_stopped(
    start: Start, client: Client, redis_client: Redis, name: str
) -> None:
    own, big, one = f"{name}-own", f"{name}-big", f"{name}-one"
    worker = start("one").wait_ready()
    client.load_model(big, "bundled://tiny", pool=name, default=True, timeout=PATIENCE_S, **OPTIONS)
    client.unload_model(own, pool=name, timeout=PATIENCE_S)  # of the settings
    record = desired_state_key("pool", name)
    redis_client.hset(record, "x", "y")  # an invalid entry, which does not affect others
    missing = {"id": f"{name}-missing", "source": "/nowhere.gguf"}
    redis_client.hset(record, field_of(model_key(missing["id"])).decode(), json.dumps({"at": 1, "model": missing}))
    worker.stop()
    start("one").wait_ready()
    expected = {big: "ready", missing["id"]: "lacking"}
    wait_until(lambda: states(client, one) == expected, f"{expected}")
    wait_until(lambda: defaults(client, name) == [big], "the default")
    assert own not in [model["id"] for model in client.models()]
    why = {thing["model"]: thing["why"]["message"] for thing in things(client, one) if thing["why"]}
    assert "'/nowhere.gguf' does not exist" in why[missing["id"]]
    client.unload_model(missing["id"], pool=name, timeout=PATIENCE_S)
    wait_until(lambda: states(client, one) == {big: "ready"}, "the model alone")
    assert client.generate(big, STORY, max_tokens=4, **GREEDY).result(PATIENCE_S)["text"] == ", there was a"
    assert client.load_model(big, "bundled://tiny", pool=name, timeout=PATIENCE_S, **OPTIONS) == big  # already loaded
    with pytest.raises(JobFailed, match=f"model id '{big}' is taken by a model loaded from 'bundled://tiny'"):
        client.load_model(big, "bundled://tiny", pool=name, n_parallel=3)
    redis_client.delete(record)  # lost, not unloaded
    wait_until(lambda: redis_client.hexists(record, field_of(model_key(big)).decode()), "it is written again")
    assert states(client, one) == {big: "ready"}


def test_worker_applies_earlier_commands_when_redis_becomes_reachable(tmp_path: Path, name: str) -> None:
    own, big, folder = f"{name}-own", f"{name}-big", tmp_path / "redis"
    with RedisServer.start(folder) as server, Redis.from_url(server.url) as redis:
        record = DesiredStateRecord(redis, name, "another@machine")
        given = ModelSettings(id=big, source="bundled://tiny", **OPTIONS)
        record.write(model_key(big), Override(model=given), whole_pool=True)
        record.write(model_key(own), Override(gone=True), whole_pool=True)
    models = json.dumps([{"id": own, "source": "bundled://tiny", **OPTIONS}])
    settings = {"CELLAMA_POOL": name, "CELLAMA_MODELS": models}
    worker = WorkerProcess(tmp_path, server.url, name=f"{name}-one", **settings)
    wait_until(lambda: "desired state not read" in worker.log(), "the worker's start with its settings")
    with RedisServer.start(folder, port=server.port), Client(server.url) as client:
        try:
            wait_until(lambda: states(client, f"{name}-one") == {big: "ready"}, "the model of its pool")
            wait_until(lambda: [model["id"] for model in client.models()] == [big], "no other one")
        finally:
            worker.stop()
