"""A worker measures only models without a result, and only while it is idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cellama.config import ModelSettings
from cellama.engine import EngineOptions
from cellama.engine.models import tuned_options
from cellama.tasks.worker import auto_tune
from cellama.tasks.worker.auto_tune import AutoTuner

FINGERPRINT = "f" * 64
MISSING = ModelSettings(id="missing", source="/missing.gguf")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto_tune, "IDLE_S", 0.0)


def run_once(caplog: pytest.LogCaptureFixture, options: EngineOptions, *, budget_s: float = 30.0, **state: Any) -> str:
    """Run one check of an otherwise idle worker with one model, and return its log."""
    given: dict[str, Any] = {"is_running": lambda: False, "is_waiting": lambda: False, "memory": lambda: "auto"}
    models = {"missing": (MISSING, options, FINGERPRINT)}
    caplog.set_level("INFO")
    AutoTuner(budget_s, models=lambda: models, **(given | state)).run_once()
    return caplog.text


@pytest.mark.parametrize("state", ["is_running", "is_waiting"])
def test_auto_tuner_does_nothing_while_a_job_runs_or_waits(caplog: pytest.LogCaptureFixture, state: str) -> None:
    assert run_once(caplog, EngineOptions(), **{state: lambda: True}) == ""


def test_auto_tuner_reports_why_a_model_was_not_tuned(caplog: pytest.LogCaptureFixture) -> None:
    text = run_once(caplog, EngineOptions())
    assert "tuning started" in text
    assert "model not tuned" in text
    assert "/missing.gguf" in text


def test_auto_tuner_skips_models_that_have_a_result_or_fixed_options(caplog: pytest.LogCaptureFixture) -> None:
    assert run_once(caplog, EngineOptions(n_parallel=4, threads=1)) == ""
    conditions = tuned_options.conditions(EngineOptions())
    tuned_options.store_result(FINGERPRINT, conditions, tuned_options.Setup(threads=1, n_parallel=2))
    assert run_once(caplog, EngineOptions()) == ""


def test_auto_tuner_waits_while_another_worker_measures(caplog: pytest.LogCaptureFixture) -> None:
    with auto_tune._alone_on_machine() as is_alone:
        assert is_alone
        assert run_once(caplog, EngineOptions()) == ""
