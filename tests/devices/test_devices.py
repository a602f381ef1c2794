"""Tests of models on several devices, which are RPC servers on this machine: `make devices` runs them."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis
from typer.testing import CliRunner

from cellama.api import Client
from cellama.api.cli import app
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.models.padded import write_padded
from cellama.engine import EngineOptions, InsufficientMemory, Model, ModelLoadFailed, ModelManager, devices
from cellama.engine.llama import plan_load
from cellama.engine.memory.budget import CPU, AvailableMemory

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .rpc_server import RpcServer, has_rpc, rpc_servers

pytestmark = pytest.mark.skipif(not has_rpc(), reason="llama.cpp was built without RPC; run `make devices`")

MIB = 1 << 20
SIZES = (4096 * MIB, 1024 * MIB)  # memory of the devices RPC0 and RPC1
TINY = "bundled://tiny"
BASE: dict[str, Any] = {"n_parallel": 2, "ctx_per_slot": 512, "threads": 1, "cache_ram_bytes": 0}
PROMPT = "Once upon a time there was a little frog"
PLACEMENTS: dict[str, dict[str, Any]] = {
    "layers": {},
    "layers by share": {"tensor_split": [1, 3]},
    "one device": {"split_mode": "none", "main_gpu": 1},
    "tensors": {"split_mode": "tensor"},
    "tensors by share": {"split_mode": "tensor", "tensor_split": [3, 1]},
    "some layers": {"n_gpu_layers": 3, "tensor_split": [1, 1]},
    "some tensors": {"override_tensors": [r"ffn_down=RPC1", r"blk\.0=CPU"]},
    "reverse order": {"devices": ["RPC1", "RPC0"]},
    "cells in RAM": {"kv_offload": False},
}


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RpcServer]]:
    with rpc_servers(tmp_path_factory.mktemp("servers"), SIZES) as servers:
        yield servers


@pytest.fixture(scope="session")
def rpc(servers: list[RpcServer]) -> list[str]:
    return [server.address for server in servers]


@pytest.fixture(scope="session")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 60 million parameters."""
    path = tmp_path_factory.mktemp("padded") / "padded.gguf"
    write_padded(path, 60)
    return path


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager("auto")
    yield manager
    manager.close()


def load(manager: ModelManager, source: str = TINY, **options: Any) -> Model:
    name = f"m{len(manager.models())}"
    return manager.load(name, source, options=EngineOptions(**{**BASE, **options}), capabilities=["generate"])


def text_of(model: Model) -> str:
    return model.engine.generate(PROMPT, max_tokens=60, temperature=0)


@pytest.fixture(scope="session")
def expected() -> str:
    with closing(ModelManager("auto")) as manager:
        return text_of(load(manager, devices=[]))


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_text_does_not_depend_on_the_placement(
    manager: ModelManager, rpc: list[str], expected: str, placement: dict[str, Any]
) -> None:
    model = load(manager, rpc=rpc, **placement)
    used = {name for name, use in model.memory.by_device().items() if use and name != CPU}
    assert used == ({"RPC1"} if placement.get("split_mode") == "none" else {"RPC0", "RPC1"})
    assert text_of(model) == expected


def test_split_mode_row_is_refused_with_llama_cpps_reason(manager: ModelManager, rpc: list[str]) -> None:
    with pytest.raises(ModelLoadFailed, match="does not support split buffers"):
        load(manager, rpc=rpc, split_mode="row")


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_plan_matches_the_memory_that_each_device_uses(
    manager: ModelManager, servers: list[RpcServer], rpc: list[str], padded: Path, placement: dict[str, Any]
) -> None:
    options = EngineOptions(**{**BASE, "n_parallel": 4, "ctx_per_slot": 8192}, rpc=rpc, **placement)
    planned = plan_load("m", padded, options, frozenset({"generate"}), AvailableMemory({})).footprint
    before = [psutil.Process(server.process.pid).memory_info().rss for server in servers]
    model = manager.load("m", str(padded), options=options, capabilities=["generate"])
    model.engine.generate(PROMPT * 40, max_tokens=8, temperature=0)
    for name, server, rss in zip(("RPC0", "RPC1"), servers, before, strict=True):
        used = psutil.Process(server.process.pid).memory_info().rss - rss
        logged, plan = model.memory.on(name), planned.on(name)
        assert plan.total_bytes == pytest.approx(logged.total_bytes, rel=0.05, abs=MIB), name
        # The pages of a compute buffer that a short prompt does not touch are not in memory.
        assert plan.total_bytes - plan.compute_bytes == pytest.approx(used, rel=0.05, abs=plan.compute_bytes + 4 * MIB)


def test_device_that_is_too_small_is_refused_with_its_need(manager: ModelManager, rpc: list[str], padded: Path) -> None:
    with pytest.raises(
        InsufficientMemory, match=r"it needs .* GiB on RPC1 .*, but only .* MiB are available"
    ) as refused:
        load(manager, str(padded), rpc=rpc, devices=["RPC1"], n_gpu_layers=-1, n_parallel=16, ctx_per_slot=65_536)
    assert refused.value.device == "RPC1"
    assert refused.value.required_bytes > refused.value.available_bytes > 900 * MIB


