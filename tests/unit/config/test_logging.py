"""Log lines as text and as JSON: events with fields, and the ids of jobs and traces."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from cellama.config.logging import configure_logging, event_logger, log_context

log = event_logger("cellama.example")


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[Literal["text", "json"]], list[str]]]:
    """Return a function that logs four events in the given format and returns the lines."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in ("cellama", "celery")}

    def log_all(log_format: Literal["text", "json"]) -> list[str]:
        root.handlers = []  # configure_logging would close the handlers of pytest
        configure_logging("INFO", log_format)
        with log_context("j1", "abc"):
            log.info("job finished")
            log.info("job cancelled", job="j1", after_s=1.5, detail="the client disconnected")
        log.debug("not logged at this level")
        log.warning("lease expired", worker="w 1", jobs=["a"], error=OSError("timed out"), level_of="x")
        try:
            raise ValueError("no")
        except ValueError:
            log.exception("job failed")
        return capsys.readouterr().err.splitlines()

    yield log_all
    root.handlers = handlers
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)


def test_text_log_lines_contain_fields_detail_and_context_ids(logged: Callable[[str], list[str]]) -> None:
    first, second, third, fourth, *trace = logged("text")
    assert first.endswith("INFO    cellama.example: job finished [job j1] [trace abc]")
    assert second.endswith(": job cancelled (job=j1, after_s=1.5): the client disconnected [trace abc]")
    assert third.endswith(": lease expired (worker='w 1', jobs=['a'], error=OSError('timed out'), level_of=x)")
    assert fourth.endswith("ERROR   cellama.example: job failed")
    assert trace[-1] == "ValueError: no"


def test_json_log_lines_have_event_fields_and_ids_as_keys(logged: Callable[[str], list[str]]) -> None:
    first, second, third, fourth = map(json.loads, logged("json"))
    assert first.pop("time").endswith("+00:00")
    common = {"level": "INFO", "logger": "cellama.example"}
    ids = {"job_id": "j1", "trace_id": "abc"}
    assert first == {**common, **ids, "event": "job finished", "message": "job finished"}
    assert second["event"] == "job cancelled"
    assert (second["after_s"], second["detail"]) == (1.5, "the client disconnected")
    assert (third["worker"], third["jobs"], third["error"]) == ("w 1", ["a"], "OSError('timed out')")
    assert (fourth["event"], "job_id" in fourth) == ("job failed", False)
    assert fourth["error"].endswith("ValueError: no")
