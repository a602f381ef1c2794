"""Test the output of `cellama status`, and the timeout and position of a job that a command follows."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from cellama.api.cli import following
from cellama.api.cli.following import SilenceTimeout
from cellama.api.cli.status import render_status
from cellama.api.client.registry_views import COUNTED
from cellama.tasks.contract.errors import JobTimeout
from cellama.tasks.estimates.position import Position

ENGINE = {
    "slots_prefilling": 4, "slots_decoding": 252, "slots_total": 256, "requests_waiting": 12345,
    "generation_rate": 12345.6, "kv_used_tokens": 9, "kv_total_tokens": 9, "cache_hits": 123456, "cache_misses": 7,
    "requests_finished": 1234567,
}  # fmt: skip
NO_PARTS = {"engine": None, "embedder": None, "reranker": None}
READER = {"requests_waiting": 4321, "prompt_rate": 98765.4, "requests_finished": 7654321}
TOTALS = {"phase": "generating", **dict.fromkeys(COUNTED, 1234)}


def shown(models: list[dict[str, Any]], width: int = 80, **queues: Any) -> str:
    worker = {"name": "cellama-0a1b@a-rather-long-name-of-a-machine", "pid": 4123456, "models": models}
    live = [{**worker, "pool": "default", "wanted": []}]
    console = Console(width=width, record=True)
    status = {
        "live": live,
        "queues": {},
        "waiting": {},
        "classes": {},
        "unserved": [],
        "totals": TOTALS,
        "age_s": 1.234,
    }
    console.print(render_status({**status, **queues}))
    return console.export_text()


def test_status_shows_threads_only_for_ready_models() -> None:
    ready = {"id": "reader", "default": True, "threads": 7, **NO_PARTS}
    loading = {"id": "writer", "default": False, **NO_PARTS}
    lines = [line.split() for line in shown([ready, loading]).splitlines() if line.strip()]
    assert lines[1][-1] == "threads"
    assert [line[-1] for line in lines if line[0] in ("reader", "writer")] == ["7", "-"]


def test_status_fits_into_80_columns() -> None:
    model = {"id": "a-model-with-a-long-id", "default": True, "threads": 128, **NO_PARTS, "engine": ENGINE}
    text = shown([model])
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for part in ("(default)", "256/256", "12345", "12346", "100 %", "1234567", "128", "machine pid 4123456"):
        assert part in text


def test_status_shows_counts_for_a_model_that_only_embeds() -> None:
    model = {"id": "reader", "default": True, "threads": 2, **NO_PARTS, "embedder": READER, "reranker": READER}
    row = next(line.split() for line in shown([model]).splitlines() if line.split()[:1] == ["reader"])
    assert row == ["reader", "(default)", "-", "8642", "197531", "-", "-", "15308642", "2"]


def test_status_shows_totals_with_their_age() -> None:
    text = " ".join(shown([]).split())
    for part in (
        "all models, 1.2 s ago: generating",
        "1234 requests running",
        "1234 from RAM",
        "1234 saved, 1234 evicted",
    ):
        assert part in text


def test_status_shows_the_estimated_wait_of_a_new_job_by_class() -> None:
    queues = {"deep": 90_000, "new": 3}
    waits = {"deep": (0.0, 28.71), "new": (None, None)}
    classes = {
        model: {"interactive": {"eta_s": interactive}, "bulk": {"eta_s": bulk}}
        for model, (interactive, bulk) in waits.items()
    }
    text = " ".join(shown([], waiting=queues, queues=queues, classes=classes).split())
    assert "waiting jobs: deep 90000 (new job: interactive ~0.0 s, bulk ~28.7 s), new 3" in text


class Clock:
    """A clock that tests advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(following.time, "monotonic", lambda: self.now)


def test_silence_timeout_starts_when_the_job_gets_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, patience = Clock(monkeypatch), SilenceTimeout("j", 60.0)
    for clock.now in (50.0, 500.0):  # the time in the queue does not count …
        patience.describe(Position("j", "waiting", 8, 65.0))
    clock.now = 555.0
    patience.describe(Position("j", "running"))
    clock.now = 561.0  # … but once the job has a slot, it must produce output
    with pytest.raises(
        JobTimeout, match=r"job j produced no output for 60 s, and it is still running; .*`cellama jobs follow j`"
    ):
        patience.describe(Position("j", "running"))


def test_silence_timeout_includes_unserved_time_unless_unserved_jobs_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, patience = Clock(monkeypatch), SilenceTimeout("j", 60.0)
    patient = SilenceTimeout("j", 60.0, allow_unserved=True)
    clock.now = 61.0
    assert "no worker serves its model" in patient.describe(Position("j", "waiting", 0, None, served=False))
    with pytest.raises(JobTimeout, match="no worker serves its model"):
        patience.describe(Position("j", "waiting", 0, None, served=False))


def test_estimate_of_a_waiting_job_counts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, patience = Clock(monkeypatch), SilenceTimeout("j", 60.0)
    estimates = []
    for clock.now, ahead, eta_s in ((0.0, 8, 65.0), (10.0, 8, 65.0), (70.0, 8, 65.0), (71.0, 7, 58.0)):
        estimates.append(patience.describe(Position("j", "waiting", ahead, eta_s)).partition("ahead, ")[2])
    assert estimates == ["about 65 s", "about 55 s", "soon", "about 58 s"]


def test_status_shows_the_size_of_a_shared_cache_directory_once() -> None:
    model = {"id": "m", "default": False, "embedder": None, "reranker": None}
    used = [{**ENGINE, "disk_used_bytes": gib << 30, "disk_quota_bytes": 8 << 30} for gib in (1, 2)]
    text = shown([{**model, "engine": engine} for engine in (*used, {**ENGINE, "disk_quota_bytes": 0}, ENGINE)])
    assert [line.strip() for line in text.splitlines() if "KV states on disk" in line] == [
        "KV states on disk: 2.0 GiB of 8.0 GiB"
    ]
