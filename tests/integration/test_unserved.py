"""Jobs that no worker serves end with an error after `unserved_timeout_s`, and jobs that wait for a worker don't."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chord
from celery.exceptions import ChordError
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cellama.api import AsyncClient, Client
from cellama.api.machine.redis_server import RedisServer, free_port
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.keys import job_key, reaper_key, served_key, strays_key, waiting_key, watched_key
from cellama.tasks.contract.names import model_of
from cellama.tasks.jobs import app_at
from cellama.tasks.state.ledger import Ending, Ledger
from cellama.tasks.state.unserved import UnservedJobs, UnservedWait, report_served

from ..conftest import MODELS, PATIENCE_S, WorkerProcess, empty_database, wait_until
from .ledgers import begin, journal, submit, take

LEASE_S = 60
TIMEOUT_S = 600
LONG_AGO_S = 2 * TIMEOUT_S
QUEUE = "cellama:queue:tinny"


class Watch:
    """A search for unserved jobs on a real Redis. Jobs and reports are as old as the test requires."""

    def __init__(self, redis: Redis, url: str) -> None:
        self.redis = redis
        self.url = url
        self.ledger = Ledger(redis)
        self.stored: list[tuple[str, Ending]] = []
        self.queues_read: set[str] = set()
        self.search = UnservedJobs(
            redis,
            self.ledger,
            lambda *end: self.stored.append(end),
            timeout_s=TIMEOUT_S,
            lease_s=LEASE_S,
            queues_read=lambda: self.queues_read,
        )
        self.search.run_once()
        redis.hincrbyfloat(watched_key(), "since", -LONG_AGO_S)

    def job(self, queue: str = QUEUE, age_s: float = LONG_AGO_S, **fields: Any) -> str:
        job_id = submit(self.ledger, queue)
        self.redis.zincrby(waiting_key(queue), -age_s, job_id)
        self.redis.hincrbyfloat(job_key(job_id), "submitted_at", -age_s)
        if fields:
            self.redis.hset(job_key(job_id), mapping=fields)
        return job_id

    def look(self) -> list[str]:
        """Look once, and return the ids of all jobs that have ended."""
        self.redis.delete(reaper_key("unserved"), reaper_key("strays"))
        self.search.run_once()
        return [job_id for job_id, _ in self.stored]


@pytest.fixture
def watch(redis_server: RedisServer) -> Iterator[Watch]:
    with empty_database(redis_server, 11) as url, Redis.from_url(url) as redis:
        yield Watch(redis, url)


def test_unserved_job_ends_once_with_an_error_that_names_the_model(watch: Watch) -> None:
    old, young = watch.job(), watch.job(age_s=TIMEOUT_S / 2)
    assert watch.look() == watch.look() == [old]
    ((_, ending),) = watch.stored
    assert ending.event["code"] == "unknown_model"
    assert ending.event["message"].startswith("model: 'tinny' is not served by any worker")
    assert [event["type"] for event in journal(watch.redis, old)] == ["error"]
    assert begin(watch.ledger, old).verdict == "done"  # a worker that starts to serve the model now
    assert (watch.ledger.state(old), watch.ledger.state(young)) == ("done", "queued")


def test_job_waits_while_a_worker_has_reported_its_queue_recently(watch: Watch) -> None:
    watch.job()
    report_served(watch.redis, [QUEUE])
    assert watch.look() == []
    watch.redis.zincrby(served_key(), -LONG_AGO_S, QUEUE)
    assert len(watch.look()) == 1


def test_job_waits_for_the_whole_timeout_again_when_checks_were_interrupted(watch: Watch) -> None:
    watch.job()
    watch.redis.hincrbyfloat(watched_key(), "last", -4 * LEASE_S)  # an outage of Redis, or of all workers
    assert watch.look() == watch.look() == []
    watch.redis.hincrbyfloat(watched_key(), "since", -TIMEOUT_S)
    assert len(watch.look()) == 1


def test_job_with_an_eta_waits_for_the_whole_timeout_after_its_eta(watch: Watch) -> None:
    watch.job(delay=LONG_AGO_S)
    due = watch.job(delay=LONG_AGO_S - TIMEOUT_S)
    assert watch.look() == [due]


def test_held_and_running_jobs_of_an_unserved_queue_continue(watch: Watch) -> None:
    held, running = watch.job(), watch.job()
    take(watch.ledger, held)
    begin(watch.ledger, running)
    assert watch.look() == []
    assert (watch.ledger.state(held), watch.ledger.state(running)) == ("queued", "running")


def test_job_in_another_queue_waits_while_a_celery_worker_reads_the_queue(watch: Watch) -> None:
    job_id = watch.job("mine")
    watch.queues_read = {"mine"}
    assert watch.look() == []
    watch.queues_read = set()
    watch.redis.zincrby(served_key(), -LONG_AGO_S, "mine")
    assert watch.look() == [job_id]
    assert watch.stored[0][1].event["message"].startswith("queue: 'mine' is not served by any worker")


@pytest.mark.parametrize("queue", [QUEUE, "celery", "cellama.typo"])
def test_plain_celery_job_in_an_unserved_queue_ends_and_other_messages_remain(watch: Watch, queue: str) -> None:
    with Celery("plain", broker=watch.url, set_as_current=False) as plain:
        others = [plain.send_task("shop.buy", queue=queue) for _ in range(2)]
        job = plain.send_task("cellama.generate", ["tiny", "Hi"], queue=queue)
        plain.send_task("shop.buy", queue=queue)
    assert watch.look() == []
    watch.redis.zincrby(strays_key(), -LONG_AGO_S, job.id)
    watch.queues_read = {queue} - {QUEUE}  # a worker of another app, which is slow
    assert watch.look() == [] or queue == QUEUE
    watch.queues_read = set()
    assert watch.look() == watch.look() == [job.id]
    assert model_of(queue) in watch.stored[0][1].event["message"]
    assert watch.redis.llen(queue) == len(others) + 1
    assert not watch.redis.exists(strays_key(), waiting_key(queue))


def test_job_whose_message_a_worker_takes_at_the_last_moment_is_not_ended(watch: Watch) -> None:
    with Celery("plain", broker=watch.url, set_as_current=False) as plain:
        job = plain.send_task("cellama.generate", ["tiny", "Hi"], queue="mine")
    assert watch.look() == []
    watch.redis.zincrby(strays_key(), -LONG_AGO_S, job.id)
    found = watch.search._strays_in
    watch.search._strays_in = lambda queue: (found(queue), watch.redis.delete(queue))[0]  # type: ignore[method-assign]
    assert watch.look() == []
    assert watch.ledger.state(job.id) is None


def wait_with(redis: Redis) -> UnservedWait:
    """The wait of a caller whose time passes after a moment."""
    options: dict[str, Any] = {"timeout_s": 0.1, "lease_s": 0.02, "queues_read": set}
    return UnservedWait(UnservedJobs(redis, Ledger(redis), lambda *_: None, **options))


def test_caller_ends_its_job_when_two_consecutive_checks_find_it_unserved(watch: Watch) -> None:
    job_id, other, wait = watch.job(), watch.job(), wait_with(watch.redis)
    wait_until(lambda: wait.is_due, "a check that is due")
    wait.check([job_id])
    assert watch.ledger.state(job_id) == "queued"  # after an outage, workers have not reported their queues yet
    wait_until(lambda: wait.check([job_id]) or watch.ledger.state(job_id) == "done", "the end of the job")
    assert watch.ledger.state(other) == "queued"


def test_caller_continues_to_wait_while_redis_is_unreachable() -> None:
    with Redis(port=free_port(), retry=Retry(NoBackoff(), 0)) as redis:
        wait = wait_with(redis)
        wait_until(lambda: wait.is_due, "a check that is due")
        wait.check(["job"])  # does not raise


# Real workers

REAL = {"CELLAMA_LEASE_S": "3", "CELLAMA_UNSERVED_TIMEOUT_S": "1"}  # 12 s, which is four leases
STRATEGY = """
import time
from pathlib import Path

