"""Run a short form of the fuzz benchmark with the whole corpus: a bad payload must affect only its own job."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ..conftest import clean_environment

TIMEOUT_S = 400.0
# A generous limit: a hang lasts forever, and a slow machine must not look like one.
OPTIONS = ("--payloads", "95", "--forms", "95", "--warm-up", "0", "--in-flight-corpus", "4", "--limit", "90")


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_fuzz_payloads_fail_without_changing_the_output_of_other_jobs() -> None:
    command = [sys.executable, "-m", "cellama.bench", "fuzz", *OPTIONS]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, text=True, env=clean_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    found = {name: value for name, value in report["ratios"].items() if report["targets"][name] == "0"}
    assert found == dict.fromkeys(found, 0), report["caveats"]
    assert [row["payloads"] + row["unsendable"] > 90 for row in report["rows"]] == [True] * 3
    assert all(row["good"] for row in report["rows"])
