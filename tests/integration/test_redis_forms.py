"""Clients, workers, streams and results with Redis behind sentinels and on a Unix socket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellama.api.machine.redis_server import find_redis_binary

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until
from ..sentinels import SentinelSetup

PASSWORD = "open-sesame"
PRODUCER = """
import asyncio
from cellama.api import AsyncClient, Client
from cellama.tasks import generate

async def again():
    async with AsyncClient() as client:
        job = await client.generate("tiny", "Once upon a time", max_tokens=4, temperature=0)
        return "".join([event.get("text", "") async for event in job.stream()])

with Client() as client:
    job = client.generate("tiny", "Once upon a time", max_tokens=4, temperature=0)
    text = "".join(event.get("text", "") for event in job.stream())
    print(text == job.result(60)["text"] == asyncio.run(again()))
    print(generate.delay("tiny", "Once upon a time", max_tokens=4, temperature=0).get(60)["text"] == text)
"""
STATUS = "import sys; sys.argv[1:] = ['status']; from cellama.api.cli import main; main()"
FAILOVER = """
import sys
from cellama.tasks import generate
params = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
jobs = [generate.delay("tiny", "Once upon a time", stream=bool(n % 2), **params) for n in range(8)]
print("queued", flush=True)
texts = {job.get(timeout=120)["text"] for job in jobs}
print(len(texts), flush=True)
"""


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[SentinelSetup]:
    with SentinelSetup(tmp_path / "redis", password=PASSWORD) as setup:
        yield setup


@pytest.fixture
def socket_url(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "redis.sock"
    argv = [str(find_redis_binary()), "--port", "0", "--unixsocket", str(path), "--requirepass", PASSWORD]
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until(path.exists, "the socket")
    yield f"unix://:{PASSWORD}@{path}?db=1"
    process.kill()
    process.wait()


def run(url: str, program: str) -> str:
    command = [sys.executable, "-c", program]
    environment = clean_environment(CELLAMA_REDIS_URL=url)
    done = subprocess.run(command, env=environment, capture_output=True, timeout=2 * PATIENCE_S, text=True)
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    return done.stdout


def test_jobs_and_streams_work_over_a_unix_socket(socket_url: str, tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path, socket_url)
    try:
        worker.wait_ready()
        assert run(socket_url, PRODUCER) == "True\nTrue\n"
        assert "tiny" in run(socket_url, STATUS)
    finally:
        code = worker.stop()
    assert code == 0
    assert PASSWORD not in worker.log()


def test_jobs_finish_after_a_sentinel_failover(sentinels: SentinelSetup, tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path, sentinels.url)
    try:
        worker.wait_ready()
        assert run(sentinels.url, PRODUCER) == "True\nTrue\n"
        environment = clean_environment(CELLAMA_REDIS_URL=sentinels.url)
        command = [sys.executable, "-c", FAILOVER]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as producer:
            assert producer.stdout is not None
            with worker.slowed(0.25):  # 200 tokens last for most of a minute
                assert producer.stdout.readline() == "queued\n"
                wait_until(lambda: worker.engine()["slots_decoding"] == 8, "all jobs running")
                sentinels.wait_until_replicated()
                sentinels.kill_master()
            assert producer.stdout.readline() == "1\n"
        assert run(sentinels.url, PRODUCER) == "True\nTrue\n"
    finally:
        code = worker.stop()
    assert code == 0
    assert PASSWORD not in worker.log()
