"""A constrained job continues only on a worker with the version of llguidance that it started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.tasks import chat, generate
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.keys import job_key, workers_key
from cellama.tasks.state.ledger import Entry, Ledger, new_run
from cellama.tasks.state.registry import live_workers, llguidance_version

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import LONG, STORY, StartWorker, check_whole, read, wait_for_token

OTHER = "99.0"
EMPTY: dict[str, Any] = {"json_schema": {}}
FREE: dict[str, Any] = {**LONG, "max_tokens": 400}
WORDS: dict[str, Any] = {**FREE, "regex": "([a-z]+[ .\\n])*"}


@pytest.fixture
def other_version(tmp_path: Path) -> str:
    """Return a directory of packages with metadata of another version of llguidance.

    Its code is the installed version.
    """
    info = tmp_path / "packages" / f"llguidance-{OTHER}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llguidance\nVersion: {OTHER}\n")
    return str(info.parent)


def killed_in_mid_stream(worker: WorkerProcess, model: str, redis: Redis, **params: Any) -> Any:
    """Return a job whose worker was killed while it streamed, so it has a part of its text and no end."""
    with worker.slowed(0.2):
        job = generate.delay(model, STORY, **params)
        wait_for_token(redis, job.id)
        assert redis.hget(job_key(job.id), "state") == b"running"
        worker.process.kill()
    assert worker.process.wait() < 0
    return job


def test_constrained_job_of_a_killed_worker_resumes_exactly_on_a_worker_with_the_same_llguidance(
    start_worker: StartWorker, model: str, redis_client: Redis, other_version: str
) -> None:
    first = start_worker(lease_s=3)
    undisturbed = generate.delay(model, STORY, **WORDS).get(timeout=PATIENCE_S)["text"]
    job = killed_in_mid_stream(first, model, redis_client, **WORDS)
    other = start_worker(lease_s=3, python_path=other_version)
    wait_until(
        lambda: f"job handed over to another worker (job_id={job.id})" in other.log(), "an attempt of the other version"
    )
    same = start_worker(lease_s=3)
    assert job.get(timeout=PATIENCE_S)["text"] == undisturbed
    told = read(redis_client, job.id)
    check_whole(told, undisturbed)
    assert told[0]["llguidance"] == llguidance_version()
    versions = {entry.pid: entry.llguidance for entry in live_workers(redis_client)}
    assert (versions[other.process.pid], versions[same.process.pid]) == (OTHER, llguidance_version())
    assert int(redis_client.hget(job_key(job.id), "attempt") or 0) >= 3
    assert 0 < same.engine_now()["generated_tokens"] < WORDS["max_tokens"]
    assert other.engine_now()["generated_tokens"] == 0


def test_constrained_job_fails_when_no_worker_has_its_llguidance_version(
    start_worker: StartWorker, model: str, redis_client: Redis, other_version: str
) -> None:
    first = start_worker(lease_s=3)
    job = killed_in_mid_stream(first, model, redis_client, **WORDS)
    other = start_worker(lease_s=3, python_path=other_version)
    wait_until(
        lambda: f"job handed over to another worker (job_id={job.id})" in other.log(), "an attempt of the other version"
    )
    forget(redis_client, first)
    with pytest.raises(JobFailed, match=f"started with llguidance {llguidance_version()}, which no worker") as caught:
        job.get(timeout=PATIENCE_S)
    assert (caught.value.code, caught.value.retryable) == ("grammar_changed", True)
    *output, end = read(redis_client, job.id)
    assert any(event["type"] == "token" for event in output)
    assert (end["type"], end["code"]) == ("error", "grammar_changed")


def test_unconstrained_job_continues_with_any_llguidance_version(
    start_worker: StartWorker, model: str, redis_client: Redis, other_version: str
) -> None:
    first = start_worker(lease_s=3)
    undisturbed = generate.delay(model, STORY, **FREE).get(timeout=PATIENCE_S)["text"]
    job = killed_in_mid_stream(first, model, redis_client, **FREE)
    start_worker(lease_s=3, python_path=other_version)
    assert job.get(timeout=PATIENCE_S)["text"] == undisturbed
    told = read(redis_client, job.id)
    check_whole(told, undisturbed)
    assert "llguidance" not in told[0]


@pytest.mark.parametrize("params", [{"tool_choice": "required"}, {"tool_choice": "auto"}])
def test_chat_with_tools_is_constrained(worker: WorkerProcess, redis_client: Redis, params: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    question = [{"role": "user", "content": "Hi"}]
    for given, recorded in (({"tools": [tool], **params}, [llguidance_version()]), ({}, [])):
        job = chat.delay("tiny", question, max_tokens=20, **given)
        job.get(timeout=PATIENCE_S)
        begun = read(redis_client, job.id)[0]
        assert [begun[name] for name in ("llguidance",) if name in begun] == recorded


def test_constrained_job_fails_when_its_earlier_attempt_had_no_llguidance_version(
    start_worker: StartWorker, worker: WorkerProcess, model: str, redis_client: Redis
) -> None:
    """An unconstrained job continues although another version sampled its first tokens."""
    (weights,) = {w.models[0]["fingerprint"] for w in live_workers(redis_client) if w.pid == worker.process.pid}
    ledger, jobs = Ledger(redis_client), [generate.delay(model, STORY, max_tokens=4, **how) for how in ({}, EMPTY)]
    for job in jobs:
        attempt = ledger.begin(job.id, new_run(), "w", alone=True)
        begun = {"seq": 0, **events.started(model, 4, "w", 7), "fingerprint": weights}
        ledger.write(
            [
                Entry(job_id=job.id, run=attempt.run, event=begun),
                Entry(job_id=job.id, run=attempt.run, event={"seq": 1, **events.token("x", [5])}),
            ]
        )
    start_worker()
    assert jobs[0].get(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
    with pytest.raises(JobFailed, match="started with a version of cellama without llguidance") as caught:
        jobs[1].get(timeout=PATIENCE_S)
    assert caught.value.code == "grammar_changed"


def forget(redis: Redis, worker: WorkerProcess) -> None:
    """Remove a worker's entry, as other workers do a minute after the worker has stopped."""
    entries: Any = redis.hgetall(workers_key())
    (name,) = [name for name, entry in entries.items() if json.loads(entry)["pid"] == worker.process.pid]
    redis.hdel(workers_key(), name)
