"""Nothing is lost, torn or done twice whatever dies: the chaos benchmark, short, with the same checks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cellama.bench.harness import pace

from ..conftest import clean_environment

JOBS = 40
LEAST_STEP_S = "0.01"  # 40 jobs of 200 tokens take five seconds at least: longer than any period
TIMEOUT_S = 400.0
CHECKED = ("results", "stored twice", "torn", "read torn", "texts off", "unacked", "untimely")


def chaos(scenario: str, *options: str) -> dict[str, Any]:
    """The one row of a scenario."""
    command = [sys.executable, "-m", "cellama.bench", "chaos", "--scenarios", scenario, "--jobs", str(JOBS)]
    environment = clean_environment(**{pace.LEAST_S: LEAST_STEP_S})
    done = subprocess.run([*command, *options], capture_output=True, timeout=TIMEOUT_S, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    row: dict[str, Any] = report["rows"][0]
    return row


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
    row = chaos(scenario, *options)
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
