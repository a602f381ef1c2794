"""Run small versions of the benchmarks with the bundled model. Their figures are not meaningful."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cellama.engine.bundled import TINY_PATH

from ..conftest import clean_environment

SMALL = {  # except `clients`, which tests/integration/gateway/test_structured_clients.py covers
    "prefix_cache": "--conversations 3 --slots 2 --turns 2 --system 64 --message 16 --new 4 --think 0.05",
    "strategies": "--requests 6 --slots 3 --scale 0.1",
    "tokenize_overhead": "--prompt 30 --repeats 3 --callers 1 3 --slots 2 --rounds 1",
    "single_generate": "--prompts 16 64 --new 4 --samples 1",
    "server_concurrent": "--callers 1 4 --slots 2 --prompt 16 --new 4",
    "speculation": "--streams 1 --rounds 1 --new 8",
    "structured": "--slots 2 --new 8 --rounds 1 --vocabulary 2000 --masks 200 --schemas 4 --threads 1",
    "footprint": "--cases 2 --shapes 0",
    "host_work": "--slots 2 --new 4 --stream 8 --rounds 1",
    "decode": "--slots 2 --prompt 16 --new 8 --rounds 1",
    "mixed": "--requests 9 --chats 1 --turns 3 --scale 0.2 --slots 3 --server-slots 2 --arrivals 12 --rates 8 "
    "--threads 1",
    "enqueue": "--jobs 50 --threads 2 --rounds 1",
    "small_jobs": "--jobs 20 --rounds 1 --slots 2",
    "embeddings": "--lengths 8 32 --tokens 256 --rounds 1 --threads 1",
    "urgent": "--slots 2 --bulk 10 --prompt 32 --new 400 --samples 1 --pause 0.1 --threads 1",
    "positions": "--jobs 24 --burst 12 --left 2 --slots 2 --new 4 16 --prompt 16 --pace 0.1",
    "gateway": "--streams 20 --beside 4 --new 8 --slots 8 --rounds 1 --threads 1 --pace 0",
    "overload": "--levels 1 --seconds 1 --capacity 8 --slots 2 --server-slots 2 --threads 1 --max-wait 10",
    "kept_states": "--samples 2 --prompt 400 --conversations 6 --in-ram 2 --opening 96 --turns 2 --rate 20 --states 2 "
    "--seconds 0.05 --requests 4 --rounds 1",
    "storm": "--lines 60 --new 24 --tenants 2 --command-kills 1 --worker-kills 1",
    "offline": "--ours batch engine jobs --lines 12 --prompt 24 --shared-prompt 60 --shared 40 --families 3 --new 6 "
    "--slots 4 --server-slots 2 4 --try-lines 6 --threads 1",
}
NONE = {  # figures that are 0 on any machine
    "storm": "lines lost, doubled or other",
}
TIMEOUT_S = 900.0  # per benchmark, because the machine may be busy


COMMAND = [sys.executable, "-c", "from cellama.api.cli import main; main()", "bench"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=clean_environment())


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("name", SMALL)
def test_benchmark_prints_a_table_and_one_json_line(name: str) -> None:
    done = bench(name, "--model", str(TINY_PATH), *SMALL[name].split())
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert report["bench"] == name
    assert report["rows"]
    assert {"machine", "commit", "ratios", "caveats"} <= report.keys()
    if name == "footprint":
        assert (
            0.9 <= report["ratios"]["planned over logged, min"] <= report["ratios"]["planned over logged, max"] <= 1.1
        )
    if name == "offline":
        assert {row["lines"] for row in report["rows"]} == {12}
    if name == "mixed":
        assert Counter(row["part"] for row in report["rows"]) == {"at once": 3, "alone": 1, "beside bulk": 1}
        assert {row["requests"] for row in report["rows"] if row["part"] != "at once"} == {12}
    if name == "urgent":
        assert report["ratios"]["bulk finished"] == 1
        assert {"busy over idle", "busy over idle, p95", "bulk rate kept"} <= report["ratios"].keys()
    if name == "embeddings":
        ours = {"engine", "jobs", "file to file, JSONL", "file to file, Parquet"}
        assert ours <= {row["who"] for row in report["rows"]}
        assert all(row["cosine"] > 0.999 for row in report["rows"])
    if name == "storm":
        assert [row["errors"] for row in report["rows"]] == [0, 0]
    if name == "kept_states":
        tiers = [row["tier"] for row in report["rows"] if "first token" in row]
        assert tiers[:2] == ["none", "ram"]
        assert len(report["rows"]) == 5 + 2 + 1 + 2
    if name == "overload":
        assert {row["tier"] for row in report["rows"]} == {"priority", "default", "flex"}
        assert report["ratios"]["1 x: flex requests complete"] == 1
    if name == "gateway":
        assert {row["wrong"] for row in report["rows"]} == {0}
    if name in NONE:
        assert report["ratios"][NONE[name]] == 0


def test_bench_all_runs_short_benchmarks_and_reports_each_exit_code() -> None:
    done = bench("all", "--short", "--only", "tokenize_overhead", "single_generate", "--model", str(TINY_PATH))
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["bench"] for report in reports] == ["tokenize_overhead", "single_generate"]
    assert len(re.findall(r"^(?:tokenize_overhead|single_generate) +ok +\d", done.stdout, re.MULTILINE)) == 2


def test_bench_all_fails_when_a_benchmark_fails() -> None:
    done = bench("all", "--short", "--only", "tokenize_overhead", "--model", "no-such.gguf")
    assert done.returncode == 1
    assert re.search(r"^tokenize_overhead +failed with 2", done.stdout, re.MULTILINE)


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_benchmark_deletes_its_files_when_it_is_terminated(tmp_path: Path) -> None:
    command = [*COMMAND, "urgent", "--model", str(TINY_PATH), *SMALL["urgent"].split()]
    process = subprocess.Popen(
        [*command, "--pause", "600"], stdout=subprocess.DEVNULL, env=clean_environment(TMPDIR=str(tmp_path))
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not any(log.stat().st_size for log in tmp_path.glob("*/worker0.log")):  # it has begun
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()


def test_bench_lists_benchmarks_and_rejects_unknown_names() -> None:
    listed = bench()
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in SMALL)
    unknown = bench("prefix_cash")
    assert unknown.returncode == 2
    assert "invalid choice: 'prefix_cash'" in unknown.stderr