while not Path({gate!r}).exists():
    time.sleep(0.05)

from cellama.engine.scheduling.strategies import Adaptive as Gated
"""


@pytest.fixture(scope="module")
def url(redis_server: RedisServer) -> Iterator[str]:
    with empty_database(redis_server, 13) as url:
        yield url


@pytest.fixture(scope="module")
def impatient(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path_factory.mktemp("impatient"), url, name="impatient", **REAL)
    yield process.wait_ready()
    assert process.stop() == 0, process.log()


@pytest.fixture
def loading(url: str, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker that loads the model `slow` until the file `gate` exists."""
    (tmp_path / "gated.py").write_text(STRATEGY.format(gate=str(tmp_path / "gate")))
    models = json.dumps([{**json.loads(MODELS)[0], "id": "slow", "batch_strategy": "gated:Gated"}])
    settings = {**REAL, "CELLAMA_MODELS": models, "PYTHONPATH": str(tmp_path)}
    process = WorkerProcess(tmp_path, url, name="loading", **settings)
    yield process
    assert process.stop() == 0, process.log()


def test_unserved_jobs_fail_for_every_caller_and_jobs_of_a_loading_model_wait(
    impatient: WorkerProcess, loading: WorkerProcess, url: str, tmp_path: Path
) -> None:
    app = app_at(url)
    generate = app.tasks["cellama.generate"]
    errback = app.signature("shop.note", queue="shop")
    with Client(url) as client:
        waiting = client.generate("slow", "Hi", wait=True, max_tokens=3)
        jobs = [
            generate.apply_async(("tinny", "Hi"), link_error=errback),
            generate.apply_async(("tiny", "Hi"), queue="typo"),
        ]
        body = chord([generate.s("tiny", "Hi", max_tokens=2), generate.s("tinny", "Hi")])(app.signature("shop.sum"))
        streamed = client.generate("tinny", "Hi", wait=True)
        *_, last = streamed.stream(timeout=PATIENCE_S)
        assert (last["type"], last["code"]) == ("error", "unknown_model")
        assert "did you mean 'tiny'?" in last["message"]
        for job in jobs:
            with pytest.raises(JobFailed) as failure:
                job.get(timeout=PATIENCE_S)
            assert failure.value.code == "unknown_model"
        with pytest.raises(ChordError, match="tinny"):
            app.AsyncResult(body.id).get(timeout=PATIENCE_S)
        wait_until(lambda: impatient.redis.llen("shop"), "the errback")
        assert waiting.position().state == "waiting"
        assert "model loaded" not in loading.log()
        (tmp_path / "gate").touch()
        assert waiting.result(PATIENCE_S)["text"]


