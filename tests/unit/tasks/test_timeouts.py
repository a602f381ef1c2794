"""Timeouts of jobs: their own, or the default of the settings, which does not apply to bulk jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cellama.tasks import app, generate
from cellama.tasks.calls.enqueue import timeout_of

CASES = [
    ({}, 3, 50.0),
    ({}, 5, 50.0),
    ({}, 6, None),
    ({"timeout": None}, 3, None),
    ({"timeout": 7}, 9, 7.0),
    ({"timeout": 0.5}, 0, 0.5),
]


@pytest.mark.parametrize(("kwargs", "priority", "expected"), CASES)
def test_timeout_comes_from_the_job_or_the_settings_except_for_bulk_jobs(
    settings_environment: Callable[..., None], kwargs: dict[str, Any], priority: int, expected: float | None
) -> None:
    settings_environment(default_timeout_s="50")
    assert timeout_of(kwargs, priority) == expected
    settings_environment(default_timeout_s="0")
    assert timeout_of({}, priority) is None


@pytest.mark.parametrize(("kwargs", "priority", "expected"), CASES)
def test_running_job_keeps_the_timeout_that_was_set_when_it_was_queued(
    settings_environment: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    kwargs: dict[str, Any],
    priority: int,
    expected: float | None,
) -> None:
    settings_environment(default_timeout_s="50")
    seen: list[Any] = []
    monkeypatch.setattr(app, "runtime", object())
    monkeypatch.setattr(app, "attempt", lambda task, streams, payload: seen.append(payload()), raising=False)
    generate.push_request(delivery_info={"priority": priority}, called_directly=False)
    try:
        generate.run("tiny", "Hi", **kwargs)
    finally:
        generate.pop_request()
    assert [(job.timeout, job.priority) for job in seen] == [(expected, priority)]