def test_layers_that_do_not_fit_stay_in_ram(manager: ModelManager, rpc: list[str], padded: Path) -> None:
    model = load(manager, str(padded), rpc=rpc, devices=["RPC1"], n_parallel=16, ctx_per_slot=32_768)
    assert 0 < model.devices["RPC1"] < sum(model.devices.values())
    assert model.devices[CPU] > 0
    assert 500 * MIB < model.memory.on("RPC1").total_bytes < SIZES[1]
    assert model.engine.generate(PROMPT, max_tokens=4, temperature=0)


def test_missing_device_is_refused_with_the_known_devices(manager: ModelManager, rpc: list[str]) -> None:
    with pytest.raises(ModelLoadFailed, match=r"'CUDA0' is not a device .*; found: RPC0, RPC1"):
        load(manager, rpc=rpc, devices=["CUDA0"])


def test_models_share_devices_and_the_budget_counts_each_of_them(manager: ModelManager, rpc: list[str]) -> None:
    free = [device.free_bytes for device in devices() if device.name == "RPC0"]
    first, second = load(manager, rpc=rpc), load(manager, rpc=rpc, devices=["RPC0"])
    available = manager._admission.budget.available().free["RPC0"]
    taken = sum(model.memory.on("RPC0").total_bytes for model in (first, second))
    assert free == [SIZES[0]]
    assert available <= SIZES[0] - taken
    assert text_of(first) == text_of(second)


def test_plan_command_shows_each_device(rpc: list[str], padded: Path) -> None:
    argv = ["models", "plan", str(padded), "--set", f"rpc={json.dumps(rpc)}", "--json"]
    found = CliRunner().invoke(app, argv)
    assert found.exit_code == 0, found.output
    plan = json.loads(found.stdout)
    shown = {device["name"]: device for device in plan["devices"]}
    assert [shown[name]["description"] for name in ("RPC0", "RPC1")] == rpc
    assert plan["n_gpu_layers"] == shown["RPC0"]["layers"] + shown["RPC1"]["layers"] == plan["num_layers"]


def test_loading_a_hundred_times_leaks_no_memory(rpc: list[str], servers: list[RpcServer]) -> None:
    processes = [psutil.Process(), *(psutil.Process(server.process.pid) for server in servers)]

    def load_and_free() -> None:
        with closing(ModelManager("auto")) as manager:
            load(manager, rpc=rpc).engine.generate("Once", max_tokens=2)

    for _ in range(10):
        load_and_free()
    gc.collect()
    before = [process.memory_info().rss for process in processes]
    files = [process.num_fds() for process in processes]
    for _ in range(100):
        load_and_free()
    gc.collect()
    after = [process.memory_info().rss for process in processes]
    assert all(later - earlier < 30 * MIB for earlier, later in zip(before, after, strict=True)), (before, after)
    assert [process.num_fds() for process in processes] == files


def test_job_resumes_on_another_worker_when_a_device_dies(
    tmp_path: Path, redis_server: RedisServer, expected: str
) -> None:
    model = {"id": "m", "source": TINY, "default": True, **BASE}
    folders = [tmp_path / name for name in ("remote", "local")]
    for folder in folders:
        folder.mkdir()
    with rpc_servers(tmp_path, SIZES) as servers:
        addresses = [server.address for server in servers]
        settings = {"CELLAMA_MODELS": json.dumps([{**model, "rpc": addresses}]), "CELLAMA_LEASE_S": "3"}
        remote = WorkerProcess(folders[0], redis_server.url, "remote", **settings).wait_ready()
        local = None
        try:
            with Client(redis_server.url) as client, remote.slowed(0.3):
                job = client.generate("m", PROMPT, max_tokens=60, temperature=0)
                wait_until(lambda: _num_tokens(remote.redis, job.id) >= 8, "the first tokens")
                assert remote.process.poll() is None
                servers[1].kill()
                assert remote.process.wait(PATIENCE_S) == -signal.SIGABRT
                settings["CELLAMA_MODELS"] = json.dumps([model])
                local = WorkerProcess(folders[1], redis_server.url, "local", **settings).wait_ready()
                result = job.result(PATIENCE_S)
            assert result["text"] == expected
            assert _num_tokens(local.redis, job.id) == 60  # each token once, of which the first worker computed some
        finally:
            for worker in (remote, local):
                if worker is not None:
                    worker.stop()


def _num_tokens(redis: Redis, job_id: str) -> int:
    """Return the number of tokens in a job's journal."""
    from cellama.tasks.contract.journal import events_in
    from cellama.tasks.contract.keys import journal_key

    entries: Any = redis.xrange(journal_key(job_id))
    events: list[Any] = list(events_in(entries))
    return sum(len(event.get("tokens", ())) for event in events if event["type"] == "token")
