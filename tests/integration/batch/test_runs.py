"""Bulk runs through real workers: each line once, whatever dies."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from typing import Any

import pytest
from redis import Redis

from cellama.api import Client
from cellama.tasks.state.bulk_runs import Batches

from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import ANIMALS, CELLAMA, Commands, StartWorker, stories


def _runs(commands: Commands, redis: Redis) -> list[dict[str, Any]]:
    return [run for run in Batches(redis).all() if run["output"] == str(commands.output)]


def end(commands: Commands, command: subprocess.Popen[str], redis: Redis) -> None:
    """Ends a command that runs, and what its worker has of it."""
    assert command.poll() is None
    (run,) = _runs(commands, redis)
    Batches(redis).cancel(str(run["id"]))
    assert command.wait(PATIENCE_S) == 1, commands.log()


def test_batch_run_completes_lines_of_all_kinds_and_reports_invalid_lines(
    worker: WorkerProcess, commands: Commands
) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": question, "temperature": 0}
    commands.write(
        [
            {"id": "story", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0},
            {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body},
            {"id": "vectors", "text": "a red fox"},
            "{broken",
            {"id": "story", "prompt": "twice"},
            {"id": "long", "prompt": "word " * 3000},
        ]
    )
    assert commands.run() == 1
    found = {each.get("custom_id", each.get("id")): each for each in commands.results()}
    assert found["story"]["text"] == ", there was a"
    choice = found["chat"]["response"]["body"]["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "The capital of France is Paris.",
        "refusal": None,
    }
    assert len(found["vectors"]["embeddings"][0]) == 192
    told = {(each["line"], each["error"]["code"]) for each in commands.errors()}
    assert told == {(4, "invalid_request"), (5, "invalid_request"), (6, "prompt_too_long")}
    assert '"state": "completed"' in commands.log()
    assert commands.run() == 1  # the same again: nothing is left to do, and the same lines are wrong
    assert len(commands.results()) == 3
    assert len(commands.errors()) == 3


def test_batch_run_neither_loses_nor_repeats_lines_when_command_and_workers_are_killed(
    start_worker: StartWorker, commands: Commands, redis_client: Redis
) -> None:
    workers = [start_worker(), start_worker()]
    commands.write(stories(120))
    assert commands.run("--order", "input") == 0
    assert [each["id"] for each in commands.results()] == [f"s{i}" for i in range(120)]
    undisturbed = {each["id"]: each["text"] for each in commands.results()}
    commands.output.unlink()
    with contextlib.ExitStack() as slowed:  # so that the run is not finished when a process is killed
        for worker in workers:
            slowed.enter_context(worker.slowed(0.05))
        command = commands.start_run()
        for count in (10, 40):
            wait_until(lambda count=count: commands.num_results() >= count, f"{count} results")
            command.kill()
            command.wait()
            victim = workers.pop(0)
            victim.process.kill()
            victim.process.wait()
            assert commands.num_results() < 120
            workers.append(start_worker())
            slowed.enter_context(workers[-1].slowed(0.05))
            command = commands.start_run()
    assert command.wait(PATIENCE_S) == 0, commands.log()
    results = commands.results()
    assert len(results) == 120
    assert {each["id"]: each["text"] for each in results} == undisturbed


def test_ids_keep_their_types_in_results_and_errors_even_after_resuming(
    worker: WorkerProcess, commands: Commands
) -> None:
    lines: list[Any] = [{"id": line_id, "prompt": "Hi", "max_tokens": 2} for line_id in (7, "7", 2**64)]
    commands.write([*lines, {"id": 8, "prompt": "word " * 3000}, {"id": 9, "prompt": ""}, {"id": 7, "prompt": "twice"}])
    assert commands.run("--order", "input") == 1
    assert [each["id"] for each in commands.results()] == [7, "7", 2**64]
    assert {(each["id"], each["line"]) for each in commands.errors()} == {(8, 4), (9, 5), (7, 6)}
    before = commands.output.read_text()
    assert commands.call("resume", "out.jsonl", "--json") == 1
    assert commands.output.read_text() == before
    assert {each["id"] for each in commands.errors()} == {7, 8, 9}


def test_token_counts_include_results_of_earlier_commands(
    worker: WorkerProcess, commands: Commands, redis_client: Redis
) -> None:
    lines = [*stories(2, max_tokens=4), *stories(40, max_tokens=20)[2:]]
    tokens = 2 * 4 + 38 * 20
    commands.write(lines)
    with worker.slowed(0.05):
        command = commands.start_run()
        wait_until(lambda: commands.num_results() >= 2, "results")
        command.kill()
        command.wait()
        assert commands.num_results() < 40
    assert commands.call("resume", "out.jsonl", "--json") == 0, commands.log()
    assert commands.end()["completion_tokens"] == tokens
    (run,) = _runs(commands, redis_client)
    assert (run["finished"], run["completion_tokens"]) == (40, tokens)
    used = [each["usage"] for each in commands.results()]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert run[name] == sum(usage[name] for usage in used)
    assert commands.run() == 0  # nothing is left to do
    assert (commands.end()["completion_tokens"], commands.end()["rate"]) == (tokens, 0.0)
    assert _runs(commands, redis_client)[0]["completion_tokens"] == tokens
    assert commands.call("resume", "out.jsonl") == 0
    assert "already completed: 40 lines done, 0 failed" in commands.words()


def test_embedding_run_reports_lines_per_second(worker: WorkerProcess, commands: Commands, model: str) -> None:
    commands.write([{"id": i, "text": f"a little fox {i}"} for i in range(20)])
    assert commands.call("run", "in.jsonl", "-o", "out.jsonl", "-m", model) == 0
    assert "completed: 20 lines done, 0 failed" in commands.words()
    assert re.search(r"[\d.]+ s · [\d.]+ lines/s tokens: \d+ in prompts$", commands.words())
    assert not (commands.folder / "out.errors.jsonl").exists()


def test_resumed_run_recomputes_only_changed_lines(worker: WorkerProcess, commands: Commands) -> None:
    lines = stories(6, max_tokens=4)
    commands.write(lines)
    assert commands.run("--keep-work") == 0
    before = {each["id"]: each for each in commands.results()}
    lines[2]["prompt"] = "What"
    commands.write([*lines[:5], {"id": "new", "prompt": "Hi", "max_tokens": 2}])
    assert commands.run() == 0
    after = {each["id"]: each for each in commands.results()}
    assert set(after) == {"s0", "s1", "s2", "s3", "s4", "new"}
    assert after["s2"] != before["s2"]
    assert all(after[each] == before[each] for each in ("s0", "s1", "s3", "s4"))
    assert len(commands.results()) == 6


def test_run_can_be_cancelled_and_resumed_from_another_process(
    worker: WorkerProcess, commands: Commands, redis_client: Redis
) -> None:
    commands.write([*stories(2, max_tokens=4), *stories(40, max_tokens=100)[2:]])
    with worker.slowed(0.2):
        command = commands.start_run()
        wait_until(lambda: commands.num_results() >= 2, "results")
        assert commands.call("cancel", "out.jsonl") == 0
        assert command.wait(PATIENCE_S) == 1
    assert [run["state"] for run in _runs(commands, redis_client)] == ["cancelled"]
    count = len(commands.results())
    assert 2 <= count < 40
    assert commands.call("resume", "out.jsonl", "--json") == 0, commands.log()
    assert len({each["id"] for each in commands.results()}) == len(commands.results()) == 40


def test_second_command_does_not_touch_the_output_of_a_running_command(
    worker: WorkerProcess, commands: Commands, redis_client: Redis
) -> None:
    commands.write([*stories(2, max_tokens=4), *stories(40, max_tokens=400)[2:]])
    with worker.slowed():
        command = commands.start_run()
        wait_until(lambda: commands.num_results() >= 2, "results")
        assert commands.run("--overwrite") == 2
        assert "is the output of a running command" in commands.words()
        assert commands.num_results() >= 2
        end(commands, command, redis_client)


def test_deadline_stops_a_run(worker: WorkerProcess, commands: Commands) -> None:
    commands.write(stories(60, max_tokens=1500))
    with worker.slowed():
        assert commands.run("--deadline", "2s") == 1
    assert '"state": "expired"' in commands.log()
    assert len(commands.results()) < 60


def test_interactive_job_finishes_while_a_bulk_run_fills_the_worker(
    worker: WorkerProcess, commands: Commands, model: str, redis_client: Redis
) -> None:
    commands.write(stories(60, max_tokens=800))
    with worker.slowed():
        command = commands.start_run()
        wait_until(lambda: _runs(commands, redis_client), "the run")
        wait_until(lambda: worker.engine_now()["slots_decoding"] == 8, "the run to fill the worker")
        with Client() as client:
            job = client.generate(model, "Once upon a time", max_tokens=4, temperature=0)
            assert job.result(timeout=PATIENCE_S)["text"] == ", there was a"
        end(commands, command, redis_client)


def test_batch_run_reads_stdin_and_writes_stdout(worker: WorkerProcess, commands: Commands, model: str) -> None:
    text = "".join(json.dumps(line) + "\n" for line in stories(3, max_tokens=2))
    argv = [*CELLAMA, "batch", "run", "-", "-o", "-", "-m", model]
    done = subprocess.run(
        argv, input=text, env=commands.environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line)["id"] for line in done.stdout.splitlines()) == ["s0", "s1", "s2"]
    assert "3 lines done" in done.stderr


def test_stdout_receives_results_as_they_complete_and_ctrl_c_stops_the_run(
    worker: WorkerProcess, commands: Commands, model: str, redis_client: Redis
) -> None:
    commands.write([*stories(1, max_tokens=4), *stories(40, max_tokens=400)[1:], "{broken"])
    pipe, before = subprocess.PIPE, {run["id"] for run in Batches(redis_client).all()}
    argv = [*CELLAMA, "batch", "run", "in.jsonl", "-o", "-", "-m", model, "--json"]
    with (
        worker.slowed(),
        subprocess.Popen(
            argv,
            cwd=commands.folder,
            env=commands.environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
        ) as command,
    ):
        assert command.stdout is not None
        assert command.stderr is not None
        assert json.loads(command.stdout.readline())["id"].startswith("s")
        assert command.poll() is None
        command.send_signal(signal.SIGINT)
        rest, words = command.stdout.read(), command.stderr.read()  # communicate() forgets what readline() has buffered
    assert command.returncode == 130
    assert len(rest.splitlines()) < 39
    assert all(json.loads(line)["id"].startswith("s") for line in rest.splitlines())
    broken = next(json.loads(line) for line in words.splitlines() if '"line": 41' in line)
    assert broken["error"]["code"] == "invalid_request"
    assert "write its output to a file (-o FILE)" in words
    (run,) = [run["id"] for run in Batches(redis_client).all() if run["id"] not in before]
    wait_until(lambda: not (Batches(redis_client).read(run) or {}).get("alive"), "the run to be over")
    with Client() as client:
        wait_until(lambda: client.stats()["slots_busy"] == 0, "nothing to be computed for nobody")


def test_resumed_run_can_switch_from_input_order_to_completion_order(
    worker: WorkerProcess, commands: Commands, redis_client: Redis
) -> None:
    lines = stories(80, max_tokens=16)
    lines[0]["max_tokens"] = 600  # all others wait for it
    commands.write(lines)
    with worker.slowed(0.1):
        command = commands.start_run("--order", "input")
        wait_until(lambda: any(run.get("finished") for run in _runs(commands, redis_client)), "held results")
        command.kill()
        command.wait()
    assert commands.results() == []
    assert commands.run() == 0
    assert sorted(each["id"] for each in commands.results()) == sorted(line["id"] for line in lines)


def test_new_first_line_is_appended_when_later_lines_are_already_written(
    worker: WorkerProcess, commands: Commands
) -> None:
    lines = stories(5, max_tokens=2)
    commands.write(lines)
    assert commands.run("--order", "input", "--keep-work") == 0
    commands.write([{"id": "new", "prompt": "Hi", "max_tokens": 2}, *lines])
    assert commands.run("--order", "input") == 0
    assert [each["id"] for each in commands.results()] == ["s0", "s1", "s2", "s3", "s4", "new"]


def test_retry_failed_option_reruns_failed_lines(worker: WorkerProcess, commands: Commands) -> None:
    commands.write([*stories(2, max_tokens=2), {"id": "long", "prompt": "word " * 3000}])
    assert commands.run() == 1
    for _ in range(2):
        assert commands.call("resume", "out.jsonl", "--retry-failed", "--json") == 1
        assert [(each["id"], each["error"]["code"]) for each in commands.errors()] == [("long", "prompt_too_long")]
        assert commands.end()["failed"] == 1
    assert len(commands.results()) == 2


@pytest.mark.parametrize("order", ["completion", "input"])
def test_dedupe_option_runs_identical_greedy_lines_once(worker: WorkerProcess, commands: Commands, order: str) -> None:
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
    lines = [{"id": f"{i}", "prompt": f"A little {ANIMALS[i % 3]}", **greedy} for i in range(30)]
    drawn = [
        {"id": f"d{i}", "prompt": "A little", "temperature": 1.0, "ignore_eos": True, "max_tokens": 4} for i in "ab"
    ]
    commands.write([*lines, *drawn])
    assert commands.run() == 0
    plain = {each["id"]: each["text"] for each in commands.results()}
    assert commands.end()["completion_tokens"] == 4 * 32
    assert commands.run("--overwrite", "--merge-identical", "--order", order) == 0
    assert commands.end()["completion_tokens"] == 4 * (3 + 2)
    results = commands.results()
    assert {each["id"]: each["text"] for each in results if each["id"].isdigit()} == {
        name: text for name, text in plain.items() if name.isdigit()
    }
    assert len(results) == 32
    if order == "input":
        assert [each["id"] for each in results] == [each["id"] for each in [*lines, *drawn]]
