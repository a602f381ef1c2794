"""The table of error codes, compared to all places that use codes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellama.api
import cellama.engine
import cellama.tasks
from cellama.api.cli.commands import EPILOGUE
from cellama.engine.errors import EngineError
from cellama.tasks.contract import errors, events
from cellama.tasks.contract.codes import CODES, EXITS, Code, Exit
from cellama.tasks.contract.errors import JobError, JobFailed

ROOT = Path(__file__).parents[4]
JOB_ERRORS = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, JobError)]
ENGINE_ERRORS = [
    c
    for c in vars(cellama.engine).values()
    if inspect.isclass(c) and issubclass(c, EngineError) and c is not EngineError
]


@pytest.mark.parametrize("kind", [*ENGINE_ERRORS, *JOB_ERRORS], ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_error_code_is_in_the_table(kind: type[EngineError | JobError]) -> None:
    assert kind.code in CODES


@pytest.mark.parametrize("row", CODES.values(), ids=lambda row: row.code)
def test_job_error_has_the_properties_of_its_code(row: Code) -> None:
    error = JobFailed(row.code, "")
    assert (error.retryable, error.http_status, error.exit_code) == (row.retryable, row.http_status, row.exit_code)
    assert events.error(row.code, "")["retryable"] == row.retryable


def test_job_failed_has_the_given_retryable_flag() -> None:
    assert JobFailed("decode_failed", "", retryable=False).retryable is False
    assert JobFailed("something new", "", retryable=True).retryable is True


def written_codes() -> Iterator[str]:
    """Yield the codes in calls of `JobFailed("…")` and `error("…")` in the code of cellama."""
    for folder in ("api", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                    continue
                if ast.unparse(node.func) in ("JobFailed", "error", "events.error"):
                    yield str(node.args[0].value)


def test_error_codes_in_calls_are_in_the_table() -> None:
    found = set(written_codes())
    assert {"model_changed", "refused", "stream_trimmed"} <= found
    assert found <= CODES.keys(), found - CODES.keys()


def test_unknown_code_has_http_status_500() -> None:
    error = JobFailed("something new", "")
    assert (error.http_status, error.exit_code, error.retryable) == (500, Exit.FAILED, False)


def test_codes_with_http_status_400_have_the_exit_code_for_wrong_usage() -> None:
    assert all(row.exit_code is Exit.USAGE for row in CODES.values() if row.http_status == 400)


def test_errors_are_exported_by_cellama_tasks_and_api() -> None:
    for package in (cellama.api, cellama.tasks):
        assert {kind.__name__ for kind in JOB_ERRORS} <= set(package.__all__)
        assert all(getattr(package, name) is not None for name in package.__all__)


def test_help_of_commands_lists_all_exit_codes() -> None:
    assert EXITS.keys() == set(Exit) - {Exit.CONFIG}
    assert all(f"{code:d} {meaning}" in EPILOGUE for code, meaning in EXITS.items())
