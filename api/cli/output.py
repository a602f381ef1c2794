"""Print text, tables, JSON, warnings and errors. Control characters are removed from text printed on a terminal."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cellama.api.batch.output import json_for_terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    out: Console
    err: Console

# C0, DEL and C1, except newline and tab
_CONTROLS = dict.fromkeys(code for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
NO_WORKERS = "no worker is running; start one with `cellama up` or `cellama worker`"
PIPE_COLUMNS = 200  # if the output is not a terminal: wide enough that most lines are not wrapped


def __getattr__(name: str) -> Any:
    """Create the consoles `out` and `err` when they are first used.

    A command that must start quickly imports this module instead of the consoles, because importing Rich takes longer
    than sending a job.
    """
    if name in ("out", "err"):
        return _console(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _console(name: str) -> Console:
    from rich.console import Console

    stream = sys.stdout if name == "out" else sys.stderr
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(stderr=name == "err", highlight=False, width=width)


def called() -> str:
    """Return the command that runs this program: `cellama`, or its relative path if it is not on the PATH."""
    if shutil.which("cellama") or Path(sys.argv[0]).name != "cellama":
        return "cellama"
    return os.path.relpath(sys.argv[0])


def printable(text: str) -> str:
    """Return the text without control characters that the terminal would interpret."""
    return text.translate(_CONTROLS)


def write_text(text: str) -> None:
    """Write generated text to stdout. On a terminal, remove control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Print a JSON document on one line."""
    text = json.dumps(value, ensure_ascii=False)
    sys.stdout.write((json_for_terminal(text) if sys.stdout.isatty() else text) + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    """Print an error message to stderr."""
    err = _console("err")
    err.print("[bold red]error:[/] ", end="")
    err.print(printable(message) if err.is_terminal else message, markup=False, soft_wrap=True)


def print_warning(message: str) -> None:
    """Print a warning to stderr."""
    err = _console("err")
    err.print("[bold yellow]warning:[/] ", end="")
    err.print(printable(message) if err.is_terminal else message, markup=False, soft_wrap=True)


def table_of(*columns: str, right: str = "", whole: str = "", title: str | None = None) -> Table:
    """Return an empty table.

    Long cells wrap and are never cut off. `right` lists the right-aligned columns, which contain numbers. `whole` lists
    the columns that never wrap because users copy their contents, such as ids. `right` and `whole` are strings of
    column names separated by ", ".
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        numeric = column in right.split(", ")
        no_wrap = column in whole.split(", ")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=no_wrap)
    return table


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, for example "1 model" or "2 models"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def url_of(host: str, port: int) -> str:
    """Return the HTTP URL for a host and port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def readable_time(unix_s: float) -> str:
    """Return a Unix time as local time, for example "2026-01-31 13:05:00"."""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def readable(num_bytes: float) -> str:
    """Return a size as text, for example "1.5 GiB"."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or abs(size) >= 100 else f"{size:.1f} {_UNITS[unit]}"
