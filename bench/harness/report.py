"""Print benchmark results as a table and as a JSON line, and save the line in `bench/results/` on request."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

MAX_COLUMNS = 13  # of a table; with more, it would not fit into 100 characters
RESULTS = Path(__file__).parents[1] / "results"
_SOURCES = (":(top)", ":(top,exclude)bench/results")


@dataclass(frozen=True)
class Report:
    """The result of a benchmark.

    Rows with the same keys form a table, and `targets` contains the desired ratios. `wrong` lists violations. If
    `wrong` is not empty, the command fails.
    """

    rows: Sequence[Mapping[str, Any]]
    ratios: Mapping[str, float] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    caveats: Sequence[str] = ()
    wrong: Sequence[str] = ()


def show(name: str, workload: Mapping[str, Any], report: Report, *, save: bool = False) -> None:
    """Print a report. With `save`, append its JSON line to the saved results of this benchmark."""
    console = Console(width=max(100, Console().width))
    title: str | None = f"{name}: " + ", ".join(f"{key} {value}" for key, value in workload.items())
    for _, rows in itertools.groupby(report.rows, key=tuple):
        console.print(_table(list(rows), title))
        title = None
    for key, value in report.ratios.items():
        target = f"   (target: {report.targets[key]})" if key in report.targets else ""
        console.print(f"{key}: {_number(value, 3)}{target}")
    for caveat in report.caveats:
        console.print(f"[dim]{caveat}[/dim]")
    for line in report.wrong:
        console.print(f"[bold red]wrong:[/] {escape(line)}")
    line = json.dumps(
        {"bench": name, **workload, "rows": report.rows, "ratios": report.ratios, "targets": report.targets}
        | {"caveats": report.caveats, **({"wrong": report.wrong} if report.wrong else {}), **where()}
    )
    print(line)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _table(rows: Sequence[Mapping[str, Any]], title: str | None) -> Table:
    table = Table(title=title)
    if len(rows[0]) > MAX_COLUMNS:  # one line per figure
        first, *others = rows[0]
        table.add_column(first)
        for row in rows:
            table.add_column(_cell(row[first]), justify="right")
        for key in others:
            table.add_row(key, *(_cell(row[key]) for row in rows))
        return table
    for key, value in rows[0].items():
        table.add_column(key, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    return _number(value, 4) if isinstance(value, float) else str(value)


def _number(value: float, digits: int) -> str:
    """Return a number rounded to `digits` significant digits.

    Values of 1,000 or more are integers without an exponent.
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def where() -> dict[str, str]:
    """Return the hardware and the commit.

    The commit is marked as dirty if files other than saved results have uncommitted changes.
    """
    commit = _git("describe", "--always") + "-dirty" * bool(_git("diff", "HEAD", "--name-only", "--", *_SOURCES))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{platform.machine()}, {_cpu_name()}, {cores} cores, Python {platform.python_version()}"
    return {"machine": machine, "commit": commit}


def _git(*argv: str) -> str:
    return subprocess.run(["git", *argv], capture_output=True, text=True, check=False).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
