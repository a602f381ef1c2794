"""Two installations that share a Redis database, with different key prefixes, are isolated from each other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment

PREFIX = "staging"
KEY = "the same in both"
WAITING = "served-by-none"
SHORT = {"max_tokens": 4, "temperature": 0}

# Each installation runs this program, which runs a job, leaves jobs waiting, and reports what it sees.
PROGRAM = f"""
import json, time
from cellama.api import Client
from cellama.api.metrics.scrape import Scrape
from cellama.tasks.connection.connections import connect
deadline = time.monotonic() + {PATIENCE_S}
with Client() as client:
    while not client.workers() and time.monotonic() < deadline:
        time.sleep(0.05)
    job = client.generate("tiny", "Once", idempotency_key={KEY!r}, **{SHORT!r})
    text = job.result({PATIENCE_S})["text"]
    waiting = client.generate_many({WAITING!r}, ["a", "b"], wait=True)
    workers, figures = client.workers(), Scrape(connect())().numbers
    print(json.dumps(dict(
        job=job.id, text=text, workers=[worker.pid for worker in workers],
        waiting=[job.id for job in waiting], open=[job.job_id for job in client.jobs()],
        num_waiting=sum(figures["cellama_jobs_waiting"].values()), num_workers=figures["cellama_workers"][()],
        models=[model["id"] for model in client.models()],
    )))
"""
LOADING = """
from cellama.api import Client
with Client() as client:
    client.load_model("more", "bundled://tiny", n_parallel=1, threads=1)
    client.purge("served-by-none")
"""


def run(program: str, redis_url: str, **settings: str) -> str:
    """Run code in a process of an installation and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(CELLAMA_REDIS_URL=redis_url, **settings),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def other_worker(redis_server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    """Return a worker of the other installation, with the same name as the worker of the test run."""
    process = WorkerProcess(tmp_path, redis_server.url, CELLAMA_KEY_PREFIX=PREFIX)
    yield process
    assert process.stop() == 0, process.log()


def test_installations_with_different_key_prefixes_are_isolated(
    worker: WorkerProcess, other_worker: WorkerProcess, redis_server: RedisServer, redis_client: Redis
) -> None:
    url = redis_server.url
    other: dict[str, Any] = json.loads(run(PROGRAM, url, CELLAMA_KEY_PREFIX=PREFIX))
    own: dict[str, Any] = json.loads(run(PROGRAM, url))
    assert own["text"] == other["text"]
    assert own["job"] != other["job"], "an idempotency key stands for a job of one installation"
    for seen, process in ((own, worker), (other, other_worker)):
        assert (seen["workers"], seen["num_workers"]) == ([process.process.pid], 1)
        assert (set(seen["waiting"]) <= set(seen["open"]), seen["models"]) == (True, ["tiny"])
    assert (other["open"], other["num_waiting"]) == (other["waiting"], 2)
    assert not set(own["open"]) & set(other["open"])

    run(LOADING, url, CELLAMA_KEY_PREFIX=PREFIX)  # both workers have this name; only one has the prefix
    with Client() as client:
        assert [model["id"] for model in client.models()] == ["tiny"]
        assert [client.position(job_id).state for job_id in own["waiting"]] == ["waiting", "waiting"]
        assert client.purge(WAITING) == 2
    assert not redis_client.exists(f"{PREFIX}:waiting:{PREFIX}:queue:{WAITING}"), "its own purge left nothing"
