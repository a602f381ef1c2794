"""How worker processes log: one line per event, to stderr."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Sends all logs of this process to stderr at `level`; libraries speak from WARNING on."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT, force=True)
    for name in ("cellama", "celery"):
        logging.getLogger(name).setLevel(level)
