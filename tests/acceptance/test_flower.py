"""Test that Flower, opened in a real browser, shows the queue depth and the slots."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from cellama.api.machine.redis_server import RedisServer, free_port
from cellama.tasks import app, generate
from cellama.tasks.contract.names import queue_keys

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"  # kept for inspection
CREDENTIALS = "me:secret"
BOARD_URL = "http://127.0.0.1:3000/d/cellama?kiosk&from=now-1h"
LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": False, "priority": 9}


class Flower:
    """A running Flower that requires a password."""

    def __init__(self, folder: Path, redis_url: str, models: str) -> None:
        self.port = free_port()
        self.folder = folder
        environment = clean_environment(
            CELLAMA_REDIS_URL=redis_url,
            CELLAMA_MODELS=models,
            CELLAMA_BOARD_URL=BOARD_URL,
            FLOWER_BASIC_AUTH=CREDENTIALS,
        )
        argv = [sys.executable, "-m", "cellama.api.machine.flower", f"--port={self.port}"]
        with (folder / "flower.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*argv, "--address=127.0.0.1"], cwd=folder, env=environment, stdout=log, stderr=log
            )

    def get(self, path: str, credentials: str = CREDENTIALS) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        request.add_header("Authorization", "Basic " + base64.b64encode(credentials.encode()).decode())
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def look(self, path: str, name: str) -> str:
        """Return the page as it is after its scripts have run, and save a screenshot."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"]
        browser += [f"--user-data-dir={self.folder / 'chromium'}", "--virtual-time-budget=4000"]
        url = f"http://{CREDENTIALS}@127.0.0.1:{self.port}{path}"
        for what in (f"--screenshot={SCREENSHOTS / name}.png", "--dump-dom"):
            done = subprocess.run(
                [*browser, what, url], capture_output=True, timeout=PATIENCE_S, text=True, env=os.environ, check=True
            )
        return done.stdout


@pytest.fixture
def flower(tmp_path: Path, redis_server: RedisServer) -> Iterator[tuple[Flower, WorkerProcess, str]]:
    model = f"m{uuid.uuid4().hex[:8]}"
    models = json.dumps([{"id": model, "source": "bundled://tiny", "n_parallel": 4, "threads": 1, "default": True}])
    worker = WorkerProcess(tmp_path, redis_server.url, name=model, CELLAMA_MODELS=models)
    flower = Flower(tmp_path, redis_server.url, models)
    try:
        worker.wait_ready()
        yield flower, worker, model
    finally:
        flower.process.terminate()
        flower.process.wait(PATIENCE_S)
        worker.process.kill()
        worker.process.wait()


def test_flower_shows_queue_depth_and_slots_only_with_a_password(
    flower: tuple[Flower, WorkerProcess, str], redis_client: Redis
) -> None:
    page, worker, model = flower

    def ready() -> bool:
        try:
            return any(name.startswith(f"{model}@") for name in page.get("/api/workers?refresh=1"))
        except OSError:
            return False

    wait_until(ready, "the worker in Flower")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        page.get("/api/workers", credentials="me:wrong")

    with worker.slowed():
        _check_depth_and_slots(page, worker, model, redis_client)


def _check_depth_and_slots(page: Flower, worker: WorkerProcess, model: str, redis_client: Redis) -> None:
    jobs = [generate.delay(model, "Once upon a time", **LONG) for _ in range(40)]
    plain = Celery(broker=app.conf.broker_url)
    plain.send_task("cellama.generate", [model, "Once upon a time"], {"max_tokens": 2}, queue=f"cellama:queue:{model}")
    wait_until(lambda: worker.engine()["slots_decoding"] == 4, "busy slots")
    depth = sum(int(str(redis_client.llen(key))) for key in queue_keys(model))
    lengths = {queue["name"]: queue["messages"] for queue in page.get("/api/queues/length")["active_queues"]}
    assert 20 < lengths[f"cellama:queue:{model}"] <= depth
    broker = page.look("/broker", "flower-broker")
    assert f'href="{html.escape(BOARD_URL)}">Board</a>' in broker
    shown = re.search(rf"<td>cellama:queue:{model}</td>\s*<td[^>]*>(\d+)</td>", broker)
    assert shown is not None
    assert 10 < int(shown[1]) <= lengths[f"cellama:queue:{model}"]

    name = next(name for name in page.get("/api/workers?refresh=1") if name.startswith(f"{model}@"))
    assert "4 of 4 busy" in page.look(f"/worker/{name}", "flower-worker")
    assert "generate" in page.look("/tasks", "flower-tasks")
    shown_of_calls = [(task["args"], task["kwargs"]) for task in page.get("/api/tasks").values()]
    assert ("(…)", "(…)") in shown_of_calls  # sent by plain Celery
    assert not any("Once upon" in str(call) for call in shown_of_calls)
    for job in jobs:
        job.revoke(terminate=True)
