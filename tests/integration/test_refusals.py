"""Processes wait while Redis refuses commands, and then resume their work."""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Signature, Task, chain, chord
from celery.backends.redis import CHORD_PART_RETURN_LUA
from redis import Redis

from cellama.api import AsyncClient, Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.errors import RedisFull, RedisUnreachable
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import job_key
from cellama.tasks.contract.kinds.generate import TASK_GENERATE
from cellama.tasks.jobs import app_at
from cellama.tasks.state.scripts import sha

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from ..gateways import GatewayProcess
from ..refusing_redis import Refuses, RefusingRedis, brpop, everything, needs_memory, writes
from .conftest import MEDIUM, STORY, check_whole, read, wait_for_token

WAITS = re.compile(r"WARNING cellama.tasks.connection.redis_waits: Redis (refuses commands|does not answer)")
RESUMES = "Redis accepts commands again"
# A reply for each exception of redis-py and each set of refused commands. test_refusing_servers.py uses real servers.
# tests/unit/tasks/connection/test_refusals.py has the wordings of all versions.
REPLIES = {
    "busy": ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", everything),
    "loading": ("LOADING Redis is loading the dataset in memory", everything),
    "masterdown": ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", everything),
    "readonly": ("READONLY You can't write against a read only replica. script: f_1, on @user:5.", writes),
    "unblocked": ("UNBLOCKED force unblock from blocking operation, instance state changed", brpop),
    "oom": ("OOM command not allowed when used memory > 'maxmemory'. script: f_1, on @user_script:30.", needs_memory),
}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RefusingRedis]:
    with RedisServer.start(tmp_path_factory.mktemp("redis")) as server:
        proxy = RefusingRedis(server)
        yield proxy
        proxy.close()