def test_callers_end_awaited_jobs_when_no_worker_is_running(
    redis_server: RedisServer, settings_environment: Callable[..., None]
) -> None:
    with empty_database(redis_server, 10) as url, ThreadPoolExecutor() as pool:
        settings_environment(redis_url=url, lease_s="3", unserved_timeout_s="1")
        with Client(url) as client:
            jobs = [client.generate("tiny", "Hi", wait=True) for _ in range(4)]

            async def result() -> Any:
                async with AsyncClient(url) as other:
                    return await other.job(jobs[2].id).result(PATIENCE_S)

            waits = [
                pool.submit(app_at(url).AsyncResult(jobs[0].id).get, timeout=PATIENCE_S),
                pool.submit(jobs[1].result, PATIENCE_S),
                pool.submit(asyncio.run, result()),
            ]
            for wait in waits:
                with pytest.raises(JobFailed, match="start a worker with `cellama up`"):
                    wait.result(PATIENCE_S)
            assert client.position(jobs[3].id).state == "waiting"  # nobody waits for it


def test_jobs_sent_by_name_fail_with_a_clear_error_when_task_or_queue_is_wrong(
    impatient: WorkerProcess, url: str
) -> None:
    with Celery("plain", broker=url, backend=url, set_as_current=False) as plain:
        errback = plain.signature("shop.note", queue="notes")
        jobs = {
            "model: 'tinny' is not served by any worker": {"queue": "cellama:queue:tinny", "link_error": errback},
            "queue: 'celery' is not served by any worker": {},
            "queue: 'cellama.typo' is not served by any worker": {"queue": "cellama.typo"},
        }
        sent = {
            message: plain.send_task("cellama.generate", ["tiny", "Hi"], **options) for message, options in jobs.items()
        }
        unknown = plain.send_task("cellama.genrate", ["tiny", "Hi"], queue="cellama:queue:tiny", link_error=errback)
        with pytest.raises(Exception, match=r"did you mean 'cellama\.generate'") as failure:
            unknown.get(timeout=PATIENCE_S)
        assert type(failure.value).__name__ == "JobFailed"
        wait_until(lambda: impatient.redis.llen("notes") == 1, "the errback")
        for message, job in sent.items():
            with pytest.raises(Exception, match=message):
                job.get(timeout=PATIENCE_S)
        wait_until(lambda: impatient.redis.llen("notes") == 2, "the second errback")
    with Client(url) as client:
        for job in (unknown, *sent.values()):
            assert [event["type"] for event in client.stream(job.id)] == ["error"]
