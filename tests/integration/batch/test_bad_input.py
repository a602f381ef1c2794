"""Bulk runs report bad lines, files and disks, and lose no finished line."""

from __future__ import annotations

import json

import pytest

from cellama.api import Client
from cellama.api.batch import run

from ...conftest import PATIENCE_S, WorkerProcess
from .conftest import Commands, stories


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "nowhere.jsonl", "-o", "x.jsonl"], "file 'nowhere.jsonl' not found"),
        (["run", "in.jsonl", "-o", "mine.jsonl"], "is not the output of an unfinished run"),
        (
            ["run", "in.jsonl", "-o", "no/such/x.jsonl"],
            "directory 'no/such' not found; create it, or",
        ),
        (["run", "in.jsonl", "-o", "/proc/x.jsonl"], "can't write '/proc/x.jsonl.work'"),
        (
            ["run", "in.jsonl", "-o", "x.xlsx", "--overwrite"],
            "'x.xlsx', because xlsx is not an output format; use .jsonl, .csv",
        ),
        (["run", "utf16.jsonl", "-o", "x.jsonl", "--overwrite"], "'utf16.jsonl' is UTF-16 text, but must be UTF-8"),
        (["run", "in.jsonl", "-o", "x.jsonl"], "no line has a model; set a model with --model"),
        (["run", "prompts.txt", "-o", "x.jsonl"], "no line has a model; set a model with --model"),
        (["run", "empty.jsonl", "-o", "x.jsonl"], "'empty.jsonl' has no lines; check that it is the right file"),
        (["run", "in.jsonl", "-o", "x.jsonl", "--order", "random"], "use one of completion, input"),
        (["run", "in.jsonl", "-o", "x.jsonl", "--deadline", "soon"], "invalid duration 'soon'"),
        (["resume", "nothing.jsonl"], "'nothing.jsonl' is not the output of a run"),
        (["status", "nothing"], "unknown run 'nothing'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_batch_run_rejects_bad_options_before_queueing_anything(
    commands: Commands, argv: list[str], message: str
) -> None:
    commands.write(stories(1))
    commands.write(['{"id": 1}'], name="mine.jsonl")
    commands.write(["", " "], name="empty.jsonl")
    (commands.folder / "prompts.txt").write_text("Once\nHi\n")
    (commands.folder / "utf16.jsonl").write_text(json.dumps(stories(1)[0]) + "\n", encoding="utf-16")
    before = set(commands.folder.iterdir())
    assert commands.call(*argv) == (1 if argv[0] == "status" else 2)
    assert message in commands.words(), commands.log()
    assert {path.name for path in set(commands.folder.iterdir()) - before} == {"command.log"}  # nothing has begun


def test_batch_run_rejects_an_oversized_line_and_completes_the_other_lines(
    worker: WorkerProcess, commands: Commands
) -> None:
    commands.write([*stories(2, max_tokens=2), {"id": "giant", "prompt": "x" * 10_000_000}, *stories(3)[2:]])
    assert commands.run() == 1
    assert {each["id"] for each in commands.results()} == {"s0", "s1", "s2"}
    (error,) = commands.errors()
    assert error["line"] == 3
    assert "the limit is" in error["error"]["message"]


@pytest.mark.parametrize("max_file_bytes", [50_000, 800_000], ids=["at the start", "in the middle"])
def test_batch_run_stops_on_a_full_disk_and_can_be_resumed(
    worker: WorkerProcess, commands: Commands, max_file_bytes: int
) -> None:
    commands.write([{"id": f"v{i}", "text": f"a little fox {i}"} for i in range(400)])
    assert commands.start_run(max_file_bytes=max_file_bytes).wait(PATIENCE_S) == 1
    assert "finished lines are saved" in commands.words()
    before = [each["id"] for each in commands.results()]
    assert commands.run() == 0, commands.log()
    results = commands.results()
    assert [each["id"] for each in results[: len(before)]] == before
    assert sorted(each["id"] for each in results) == sorted(f"v{i}" for i in range(400))


def test_batch_run_refuses_to_overwrite_the_output_of_another_run(worker: WorkerProcess, commands: Commands) -> None:
    commands.write(stories(3, max_tokens=2))
    assert commands.run("--keep-work") == 0
    before = commands.output.read_text()
    commands.write([{"id": f"s{i}", "prompt": "Something else", "max_tokens": 2} for i in range(3)])
    assert commands.run() == 2
    assert "contains results of another run" in commands.words()
    assert commands.output.read_text() == before
    assert commands.call("run", "other.jsonl", "-o", "out.jsonl") == 2
    commands.write(stories(3, max_tokens=2))
    assert commands.call("resume", "out.jsonl") == 0  # with the options that it had
    assert commands.run() == 0
    assert commands.output.read_text() == before


def test_lines_for_an_unserved_model_fail_without_affecting_other_lines(
    worker: WorkerProcess, commands: Commands, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MODEL_TIMEOUT_S", 1.0)
    source, target = commands.folder / "in.jsonl", commands.output
    commands.write([*stories(3, max_tokens=2), {"id": "lost", "prompt": "Once", "model": "nowhere"}])
    with Client() as client:
        for _ in range(2):  # a failed line is not retried …
            progress = client.batch(source, target, model=model).progress
            assert (progress.finished, progress.failed) == (3, 1)
        (error,) = commands.errors()
        assert (error["id"], error["line"], error["error"]["code"]) == ("lost", 4, "unknown_model")
        assert f"models: {model}" in error["error"]["message"]
        commands.write([*stories(3, max_tokens=2), {"id": "lost", "prompt": "Once", "max_tokens": 2}])
        progress = client.batch(source, target, model=model).progress  # … before it is corrected
    assert (progress.finished, progress.failed) == (4, 0)
    assert not (commands.folder / "out.errors.jsonl").exists()
