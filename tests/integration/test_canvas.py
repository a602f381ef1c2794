"""Canvases of cellama's tasks and the tasks of a user's app, whose worker is a separate process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult
from kombu import Exchange, Queue
from redis import Redis

from cellama.api import AsyncClient, Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import app, chat, generate
from cellama.tasks.contract.errors import InvalidJob, JobFailed, ResultIgnored
from cellama.tasks.contract.names import queue_name
from cellama.tasks.state.registry import live_workers

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until

EventsOf = Callable[..., list[dict[str, Any]]]
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "seed": 1}
STORY = "Once upon a time"


@pytest.fixture(scope="module")
def users(worker: WorkerProcess, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the module of the user's app while its worker runs."""
    from . import users_app

    log = (tmp_path_factory.mktemp("users") / "worker.log").open("wb")
    argv = [sys.executable, "-m", "celery", "-A", users_app.__name__, "worker", "-P", "solo", "-n", "users@%h"]
    process = subprocess.Popen(
        [*argv, "--without-gossip", "--without-mingle", "-Q", ",".join(users_app.QUEUES)],
        cwd=Path(__file__).parents[2],
        env=clean_environment(CELLAMA_REDIS_URL=redis_server.url),
        stdout=log,
        stderr=log,
    )
    try:
        assert users_app.echo.delay("ready").get(timeout=PATIENCE_S) == "ready", Path(log.name).read_text()
        yield users_app
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        log.close()


@pytest.fixture(scope="module")
def story(users: Any) -> str:
    """Return the text that the model generates for STORY."""
    return str(generate.delay("tiny", STORY, **SHORT).get(timeout=PATIENCE_S)["text"])


def test_group_returns_results_in_order(story: str) -> None:
    jobs = group(generate.s("tiny", STORY, **SHORT), generate.s("tiny", "Bees", **SHORT)).apply_async()
    results = jobs.get(timeout=PATIENCE_S)
    assert [len(results), results[0]["text"]] == [2, story]


def test_map_and_starmap_run_as_groups(story: str) -> None:
    (one,) = generate.starmap([("tiny", STORY)]).apply_async(kwargs=SHORT).get(timeout=PATIENCE_S)
    assert one["text"] == story
    assert [sig.args for sig in generate.map(["a", "b"]).tasks] == [("a",), ("b",)]


def test_chord_of_jobs_calls_a_user_task(users: Any) -> None:
    header = [generate.s("tiny", f"{i}", **SHORT) for i in range(3)]
    assert chord(header)(users.length.s()).get(timeout=PATIENCE_S) == 3


def test_chord_of_user_tasks_calls_a_job(users: Any) -> None:
    body = chat.s(model="tiny", messages=[{"role": "user", "content": "Hi"}], **SHORT)
    done = chord([users.echo.s("a"), users.echo.s("b")], body.set(immutable=True)).apply_async()
    assert done.get(timeout=PATIENCE_S)["message"]["role"] == "assistant"


def test_user_task_result_becomes_the_prompt_of_the_next_step(users: Any, story: str) -> None:
    steps = chain(users.echo.s(STORY), generate.s(model="tiny", **SHORT), users.text_of.s())
    assert steps.apply_async().get(timeout=PATIENCE_S) == story


def test_job_result_becomes_the_prompt_of_the_next_step(story: str) -> None:
    steps = chain(generate.s("tiny", STORY, **SHORT), generate.s(model="tiny", **SHORT))
    continued = generate.delay("tiny", story, **SHORT).get(timeout=PATIENCE_S)["text"]
    assert steps.apply_async().get(timeout=PATIENCE_S)["text"] == continued


def test_group_in_a_chain_and_canvas_in_a_task_complete(users: Any) -> None:
    steps = chain(users.echo.s(STORY), group(generate.s(model="tiny", **SHORT) for _ in range(2)), users.length.s())
    assert steps.apply_async().get(timeout=PATIENCE_S) == 2
    within = users.asks_within.delay(["a", "b"]).get(timeout=PATIENCE_S)
    assert users.app.AsyncResult(within).get(timeout=PATIENCE_S) == 2


