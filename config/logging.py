"""How worker processes log: one line per event, to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime

JSON_LINES = "cellama.telemetry"  # a logger that says nothing but lines of JSON
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_about: ContextVar[tuple[str, str]] = ContextVar("cellama_logged_about", default=("", ""))


@contextlib.contextmanager
def logging_about(job_id: str, trace_id: str = "") -> Iterator[None]:
    """Lines that this thread, or task, logs in here have the id of a job and of a trace; an empty one is left out."""
    token = _about.set((job_id, trace_id))
    try:
        yield
    finally:
        _about.reset(token)


class _TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """Ids that the message has already are not told twice."""
        job_id, trace_id = _about.get()
        told = super().formatMessage(record)
        if job_id and job_id not in told:
            told += f" [job {job_id}]"
        return f"{told} [trace {trace_id}]" if trace_id else told


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        job_id, trace_id = _about.get()
        line |= {name: value for name, value in (("job_id", job_id), ("trace_id", trace_id)) if value}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str, form: str = "text") -> None:
    """Sends all logs of this process to stderr at `level`, as text or json; libraries speak from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if form == "json" else _TextLines(FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("cellama", "celery"):
        logging.getLogger(name).setLevel(level)


def json_lines() -> logging.Logger:
    """The logger for lines of JSON, whatever the level of others; to stderr, unless it was given handlers before."""
    lines = logging.getLogger(JSON_LINES)
    lines.setLevel(logging.INFO)
    lines.propagate = False
    if not lines.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        lines.addHandler(handler)
    return lines