@pytest.fixture(scope="module")
def worker(proxy: RefusingRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Return a worker process that runs through all outages of this module, and check how it exits."""
    process = WorkerProcess(tmp_path_factory.mktemp("worker"), proxy.url)
    yield process.wait_ready()
    assert process.stop() == 0, process.log()
    assert "Unrecoverable" not in process.log()


@pytest.fixture(scope="module")
def client(proxy: RefusingRedis) -> Iterator[Client]:
    with Client(proxy.url) as client:
        yield client


@pytest.fixture(scope="module")
def direct(proxy: RefusingRedis) -> Iterator[Client]:
    """Return a client whose commands are never refused."""
    with Client(proxy.direct_url) as client:
        yield client


@pytest.fixture(scope="module")
def gateway(
    proxy: RefusingRedis, worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"), proxy.url)
    yield process.wait_ready()
    assert process.stop() == 0, process.log()


@pytest.fixture(scope="module")
def undisturbed(client: Client, worker: WorkerProcess) -> str:
    text: str = client.generate("tiny", STORY, **MEDIUM).result(PATIENCE_S)["text"]
    return text


def outages(worker: WorkerProcess) -> int:
    return len(WAITS.findall(worker.log()))


def wait_until_it_waits(worker: WorkerProcess, refused: Counter[str], waited: int) -> None:
    wait_until(lambda: refused["BRPOP"] or refused["EVALSHA"] or refused["HSET"], "refused commands")
    if set(refused) != {"BRPOP"}:  # otherwise it only repeats the BRPOP
        wait_until(lambda: outages(worker) > waited, "the log entry of the waiting worker")
        wait_until(lambda: sum(refused.values()) > 12, "repeated commands")


def check_log(worker: WorkerProcess, waited: int) -> None:
    """Check that the log has one line for each outage and one for its end, and that the reaper requeued no job."""
    wait_until(lambda: worker.log().count(RESUMES) == outages(worker), "the end of the outage")
    assert outages(worker) <= waited + 1
    assert worker.process.poll() is None
    assert "job requeued" not in worker.log()


@pytest.mark.parametrize("case", ["busy", "readonly", "unblocked", "oom"])
def test_idle_worker_waits_during_refusals_and_then_runs_jobs(
    case: str, proxy: RefusingRedis, worker: WorkerProcess, client: Client, undisturbed: str
) -> None:
    waited = outages(worker)
    reply, refuses = REPLIES[case]
    with proxy.refusing(reply, refuses) as refused:
        wait_until_it_waits(worker, refused, waited)
    assert client.generate("tiny", STORY, wait=True, **MEDIUM).result(PATIENCE_S)["text"] == undisturbed
    check_log(worker, waited)


@pytest.mark.parametrize("case", REPLIES)
def test_busy_worker_waits_during_refusals_and_its_jobs_finish_once(
    case: str, proxy: RefusingRedis, worker: WorkerProcess, client: Client, direct: Client, undisturbed: str
) -> None:
    """One job runs with two kinds of readers, and another job is queued by a producer that Redis does not refuse."""
    waited = outages(worker)
    reply, refuses = REPLIES[case]
    with Redis.from_url(proxy.direct_url) as redis, ThreadPoolExecutor() as readers:
        with worker.slowed():
            running = client.generate("tiny", STORY, stream=True, wait=True, **MEDIUM)
            reading = [readers.submit(lambda: list(client.stream(running.id)))]
            reading.append(readers.submit(asyncio.run, read_async(proxy.url, running.id)))
            wait_for_token(redis, running.id)
            with proxy.refusing(reply, refuses) as refused:
                waiting = direct.generate("tiny", STORY, wait=True, **MEDIUM)
                wait_until_it_waits(worker, refused, waited)
                assert redis.hget(job_key(running.id), "state") == b"running"
        assert [job.result(PATIENCE_S)["text"] for job in (running, waiting)] == [undisturbed] * 2
        events = read(redis, running.id)
        check_whole(events, undisturbed)
        assert [reader.result(PATIENCE_S) for reader in reading] == [events] * 2
        assert {redis.hget(job_key(job.id), "attempt") for job in (running, waiting)} == {b"1"}
    check_log(worker, waited)


async def read_async(url: str, job_id: str) -> list[Event]:
    async with AsyncClient(url) as client:
        return [event async for event in client.job(job_id).stream()]


@pytest.mark.parametrize("case", ["busy", "readonly", "oom"])
def test_producer_gets_a_retryable_error(
    case: str, proxy: RefusingRedis, worker: WorkerProcess, client: Client
) -> None:
    waited = outages(worker)
    reply, refuses = REPLIES[case]
    with proxy.refusing(reply, refuses), pytest.raises(RedisFull if "oom" in case else RedisUnreachable) as raised:
        client.generate("tiny", STORY, wait=True)
    assert raised.value.retryable
    assert raised.value.http_status == (507 if "oom" in case else 503)
    check_log(worker, waited)


def test_repeated_call_after_a_lost_reply_runs_once(
    proxy: RefusingRedis, worker: WorkerProcess, client: Client, undisturbed: str
) -> None:
    generate = app_at(proxy.url).tasks[TASK_GENERATE]
    with worker.slowed(), Redis.from_url(proxy.direct_url) as redis:
        with (
            proxy.losing_replies("EVALSHA"),
            pytest.raises(RedisUnreachable, match="may have been queued") as lost,
        ):
            generate.delay("tiny", STORY, **MEDIUM)
        job_id = lost.value.job_id
        assert f"task_id={job_id!r}" in str(lost.value)
        assert redis.hget(job_key(str(job_id)), "state") in (b"queued", b"running")
        assert generate.apply_async(("tiny", STORY), MEDIUM, task_id=job_id).id == job_id
    assert client.job(str(job_id)).result(PATIENCE_S)["text"] == undisturbed
    generate.apply_async(("tiny", STORY), MEDIUM, task_id=job_id)  # even after it has ended
    with Redis.from_url(proxy.direct_url) as redis:
        assert client.generate("tiny", STORY, **MEDIUM).result(PATIENCE_S)["text"] == undisturbed
        assert redis.hget(job_key(str(job_id)), "attempt") == b"1"


@pytest.mark.parametrize(("case", "status"), [("oom", 507), ("readonly", 503), ("busy", 503)])
def test_gateway_reports_that_a_request_can_be_retried(
    case: str, status: int, proxy: RefusingRedis, worker: WorkerProcess, gateway: GatewayProcess
) -> None:
    waited = outages(worker)
    body = {"model": "tiny", "prompt": STORY, "max_tokens": 4}
    assert gateway.post("/v1/completions", json=body).status_code == 200
    with proxy.refusing(*REPLIES[case]):
        answer = gateway.post("/v1/completions", json=body)
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, "1"), answer.text
    wait_until(lambda: gateway.post("/v1/completions", json=body).status_code == 200, "an answer")
    check_log(worker, waited)


COUNTS_CHORD = hashlib.sha1(CHORD_PART_RETURN_LUA.encode()).hexdigest().encode()
STEPS: dict[str, tuple[Callable[[Task, Signature], Signature], Refuses]] = {
    "of a user's app": (lambda generate, step: generate.s("tiny", STORY) | step, lambda name, _: name == "LPUSH"),
    "of ours": (
        lambda generate, step: chain(generate.s("tiny", STORY), generate.si("tiny", STORY), step),
        lambda name, first: name == "EVALSHA" and first == sha("submit").encode(),
    ),
    "behind a chord": (
        lambda generate, step: chord([generate.s("tiny", STORY), generate.s("tiny", STORY)], step),
        lambda name, first: name == "EVALSHA" and first == COUNTS_CHORD,
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", STEPS)
def test_next_canvas_step_is_sent_when_redis_accepts_commands_again(
    which: str, proxy: RefusingRedis, worker: WorkerProcess, undisturbed: str
) -> None:
    canvas, refuses = STEPS[which]
    queue = f"users-{uuid.uuid4().hex}"
    app = app_at(proxy.direct_url)
    with Redis.from_url(proxy.direct_url) as redis:
        with proxy.refusing(REPLIES["readonly"][0], refuses) as refused:
            canvas(app.tasks[TASK_GENERATE], app.signature("users.step", queue=queue)).apply_async()
            wait_until(lambda: sum(refused.values()) > 1, "repeated refusals of a step")
            assert not redis.exists(queue)
        wait_until(lambda: redis.llen(queue), "the last step")
        assert redis.llen(queue) == 1
    assert worker.process.poll() is None
