"""Test the command line on one machine: `cellama up`, generate, chat, status, Flower and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from cellama.config.local_redis import redis_dir, stored_url

from ..conftest import PATIENCE_S, descendants, wait_until
from .machines import CELLAMA, Machine, up

PRODUCER = """
from cellama.tasks import generate
print(generate.delay("tiny", "Once upon a time", max_tokens=4, temperature=0).get(60)["text"])
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Yield a shared machine, for tests that don't change it."""
    with up(tmp_path_factory.mktemp("machine")) as machine:
        yield machine


def test_up_prints_addresses_and_a_command_to_try(machine: Machine) -> None:
    output = machine.output()
    assert f"http://127.0.0.1:{machine.flower_port}" in output
    assert 'cellama generate tiny "Once upon a time"' in output
    assert "tiny (16 slots)" in output


def test_generate_streams_text_in_chunks(machine: Machine) -> None:
    done = machine.run("generate", "tiny", "Once upon a time", "--temperature", "0", "--max-tokens", "40")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(", there was a little fox named Mia who lived in a green forest.")
    assert re.search(r"40 tokens · length · \d+ tok/s · first token after \d+ ms", done.stderr)
    lines = machine.run("generate", "tiny", "Once upon a time", "--temperature", "0", "--max-tokens", "40", "--json")
    events = [json.loads(line) for line in lines.stdout.splitlines()]
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert len([e for e in events if e["type"] == "token"]) > 20
    assert "".join(e.get("text", "") for e in events) + "\n" == done.stdout


