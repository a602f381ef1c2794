"""A worker with a hanging engine exits, and its jobs resume on another worker."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.engine.system.watchdog import EXIT_STALLED

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import RESUMED, STEP_S, STORY

STRATEGY = """
import threading
from pathlib import Path

from cellama.bench.harness.pace import Paced

class Hanging(Paced):
    def build_batch(self, *arguments):
        if Path("hang").exists():
            what_hangs = threading.Event()
            what_hangs.wait()
        return super().build_batch(*arguments)
"""


def worker_with(folder: Path, url: str, name: str, strategy: str, **settings: str) -> WorkerProcess:
    model = {
        "id": f"{name}-tiny",
        "source": "bundled://tiny",
        "n_parallel": 2,
        "threads": 1,
        "batch_strategy": strategy,
    }
    return WorkerProcess(folder, url, name=f"{name}-{strategy[:3]}", CELLAMA_MODELS=json.dumps([model]), **settings)


def test_worker_with_a_hanging_engine_exits_and_its_job_resumes_on_another_worker(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    name = f"h{uuid.uuid4().hex[:8]}"
    (tmp_path / "mine.py").write_text(STRATEGY)
    hanging = worker_with(tmp_path, redis_server.url, name, "mine:Hanging", CELLAMA_HANG_S="3")
    other = None
    try:
        hanging.wait_ready()
        with Client() as client:
            with hanging.slowed(STEP_S):
                job = client.generate(f"{name}-tiny", STORY, **RESUMED)
                next(event for event in job.stream() if event["type"] == "token")
                (tmp_path / "hang").touch()
                assert wait_until(hanging.process.poll, "the end of the worker") == EXIT_STALLED
            assert "has been in one step (step) for" in hanging.log()
            assert "what_hangs.wait()" in hanging.log()
            (tmp_path / "elsewhere").mkdir()
            other = worker_with(tmp_path / "elsewhere", redis_server.url, name, "adaptive").wait_ready()
            assert job.result(timeout=PATIENCE_S)["usage"]["completion_tokens"] == RESUMED["max_tokens"]
    finally:
        for worker in (hanging, other):
            if worker is not None:
                worker.stop()
