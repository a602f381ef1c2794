"""Commands for jobs, queues and bulk runs while no worker runs."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from cellama.api.cli import app
from cellama.api.cli.status import read_screen
from cellama.api.client.client import Client
from cellama.api.machine.redis_server import PortTaken, RedisServer, free_port
from cellama.tasks import generate
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.errors import InvalidJob, UnknownJob, UnknownModel
from cellama.tasks.contract.keys import batch_key, dead_key, job_key, workers_key
from cellama.tasks.state.bulk_runs import ALIVE_S, Batches

from ..conftest import worker_entry


def cellama(*argv: str) -> Result:
    return CliRunner().invoke(app, argv, env={"COLUMNS": "200"})


@pytest.fixture
def unserved(redis_client: Redis) -> Iterator[str]:
    """Return the id of a model that no worker serves, and for which two jobs wait."""
    model = f"m{uuid.uuid4().hex[:8]}"
    jobs = [generate.delay(model, "Once"), generate.delay(model, "Once")]
    yield model
    for job in jobs:
        job.revoke(terminate=True)


def ids_of(model: str) -> list[str]:
    return [job["job_id"] for job in json.loads(cellama("jobs", "list", "-m", model, "--json").output)]


def test_status_shows_queues_without_workers(unserved: str) -> None:
    assert f"2 jobs waiting for {unserved}, which no worker serves" in cellama("status").output
    status = json.loads(cellama("status", "--json").output)
    assert unserved in status["unserved"]
    assert (status["queues"][unserved], status["waiting"][unserved], status["eta_s"][unserved]) == (2, 2, None)


def test_status_and_top_show_dead_jobs_and_queues_by_class(unserved: str, redis_client: Redis) -> None:
    generate.apply_async((unserved, "Once"), priority=9, expires=60)
    died = f"dead-{uuid.uuid4().hex[:8]}"
    entry = {"task": "cellama.generate", "attempt": 4, "worker": "w@host", "queue": f"cellama:queue:{unserved}"}
    redis_client.hset(job_key(died), mapping=entry)
    redis_client.zadd(dead_key(), {died: time.time()})
    with Client() as client:
        seen = read_screen(client)
    text = cellama("top", "--once").output
    redis_client.zrem(dead_key(), died)
    redis_client.delete(job_key(died))
    waiting = {name: told["waiting"] for name, told in seen["classes"][unserved].items()}
    assert (waiting, seen["waiting"][unserved]) == ({"interactive": 2, "bulk": 1}, 3)
    assert next(job for job in seen["dead"] if job["id"] == died)["attempts"] == 4
    assert unserved in text
    assert f"{died} in cellama:queue:{unserved}, 4 attempts, the last on w@host" in text


@pytest.mark.parametrize(("is_up", "code"), [(True, Exit.OK), (False, Exit.UNREACHABLE)], ids=["up", "away"])
def test_metrics_once_option_fails_without_redis(
    redis_server: RedisServer, settings_environment: Callable[..., None], is_up: bool, code: Exit
) -> None:
    settings_environment(redis_url=redis_server.url if is_up else f"redis://127.0.0.1:{free_port()}/0")
    told = cellama("metrics", "--once")
    assert (f"cellama_up {is_up:.1f}" in told.stdout, told.exit_code) == (True, code)


def test_gateway_suggests_a_remedy_when_its_port_is_taken() -> None:
    refused = cellama("gateway", "--host", "192.0.2.1")  # no machine has this address (RFC 5737)
    assert isinstance(refused.exception, PortTaken)
    assert "port 8000 on 192.0.2.1 can't be opened" in str(refused.exception)
    assert "--host" in str(refused.exception)


def test_jobs_list_shows_ids_until_the_jobs_finish(unserved: str) -> None:
    first, second = ids_of(unserved)
    shown = cellama("jobs", "list", "--model", unserved).output
    assert shown.index(first) < shown.index(second)
    assert "only the first 1 jobs" in cellama("jobs", "list", "--model", unserved, "--limit", "1").output
    assert cellama("jobs", "cancel", first).exit_code == 0
    assert ids_of(unserved) == [second]


def test_cancel_reports_its_effect_and_status_shows_the_cancelled_job(unserved: str) -> None:
    first, _ = ids_of(unserved)
    assert cellama("cancel", first).output == f"cancelled job {first}, which was waiting\n"
    assert cellama("status", first).output == f"job {first} was cancelled\n"
    assert json.loads(cellama("status", first, "--json").output)["finish_reason"] == "cancelled"
    again = cellama("cancel", first, "--json")
    assert (again.exit_code, json.loads(again.output)["cancelled"]) == (1, False)


def test_cancel_rejects_an_unknown_id_and_does_not_affect_other_jobs(unserved: str) -> None:
    first, second = ids_of(unserved)
    assert isinstance(cellama("cancel", first, "nonsense").exception, UnknownJob)
    assert ids_of(unserved) == [first, second]


def test_queue_purge_asks_for_confirmation_cancels_waiting_jobs_and_rejects_unknown_models(unserved: str) -> None:
    first, _ = ids_of(unserved)
    refused = CliRunner().invoke(app, ["queue", "purge", unserved], input="n\n")
    assert (refused.exit_code, len(ids_of(unserved))) == (1, 2)
    done = cellama("queue", "purge", unserved, "--yes", "--json")
    assert json.loads(done.output) == {"model": unserved, "ended": 2}
    assert (ids_of(unserved), cellama("status", first).output) == ([], f"job {first} was cancelled\n")
    assert isinstance(cellama("queue", "purge", "nosuch", "--yes").exception, UnknownModel)


@pytest.fixture
def run_id(redis_client: Redis) -> str:
    """Return the id of a run that started half an hour ago. Its command has exited."""
    name = str(uuid.uuid4())
    facts = {"input": "/x/in.jsonl", "output": f"/x/{name}.jsonl", "model": "7", "total": 9, "finished": 4, "failed": 1}
    Batches(redis_client).write(name, state="in_progress", **facts)
    at = redis_client.hget(batch_key(name), "at") or b""
    redis_client.hset(batch_key(name), "at", float(at) - 2 * ALIVE_S)
    return name


@pytest.fixture
def live_worker(redis_client: Redis) -> Iterator[str]:
    """Register a worker, and return the id of its model."""
    model, now = f"m{uuid.uuid4().hex[:8]}", time.time()
    served = {
        "id": model,
        "status": "ready",
        "default": False,
        "engine": None,
        "embedder": None,
        "reranker": None,
        "capabilities": ["generate"],
    }
    entry = worker_entry(f"w-{model}@host", served, seen_at=now + 3600)
    redis_client.hset(workers_key(), entry.name, json.dumps(asdict(entry)))
    yield model
    redis_client.hdel(workers_key(), entry.name)


def test_runs_are_listed_with_model_time_and_state(run_id: str) -> None:
    line = next(line for line in cellama("batch", "list").output.splitlines() if run_id[:8] in line)
    assert {"interrupted", time.strftime("%m-%d"), f"/x/{run_id}.jsonl"} <= set(line.split())
    assert "4 of 9" in line
    shown = cellama("batch", "status", run_id[:8]).output
    assert f"cellama batch resume /x/{run_id}.jsonl" in shown
    assert "4 of 9 done, 1 failed" in shown
    facts = json.loads(cellama("batch", "status", run_id, "--json").output)
    assert (facts["model"], facts["state"], facts["alive"]) == ("7", "in_progress", False)


def test_runs_with_a_common_id_prefix_are_distinguished(redis_client: Redis) -> None:
    ids = [f"batch_{uuid.uuid4().hex}" for _ in range(2)]
    for name in ids:
        Batches(redis_client).write(name, state="completed", output="/x/output.jsonl")
    shown = cellama("batch", "list").output
    assert all(name[: len("batch_") + 8] in shown for name in ids)


def test_batch_commands_show_no_file_paths_from_the_gateways_machine(redis_client: Redis) -> None:
    name = f"batch_{uuid.uuid4().hex}"
    Batches(redis_client).write(name, state="in_progress", input="/x/input.jsonl", output="/x/output.jsonl")
    redis_client.hset(batch_key(name), "at", time.time() - 2 * ALIVE_S)
    shown = "".join(cellama("batch", *argv).output for argv in (("list",), ("status", name), ("cancel", name)))
    told = [line for line in shown.splitlines() if name[: len("batch_") + 8] in line or "resume it" in line]
    assert "/x/" not in "".join(told)
    assert "interrupted; a gateway will resume it" in shown
    assert f"no gateway was running it; finished lines are in the output file of /v1/batches/{name}" in shown


def test_cancelling_an_interrupted_run_takes_effect_immediately_and_once(run_id: str) -> None:
    assert ": no command was running it" in cellama("batch", "cancel", run_id).output
    facts = json.loads(cellama("batch", "status", run_id, "--json").output)
    assert (facts["state"], facts["alive"]) == ("cancelled", False)
    again = cellama("batch", "cancel", run_id)
    assert again.exit_code == 1
    assert "has already finished; its state is cancelled" in again.output


def test_run_that_failed_to_start_is_not_listed(redis_server: object, tmp_path: Path) -> None:
    refused = cellama("batch", "run", str(tmp_path / "no.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    assert isinstance(refused.exception, InvalidJob)
    assert str(tmp_path) not in cellama("batch", "list", "--json").output


def test_misspelled_model_is_rejected_immediately_and_leaves_nothing_behind(live_worker: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    argv = ("batch", "run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    refused = cellama(*argv, "-m", f"{live_worker}x")
    assert isinstance(refused.exception, UnknownModel)
    assert f"did you mean {live_worker!r}" in str(refused.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
