"""Hooks of middlewares: their order, their arguments, and their exceptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cellama.engine import InvalidRequest
from cellama.tasks.middleware import AttemptContext, Middleware, Middlewares, load_middleware

from .attempt_contexts import context, running


class Recorder(Middleware):
    """A middleware that records the calls of hooks around attempts."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def before_attempt(self, attempt: AttemptContext) -> None:
        self.calls.append(("before", attempt.job_id, attempt.end))

    def after_attempt(self, attempt: AttemptContext) -> None:
        self.calls.append(("after", attempt.job_id, attempt.end, attempt.result, attempt.error))


class Broken(Recorder):
    """A middleware that fails in each hook."""

    def after_attempt(self, attempt: AttemptContext) -> None:
        super().after_attempt(attempt)
        raise SystemExit(3)


def test_hooks_around_an_attempt_receive_its_result_or_error() -> None:
    recorder, error = Recorder(), ValueError("no")
    attempt = context("good")
    with running(recorder, attempt):
        attempt.result = {"text": "x"}
    with running(recorder, context("bad")):
        raise error
    assert recorder.calls == [
        ("before", "good", None),
        ("after", "good", "success", {"text": "x"}, None),
        ("before", "bad", None),
        ("after", "bad", "failure", None, error),
    ]


def test_failing_hook_is_logged_once_and_does_not_affect_the_job(caplog: pytest.LogCaptureFixture) -> None:
    broken, recorder = Broken(), Recorder()
    middlewares = Middlewares([broken, recorder])
    for _ in range(3):
        middlewares.call(Middleware.after_attempt, context())
    middlewares.close()
    assert len(broken.calls) == len(recorder.calls) == 3
    assert [record.message for record in caplog.records] == [
        "middleware hook failed (middleware=Broken, hook=after_attempt): "
        "it is still called, but further failures are not logged",
        "middleware hook failed (middleware=Broken, hook=after_attempt, num_failures=3)",
    ]


def test_only_overridden_hooks_are_called() -> None:
    middlewares = Middlewares([Recorder()])
    assert middlewares.have(Middleware.before_attempt)
    assert not middlewares.have(Middleware.on_step)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere:Hooks", "ModuleNotFoundError"),
        ("my_middleware:Nothing", "AttributeError"),
        ("my_middleware:Plain", "not a subclass"),
    ],
)
def test_invalid_import_path_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    (tmp_path / "my_middleware.py").write_text("class Plain:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidRequest, match=f"middleware.*'{path}'.*{problem}"):
        load_middleware(path)
