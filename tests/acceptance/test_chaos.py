"""Run a short form of the chaos benchmark, which fails if work is lost, incomplete or done twice."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cellama.bench.harness import pace

from ..conftest import clean_environment

JOBS = 40
LEAST_STEP_S = "0.01"  # makes 40 jobs of 200 tokens take at least 5 s, longer than any period
TIMEOUT_S = 400.0
SCENARIOS = ("kills", "outages", "freezes", "clocks", "rollbacks", "poison")
RIGHT = {"results": JOBS, "stored twice": 0, "torn": 0, "read torn": 0, "texts off": 0, "unacked": "0", "untimely": ""}


def chaos(*scenarios: str, options: tuple[str, ...], jobs: int = JOBS) -> list[dict[str, Any]]:
    """Run these scenarios, check that they report no error, and return their rows."""
    command = [sys.executable, "-m", "cellama.bench", "chaos", "--scenarios", *scenarios, "--jobs", str(jobs), *options]
    environment = clean_environment(**{pace.LEAST_S: LEAST_STEP_S})
    done = subprocess.run(command, capture_output=True, timeout=2 * TIMEOUT_S, text=True, env=environment)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert reports, done.stderr[-3000:]
    assert not reports[0].get("wrong"), done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = reports[0]["rows"]
    return rows


@pytest.mark.timeout(2 * TIMEOUT_S + 30)
def test_jobs_finish_once_under_chaos_with_the_same_text_as_an_undisturbed_run() -> None:
    """No job starts a second attempt only because Redis was unreachable.

    The benchmark's lease is longer than a busy machine delays a thread, so the counts don't depend on the machine."""
    numbers = ("--kills", "3", "--outages", "4", "--freezes", "2", "--rollbacks", "2")
    found = chaos(*SCENARIOS, options=("--new", "200", "--period", "1.5", *numbers))
    rows = {row["scenario"]: row for row in found}
    assert list(rows) == list(SCENARIOS)
    for row in rows.values():
        assert row["troubles"] >= 1, row
        assert {name: row[name] for name in RIGHT} == RIGHT, row
    outages = rows["outages"]
    assert (outages["alive"], outages["attempts"]) == ("2/2", JOBS)
    assert rows["poison"]["poison"] == "dead after 3 attempts"


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_canvas_steps_run_and_chords_complete_when_workers_are_killed() -> None:
    options = ("--new", "100", "--kills", "3", "--period", "1.5", "--canvases", "1", "--chord", "50")
    (row,) = chaos("canvas", options=options)
    assert (row["kills"], row["steps lost"]) == (3, 0)
    assert row["bodies once"] == row["chords"] == 2


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_canvas_step_runs_when_the_worker_is_killed_after_the_previous_job() -> None:
    """Check the points between two steps. Steps may run twice if the worker was killed after it had sent them."""
    row, *points = chaos("ends", options=("--new", "16", "--ends", "8", "--chord", "6"))
    assert row["kills"] == sum(point["kills"] for point in points) == 8
    assert (row["steps lost"], row["ended once"], row["stored"]) == (0, row["jobs"], row["jobs"])
    assert row["bodies once"] == row["chords"] > 0


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_jobs_whose_journals_are_lost_end_once_and_other_jobs_resume() -> None:
    (row,) = chaos("expired", options=("--new", "100", "--ways", "killed"), jobs=24)
    assert 0 < row["trimmed"] <= row["expired"] < row["begun"]
    assert (row["ended once"], row["stored"], row["reruns"]) == (row["jobs"], row["jobs"], 0)


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_workers_keep_running_while_redis_loads_its_data() -> None:
    """Check one refusal. tests/integration/test_refusing_servers.py checks the others."""
    rows = chaos("refusals", options=("--new", "100", "--refused", "1.5", "--refusals", "LOADING"), jobs=24)
    assert [(row["refusal"], row["workers"]) for row in rows] == [("LOADING", "idle"), ("LOADING", "busy")]
    for row in rows:
        assert row["refused"] > 0
        assert (row["running"] > 0) == (row["workers"] == "busy")
        assert (row["alive"], row["attempts"], row["results"]) == ("2/2", row["jobs"], row["jobs"])
