"""Lines of logs: as text or JSON, with the ids of what they are about."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from cellama.config.logging import configure_logging, logging_about

log = logging.getLogger("cellama.of_a_test")


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], list[str]]]:
    """What is logged after this is called with a format."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in ("cellama", "celery")}

    def configured(form: str) -> list[str]:
        root.handlers = []  # pytest's are not to be closed
        configure_logging("INFO", form)
        with logging_about("j1", "abc"):
            log.info("done")
            log.info("job %s is done", "j1")
        try:
            raise ValueError("no")
        except ValueError:
            log.exception("wrong")
        return capsys.readouterr().err.splitlines()

    yield configured
    root.handlers = before
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)


def test_text_has_ids_that_the_message_has_not(lines: Callable[[str], list[str]]) -> None:
    first, second, third, *trace = lines("text")
    assert first.endswith("cellama.of_a_test: done [job j1] [trace abc]")
    assert second.endswith("job j1 is done [trace abc]")
    assert third.endswith("wrong")
    assert trace[-1] == "ValueError: no"


def test_json_has_a_line_per_event(lines: Callable[[str], list[str]]) -> None:
    first, _, third = map(json.loads, lines("json"))
    assert first.pop("time").endswith("+00:00")
    known = {"level": "INFO", "logger": "cellama.of_a_test", "message": "done"}
    assert first == {**known, "job_id": "j1", "trace_id": "abc"}
    assert (third["message"], "job_id" in third) == ("wrong", False)
    assert third["error"].endswith("ValueError: no")
