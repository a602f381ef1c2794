"""The one table of error codes against every place that has codes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellama.engine
from cellama.engine.errors import EngineError
from cellama.tasks.contract import errors
from cellama.tasks.contract.codes import CODES, http_status_of
from cellama.tasks.contract.errors import JobError, JobFailed

ROOT = Path(__file__).parents[4]
JOB_ERRORS = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, JobError)]
ENGINE_ERRORS = [
    c
    for c in vars(cellama.engine).values()
    if inspect.isclass(c) and issubclass(c, EngineError) and c is not EngineError
]


@pytest.mark.parametrize("kind", ENGINE_ERRORS, ids=lambda kind: kind.__name__)
def test_errors_of_the_engine_are_as_the_table_says(kind: type[EngineError]) -> None:
    row = CODES[kind.code]
    assert (row.retryable, row.http_status) == (kind.retryable, kind.http_status)


@pytest.mark.parametrize("kind", JOB_ERRORS, ids=lambda kind: kind.__name__)
def test_errors_of_jobs_are_as_the_table_says(kind: type[JobError]) -> None:
    if kind not in (JobError, JobFailed):
        assert CODES[kind.code].retryable == kind.retryable


def written_codes() -> Iterator[str]:
    """The codes in calls of `JobFailed("…")` and `error("…")`, wherever they are."""
    for folder in ("api", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                    continue
                if ast.unparse(node.func) in ("JobFailed", "error", "events.error"):
                    yield str(node.args[0].value)


def test_codes_that_are_written_out_are_in_the_table() -> None:
    found = set(written_codes())
    assert {"model_changed", "refused", "result_lost"} <= found
    assert found <= CODES.keys(), found - CODES.keys()


def test_http_status_of_an_unknown_code_is_500() -> None:
    assert http_status_of(JobFailed("timeout", "")) == 504
    assert http_status_of(JobFailed("something new", "")) == 500