def test_user_task_can_be_replaced_by_jobs(users: Any, story: str) -> None:
    assert users.becomes_a_job.delay(STORY).get(timeout=PATIENCE_S)["text"] == story
    assert len(users.becomes_jobs.delay(["a", "b"]).get(timeout=PATIENCE_S)) == 2


def test_link_receives_the_result_and_link_error_receives_the_failure(
    users: Any, redis_client: Redis, story: str
) -> None:
    linked = users.text_of.s().freeze()
    job = generate.apply_async(("tiny", STORY), SHORT, link=users.text_of.s().set(task_id=linked.id))
    assert AsyncResult(linked.id, app=users.app).get(timeout=PATIENCE_S) == story
    assert job.get(timeout=PATIENCE_S)["text"] == story
    bad = generate.apply_async(("tiny", STORY), {**SHORT, "grammar": "no grammar"}, link_error=users.note_failure.s())
    wait_until(lambda: redis_client.get(f"test:failed:{bad.id}"), "the errback")


def test_nested_steps_use_the_routes_of_their_app(users: Any, redis_client: Redis, story: str) -> None:
    """The app's worker reads none of the queues that cellama's workers know."""
    job = generate.s("tiny", STORY, **SHORT)
    told = chain(job, users.text_of.s())
    nested = chain(job, group(users.text_of.s(), chain(generate.s(model="tiny", **SHORT), users.text_of.s())))
    assert nested.apply_async().get(timeout=PATIENCE_S)[0] == story
    inner = chord([told, chain(job, generate.s(model="tiny", **SHORT), users.text_of.s())], users.length.s())
    assert chord([inner, job], users.length.s()).apply_async().get(timeout=PATIENCE_S) == 2
    assert chain(chord([job, job], users.length.s()), users.echo.s()).apply_async().get(timeout=PATIENCE_S) == 2
    by_name = users.app.signature(users.text_of.name)
    assert chain(job, by_name).apply_async().get(timeout=PATIENCE_S) == story
    assert not redis_client.exists("celery")  # Celery's default queue


def test_step_priority_is_mapped_to_a_priority_that_the_worker_consumes(users: Any) -> None:
    """Kombu has four priorities by default, whereas cellama's workers have ten."""
    for priority in range(10):
        done = chord([generate.s("tiny", STORY, **SHORT)] * 2, users.length.s().set(priority=priority)).apply_async()
        assert done.get(timeout=PATIENCE_S) == 2


def test_explicit_queue_of_a_step_is_kept(users: Any, redis_client: Redis) -> None:
    step = users.text_of.s().set(queue="shop.elsewhere")
    generate.apply_async(("tiny", STORY), SHORT, link=step).get(timeout=PATIENCE_S)
    wait_until(lambda: redis_client.llen("shop.elsewhere"), "the step in its queue")
    redis_client.delete("shop.elsewhere")


def test_step_without_a_queue_is_rejected_before_anything_is_queued(worker: WorkerProcess) -> None:
    with Celery("strict", broker=app.conf.broker_url, set_as_current=False) as strict:
        strict.conf.update(task_create_missing_queues=False, task_routes={"strict.*": {"queue": "nowhere"}})
        with pytest.raises(InvalidJob, match=r"step strict\.next: Queue 'nowhere' missing from task_queues; set"):
            generate.apply_async(("tiny", STORY), SHORT, link=strict.signature("strict.next"))


