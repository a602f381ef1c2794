"""Test the progress and the summary of a bulk run, which must not report success when lines failed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cellama.api.batch.options import Progress, Summary
from cellama.api.cli.batch_progress import showing, summarise


def summary_of(progress: Progress, capsys: pytest.CaptureFixture[str], state: str = "completed") -> list[str]:
    progress.started_at = time.monotonic() - 0.2
    summarise(Summary("r", state, progress, Path("[x].errors.jsonl")), json=False, to_stdout=False)
    return capsys.readouterr().err.splitlines()


def test_summary_shows_rates_when_the_run_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    done, rates, tokens = summary_of(Progress(total=2, finished=2, prompt_tokens=9, completion_tokens=200), capsys)
    assert done == "completed: 2 lines done, 0 failed"
    seconds, lines, rate = rates.split(" · ")
    assert seconds == "0.2 s" or float(lines.split()[0]) < 10
    assert float(lines.split()[0]) <= 10
    assert 500 < float(rate.split()[0]) <= 1000
    assert tokens == "tokens: 9 in prompts, 200 generated"


def test_summary_omits_the_token_rate_when_nothing_was_generated(capsys: pytest.CaptureFixture[str]) -> None:
    done, rates, tokens = summary_of(Progress(total=1, finished=1, prompt_tokens=9, cached_tokens=2), capsys)
    assert done == "completed: 1 line done, 0 failed"
    assert "tok/s" not in rates
    assert tokens == "tokens: 9 in prompts (2 cached)"


@pytest.mark.parametrize(
    ("counts", "state", "line"),
    [
        ({"finished": 9, "already": 9}, "completed", "already completed: 9 lines done, 0 failed"),
        (
            {"finished": 9, "already": 4, "finished_before": 4},
            "completed",
            "completed: 9 lines done (4 of them earlier), 0 failed",
        ),
        ({"finished": 1, "failed": 1, "already": 1}, "completed", "completed: 1 line done, 1 failed"),
        ({"failed": 2}, "completed", "failed: all 2 lines failed"),
        ({"failed": 2, "already": 2}, "completed", "already completed: 0 lines done, 2 failed"),
        ({"finished": 1}, "cancelled", "cancelled: 1 line done, 0 failed"),
    ],
)
def test_summary_starts_with_the_outcome_of_all_lines(
    counts: dict[str, Any], state: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = summary_of(Progress(total=9, **counts), capsys, state)
    assert lines[0] == line
    failed = counts.get("failed")
    assert (lines[-1] == "errors of failed lines: [x].errors.jsonl") == bool(failed)


def test_progress_log_is_empty_until_the_first_notice(capsys: pytest.CaptureFixture[str]) -> None:
    with showing(json=False, to_stdout=False) as show:
        show.progress(Progress(total=2))
        assert capsys.readouterr().err == ""
        for _ in range(3):
            show.progress(Progress(total=2, notice="Redis does not answer"))
        assert capsys.readouterr().err == "0 of 2 lines, Redis does not answer\n"
