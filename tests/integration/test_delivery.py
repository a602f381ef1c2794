"""Jobs survive outages and the loss of workers and messages, and their readers receive every end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import pytest
from celery.exceptions import TaskRevokedError
from redis import Redis

from cellama.api import AsyncClient, Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import app, generate
from cellama.tasks.contract.errors import InvalidJob, JobCancelled, JobFailed, UnknownJob
from cellama.tasks.contract.keys import cancel_key, job_key, journal_key
from cellama.tasks.contract.names import queue_keys
from cellama.tasks.state.ledger import Ledger

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY, LONG, RESUMED, STEP_S, STORY, StartWorker, read, wait_for_token
from .ledgers import STARTED, TOKEN, begin, journal, take, write

NOBODY = "nobody-serves-this"


def test_lost_message_is_queued_again(start_worker: StartWorker, model: str, redis_client: Redis) -> None:
    with Client() as client:
        job = client.generate(model, STORY, wait=True, max_tokens=4, **GREEDY)
        assert redis_client.rpop(queue_keys(model)[3])  # like a worker that dies before it records the job
        start_worker(lease_s=3)
        assert job.result(timeout=PATIENCE_S)["text"] == ", there was a"


def test_job_fails_once_when_its_journal_is_lost(start_worker: StartWorker, model: str, redis_client: Redis) -> None:
    job, ledger = generate.delay(model, STORY, max_tokens=4, **GREEDY), Ledger(redis_client)
    redis_client.rpop(queue_keys(model)[3])
    taken = take(ledger, job.id)
    attempt = begin(ledger, job.id, token=taken.token)
    write(ledger, attempt, STARTED, TOKEN)
    ledger.hand_back(attempt)
    ledger.requeue(taken)
    redis_client.delete(journal_key(job.id))
    start_worker(lease_s=3)
    with pytest.raises(JobFailed) as caught:
        job.get(timeout=PATIENCE_S)
    assert caught.value.code == "stream_trimmed"
    assert [(event["seq"], event["type"]) for event in journal(redis_client, job.id)] == [(2, "error")]
    assert ledger.state(job.id) == "done"


def test_urgent_job_finishes_while_bulk_jobs_fill_the_worker(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    worker = start_worker(slots=2, look_ahead=1)
    with worker.slowed(STEP_S):
        longer = {**LONG, "max_tokens": 150}  # takes over half a minute on this slow worker
        bulk = [generate.delay(model, STORY, stream=False, priority=9, **longer) for _ in range(20)]
        begun = [job_key(job.id) for job in bulk]  # the jobs that the worker holds compete for its slots
        wait_until(lambda: any(int(redis_client.hget(key, "next_seq") or 0) > 1 for key in begun), "a token")
        left = 20 - 3  # the worker holds one job per slot, and the look-ahead
        wait_until(lambda: redis_client.llen(queue_keys(model)[9]) == left, "the worker's share of the queue")
        assert len(generate.delay(model, STORY, max_tokens=8, **GREEDY).get(timeout=PATIENCE_S)["text"]) > 0
        assert redis_client.llen(queue_keys(model)[9]) == left
        assert not any(redis_client.hget(job_key(job.id), "state") == b"done" for job in bulk)
    texts = {job.get(timeout=PATIENCE_S)["text"] for job in bulk}
    assert len(texts) == 1


def test_protected_job_finishes_while_default_jobs_fill_the_worker(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    worker = start_worker(slots=2, look_ahead=1)
    with worker.slowed(STEP_S):
        longer = {**LONG, "max_tokens": 150}  # takes over half a minute on this slow worker
        default = [generate.delay(model, STORY, stream=False, **longer) for _ in range(8)]
        begun = [job_key(job.id) for job in default]
        wait_until(lambda: any(int(redis_client.hget(key, "next_seq") or 0) > 1 for key in begun), "a token")
        left = 8 - 3  # the worker holds one job per slot, and the look-ahead
        wait_until(lambda: redis_client.llen(queue_keys(model)[3]) == left, "the worker's share of the queue")
        protected = generate.delay(model, STORY, max_tokens=8, priority=0, **GREEDY)
        assert len(protected.get(timeout=PATIENCE_S)["text"]) > 0
        assert redis_client.llen(queue_keys(model)[3]) == left
        assert not any(redis_client.hget(job_key(job.id), "state") == b"done" for job in default)
    assert len({job.get(timeout=PATIENCE_S)["text"] for job in default}) == 1


def test_cancellation_takes_effect_when_a_worker_starts_later(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    first = start_worker(lease_s=3)
    with first.slowed():
        job = generate.delay(model, STORY, **LONG)
        wait_for_token(redis_client, job.id)
        first.process.kill()
        first.process.wait()
    with Client() as client:
        client.cancel(job.id)
        start_worker(lease_s=3)
        with pytest.raises(JobCancelled):
            client.result(job.id, timeout=PATIENCE_S)
    end = read(redis_client, job.id)[-1]
    assert (end["finish_reason"], end["usage"]["completion_tokens"] > 0) == ("cancelled", True)
    assert not redis_client.exists(cancel_key(job.id))


@pytest.mark.parametrize("how", ["cancel", "revoke"])
def test_cancelling_an_unserved_job_takes_effect_immediately(how: str, redis_client: Redis) -> None:
    with Client() as client:
        job = client.generate(NOBODY, STORY, wait=True)
        if how == "cancel":
            job.cancel()
        else:
            app.AsyncResult(job.id).revoke()
        with pytest.raises(JobCancelled):
            job.result(timeout=PATIENCE_S)
        assert [event["finish_reason"] for event in job.stream()] == ["cancelled"]
        assert client.position(job.id).state == "done"
    with pytest.raises(TaskRevokedError):
        app.AsyncResult(job.id).get(timeout=PATIENCE_S)


@pytest.mark.usefixtures("worker")
def test_timeout_applies_to_jobs_that_no_worker_has_taken() -> None:
    with Client() as client:
        late = client.generate(NOBODY, STORY, wait=True, timeout=0.5)
        texts = client.embed(NOBODY, "text", wait=True, timeout=0.5)
        assert late.result(timeout=PATIENCE_S)["finish_reason"] == "timeout"
        assert [event["finish_reason"] for event in late.stream()] == ["timeout"]
        with pytest.raises(JobFailed, match="within its timeout"):
            texts.result(timeout=PATIENCE_S)


@pytest.mark.usefixtures("worker")
def test_default_timeout_applies_to_interactive_jobs_without_a_timeout(
    settings_environment: Callable[..., None], redis_server: RedisServer
) -> None:
    settings_environment(redis_url=redis_server.url, default_timeout_s="1")
    with Client() as client:
        late = client.generate(NOBODY, STORY, wait=True)
        kept = [client.generate(NOBODY, STORY, wait=True, **own) for own in ({"priority": 9}, {"timeout": None})]
        assert late.result(timeout=PATIENCE_S)["finish_reason"] == "timeout"
        assert [client.position(job.id).state for job in kept] == ["waiting", "waiting"]
        for job in kept:
            job.cancel()


@pytest.mark.usefixtures("worker")
def test_same_idempotency_key_returns_the_same_job() -> None:
    key = uuid.uuid4().hex
    with Client() as client:
        first, same, other = (
            client.generate("tiny", STORY, max_tokens=4, idempotency_key=k, **GREEDY) for k in (key, key, key + "x")
        )
        assert first.id == same.id != other.id
        assert first.result(timeout=PATIENCE_S) == same.result(timeout=PATIENCE_S)
        again = client.generate("tiny", STORY, max_tokens=4, idempotency_key=key, **GREEDY)
        assert again.id == first.id
        assert again.result(timeout=PATIENCE_S) == first.result(timeout=PATIENCE_S)
    assert generate.apply_async(("tiny", STORY), {"max_tokens": 4, **GREEDY}, idempotency_key=key).id == first.id


def test_oversized_job_is_rejected_with_its_size_and_the_limit() -> None:
    with pytest.raises(InvalidJob, match=r"has 5000\d{3} bytes, and the limit is 4194304"):
        generate.delay("tiny", "x" * 5_000_000)


def test_stream_of_an_unknown_job_raises_unknown_job() -> None:
    with Client() as client, pytest.raises(UnknownJob, match="job nothing is unknown"):
        list(client.stream("nothing"))
    with Client() as client, pytest.raises(UnknownJob, match="job nothing is unknown"):
        client.position("nothing")


def test_stream_sends_pings_with_the_queue_position_while_the_job_waits() -> None:
    with Client() as client:
        jobs = [client.generate(NOBODY, STORY, wait=True) for _ in range(2)]
        stream = jobs[1].stream(ping=0.1)
        assert [next(stream) for _ in range(3)] == [{"type": "ping"}] * 3
        position = jobs[1].position()
        assert (position.state, position.eta_s) == ("waiting", None)
        assert position.ahead >= 1
        for job in jobs:
            job.cancel()
        assert [event for event in stream if event["type"] != "ping"][-1]["finish_reason"] == "cancelled"


def test_closing_a_stream_cancels_its_job_only_when_requested(worker: WorkerProcess, redis_client: Redis) -> None:
    async def leave(job_id: str) -> None:
        async with AsyncClient() as client:
            stream = client.stream(job_id, cancel_on_exit=True)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]

    with Client() as client, worker.slowed(STEP_S):
        jobs = [client.generate("tiny", STORY, **RESUMED) for _ in range(3)]
        for job, cancels in zip(jobs[:2], (True, False), strict=True):
            stream = job.stream(cancel_on_exit=cancels)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        asyncio.run(leave(jobs[2].id))
        for job in (jobs[0], jobs[2]):
            read(redis_client, job.id)
    ends = [read(redis_client, job.id)[-1]["finish_reason"] for job in jobs]
    assert ends == ["cancelled", "length", "cancelled"]


def test_log_contains_no_prompts_or_generated_text(worker: WorkerProcess) -> None:
    prompt = "Once upon a time, a secretive hedgehog"
    job = generate.delay("tiny", prompt, max_tokens=30, **GREEDY)
    result = job.get(timeout=PATIENCE_S)
    wait_until(lambda: f"job finished (job_id={job.id}" in worker.log(), "the end of the job in the log")
    assert "secretive" not in worker.log()
    assert result["text"][:20] not in worker.log()
