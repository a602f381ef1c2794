"""LoRA adapters of a running worker are used and controlled through jobs, clients and the command line."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from cellama.api import AsyncClient, Client
from cellama.api.cli import app
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import chat, generate
from cellama.tasks.contract.errors import JobFailed, UnknownModel

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY, LONG

PIRATE = "bundled://pirate"
STORY = "Once upon a time"
PLAIN, SEAS = ", there was a", " on the seven seas,"


@pytest.fixture(scope="module")
def name() -> str:
    """Return a name for the worker and its model."""
    return f"a{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def shared_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, name: str
) -> Iterator[WorkerProcess]:
    adapters = {"asked": {"source": PIRATE, "scale": 0}}
    model = {"id": name, "source": "bundled://tiny", "n_parallel": 4, "threads": 1, "adapters": adapters}
    folder = tmp_path_factory.mktemp("adapters")
    worker = WorkerProcess(folder, redis_server.url, name=name, CELLAMA_MODELS=json.dumps([model]))
    yield worker.wait_ready()
    worker.stop()


@pytest.fixture
def worker(shared_worker: WorkerProcess, name: str) -> Iterator[WorkerProcess]:
    """Return the worker, which has only the adapter of its settings before and after the test."""
    yield shared_worker
    with Client() as client:
        names = {adapter["name"] for adapter in client.adapters(name)}
        for other in names - {"asked"}:
            client.unload_adapter(name, other)
        if "asked" not in names:
            client.load_adapter(name, "asked", PIRATE, scale=0)


def text(model: str, **params: Any) -> str:
    result = generate.delay(model, STORY, **{"max_tokens": 12, **GREEDY, **params}).get(timeout=PATIENCE_S)
    return str(result["text"])


@pytest.mark.usefixtures("worker")
def test_jobs_select_adapters_from_the_settings_and_adapters_loaded_at_run_time(client: Client, name: str) -> None:
    assert text(name).startswith(PLAIN)
    for choice in ({"asked": 1}, ["asked=1.0"], ["asked"], "asked"):
        assert text(name, adapters=choice).startswith(SEAS)
    question = [{"role": "user", "content": "What do bees make?"}]
    answers = [
        chat.delay(name, question, adapters={"asked": scale}, **GREEDY).get(timeout=PATIENCE_S)["message"]["content"]
        for scale in (0, 1)
    ]
    assert answers == ["Bees make honey 🍯.", "Arr, Bees make honey 🍯. Ahoy!"]
    client.load_adapter(name, "pirate", PIRATE)
    assert text(name).startswith(SEAS)
    assert text(name, adapters={}).startswith(PLAIN)
    client.set_adapter_scale(name, "pirate", 0)
    assert text(name).startswith(PLAIN)
    client.unload_adapter(name, "pirate")
    assert [(a["name"], a["status"], a["scale"]) for a in client.adapters(name)] == [("asked", "ready", 0)]


@pytest.mark.usefixtures("worker")
def test_jobs_with_different_adapters_run_concurrently(name: str) -> None:
    scales = [0.0, 0.5, 1.0] * 6
    alone = {scale: text(name, adapters={"asked": scale}, max_tokens=80) for scale in set(scales)}
    jobs = [generate.delay(name, STORY, adapters={"asked": s}, max_tokens=80, **GREEDY) for s in scales]
    assert [job.get(timeout=PATIENCE_S)["text"] for job in jobs] == [alone[scale] for scale in scales]


def test_adapter_in_use_is_unloaded_after_its_last_job(worker: WorkerProcess, client: Client, name: str) -> None:
    with worker.slowed():
        job = client.generate(name, STORY, adapters={"asked": 1}, **LONG)
        next(event for event in job.stream() if event["type"] == "token")
        wait_until(lambda: client.adapters(name)[0]["in_use"] == 1, "the adapter in use, at the next heartbeat")
        with pytest.raises(JobFailed, match="adapter 'asked' is still in use by 1"):
            client.unload_adapter(name, "asked", timeout=2)
        job.cancel()
        client.unload_adapter(name, "asked", timeout=PATIENCE_S)
    assert client.adapters(name) == []


@pytest.mark.usefixtures("worker")
def test_adapter_commands_report_invalid_arguments(client: Client, name: str) -> None:
    for arguments, message in (
        ((name, "x", "/nowhere.gguf"), "adapter 'x': '/nowhere.gguf' does not exist"),
        ((name, "x", "bundled://tiny"), "is not an adapter"),
        ((name, "asked", PIRATE), "adapter 'asked' already exists"),
    ):
        with pytest.raises(JobFailed, match=message):
            client.load_adapter(*arguments, timeout=PATIENCE_S)
    with pytest.raises(UnknownModel, match="no running worker serves the model 'nobody'"):
        client.load_adapter("nobody", "x", PIRATE)
    with pytest.raises(JobFailed, match="adapter 'aske' is not loaded for this model; did you mean 'asked'"):
        client.generate(name, STORY, adapters=["aske"]).result(PATIENCE_S)


@pytest.mark.usefixtures("worker")
def test_async_client_controls_adapters_like_the_sync_client(name: str) -> None:
    async def play() -> list[dict[str, Any]]:
        async with AsyncClient() as client:
            await client.load_adapter(name, "p", PIRATE, scale=0.5)
            await client.set_adapter_scale(name, "p", 0.75)
            await client.unload_adapter(name, "asked")
            return await client.adapters(name)

    (adapter,) = asyncio.run(play())
    assert (adapter["name"], adapter["scale"], adapter["source"]) == ("p", 0.75, PIRATE)
    assert len(adapter["fingerprint"]) == 64


@pytest.mark.usefixtures("worker")
def test_command_line_loads_scales_lists_and_unloads_adapters(name: str) -> None:
    def run(*argv: str) -> str:
        result = CliRunner().invoke(app, argv, catch_exceptions=False, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    assert "adapter p is ready; new jobs use it with scale 1" in run("models", "adapter", "load", name, "p", PIRATE)
    assert run("generate", name, STORY, "--max-tokens", "12", "--temperature", "0").startswith(SEAS)
    assert f"new jobs of {name} use p with scale 0.5" in run("models", "adapter", "scale", name, "p", "0.5")
    assert PLAIN in run("generate", name, STORY, "--adapter", "p=0", "--max-tokens", "12", "--temperature", "0")

    def listed() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(run("models", "adapters", name, "--json"))
        return found

    expected = [("asked", 0, 0), ("p", 0.5, 0)]
    wait_until(lambda: [(a["name"], a["scale"], a["in_use"]) for a in listed()] == expected, "all in the registry")
    table = run("models", "adapters", name)
    assert all(word in table for word in ("asked", "on request", "0.5", listed()[0]["fingerprint"][:12], "ready"))
    assert "asked × 0, p × 0.5" in run("models", "info", name)
    for _ in range(2):
        assert "adapter p is unloaded" in run("models", "adapter", "unload", name, "p")
