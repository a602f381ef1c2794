"""Tests of `cellama worker --gpus each`, which runs one process per GPU. The GPUs are simulated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer, die_with
from cellama.tasks.connection.connections import connect
from cellama.tasks.state.registry import live_workers

from ..conftest import PATIENCE_S, clean_environment, empty_database, end_process, wait_until

SCRIPT = """
from cellama.api.cli import main, services
services.visible_gpus = lambda: ["CUDA0", "CUDA1"]
main()
"""


@pytest.mark.parametrize("gpus", ["each", "1,0"])
def test_one_worker_per_gpu_runs_and_stops(redis_server: RedisServer, tmp_path: Path, gpus: str) -> None:
    with empty_database(redis_server, 9) as url, connect(url) as redis:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, "worker", "--gpus", gpus, "-m", "tiny=bundled://tiny"],
            cwd=tmp_path,
            env=clean_environment(CELLAMA_REDIS_URL=url),
            preexec_fn=die_with(os.getpid()),
        )
        try:
            workers = wait_until(lambda: len(found := live_workers(redis)) == 2 and found, "two workers")
            visible = {psutil.Process(worker.pid).environ()["CUDA_VISIBLE_DEVICES"] for worker in workers}
            assert visible == {"0", "1"}
            assert {worker.name.partition("@")[0].rpartition("-")[2] for worker in workers} == {"gpu0", "gpu1"}
            with Client(url) as client:
                jobs = client.generate_many("tiny", [f"Story {number}" for number in range(40)], max_tokens=40)
                assert {job.result(PATIENCE_S)["finish_reason"] for job in jobs} <= {"length", "stop"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert not any(psutil.pid_exists(worker.pid) for worker in workers)
        finally:
            if process.poll() is None:
                end_process(process)
