"""The ACL rules for Redis users in docs/redis.md permit every command that cellama sends."""

from __future__ import annotations

import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until

DOCS = Path(__file__).parents[2] / "docs" / "redis.md"
PASSWORD = "open-sesame"
PRODUCER = """
import asyncio
from cellama.api import AsyncClient, Client
from cellama.tasks import app, generate

STORY = ("tiny", "Once upon a time")

async def again():
    async with AsyncClient() as client:
        job = await client.generate(*STORY, max_tokens=4)
        return [event async for event in job.stream()][-1]["type"]

with Client() as client:
    job = client.generate(*STORY, max_tokens=4, idempotency_key="one")
    client.position(job.id)
    assert [event["type"] for event in job.stream()][-1] == "done"
    assert job.result(60)["text"] == client.result(job.id)["text"]
    assert asyncio.run(again()) == "done"
    endless = client.generate(*STORY, max_tokens=1900, ignore_eos=True)
    endless.cancel()
    client.generate_many("tiny", ["One", "Two"], max_tokens=2)
    while not (answers := app.control.inspect(timeout=1).ping()):
        pass
    print(len(client.models()), len(answers))
    generate.delay(*STORY, max_tokens=2).get(60)
    plain = app.send_task("cellama.generate", STORY, {"max_tokens": 2}, queue="cellama:queue:tiny")
    assert plain.get(60)["text"]
"""
STATUS = "import sys; sys.argv[1:] = ['status']; from cellama.api.cli import main; main()"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis with the documented users, and no other user except its administrator."""
    rules = [line for line in DOCS.read_text().splitlines() if line.startswith("ACL SETUSER")]
    with RedisServer.start(tmp_path / "redis", password="admin", admin_commands=True) as server:
        with Redis.from_url(server.url) as redis:
            for rule in rules:
                redis.execute_command(*shlex.split(rule.replace("PASSWORD", PASSWORD)))
        yield server


def url_of(server: RedisServer, user: str) -> str:
    return f"redis://{user}:{PASSWORD}@127.0.0.1:{server.port}/0"


def run(server: RedisServer, program: str) -> str:
    environment = clean_environment(CELLAMA_REDIS_URL=url_of(server, "cellama-producer"))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=2 * PATIENCE_S, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_documented_acl_rules_permit_everything_that_cellama_does(server: RedisServer, tmp_path: Path) -> None:
    with Redis.from_url(server.url, decode_responses=True) as admin:
        worker = WorkerProcess(tmp_path, url_of(server, "cellama-worker"), name=uuid.uuid4().hex)
        try:
            worker.wait_ready()
            assert run(server, PRODUCER) == "1 1\n"
            assert "tiny" in run(server, STATUS)
        finally:
            code = worker.stop()
        refused: list[Any] = admin.execute_command("ACL", "LOG", "100")
    assert code == 0, worker.log()
    named = [dict(zip(entry[::2], entry[1::2], strict=True)) if isinstance(entry, list) else entry for entry in refused]
    # redis-py sends CLIENT SETINFO, and continues if the user may not use it.
    assert [entry for entry in named if not entry["object"].startswith("client")] == []


def test_worker_warns_about_an_evicting_redis_at_each_start_even_without_config_permission(
    server: RedisServer, tmp_path: Path
) -> None:
    with Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
    for start in ("first", "second"):
        (tmp_path / start).mkdir()
        worker = WorkerProcess(tmp_path / start, url_of(server, "cellama-worker"), name=start)
        try:
            wait_until(
                lambda worker=worker: "maxmemory-policy is allkeys-lru, so Redis evicts jobs" in worker.log(), start
            )
        finally:
            worker.stop()
