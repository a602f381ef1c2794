"""Test jobs and bulk runs during an upgrade, with producers and workers of both versions on the same Redis.

The previous version is taken from git, and runs with the installed libraries.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.keys import job_key
from cellama.tasks.contract.names import PRIORITY_BULK, queue_key, queue_name
from cellama.tasks.state.ledger import Ledger

from ..conftest import MODELS, PATIENCE_S, WorkerProcess, clean_environment, empty_database, wait_until
from ..integration.conftest import RESUMED, STEP_S, check_whole, read, wait_for_token

ROOT = Path(__file__).parents[2]
PREVIOUS = "f62bfa1c1c1de96ca53c3540144ae830470868d1"  # until there is a release: a commit from 25 November 2026
PACKAGES = ("api", "bench", "config", "engine", "tasks")
VERSIONS = ("previous", "this")
PROMPTS = ["Once upon a time", "There was a little fox", "The bees"]
PRODUCER = """
import json, sys
from celery import chain
import cellama.tasks
from cellama.api import Client
from cellama.tasks import generate

model, timeout_s = sys.argv[1], float(sys.argv[2])
greedy = {"temperature": 0, "max_tokens": 24}
with Client() as client:
    jobs = {
        "generate": client.generate(model, "Once upon a time", wait=True, seed=7, max_tokens=24),
        "chat": client.chat(model, [{"role": "user", "content": "What do bees make?"}], wait=True, **greedy),
        "embed": client.embed(model, ["a fox", "a bee"], wait=True),
    }
    steps = chain(generate.s(model, "A fox", **greedy), generate.s(model=model, **greedy))()
    print(json.dumps([cellama.tasks.__file__, *(job.id for job in jobs.values()), steps.parent.id]), flush=True)
    results = {name: job.result(timeout_s) for name, job in jobs.items()}
    streamed = [event for event in jobs["generate"].stream(timeout=timeout_s) if event["type"] == "token"]
    answers = {
        "generate": results["generate"]["text"],
        "stream": "".join(event["text"] for event in streamed),
        "chat": results["chat"]["message"],
        "embed": results["embed"]["embeddings"],
        "chain": [steps.parent.get(timeout=timeout_s)["text"], steps.get(timeout=timeout_s)["text"]],
    }
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for PYTHONPATH with the previous version of cellama."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", f"{PREVIOUS}^{{commit}}"], capture_output=True).returncode:
        pytest.skip(f"the repository lacks commit {PREVIOUS[:8]}, as a shallow clone does; run git fetch --unshallow")
    site = tmp_path_factory.mktemp("previous")
    archive = site / "previous.tar"
    argv = [*git, "archive", "--output", str(archive), "--prefix", "cellama/", PREVIOUS, *PACKAGES]
    subprocess.run(argv, check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(site, filter="data")
    return site


@pytest.fixture
def url(redis_server: RedisServer) -> Iterator[str]:
    with empty_database(redis_server, 14) as url:
        yield url


@pytest.fixture
def redis(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as client:
        yield client


class Installation:
    """Runs processes of both versions on the same Redis."""

    def __init__(self, folder: Path, url: str, previous: Path) -> None:
        self.folder = folder
        self.url = url
        self._paths = {
            "previous": {"PYTHONPATH": str(previous), "CELLAMA_AUTO_TUNE_S": ""},  # it does not know this setting
            "this": {},
        }
        self.workers: list[WorkerProcess] = []
        self._commands: list[subprocess.Popen[str]] = []

    def environment(self, version: str) -> dict[str, str]:
        return clean_environment(CELLAMA_REDIS_URL=self.url, **self._paths[version])

    def worker(self, version: str) -> WorkerProcess:
        folder = self.folder / f"worker{len(self.workers)}"
        folder.mkdir()
        settings = {"CELLAMA_LEASE_S": "3", "CELLAMA_MODELS": MODELS, **self._paths[version]}
        self.workers.append(WorkerProcess(folder, self.url, name=f"{version}{len(self.workers)}", **settings))
        return self.workers[-1]

    def start(self, version: str, *argv: str) -> subprocess.Popen[str]:
        command = [sys.executable, *argv]
        environment = self.environment(version)
        process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True)
        self._commands.append(process)
        return process

    def stop(self) -> None:
        for process in self._commands:
            process.kill()
            process.communicate()
        for worker in self.workers:
            worker.stop()


@pytest.fixture
def installation(tmp_path: Path, url: str, previous: Path) -> Iterator[Installation]:
    installation = Installation(tmp_path, url, previous)
    yield installation
    installation.stop()


def line_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("worker_version", VERSIONS)
def test_jobs_queued_by_either_version_finish_on_workers_with_either_version(
    installation: Installation, redis: Redis, previous: Path, worker_version: str
) -> None:
    producers = [installation.start(version, "-c", PRODUCER, "tiny", str(PATIENCE_S)) for version in VERSIONS]
    (old, *old_ids), (new, *new_ids) = map(line_of, producers)
    assert (Path(old).is_relative_to(previous), Path(new).is_relative_to(previous)) == (True, False)
    ledger = Ledger(redis)
    assert {ledger.state(job_id) for job_id in (*old_ids, *new_ids)} == {"queued"}
    installation.worker(worker_version)
    of_old, of_new = map(line_of, producers)
    assert [producer.wait(PATIENCE_S) for producer in producers] == [0, 0]
    assert of_old["stream"] == of_old["generate"]
    for vector, same in zip(of_old.pop("embed"), of_new.pop("embed"), strict=True):
        assert vector == pytest.approx(same, abs=1e-6)  # rounding depends on the texts that are embedded together
    assert of_old == {**of_new, "stream": of_new["generate"]}
    assert {ledger.state(job_id) for job_id in (*old_ids, *new_ids)} == {"done"}


@pytest.mark.parametrize(("killed", "survivor"), [VERSIONS, VERSIONS[::-1]])
def test_running_jobs_of_a_killed_worker_resume_on_a_worker_with_the_other_version(
    installation: Installation, redis: Redis, killed: str, survivor: str
) -> None:
    first = installation.worker(killed).wait_ready()
    with Client(installation.url) as client:
        undisturbed = [client.generate("tiny", prompt, **RESUMED).result(PATIENCE_S)["text"] for prompt in PROMPTS]
        with first.slowed(STEP_S):
            jobs = [client.generate("tiny", prompt, stream=True, **RESUMED) for prompt in PROMPTS]
            for job in jobs:
                wait_for_token(redis, job.id)
            second = installation.worker(survivor).wait_ready()
            assert [job.position().state for job in jobs] == ["running"] * len(jobs)
            first.process.kill()
        assert [job.result(PATIENCE_S)["text"] for job in jobs] == undisturbed
        for job, text in zip(jobs, undisturbed, strict=True):
            check_whole(read(redis, job.id), text)
            assert redis.hget(job_key(job.id), "attempt") == b"2"
    assert 0 < second.engine_now()["generated_tokens"] < len(jobs) * RESUMED["max_tokens"]


@pytest.mark.parametrize("killed", VERSIONS)
def test_workers_of_both_versions_share_a_queue_and_lose_no_job(
    installation: Installation, redis: Redis, killed: str
) -> None:
    """A worker of one version uses the ticket of a job that a worker of the other version has taken."""
    workers = {version: installation.worker(version).wait_ready() for version in VERSIONS}
    producer = installation.start("previous", "-c", PRODUCER, "tiny", str(PATIENCE_S))
    list_key = queue_key(queue_name("tiny"), PRIORITY_BULK)
    with Client(installation.url) as client, workers["this"].slowed(), workers["previous"].slowed():
        jobs = [
            client.generate("tiny", f"A fox {i}", priority=PRIORITY_BULK, max_tokens=12, temperature=0)
            for i in range(60)
        ]
        job_keys = [job_key(job.id) for job in jobs]
        for version in VERSIONS:
            started = f"{version}{list(VERSIONS).index(version)}"
            wait_until(
                lambda name=started: any(name.encode() in (redis.hget(key, "worker") or b"") for key in job_keys),
                f"a job on {started}",
            )
        client.cancel(jobs[-1].id)
        assert any(redis.hget(key, "state") == b"running" for key in job_keys)
        workers[killed].process.kill()
    assert {job.result(PATIENCE_S)["finish_reason"] for job in jobs[:-1]} <= {"length", "stop"}
    line_of(producer)
    line_of(producer)
    assert producer.wait(PATIENCE_S) == 0
    wait_until(lambda: not redis.exists(list_key), "the list to be empty")


def test_bulk_run_of_the_previous_version_is_resumed_by_the_current_version(
    installation: Installation, tmp_path: Path
) -> None:
    num_lines = 60
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
    lines = [{"id": number, "prompt": f"Once upon a time {number}", **greedy} for number in range(num_lines)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def texts(name: str) -> dict[int, str]:
        results = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len(results) == len({result["id"] for result in results}) == num_lines
        return {result["id"]: result["text"] for result in results}

    def num_results() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    output, batch = tmp_path / "out.jsonl", ("-c", "from cellama.api.cli import main; main()", "batch")
    worker = installation.worker("this").wait_ready()
    run = (*batch, "run", "in.jsonl", "-m", "tiny", "--json", "-o")
    assert installation.start("previous", *run, "whole.jsonl").wait(PATIENCE_S) == 0
    with worker.slowed():
        command = installation.start("previous", *run, "out.jsonl")
        wait_until(lambda: num_results() >= 10, "results")
        command.kill()
        command.wait()
        assert num_results() < num_lines
    assert installation.start("this", *batch, "resume", "out.jsonl", "--json").wait(PATIENCE_S) == 0
    assert texts("out.jsonl") == texts("whole.jsonl")
