"""Jobs outlive the workers that run them. Most of these workers serve their own model."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from redis import Redis

from cellama.api import Client
from cellama.bench.harness import service
from cellama.bench.harness.service import COUNTER_DIR, POISON_TOKENS
from cellama.bench.models.synthetic import Shape, write_model
from cellama.tasks import generate
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import JobFailed, UnknownJob
from cellama.tasks.contract.keys import dead_key, job_key, leases_key
from cellama.tasks.state.ledger import Entry, Ledger, new_run
from cellama.tasks.state.registry import live_workers

from ..conftest import PATIENCE_S, wait_until
from .conftest import MEDIUM, RESUMED, STEP_S, STORY, StartWorker, check_whole, read, wait_for_token


@pytest.mark.parametrize("stream", [True, False])
def test_job_of_a_killed_worker_resumes_where_it_stopped(
    start_worker: StartWorker, model: str, redis_client: Redis, stream: bool
) -> None:
    first = start_worker(lease_s=3)
    undisturbed = generate.delay(model, STORY, **RESUMED).get(timeout=PATIENCE_S)["text"]
    with first.slowed(STEP_S):
        job = generate.delay(model, STORY, stream=stream, **RESUMED)
        wait_for_token(redis_client, job.id)
        first.process.kill()
    second = start_worker(lease_s=3)
    assert job.get(timeout=PATIENCE_S)["text"] == undisturbed
    check_whole(read(redis_client, job.id), undisturbed)
    assert redis_client.hget(job_key(job.id), "attempt") == b"2"
    assert second.engine()["generated_tokens"] < RESUMED["max_tokens"]


def test_worker_does_not_end_its_job_when_a_restored_redis_denies_ownership(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    """During a failover, the old master accepts writes for a while, so two servers can disagree about the owner."""
    worker = start_worker(lease_s=3)
    undisturbed = generate.delay(model, STORY, **RESUMED).get(timeout=PATIENCE_S)["text"]
    with worker.slowed(STEP_S):
        job = generate.delay(model, STORY, **RESUMED)
        wait_for_token(redis_client, job.id)
        redis_client.hset(job_key(job.id), "holder", "another one")  # the job's run is unchanged
        wait_until(
            lambda: f"job finished (job_id={job.id}, model={model}, finish_reason=cancelled" in worker.log(),
            "the abandoned run",
        )
    assert job.get(timeout=PATIENCE_S)["text"] == undisturbed
    check_whole(read(redis_client, job.id), undisturbed)


@pytest.mark.parametrize(("drain_s", "num_signals"), [(0, 1), (60, 2)])
def test_worker_hands_its_jobs_back_when_it_stops(
    start_worker: StartWorker, model: str, redis_client: Redis, drain_s: int, num_signals: int
) -> None:
    first = start_worker(drain_s=drain_s)
    undisturbed = generate.delay(model, STORY, **MEDIUM).get(timeout=PATIENCE_S)["text"]
    with first.slowed(0.5):  # each job takes most of a minute
        jobs = [generate.delay(model, STORY, stream=bool(i % 2), **MEDIUM) for i in range(6)]
        wait_until(lambda: first.engine()["slots_decoding"] == 4, "busy slots")  # any four of the jobs
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
    # Each returned job already had a token, which is not computed again.
    tokens = len(jobs) * MEDIUM["max_tokens"]
    wait_until(lambda: second.engine()["phase"] == "idle", "an idle engine")
    assert second.engine()["generated_tokens"] < tokens
    assert "Traceback" not in first.log()


def test_worker_finishes_short_jobs_when_it_stops(start_worker: StartWorker, model: str, redis_client: Redis) -> None:
    worker = start_worker()
    with worker.slowed():
        jobs = [generate.delay(model, STORY, **MEDIUM) for _ in range(4)]
        for job in jobs:
            wait_for_token(redis_client, job.id)
        worker.process.terminate()
        wait_until(lambda: "Warm shutdown" in worker.log(), "the signal in the log")
    assert worker.process.wait(PATIENCE_S) == 0
    assert [job.state for job in jobs] == ["SUCCESS"] * len(jobs)
    assert all(job.get()["usage"]["completion_tokens"] == MEDIUM["max_tokens"] for job in jobs)
    assert redis_client.zmscore(leases_key(), [job.id for job in jobs]) == [None] * len(jobs)


def test_dead_jobs_can_be_listed_and_requeued(start_worker: StartWorker, model: str, redis_client: Redis) -> None:
    ledger = Ledger(redis_client)
    job_id = generate.delay(model, STORY, max_tokens=4).id
    for _ in range(4):
        attempt = ledger.begin(job_id, new_run(), "w", alone=True)
    error = {"seq": 0, "type": "error", "code": "dead", "message": "…", "retryable": False}
    ledger.write([Entry(job_id=job_id, run=attempt.run, event=error)])
    with Client() as client:
        assert job_id in [entry["id"] for entry in client.dead()]
        again = client.requeue_dead(job_id)
        assert again.id != job_id
        start_worker()
        assert again.result(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
        with pytest.raises(UnknownJob, match="is not a dead job"):
            client.requeue_dead(job_id)
    assert redis_client.zscore(dead_key(), job_id) is None


def test_jobs_running_alongside_a_crashing_job_are_not_suspected_later(
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
        """Run a worker until it exits or the job ends.

        Whenever the job starts, submit a job that crashes the worker.
        """
        tried = attempts()
        # On any machine, the job has no token for some seconds.
        worker = start_worker(strategy=f"{service.__name__}:FragileStrategy", step_s=1.5, ready=False)
        wait_until(lambda: attempts() > tried or job.ready() or worker.process.poll(), "a next attempt")
        if attempts() > tried:
            poison()
        wait_until(lambda: job.ready() or worker.process.poll(), "an end")

    while not job.ready():
        live()
    assert job.get(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 8
    assert attempts() == 2  # one alongside the first crashing job, one alone
    with Client() as client:
        for each in poisons:
            client.cancel(each.id)


def test_job_does_not_resume_with_the_tokens_of_another_model(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    ledger, job = Ledger(redis_client), generate.delay(model, STORY, max_tokens=4)
    attempt = ledger.begin(job.id, new_run(), "w", alone=True)
    begun = {"seq": 0, **events.started(model, 4, "w", 7), "fingerprint": "of a model that was there before"}
    token = {"seq": 1, **events.token("x", [5])}
    ledger.write([Entry(job_id=job.id, run=attempt.run, event=event) for event in (begun, token)])
    start_worker()
    with pytest.raises(JobFailed, match=f"started with a different model or adapter named '{model}'") as caught:
        job.get(timeout=PATIENCE_S)
    assert (caught.value.code, caught.value.retryable) == ("model_changed", True)


def test_job_of_a_stopped_worker_waits_for_a_worker_with_the_same_weights(
    start_worker: StartWorker, model: str, redis_client: Redis, tmp_path: Path
) -> None:
    """Meanwhile, a worker with other weights under the same name does not end the job, as it would after a kill."""
    write_model(
        tmp_path / "other.gguf", Shape(n_layer=1, n_embd=64, n_head=2, n_head_kv=2, n_ff=64, n_vocab=320), seed=1
    )
    first = start_worker(drain_s=0)
    undisturbed = generate.delay(model, STORY, **RESUMED).get(timeout=PATIENCE_S)["text"]
    with first.slowed(STEP_S):
        job = generate.delay(model, STORY, **RESUMED)
        wait_for_token(redis_client, job.id)
        other = start_worker(source=str(tmp_path / "other.gguf"))
        assert redis_client.hget(job_key(job.id), "state") == b"running"
        first.process.terminate()
        assert first.process.wait(PATIENCE_S) == 0, first.log()
    assert first.process.pid not in [worker.pid for worker in live_workers(redis_client)]
    wait_until(
        lambda: f"job handed over to another worker (job_id={job.id})" in other.log(), "an attempt of the other worker"
    )
    start_worker()
    assert job.get(timeout=PATIENCE_S)["text"] == undisturbed
    check_whole(read(redis_client, job.id), undisturbed)