def test_invalid_step_fails_and_the_job_before_it_stays_finished(
    users: Any, story: str, redis_client: Redis, events_of: EventsOf
) -> None:
    wrong = generate.s(model="tiny", top_k=-1).set(link_error=users.note_failure.s())
    for first in (generate.s("tiny", STORY, **SHORT), users.echo.s(STORY)):
        last = chain(first, wrong.clone(), users.text_of.s()).apply_async()
        with pytest.raises(JobFailed, match="top_k is -1"):
            last.parent.get(timeout=PATIENCE_S)
        with pytest.raises(JobFailed, match="top_k is -1"):
            last.get(timeout=PATIENCE_S)
        assert last.parent.parent.get(timeout=PATIENCE_S)
        assert events_of(last.parent.id)[-1]["code"] == "invalid_request"
        wait_until(lambda step=last.parent.id: redis_client.get(f"test:failed:{step}"), "the errback")


def test_chord_body_fails_when_a_part_fails(users: Any) -> None:
    header = [generate.s("tiny", STORY, **SHORT), generate.s("tiny", STORY, grammar="no grammar")]
    body = chord(header)(users.length.s())
    with pytest.raises(ChordError, match="grammar"):
        AsyncResult(body.id, app=app).get(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "options",
    [
        {"queue": Queue(queue_name("tiny"), Exchange(queue_name("tiny")), queue_name("tiny"))},
        {"exchange": "", "routing_key": queue_name("tiny")},
        {"connection": app.connection_for_write()},
        {"retry": True, "retry_policy": {"max_retries": 2, "interval_start": 0, "retry_errors": None}},
        {"priority": None, "expires": 600, "compression": "gzip", "shadow": "story"},
        {"countdown": 0.2},
        {"eta": datetime.now(UTC) + timedelta(seconds=0.1), "time_limit": 60, "soft_time_limit": 50},
    ],
)
def test_apply_async_options_behave_as_in_celery(worker: WorkerProcess, story: str, options: dict[str, Any]) -> None:
    assert generate.apply_async(("tiny", STORY), SHORT, **options).get(timeout=PATIENCE_S)["text"] == story


def test_job_is_sent_to_cellamas_redis_when_the_producer_uses_a_different_broker(
    worker: WorkerProcess, story: str
) -> None:
    with Celery("other", broker="memory://").producer_pool.acquire(block=True) as producer:
        job = generate.apply_async(("tiny", STORY), SHORT, producer=producer)
    assert job.get(timeout=PATIENCE_S)["text"] == story


def test_expired_job_is_revoked(worker: WorkerProcess, events_of: EventsOf) -> None:
    job = generate.apply_async(("tiny", STORY), SHORT, expires=datetime.now(UTC) - timedelta(seconds=1))
    with pytest.raises(TaskRevokedError, match="expired"):
        job.get(timeout=PATIENCE_S)
    assert events_of(job.id)[-1]["finish_reason"] == "cancelled"


def test_code_blocks_on_the_canvas_page_run_without_errors(users: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first, *blocks = users.BLOCKS
    assert "def load" in first
    for block in blocks:
        exec(block, vars(users))
        assert capsys.readouterr().out.strip(), block


def test_worker_serves_a_queue_that_is_added_at_run_time(worker: WorkerProcess, story: str) -> None:
    ours = [entry.name for entry in live_workers(worker.redis) if entry.pid == worker.process.pid]
    app.control.add_consumer("mine", destination=ours, reply=True)
    try:
        assert generate.apply_async(("tiny", STORY), SHORT, queue="mine").get(timeout=PATIENCE_S)["text"] == story
    finally:
        app.control.cancel_consumer("mine", destination=ours, reply=True)


def test_result_raises_when_the_job_ignores_its_result(client: Client, events_of: EventsOf) -> None:
    job = generate.apply_async(("tiny", STORY), SHORT, ignore_result=True)
    with pytest.raises(ResultIgnored, match="read its stream"):
        client.result(job.id)
    assert events_of(job.id)[-1]["finish_reason"] == "length"
    with pytest.raises(ResultIgnored, match="read its stream"):
        client.result(job.id)

    async def ask() -> None:
        async with AsyncClient() as own:
            await own.result(job.id)

    with pytest.raises(ResultIgnored, match="read its stream"):
        asyncio.run(ask())
