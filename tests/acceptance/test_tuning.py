"""Test `cellama tune` in a separate process, and a worker that uses the options that it found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellama.api.machine.redis_server import RedisServer
from cellama.bench.models.synthetic import write_model
from cellama.tasks.app import app
from cellama.tasks.state.registry import live_workers

from ..bert_model import BertShape
from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until

CELLAMA = [sys.executable, "-c", "from cellama.api.cli import main; main()"]
SHORT = ("--seconds", "6", "--threads", "1", "--slots", "4")
LOOK_AHEAD = 4


def environment(folder: Path) -> dict[str, str]:
    """Return an environment without settings and with an empty cache."""
    return clean_environment(XDG_CACHE_HOME=str(folder), COLUMNS="120")


def tune(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [*CELLAMA, "tune", *argv]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=2 * PATIENCE_S
    )


def results(folder: Path) -> list[Path]:
    return list((folder / "cellama" / "tuned").glob("*.json"))


def test_worker_uses_tuned_values_for_unset_options(redis_server: RedisServer, tmp_path: Path) -> None:
    done = tune(tmp_path, "bundled://tiny", *SHORT, "--seconds", "20", "--json")  # even on a busy machine
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    chosen = found["chosen"]["setup"]
    assert found["took_s"] < PATIENCE_S
    assert chosen["threads"] == 1
    assert chosen["n_parallel"] <= 4
    assert [str(path) for path in results(tmp_path)] == [found["kept"]]
    model = {"id": "open", "source": "bundled://tiny", "n_parallel": "auto", "threads": "auto", "default": True}
    settings = {"CELLAMA_MODELS": json.dumps([model]), "XDG_CACHE_HOME": str(tmp_path)}
    worker = WorkerProcess(tmp_path, redis_server.url, name="tuned", **settings).wait_ready()
    try:
        served = served_by(worker)
        assert served["tuned"] == {name: chosen[name] for name in served["tuned"]}
        assert set(served["tuned"]) == {"n_parallel", "threads", "n_ubatch", "kv_layout"}
        assert served["slots"] == chosen["n_parallel"]
        room = chosen["n_parallel"] + LOOK_AHEAD
        assert wait_until(pool_size, "the pool") == room
        info = show_info(tmp_path, redis_server.url)
        assert re.search(rf"tuned +.*n_parallel {chosen['n_parallel']}\b", info)
        job = app.send_task(
            "cellama.generate", ["open", "Once upon a time"], {"max_tokens": 4}, queue="cellama:queue:open"
        )
        assert job.get(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
    finally:
        assert worker.stop() == 0, worker.log()


def show_info(folder: Path, redis_url: str) -> str:
    command = [*CELLAMA, "models", "info", "open"]
    variables = {**environment(folder), "CELLAMA_REDIS_URL": redis_url}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def served_by(worker: WorkerProcess) -> dict[str, Any]:
    return next(entry for entry in live_workers(worker.redis) if entry.pid == worker.process.pid).models[0]


def pool_size() -> int | None:
    """Return the pool size that the worker named `tuned` reports, or None if it does not reply."""
    answers = app.control.inspect(timeout=2.0).stats() or {}
    mine = next((stats for name, stats in answers.items() if name.startswith("tuned@")), None)
    return None if mine is None else int(mine["pool"]["max-concurrency"])


def test_tune_prints_a_line_per_configuration_and_a_table_when_stdout_is_not_a_terminal(tmp_path: Path) -> None:
    done = tune(tmp_path, "tiny", *SHORT, "--seconds", "30")  # time for two setups even on a busy machine
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^n_parallel \d+, kv_layout \w+, n_ubatch \d+, threads 1: \d+ tokens/s", done.stdout, re.M)
    assert len(lines) >= 2
    assert done.stdout.count("►") == 1
    assert "saved for " in done.stdout
    assert 'the settings of tiny have n_parallel = 16, threads = 1; set them to "auto"' in done.stdout


def test_tune_varies_only_threads_for_an_embedding_model(tmp_path: Path) -> None:
    path = tmp_path / "bert.gguf"
    write_model(path, BertShape(n_layer=1), file_type="F16")
    done = tune(tmp_path, str(path), "--seconds", "6")
    assert done.returncode == 0, done.stderr
    assert "only threads were tuned" in done.stdout
    assert re.search(r"best: threads \d+$", done.stdout, re.M)
    assert len(results(tmp_path)) == 1


def test_interrupted_tune_saves_nothing_and_prints_the_fastest_configuration(tmp_path: Path) -> None:
    argv = [*CELLAMA, "tune", "bundled://tiny", "--seconds", "60", "--threads", "1"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            argv,
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )
    try:
        wait_until(lambda: "tokens/s" in (tmp_path / "log").read_text(), "the first measurement")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
    said = (tmp_path / "log").read_text()
    assert "interrupted: no result was saved" in said
    assert re.search(r"fastest so far: n_parallel \d+", said)
    assert "Traceback" not in said
    assert results(tmp_path) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [(("nowhere.gguf",), "'nowhere.gguf' does not exist"), (("tiny", "--seconds", "0"), "--seconds")],
)
def test_tune_reports_the_reason_when_it_cannot_run(tmp_path: Path, argv: tuple[str, ...], message: str) -> None:
    done = tune(tmp_path, *argv)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert results(tmp_path) == []
