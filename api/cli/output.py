"""How commands speak: text for people on a terminal, JSON for machines, errors on stderr with an exit code."""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cellama.api.batch.output import json_for_terminal

_CONTROLS = dict.fromkeys([*range(0x20), 0x7F, *range(0x80, 0xA0)])  # C0, DEL and C1 …
for _kept in "\n\t":
    del _CONTROLS[ord(_kept)]  # … except those that only move on
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PIPE_COLUMNS = 200  # where no terminal says how wide it is: nothing is cut off, and most lines are whole


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, highlight=False, width=None if known else PIPE_COLUMNS)


out = _console(sys.stdout)
err = _console(sys.stderr, stderr=True)


def called() -> str:
    """How this command is called in the user's shell: `cellama`, or its path where it is in no folder of PATH."""
    if shutil.which("cellama") or Path(sys.argv[0]).name != "cellama":
        return "cellama"
    return os.path.relpath(sys.argv[0])


def printable(text: str) -> str:
    """Return the text without control characters, by which it could change what a terminal shows and does."""
    return text.translate(_CONTROLS)


def write_text(text: str) -> None:
    """Write a model's text to stdout: as it is to a file or a pipe, without control characters to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Writes one JSON document as one line."""
    text = json.dumps(value, ensure_ascii=False)
    sys.stdout.write((json_for_terminal(text) if sys.stdout.isatty() else text) + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    """Writes a message for people to stderr."""
    err.print("[bold red]error:[/] ", end="")
    err.print(printable(message) if err.is_terminal else message, markup=False, soft_wrap=True)


def print_warning(message: str) -> None:
    """Write a warning for people to stderr."""
    err.print("[bold yellow]warning:[/] ", end="")
    err.print(printable(message) if err.is_terminal else message, markup=False, soft_wrap=True)


def table_of(*columns: str, right: str = "", whole: str = "", title: str | None = None) -> Table:
    """A table that is narrow and cuts nothing off: what does not fit goes on in the next line.

    `right` names the columns of numbers, `whole` those that stay in one line: what people copy.
    """
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        numeric = column in right.split(", ")
        no_wrap = column in whole.split(", ")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=no_wrap)
    return table


def url_of(host: str, port: int) -> str:
    """Where that port is asked over HTTP."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def readable_time(unix_s: float) -> str:
    """A time by the clock of this machine: "2026-01-31 13:05:00"."""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def readable(num_bytes: float) -> str:
    """A size: "1.5 GiB"."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or abs(size) >= 100 else f"{size:.1f} {_UNITS[unit]}"
