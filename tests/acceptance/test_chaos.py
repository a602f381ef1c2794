"""Nothing is lost, torn or done twice whatever dies: the chaos benchmark, short, with the same checks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ..conftest import clean_environment

JOBS = 40
TIMEOUT_S = 400.0


def chaos(scenario: str, *options: str) -> dict[str, Any]:
    """The one row of a scenario."""
    command = [sys.executable, "-m", "cellama.bench", "chaos", "--scenarios", scenario, "--jobs", str(JOBS)]
    done = subprocess.run(
        [*command, *options], capture_output=True, timeout=TIMEOUT_S, text=True, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    row: dict[str, Any] = report["rows"][0]
    return row


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("kills", ("--new", "400", "--kills", "3", "--period", "1.5")),
        ("outages", ("--new", "400", "--outages", "4", "--period", "1")),
        ("freeze", ("--new", "200", "--period", "1")),
        ("poison", ("--new", "100")),
    ],
)
def test_every_job_ends_once_with_the_text_of_an_undisturbed_run(scenario: str, options: tuple[str, ...]) -> None:
    row = chaos(scenario, *options)
    assert row["troubles"] >= 1
    assert {name: row[name] for name in ("results", "stored twice", "torn", "texts off", "unacked")} == {
        "results": JOBS,
        "stored twice": 0,
        "torn": 0,
        "texts off": 0,
        "unacked": "0",
    }
    if scenario == "outages":
        assert row["alive"] == "2/2"
    if scenario == "poison":
        assert row["poison"] == "dead after 3 attempts"