def test_redis_password_is_available_to_programs_of_the_same_user_but_never_printed(machine: Machine) -> None:
    assert "@" not in machine.environment["CELLAMA_REDIS_URL"]
    argv = [sys.executable, "-c", PRODUCER]
    options: dict[str, Any] = {"cwd": machine.folder, "env": machine.environment, "text": True}
    produced = subprocess.run(argv, **options, capture_output=True, timeout=PATIENCE_S)
    assert produced.stdout.strip() == ", there was a", produced.stderr
    url = stored_url(redis_dir(machine.folder / "data"))
    assert url is not None
    assert url.password is not None
    with (
        Redis(port=url.hosts[0][1], retry=Retry(NoBackoff(), 0)) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.ping()
    commands = [*descendants(machine.process.pid).values(), " ".join(psutil.Process(machine.process.pid).cmdline())]
    assert len(commands) >= 4  # Redis, the worker, Flower, all of them
    asked = [sys.executable, "-m", "celery", "-A", "cellama.tasks.app", "inspect", "conf"]
    conf = subprocess.run(asked, **options, capture_output=True, timeout=PATIENCE_S)
    assert "broker_url" in conf.stdout, conf.stderr
    logs = [*machine.folder.rglob("*.log")]
    assert {"up.log", "redis.log", "worker.log", "flower.log"} <= {log.name for log in logs}
    for text in (*commands, conf.stdout, conf.stderr, *(log.read_text(errors="replace") for log in logs)):
        assert url.password not in text


def test_chat_and_embed_read_arguments_and_stdin(machine: Machine) -> None:
    done = machine.run("chat", "tiny", "-", "--temperature", "0", stdin="What is the capital of Norway?\n")
    assert done.stdout == "The capital of Norway is Oslo.\n"
    embedded = machine.run("embed", "tiny", "-", "--json", stdin="a\nb\n")
    assert len(json.loads(embedded.stdout)["embeddings"]) == 2
    assert "192 dimensions" in machine.run("embed", "tiny", "a fox").stdout


def test_status_shows_worker_model_and_slots(machine: Machine) -> None:
    idle = re.compile(r"cellama-[0-9a-f]{4}@.*pid \d+ *\n.*tiny \(default\) +0/16.*\nwaiting jobs: none\n", re.DOTALL)
    wait_until(lambda: idle.search(machine.run("status").stdout), "the job before told to have ended")
    status = json.loads(machine.run("status", "--json").stdout)
    none = {"tiny": 0, ":default": 0}
    assert status["unserved"] == []
    assert (status["workers"], status["slots_total"], status["queues"]) == (1, 16, none)
    assert (status["waiting"], status["eta_s"]) == (none, {"tiny": 0.0, ":default": 0.0})


def test_models_commands_show_models_and_their_memory(machine: Machine) -> None:
    info = machine.run("models", "info", "tiny").stdout
    for shown in ("ready", "(default)", "F16", "16 slots of 2048 tokens", "fingerprint", "KV cache", "MiB"):
        assert shown in info
    assert re.search(r"backend +CPU\b", info)
    assert re.search(r"tiny \(default\).*F16.*CPU", machine.run("models", "list").stdout)
    memory = machine.run("models", "memory").stdout
    assert "memory_budget auto, on_full refuse" in memory
    assert re.search(r"tiny .* MiB", memory)
    worker = json.loads(machine.run("models", "memory", "--json").stdout)[0]
    assert [device["kind"] for device in worker["devices"]][:1] == ["cpu"]
    known = json.loads(machine.run("models", "info", "tiny", "--json").stdout)
    assert worker["models"][0]["memory"] == known["memory"]


def test_status_shows_the_state_of_a_job(machine: Machine) -> None:
    done = json.loads(machine.run("generate", "tiny", "Once", "--max-tokens", "2", "--json").stdout.splitlines()[0])
    assert machine.run("status", done["job_id"]).stdout == f"job {done['job_id']} is done\n"
    unknown = machine.run("status", "nothing")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "job nothing is unknown" in unknown.stderr


def test_dead_list_shows_dead_jobs(machine: Machine) -> None:
    assert machine.run("dead", "list").stdout == "no dead jobs\n"
    assert json.loads(machine.run("dead", "list", "--json").stdout) == []
    refused = machine.run("dead", "requeue", "nothing")
    assert refused.returncode == 1
    assert "nothing is not a dead job; list the dead jobs with `cellama dead list`" in refused.stderr


def test_generate_exits_with_a_message_when_the_model_is_unknown_or_the_job_fails(machine: Machine) -> None:
    unknown = machine.run("generate", "tinny", "Hi")
    assert (unknown.returncode, "did you mean 'tiny'" in unknown.stderr) == (3, True)
    too_long = machine.run("generate", "tiny", "-", stdin="word " * 3000)
    assert too_long.returncode == 2
    assert "maximum context length is 2047 tokens" in too_long.stderr
    assert "Traceback" not in unknown.stderr + too_long.stderr


def test_cancel_stops_a_job_started_by_another_process(machine: Machine) -> None:
    argv = [*CELLAMA, "generate", "tiny", "Once upon a time", "--json", "--ignore-eos", "--max-tokens", "1900"]
    options: dict[str, Any] = {
        "cwd": machine.folder,
        "env": machine.environment,
        "stdout": subprocess.PIPE,
        "text": True,
    }
    with machine.slowed(), subprocess.Popen(argv, **options) as job:
        first = json.loads(job.stdout.readline())
        assert machine.run("cancel", first["job_id"]).returncode == 0
        events = [json.loads(line) for line in job.stdout]
    assert (events[-1]["finish_reason"], job.returncode) == ("cancelled", 1)


def test_generate_cancels_its_job_on_ctrl_c_and_reports_the_cancellation(machine: Machine) -> None:
    argv = [*CELLAMA, "generate", "tiny", "Once upon a time", "--ignore-eos", "--max-tokens", "1900"]
    with (
        machine.slowed(),
        subprocess.Popen(
            argv, cwd=machine.folder, env=machine.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as job,
    ):
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.read(10)
        job.send_signal(signal.SIGINT)
        told = job.stderr.read()
    assert "Traceback" not in told
    assert (job.returncode, "cancelled job" in told) == (130, True)


def test_generate_cancels_its_job_when_its_output_pipe_closes(machine: Machine) -> None:
    argv = [*CELLAMA, "generate", "tiny", "Once upon a time", "--ignore-eos", "--max-tokens", "1900", "--json"]
    with (
        machine.slowed(),
        subprocess.Popen(
            argv, cwd=machine.folder, env=machine.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as job,
    ):
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.readline()
        job.stdout.close()
        told = job.stderr.read()
    assert "Traceback" not in told
    assert "Exception ignored" not in told
    assert (job.returncode, "cancelled job" in told) == (1, True)


def test_follow_streams_a_job_started_by_another_process_without_cancelling_it(machine: Machine) -> None:
    with machine.slowed():
        argv = [*CELLAMA, "generate", "tiny", "Once upon a time", "--ignore-eos", "--max-tokens", "1900", "--json"]
        with subprocess.Popen(
            argv, cwd=machine.folder, env=machine.environment, stdout=subprocess.PIPE, text=True
        ) as job:
            assert job.stdout is not None
            job_id = json.loads(job.stdout.readline())["job_id"]
            listed = json.loads(machine.run("jobs", "list", "--json").stdout)
            assert [(each["job_id"], each["state"], each["kind"]) for each in listed] == [
                (job_id, "running", "generate")
            ]
            argv = [*CELLAMA, "jobs", "follow", job_id]
            with subprocess.Popen(
                argv,
                cwd=machine.folder,
                env=machine.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as reader:
                assert reader.stdout is not None
                assert reader.stdout.read(5)
                reader.send_signal(signal.SIGINT)
                _, told = reader.communicate(timeout=PATIENCE_S)
            assert (reader.returncode, f"job {job_id} continues" in told, job.poll()) == (130, True, None)
            assert machine.run("jobs", "cancel", job_id).stdout == f"cancelled job {job_id}, which was running\n"
    cancelled = f"job {job_id} was cancelled\n"
    wait_until(lambda: machine.run("status", job_id).stdout == cancelled, "the end of the job")


def test_flower_shows_the_worker_and_its_tasks(machine: Machine) -> None:
    def workers() -> dict[str, Any]:
        url = f"http://127.0.0.1:{machine.flower_port}/workers?json=1"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                data: dict[str, Any] = json.load(answer)
                return data
        except OSError:
            return {}

    wait_until(lambda: [each["status"] for each in workers().get("data", [])] == [True], "the worker in Flower")


def test_second_up_command_reports_that_the_flower_port_is_taken(machine: Machine) -> None:
    second = machine.run("up", "--flower-port", str(machine.flower_port))
    assert second.returncode == 1
    assert f"port {machine.flower_port} on 127.0.0.1 is taken" in second.stderr
