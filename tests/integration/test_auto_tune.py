"""An idle worker tunes its model once per machine, and a job that arrives stops the measurements at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.state.registry import live_workers

from ..conftest import WorkerProcess, empty_database, wait_until

MODEL = {"id": "tiny", "source": "bundled://tiny", "default": True, "batch_strategy": "adaptive"}
DATABASE = 13


@pytest.fixture
def url(redis_server: RedisServer) -> Iterator[str]:
    with empty_database(redis_server, DATABASE) as url:
        yield url


def start(folder: Path, url: str, name: str, auto_tune_s: float) -> WorkerProcess:
    folder.joinpath(name).mkdir()
    settings = {"CELLAMA_MODELS": json.dumps([MODEL]), "CELLAMA_AUTO_TUNE_S": str(auto_tune_s)}
    settings["XDG_CACHE_HOME"] = str(folder / "cache")
    return WorkerProcess(folder / name, url, name, **settings).wait_ready()


def measuring(worker: WorkerProcess) -> list[psutil.Process]:
    """Return the worker's processes that measure a model."""
    children = psutil.Process(worker.process.pid).children()
    return [child for child in children if "cellama.engine.tuning" in child.cmdline()]


def test_worker_tunes_its_model_while_idle_and_the_next_worker_uses_the_result(url: str, tmp_path: Path) -> None:
    first = start(tmp_path, url, "first", auto_tune_s=20)
    try:
        wait_until(lambda: "model tuned" in first.log(), "the result", 120)
    finally:
        assert first.stop() == 0
    second = start(tmp_path, url, "second", auto_tune_s=0)
    try:
        (entry,) = [entry for entry in live_workers(second.redis) if entry.pid == second.process.pid]
        assert {"n_parallel", "threads"} <= entry.models[0]["tuned"].keys()
        assert "tuned options applied" in second.log()
    finally:
        assert second.stop() == 0


def test_worker_stops_measuring_when_a_job_arrives(url: str, tmp_path: Path) -> None:
    worker = start(tmp_path, url, "worker", auto_tune_s=59)
    try:
        (process,) = wait_until(lambda: measuring(worker), "a measurement")
        with Client(url) as client:
            assert process.is_running()
            client.generate("tiny", "Once", max_tokens=4).result(timeout=60)
        psutil.wait_procs([process], timeout=60)
        assert "tuning interrupted" in wait_until(lambda: "tuning interrupted" in worker.log() and worker.log(), "log")
        assert "model tuned" not in worker.log()
    finally:
        assert worker.stop() == 0
