"""Read saved benchmark results, and update the figures on pages that come from these results.

A figure on a page is a number followed by a comment that names its source. `figures` finds figures in these formats:

    6.3<!-- prefix_cache: median ms -->                          the ratio in the last line that contains this ratio
    6.3<!-- prefix_cache[padded]: median ms -->                  the same, for a model whose name contains `padded`
    0.1<!-- decode: engine t/s where slots=1 and … * 0.001 -->   a row's column, times a factor

After saving a new result, run `python -m cellama.bench.harness.kept PAGE …` to update the figures on pages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import RESULTS

_FIGURE = re.compile(
    r"(?P<shown>\d[\d.,]*)<!-- (?P<name>\w+)(?:\[(?P<model>[^\]]+)\])?: (?P<what>[^*>]+?)"
    r"(?: where (?P<where>[^*>]+?))?(?: \* (?P<factor>[\d.]+))? -->"
)


@dataclass(frozen=True, slots=True)
class Results:
    """The saved results of all benchmarks."""

    folder: Path = RESULTS

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the saved results of a benchmark, oldest first."""
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number on a page and its source."""

    shown: str
    name: str  # name of the benchmark
    model: str  # part of the model's name
    what: str  # name of a ratio, or of a column
    where: Mapping[str, str]  # values that identify the row of the column; empty for a ratio
    factor: float

    def source(self, results: Results) -> dict[str, Any]:
        """Return the latest result that contains the figure. Raises LookupError if no result contains the figure."""
        for line in reversed(results.lines(self.name)):
            if self.model in str(line.get("model", "")) and self._of(line) is not None:
                return dict(line)
        raise LookupError(
            f"no result of {self.name} contains {self.what!r} for {dict(self.where)} and model {self.model!r}"
        )

    def value(self, results: Results) -> float:
        """Return the measured value."""
        return float(self._of(self.source(results))) * self.factor

    def measured(self, results: Results) -> str:
        """Return the measured value with as many decimal places as the page shows.

        Values of 1,000 or more are rounded to three significant digits.
        """
        value = self.value(results)
        if value >= 1000:
            return f"{float(f'{value:.3g}'):,.0f}"
        return f"{value:.{len(self.shown.partition('.')[2])}f}"

    def _of(self, line: Mapping[str, Any]) -> Any:
        """Return the figure from a line of results, or None if the line does not contain it."""
        if not self.where:
            return line.get("ratios", {}).get(self.what)
        fitting = [
            row for row in line["rows"] if all(str(row.get(key)) == wanted for key, wanted in self.where.items())
        ]
        return fitting[0].get(self.what) if len(fitting) == 1 else None


def figures(text: str) -> Iterator[Figure]:
    """Yield the figures on a page."""
    return map(_figure, _FIGURE.finditer(text))


def refreshed(text: str, results: Results) -> str:
    """Return the page with updated figures."""
    return _FIGURE.sub(lambda found: _figure(found).measured(results) + found[0][len(found["shown"]) :], text)


def _figure(found: re.Match[str]) -> Figure:
    pairs = (part.partition("=") for part in (found["where"] or "").split(" and ") if part)
    where = {key: wanted for key, _, wanted in pairs}
    factor = float(found["factor"] or 1)
    return Figure(found["shown"], found["name"], found["model"] or "", found["what"], where, factor)


def main() -> None:
    for page in map(Path, sys.argv[1:]):
        page.write_text(refreshed(page.read_text(encoding="utf-8"), Results()), encoding="utf-8")


if __name__ == "__main__":
    main()
