"""Nothing is lost, torn or done twice whatever dies: the chaos benchmark, short, with the same checks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cellama.bench.benchmarks.faults.refusals import REFUSALS
from cellama.bench.harness import pace

from ..conftest import clean_environment

JOBS = 40
LEAST_STEP_S = "0.01"  # 40 jobs of 200 tokens take five seconds at least: longer than any period
TIMEOUT_S = 400.0
CHECKED = ("results", "stored twice", "torn", "read torn", "texts off", "unacked", "untimely")


def chaos(scenario: str, *options: str, jobs: int = JOBS) -> list[dict[str, Any]]:
    """Return the rows of a scenario, in which nothing was wrong."""
    command = [sys.executable, "-m", "cellama.bench", "chaos", "--scenarios", scenario, "--jobs", str(jobs)]
    environment = clean_environment(**{pace.LEAST_S: LEAST_STEP_S})
    done = subprocess.run([*command, *options], capture_output=True, timeout=TIMEOUT_S, text=True, env=environment)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert reports, done.stderr[-3000:]
    assert not reports[0].get("wrong"), done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = reports[0]["rows"]
    return rows


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("kills", ("--new", "200", "--kills", "3", "--period", "1.5")),
        ("outages", ("--new", "200", "--outages", "4", "--period", "1")),
        ("freezes", ("--new", "200", "--freezes", "2", "--period", "2")),
        ("clocks", ("--new", "200")),
        ("rollbacks", ("--new", "200", "--rollbacks", "2", "--period", "1.5")),
        ("poison", ("--new", "100")),
    ],
)
def test_every_job_ends_once_with_the_text_of_an_undisturbed_run(scenario: str, options: tuple[str, ...]) -> None:
    """No job begins a second time merely because Redis was away: the benchmark's lease is then longer than a busy
    machine keeps a thread waiting, so what is counted depends on the rules, and not on the machine."""
    (row,) = chaos(scenario, *options)
    assert row["troubles"] >= 1
    assert {name: row[name] for name in CHECKED} == {
        "results": JOBS,
        "stored twice": 0,
        "torn": 0,
        "read torn": 0,
        "texts off": 0,
        "unacked": "0",
        "untimely": "",
    }
    if scenario == "outages":
        assert (row["alive"], row["attempts"]) == ("2/2", JOBS)
    if scenario == "poison":
        assert row["poison"] == "dead after 3 attempts"


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_every_next_step_runs_and_every_chord_completes_when_workers_are_killed() -> None:
    options = ("--new", "100", "--kills", "3", "--period", "1.5", "--canvases", "1", "--chord", "50")
    (row,) = chaos("canvas", *options)
    assert (row["kills"], row["steps lost"]) == (3, 0)
    assert row["bodies once"] == row["chords"] == 2


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_no_next_step_is_lost_when_a_worker_dies_after_the_end_of_its_job() -> None:
    """A step may run twice if the worker died after it had sent the step: the benchmark counts these."""
    row, *points = chaos("ends", "--new", "16", "--ends", "8", "--chord", "6")
    assert row["kills"] == sum(point["kills"] for point in points) == 8
    assert (row["steps lost"], row["ended once"], row["stored"]) == (0, row["jobs"], row["jobs"])
    assert row["bodies once"] == row["chords"] > 0


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_jobs_whose_journals_are_lost_end_once_and_the_others_resume() -> None:
    (row,) = chaos("expired", "--new", "100", "--ways", "killed", jobs=24)
    assert 0 < row["trimmed"] <= row["expired"] < row["begun"]
    assert (row["ended once"], row["stored"], row["reruns"]) == (row["jobs"], row["jobs"], 0)


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("refusals", [REFUSALS[:4], REFUSALS[4:]])
def test_workers_wait_while_redis_refuses_and_keep_their_processes(refusals: tuple[str, ...]) -> None:
    rows = chaos("refusals", "--new", "100", "--refused", "1.5", "--refusals", *refusals, jobs=24)
    assert [(row["refusal"], row["workers"]) for row in rows] == [
        (refusal, workers) for refusal in refusals for workers in ("idle", "busy")
    ]
    for row in rows:
        assert row["refused"] > 0
        assert (row["running"] > 0) == (row["workers"] == "busy")
        assert (row["alive"], row["attempts"], row["results"]) == ("2/2", row["jobs"], row["jobs"])
