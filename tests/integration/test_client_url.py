"""Clients with a URL use only this Redis, and never the Redis in the settings."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from cellama.api import AsyncClient, Client, RedisUnreachable
from cellama.api.machine.redis_server import RedisServer, free_port
from cellama.config.local_redis import redis_dir
from cellama.tasks.contract.keys import job_key

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment

STORY = "Once upon a time"
SHORT = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def elsewhere(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of another Redis, whose only worker has a model that the worker of the test run lacks."""
    folder = tmp_path_factory.mktemp("elsewhere")
    models = json.dumps([{"id": "other", "source": "bundled://tiny", "n_parallel": 2, "threads": 1}])
    with RedisServer.start(folder / "redis") as server:
        process = WorkerProcess(folder, server.url, CELLAMA_MODELS=models)
        try:
            process.wait_ready()
            yield server.url
        finally:
            assert process.stop() == 0, process.log()


def test_client_uses_the_redis_of_its_url_for_jobs_streams_and_results(elsewhere: str, redis_client: Redis) -> None:
    with Client(elsewhere) as client, Redis.from_url(elsewhere) as there:
        job = client.generate("other", STORY, **SHORT)
        text = "".join(event["text"] for event in job.stream() if event["type"] == "token")
        assert job.result(PATIENCE_S)["text"] == text
        assert (job.position().state, client.job(job.id).result(PATIENCE_S)["text"]) == ("done", text)
        assert (there.exists(job_key(job.id)), redis_client.exists(job_key(job.id))) == (1, 0)
        many = client.generate_many("other", [STORY, STORY], **SHORT)
        assert [each.result(PATIENCE_S)["text"] for each in many] == [text, text]
        assert client.embed("other", STORY).result(PATIENCE_S)["usage"]["prompt_tokens"] > 0


def test_client_with_a_url_ignores_the_redis_of_the_settings(elsewhere: str) -> None:
    program = f"""
        from cellama.api import Client
        with Client({elsewhere!r}) as client:
            job = client.generate("other", {STORY!r}, **{SHORT!r})
            many = client.generate_many("other", [{STORY!r}], **{SHORT!r})
            assert job.result({PATIENCE_S})["text"] == many[0].result({PATIENCE_S})["text"]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=clean_environment(CELLAMA_REDIS_URL="redis://127.0.0.1:1/0"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_client_with_a_url_controls_the_workers_of_the_redis_at_that_url(elsewhere: str) -> None:
    with Client(elsewhere) as client:
        assert [(model["id"], model["status"]) for model in client.models()] == [("other", "ready")]
        client.load_adapter("other", "pirate", "bundled://pirate", scale=0)
        assert [adapter["name"] for adapter in client.adapters("other")] == ["pirate"]
        job = client.generate("nowhere", STORY, wait=True)
        job.cancel()
        assert [event["type"] for event in job.stream(timeout=PATIENCE_S)][-1] == "done"


def test_bulk_run_uses_the_redis_of_the_client_url(elsewhere: str, tmp_path: Path) -> None:
    lines, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text("".join(json.dumps({"id": str(n), "prompt": STORY}) + "\n" for n in range(4)))
    with Client(elsewhere) as client:
        summary = client.batch(lines, answers, model="other", **SHORT)
    assert (summary.state, summary.progress.finished, len(answers.read_text().splitlines())) == ("completed", 4, 4)


def test_async_client_uses_the_redis_of_its_url(elsewhere: str) -> None:
    async def run() -> tuple[str, str]:
        async with AsyncClient(elsewhere) as client:
            job = await client.generate("other", STORY, **SHORT)
            streamed = "".join([event["text"] async for event in job.stream() if event["type"] == "token"])
            return streamed, (await job.result(PATIENCE_S))["text"]

    streamed, text = asyncio.run(run())
    assert streamed == text != ""


def test_client_finds_the_password_of_a_local_redis_that_is_started_later(
    tmp_path: Path, settings_environment: Callable[..., None]
) -> None:
    settings_environment(data_dir=str(tmp_path))
    port = free_port()

    async def workers_and_job() -> tuple[int, str]:
        client = AsyncClient(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(RedisUnreachable):
            await client.workers()
        with RedisServer.start(redis_dir(tmp_path), port=port):
            job = await client.generate("tiny", STORY, wait=True)
            found = len(await client.workers()), (await anext(aiter(job.stream(ping=0.1))))["type"]
            await client.close()
            return found

    assert asyncio.run(workers_and_job()) == (0, "ping")
