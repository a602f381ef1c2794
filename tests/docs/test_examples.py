"""Run the examples of the documentation as their pages describe, with a real worker and a real Redis."""

from __future__ import annotations

import contextlib
import csv
import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness import pace
from cellama.tasks.connection.connections import connect
from cellama.tasks.state.registry import live_workers

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, paced, wait_until
from ..gateways import GatewayProcess
from .pages import ROOT
from .sites import EXAMPLES, FORM, Site, events_in, started

TYPED = ["app", "write_story", "sort_reviews", "api.views", "tasks", "config.celery", "config.settings", "config.urls"]


def test_fastapi_example_resumes_a_stream_after_the_last_event_id(fastapi_site: Site) -> None:
    status, text = fastapi_site.request("/stories", {"prompt": "Once upon a time", "max_tokens": 20})
    assert status == 200
    path = f"/stories/{json.loads(text)['id']}/events"
    status, text = fastapi_site.request(path)
    events = events_in(text)
    assert (status, events[0]["type"], events[-1]["type"]) == (200, "started", "done")
    rest = events_in(fastapi_site.request(path, **{"last-event-id": "3"})[1])
    assert rest == events[4:]


def test_fastapi_example_returns_the_http_status_of_each_error(fastapi_site: Site) -> None:
    assert fastapi_site.request("/stories/nothing/events")[0] == 404
    status, text = fastapi_site.request("/stories", {"prompt": "Hi", "max_tokens": 0})
    assert (status, json.loads(text)["code"]) == (400, "invalid_request")
    assert "max_tokens is 0" in text


def test_fastapi_example_cancels_the_job_when_its_reader_disconnects(fastapi_site: Site, worker: WorkerProcess) -> None:
    with worker.slowed(0.5), Client() as client:  # a story by this model takes most of a minute
        connection = http.client.HTTPConnection("127.0.0.1", fastapi_site.port, timeout=PATIENCE_S)
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 1000})
        connection.request("POST", "/stories/stream", body, {"content-type": "application/json"})
        assert connection.getresponse().readline().startswith(b"id: 0")
        wait_until(lambda: client.stats()["slots_busy"], "a busy slot")
        connection.close()
        wait_until(lambda: client.stats()["slots_busy"] == 0, "a free slot")


def test_django_example_chains_tasks_of_both_apps(django_site: Site) -> None:
    job = json.loads(django_site.request("/titles?animal=bear")[1])["id"]

    def title() -> str | None:
        status, text = django_site.request(f"/titles/{job}")
        return json.loads(text)["title"] if status == 200 else None

    assert len(wait_until(title, "the title").split()) == 6


def test_django_example_streams_a_story(django_site: Site) -> None:
    status, text = django_site.request("/stories", "prompt=Once", **FORM)
    assert status == 200
    status, text = django_site.request(f"/stories/{json.loads(text)['id']}/events")
    assert (status, events_in(text)[-1]["type"]) == (200, "done")


def test_bulk_example_computes_no_line_twice_when_it_is_run_again(worker: WorkerProcess, tmp_path: Path) -> None:
    source = EXAMPLES / "bulk_run"
    argv = [sys.executable, "sort_reviews.py", "reviews.csv", str(tmp_path / "sorted.csv")]
    for _ in range(2):
        done = subprocess.run(argv, cwd=source, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.stdout == "completed: 4 of 4 reviews\n", done.stderr
    rows = list(csv.DictReader((tmp_path / "sorted.csv").read_text().splitlines()))
    assert [row["id"] for row in rows] == ["r1", "r2", "r3", "r4"]
    assert {row["mood"] for row in rows} <= {"good", "bad"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sorted.answers.csv", "sorted.csv"]


def test_several_machines_example_starts_two_workers_that_share_the_jobs(tmp_path: Path) -> None:
    script = str(EXAMPLES / "several_machines" / "worker.sh")
    with RedisServer.start(tmp_path / "redis") as redis, contextlib.ExitStack() as stack:
        models = paced(json.dumps([{"id": "tiny", "source": "bundled://tiny", "n_parallel": 2, "threads": 1}]))
        environment = {"CELLAMA_REDIS_URL": redis.url, "CELLAMA_MODELS": models, pace.PACE_FILE: str(tmp_path / "pace")}
        for name in ("one", "two"):
            stack.enter_context(started([script], tmp_path, tmp_path / f"{name}.log", **environment))
        client = connect(redis.url)
        wait_until(lambda: len(live_workers(client)) == 2, "two workers")
        client.close()
        code = (
            "from cellama.api import Client\n"
            "jobs = Client().generate_many('tiny', ['Once upon a time'] * 24, max_tokens=40)\n"
            "print(len({next(job.stream())['worker'] for job in jobs}))"
        )
        argv = [sys.executable, "-c", code]
        with pace.slowed(tmp_path / "pace", 0.02):  # a single worker would need about ten seconds
            done = subprocess.run(
                argv, env=clean_environment(**environment), capture_output=True, text=True, timeout=PATIENCE_S
            )
        assert done.stdout == "2\n", done.stderr


def test_durable_responses_example_resumes_the_response_after_a_kill(gateway: GatewayProcess, tmp_path: Path) -> None:
    argv = [sys.executable, str(EXAMPLES / "durable_responses" / "write_story.py")]
    environment = {"OPENAI_BASE_URL": f"{gateway.url}/v1", "STORY_TOKENS": "60", "STORY_STATE": str(tmp_path / "state")}
    first = subprocess.Popen(argv, env=clean_environment(**environment), stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    printed = first.stdout.read(10)
    first.kill()
    printed += first.communicate(timeout=PATIENCE_S)[0]
    second = subprocess.run(
        argv, env=clean_environment(**environment), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert second.returncode == 0, second.stderr
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        whole = client.responses.create(
            model="tiny", input="Tell me a story about a fox.", temperature=0, max_output_tokens=60
        )
    text = (printed + second.stdout).strip()
    assert (text[:10], text[-10:]) == (whole.output_text.strip()[:10], whole.output_text.strip()[-10:])
    assert not (tmp_path / "state").exists()


def test_examples_pass_strict_type_checks() -> None:
    # Use the directory of `.ci/check`, whose cache already contains cellama's types.
    links = ROOT / "build" / "types" / "cellama"
    links.mkdir(parents=True, exist_ok=True)
    for folder in ("api", "config", "engine", "tasks"):
        if not (links / folder).exists():
            (links / folder).symlink_to(Path("../../..") / folder)
    folders = [EXAMPLES / name for name in ("fastapi_sse", "bulk_run", "django_site", "durable_responses")]
    modules = [argument for module in TYPED for argument in ("-m", module)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *modules],
        cwd=links.parent,
        env=clean_environment(MYPYPATH=os.pathsep.join(map(str, folders))),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_testing_example_passes_with_its_own_redis_and_worker(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment(PATH=path, TMPDIR=str(tmp_path))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    done = subprocess.run(
        argv, cwd=EXAMPLES / "testing", env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert "2 passed" in done.stdout, done.stdout[-4000:]
