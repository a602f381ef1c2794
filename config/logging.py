"""How worker processes log: one line per event, to stderr."""

from __future__ import annotations

import logging

JSON_LINES = "cellama.telemetry"  # a logger that says nothing but lines of JSON
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Sends all logs of this process to stderr at `level`; libraries speak from WARNING on."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT, force=True)
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
