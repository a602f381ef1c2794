"""Jobs outlive workers, messages and outages; whoever waits is told. Most workers here serve a model of their own."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from redis import Redis

from cellama.api import AsyncClient, Client
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness import pace, service
from cellama.bench.harness.service import COUNTER_DIR, POISON_TOKENS
from cellama.tasks import app, generate
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob, JobCancelled, JobFailed, UnknownJob
from cellama.tasks.contract.keys import DEAD_KEY, LEASES_KEY, cancel_key, job_key
from cellama.tasks.contract.names import queue_keys
from cellama.tasks.state.ledger import Ledger, new_run
from cellama.tasks.state.reader import stream_events
from cellama.tasks.state.records import Entry

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY, LONG

StartWorker = Callable[..., WorkerProcess]
NOBODY = "nobody-serves-this"
STORY = "Once upon a time"
MEDIUM = {**LONG, "max_tokens": 100}


@pytest.fixture
def model() -> str:
    """The name of a model that only the workers of this test serve."""
    return f"m{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start_worker(redis_server: RedisServer, tmp_path: Path, model: str) -> Iterator[StartWorker]:
    started: list[WorkerProcess] = []

    def start(slots: int = 4, strategy: str = pace.STRATEGY, step_s: float = 0.0, **settings: Any) -> WorkerProcess:
        """`step_s`: each step takes so long from the first one on."""
        folder = tmp_path / str(len(started))
        folder.mkdir()
        if step_s:
            (folder / "pace").write_text(str(step_s))
        models = [{"id": model, "source": "bundled://tiny", "n_parallel": slots, "threads": 1, "default": True}]
        models[0]["batch_strategy"] = strategy
        own = {f"CELLAMA_{name.upper()}": str(value) for name, value in settings.items()}
        worker = WorkerProcess(
            folder, redis_server.url, name=f"w{len(started)}{model}", **own, CELLAMA_MODELS=json.dumps(models)
        )
        started.append(worker)
        return worker.wait_ready()

    yield start
    for worker in started:
        worker.stop()


def read(redis: Redis, job_id: str, after: int = -1) -> list[dict[str, Any]]:
    return list(stream_events(redis, job_id, after, timeout_s=PATIENCE_S))


def wait_for_token(redis: Redis, job_id: str) -> None:
    stream = stream_events(redis, job_id, timeout_s=PATIENCE_S)
    wait_until(lambda: next(stream)["type"] == "token", "the first token")


def check_whole(events: list[dict[str, Any]], text: str) -> None:
    """One gapless stream with one terminal event, and that text."""
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events if event["type"] in ("started", "done", "error")] == ["started", "done"]
    assert "".join(event.get("text", "") for event in events) == text


@pytest.mark.parametrize("stream", [True, False])
def test_job_of_a_killed_worker_goes_on_where_it_stopped(
    start_worker: StartWorker, model: str, redis_client: Redis, stream: bool
) -> None:
    first = start_worker(lease_s=3)
    undisturbed = generate.delay(model, STORY, **LONG).get(timeout=PATIENCE_S)["text"]
    with first.slowed():
        job = generate.delay(model, STORY, stream=stream, **LONG)
        wait_for_token(redis_client, job.id)
        first.process.kill()
    second = start_worker(lease_s=3)
    assert job.get(timeout=PATIENCE_S)["text"] == undisturbed
    check_whole(read(redis_client, job.id), undisturbed)
    assert redis_client.hget(job_key(job.id), "attempt") == b"2"
    assert second.engine()["generated_tokens"] < LONG["max_tokens"]


def test_worker_that_is_told_by_a_redis_of_yesterday_that_its_job_is_not_its_own_does_not_end_it(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    """In a failover the old master takes writes for a while, so one may say "lost" and the other take the end."""
    worker = start_worker(lease_s=3)
    undisturbed = generate.delay(model, STORY, **LONG).get(timeout=PATIENCE_S)["text"]
    with worker.slowed():
        job = generate.delay(model, STORY, **LONG)
        wait_for_token(redis_client, job.id)
        redis_client.hset(job_key(job.id), "holder", "another one")  # its run is the job's as before
        wait_until(lambda: f"{job.id} on {model}: cancelled" in worker.log(), "the run given up")
    assert job.get(timeout=PATIENCE_S)["text"] == undisturbed
    check_whole(read(redis_client, job.id), undisturbed)


@pytest.mark.parametrize(("drain_s", "num_signals"), [(0, 1), (60, 2)])
def test_ending_worker_hands_its_jobs_back(
    start_worker: StartWorker, model: str, redis_client: Redis, drain_s: int, num_signals: int
) -> None:
    first = start_worker(drain_s=drain_s)
    undisturbed = generate.delay(model, STORY, **MEDIUM).get(timeout=PATIENCE_S)["text"]
    with first.slowed():
        jobs = [generate.delay(model, STORY, stream=bool(i % 2), **MEDIUM) for i in range(6)]
        wait_for_token(redis_client, jobs[1].id)
        for number in range(num_signals):
            first.process.send_signal(signal.SIGTERM)
            wait_until(lambda n=number: first.log().count("Warm shutdown") > n, "the signal in the log")
        assert first.process.wait(PATIENCE_S) == 0, first.log()
    handed_back = [job for job in jobs if redis_client.hget(job_key(job.id), "state") == b"handed_back"]
    assert handed_back
    second = start_worker()
    for job in jobs:
        assert job.get(timeout=PATIENCE_S)["text"] == undisturbed
        check_whole(read(redis_client, job.id), undisturbed)
    # What was handed back had a token each, and is not computed again.
    tokens = len(jobs) * MEDIUM["max_tokens"]
    wait_until(lambda: second.engine()["phase"] == "idle", "an idle engine")
    assert second.engine()["generated_tokens"] < tokens
    assert "Traceback" not in first.log()


def test_ending_worker_finishes_what_it_can(start_worker: StartWorker, model: str, redis_client: Redis) -> None:
    worker = start_worker()
    with worker.slowed():
        jobs = [generate.delay(model, STORY, **MEDIUM) for _ in range(4)]
        for job in jobs:
            wait_for_token(redis_client, job.id)
        worker.process.terminate()
        wait_until(lambda: "Warm shutdown" in worker.log(), "the signal in the log")
    assert worker.process.wait(PATIENCE_S) == 0
    assert all(job.get(timeout=1)["usage"]["completion_tokens"] == MEDIUM["max_tokens"] for job in jobs)
    assert redis_client.zmscore(LEASES_KEY, [job.id for job in jobs]) == [None] * len(jobs)


def test_message_that_the_broker_lost_is_queued_again(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    with Client() as client:
        job = client.generate(model, STORY, wait=True, max_tokens=4, **GREEDY)
        assert redis_client.rpop(queue_keys(model)[3])  # as a worker does that dies before it tells of it
        start_worker(lease_s=3)
        assert job.result(timeout=PATIENCE_S)["text"] == ", there was a"


def test_urgent_job_is_answered_while_bulk_jobs_fill_the_worker(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    worker = start_worker(slots=2, look_ahead=1)
    with worker.slowed():
        longer = {**LONG, "max_tokens": 600}  # half a minute, as slow as this
        bulk = [generate.delay(model, STORY, stream=False, priority=9, **longer) for _ in range(20)]
        begun = [job_key(job.id) for job in bulk]  # those that the worker holds race for its slots
        wait_until(lambda: any(int(redis_client.hget(key, "next_seq") or 0) > 1 for key in begun), "a token")
        assert int(str(redis_client.llen(queue_keys(model)[9]))) == 20 - 3  # it holds one per slot, and the look-ahead
        assert len(generate.delay(model, STORY, max_tokens=8, **GREEDY).get(timeout=PATIENCE_S)["text"]) > 0
        assert not any(redis_client.hget(job_key(job.id), "state") == b"done" for job in bulk)
    texts = {job.get(timeout=PATIENCE_S)["text"] for job in bulk}
    assert len(texts) == 1


def test_cancel_holds_although_no_worker_ran(start_worker: StartWorker, model: str, redis_client: Redis) -> None:
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
def test_cancel_of_a_job_that_nobody_serves_ends_it_at_once(how: str, redis_client: Redis) -> None:
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
        app.AsyncResult(job.id).get(timeout=1)


@pytest.mark.usefixtures("worker")
def test_timeout_ends_jobs_that_no_worker_has_taken() -> None:
    with Client() as client:
        late = client.generate(NOBODY, STORY, wait=True, timeout=0.5)
        texts = client.embed(NOBODY, "text", wait=True, timeout=0.5)
        assert late.result(timeout=PATIENCE_S)["finish_reason"] == "timeout"
        assert [event["finish_reason"] for event in late.stream()] == ["timeout"]
        with pytest.raises(JobFailed, match="within its timeout"):
            texts.result(timeout=PATIENCE_S)


@pytest.mark.usefixtures("worker")
def test_timeout_of_the_settings_is_for_interactive_jobs_that_name_none(
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
def test_same_key_gives_the_same_job() -> None:
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


def test_job_that_is_too_large_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidJob, match=r"is 5000\d{3} bytes long, and the limit is 4194304"):
        generate.delay("tiny", "x" * 5_000_000)


def test_stream_of_an_unknown_job_says_so() -> None:
    with Client() as client, pytest.raises(UnknownJob, match="there is no job nothing"):
        list(client.stream("nothing"))
    with Client() as client, pytest.raises(UnknownJob, match="there is no job nothing"):
        client.position("nothing")


def test_stream_pings_while_the_job_waits_and_tells_its_position() -> None:
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


def test_reader_that_leaves_cancels_only_if_it_says_so(worker: WorkerProcess, redis_client: Redis) -> None:
    async def leave(job_id: str) -> None:
        async with AsyncClient() as client:
            stream = client.stream(job_id, cancel_on_exit=True)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]

    with Client() as client, worker.slowed():
        jobs = [client.generate("tiny", STORY, **LONG) for _ in range(3)]
        for job, cancels in zip(jobs[:2], (True, False), strict=True):
            stream = job.stream(cancel_on_exit=cancels)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        asyncio.run(leave(jobs[2].id))
        for job in (jobs[0], jobs[2]):
            read(redis_client, job.id)
    ends = [read(redis_client, job.id)[-1]["finish_reason"] for job in jobs]
    assert ends == ["cancelled", "length", "cancelled"]


def test_dead_jobs_are_listed_and_queued_again(start_worker: StartWorker, model: str, redis_client: Redis) -> None:
    ledger = Ledger(redis_client)
    job_id = generate.delay(model, STORY, max_tokens=4).id
    for _ in range(4):
        attempt = ledger.begin(job_id, new_run(), "w", alone=True)
    error = {"seq": 0, "type": "error", "code": "dead", "message": "…", "retryable": False}
    ledger.write([Entry(job_id, attempt.run, error)])
    with Client() as client:
        assert job_id in [entry["id"] for entry in client.dead()]
        again = client.requeue_dead(job_id)
        assert again.id != job_id
        start_worker()
        assert again.result(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
        with pytest.raises(UnknownJob, match="no dead job"):
            client.requeue_dead(job_id)
    assert redis_client.zscore(DEAD_KEY, job_id) is None


def test_who_runs_beside_a_job_that_ends_workers_is_not_blamed_for_the_next_one(
    start_worker: StartWorker, model: str, redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COUNTER_DIR, str(tmp_path))
    poisons = []

    def poison() -> None:
        poisons.append(generate.delay(model, [300] * POISON_TOKENS, max_tokens=4, cache_prompt=False))

    def attempts() -> int:
        return int(redis_client.hget(job_key(job.id), "attempt") or 0)  # type: ignore[arg-type]

    job = generate.delay(model, STORY, max_tokens=8, ignore_eos=True, stream=False, priority=0)

    def live() -> None:
        """A worker's life, until it ends or the job does. Whenever the job begins, there is a poison more."""
        tried = attempts()
        # The job shows no token for some seconds, on any machine.
        worker = start_worker(strategy=f"{service.__name__}:CountingStrategy", step_s=0.5, lease_s=3)
        wait_until(lambda: attempts() > tried or job.ready() or worker.process.poll(), "a next attempt")
        if attempts() > tried:
            poison()
        wait_until(lambda: job.ready() or worker.process.poll(), "an end")

    while not job.ready():
        live()
    assert job.get(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 8
    assert attempts() == 2  # one beside the first poison, one alone
    with Client() as client:
        for each in poisons:
            client.cancel(each.id)


def test_job_does_not_go_on_with_the_tokens_of_another_model(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    ledger, job = Ledger(redis_client), generate.delay(model, STORY, max_tokens=4)
    attempt = ledger.begin(job.id, new_run(), "w", alone=True)
    begun = {"seq": 0, **events.started(model, 4, "w", 7), "fingerprint": "of a model that was there before"}
    token = {"seq": 1, **events.token("x", [5])}
    ledger.write([Entry(job.id, attempt.run, event) for event in (begun, token)])
    start_worker()
    with pytest.raises(JobFailed, match=f"began with another model or adapter under the name '{model}'") as caught:
        job.get(timeout=PATIENCE_S)
    assert (caught.value.code, caught.value.retryable) == ("model_changed", True)


def test_prompts_and_texts_stay_out_of_the_log(worker: WorkerProcess) -> None:
    prompt = "Once upon a time, a secretive hedgehog"
    job = generate.delay("tiny", prompt, max_tokens=30, **GREEDY)
    result = job.get(timeout=PATIENCE_S)
    wait_until(lambda: f"{job.id} on tiny" in worker.log(), "the end of the job in the log")
    assert "secretive" not in worker.log()
    assert result["text"][:20] not in worker.log()
