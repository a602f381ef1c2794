"""How commands speak: text for people on a terminal, JSON for machines, errors on stderr with an exit code."""

from __future__ import annotations

import json
import sys
from enum import IntEnum
from typing import Any

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1  # the job, or what was asked, failed
    USAGE = 2  # wrong arguments, payload or settings
    UNREACHABLE = 3  # Redis does not answer, or no worker serves the model
    TIMEOUT = 4
    INTERRUPTED = 130


def print_json(value: Any) -> None:
    """Writes one JSON document as one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    """Writes a message for people to stderr."""
    err.print("[bold red]error:[/] ", end="")
    err.print(message, markup=False, soft_wrap=True)
