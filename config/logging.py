"""Write structured logs to stderr.

Each event has a constant text and named fields, and is written as one line of text or JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

TELEMETRY_LOGGER = "cellama.telemetry"  # its messages are JSON already
TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_LOGGING_ARGUMENTS = ("exc_info", "extra", "stack_info", "stacklevel")

_context: ContextVar[tuple[str, str]] = ContextVar("cellama_log_context", default=("", ""))  # job id and trace id


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A log record's message: an event, its fields, and optionally its cause and consequence."""

    event: str
    fields: Mapping[str, object]
    detail: str

    def __str__(self) -> str:
        text = self.event
        if self.fields:
            text += f" ({', '.join(f'{name}={_as_text(value)}' for name, value in self.fields.items())})"
        return f"{text}: {self.detail}" if self.detail else text


def _as_text(value: object) -> str:
    if isinstance(value, str) and value and not any(character in value for character in " ,()='\"\n"):
        return value
    return repr(value)


class EventLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs events with named fields.

    An event's text is constant, so you can search for the event and count its occurrences. Pass values as fields. If
    the event does not explain its cause and consequence, `detail` describes the cause and, after a semicolon, the
    consequence:

        log = event_logger(__name__)
        log.warning("webhook endpoint disabled", endpoint="we_1", status=410, detail="it receives no more events")
    """

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[LogEvent, MutableMapping[str, Any]]:
        """Return the event as the log record's message, and the keyword arguments to pass on to `logging`."""
        detail = str(kwargs.pop("detail", ""))
        options = {name: kwargs.pop(name) for name in _LOGGING_ARGUMENTS if name in kwargs}
        return LogEvent(str(msg), dict(kwargs), detail), options


def event_logger(name: str) -> EventLogger:
    """Return the logger for the module whose `__name__` is `name`."""
    return EventLogger(logging.getLogger(name), {})


@contextlib.contextmanager
def log_context(job_id: str, trace_id: str = "") -> Iterator[None]:
    """Add the job and trace ids to every line that this thread or asyncio task logs within the block.

    Empty ids are omitted.
    """
    token = _context.set((job_id, trace_id))
    try:
        yield
    finally:
        _context.reset(token)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """Append the job and trace ids, unless the message already contains them."""
        job_id, trace_id = _context.get()
        line = super().formatMessage(record)
        if job_id and job_id not in line:
            line += f" [job {job_id}]"
        return f"{line} [trace {trace_id}]" if trace_id else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.msg, LogEvent):
            line["event"] = record.msg.event
            line |= {name: value for name, value in record.msg.fields.items() if name not in line}
            if record.msg.detail:
                line["detail"] = record.msg.detail
        job_id, trace_id = _context.get()
        line |= {name: value for name, value in (("job_id", job_id), ("trace_id", trace_id)) if value}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


def configure_logging(level: str, log_format: Literal["text", "json"] = "text") -> None:
    """Send this process's logs to stderr.

    Messages from cellama and Celery are logged at `level` and above, and messages from other libraries at WARNING and
    above.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter(TEXT_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("cellama", "celery"):
        logging.getLogger(name).setLevel(level)


def telemetry_logger() -> logging.Logger:
    """Return the logger for telemetry, which writes each message unchanged.

    The logger writes to stderr regardless of `log_level`, unless the application has added its own handlers.
    """
    logger = logging.getLogger(TELEMETRY_LOGGER)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    return logger
