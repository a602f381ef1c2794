"""What came of a run's lines, on its way to the disk: results and errors, by their ends or in the input's order."""

from __future__ import annotations

import json
from typing import Any

from .files import LineFile
from .lines import StoredLine
from .output_format import error_line, result_line
from .progress import TOKENS, Progress
from .work import TWIN, WorkFile

LINES_PER_WRITE = 1000  # of those that end without a worker
Ended = list[tuple[StoredLine, dict[str, Any]]]  # lines with their results, or with their errors


class Outcomes:
    """Writes each outcome once, and counts it. One thread."""

    def __init__(
        self, work: WorkFile, output: LineFile, errors: LineFile, progress: Progress, *, ordered: bool = False
    ) -> None:
        """`ordered` writes results in the order of the input."""
        self._work = work
        self._output = output
        self._errors = errors
        self._progress = progress
        self._ordered = ordered
        self._open_from: int | None = 0 if ordered else None  # lines before this one have ended; None: write any
        self._merges = work.count(TWIN) > 0

    def keep(self, results: Ended, failures: Ended) -> None:
        """On disk first, then in the work file: a crash between the two is found by reading the output's end."""
        self._write(results, failures, computed=results)
        if self._merges:
            for line, result in results:
                while twins := self._work.twins(line, LINES_PER_WRITE):
                    self._write([(twin, result) for twin in twins], [])
            for line, error in failures:
                while twins := self._work.twins(line, LINES_PER_WRITE):
                    self._write([], [(twin, error) for twin in twins])

    def _write(self, results: Ended, failures: Ended, computed: Ended | tuple[()] = ()) -> None:
        """Tokens count of results that were `computed`: lines that take over another's result have cost none."""
        tokens = {
            name: getattr(self._progress, name) + sum(result["usage"][name] for _, result in computed)
            for name in TOKENS
        }
        outcomes = [(line, result_line(line, result)) for line, result in results]
        if not self._ordered:
            self._output.append([outcome for _, outcome in outcomes])
        self._errors.append([error_line(line, error) for line, error in failures])
        with self._work.transaction():
            for line, outcome in outcomes:
                kept = json.dumps(outcome, ensure_ascii=False) if self._ordered else None
                self._work.finish(line, outcome=kept)
            for line, _ in failures:
                self._work.finish(line, failed=True)
            self._work.note(output_size=self._output.size, errors_size=self._errors.size, **tokens)
        for name, count in tokens.items():
            setattr(self._progress, name, count)
        self._progress.finished += len(results)
        self._progress.failed += len(failures)
        self._progress.in_flight = self._work.in_flight()
        if self._ordered:
            self.write_held()

    def write_held(self) -> None:
        """Results whose turn it is; all that a command before has held, if the order does not matter any more."""
        if self._open_from is not None:
            self._open_from = self._work.first_open(self._open_from)
        while held := self._work.held(LINES_PER_WRITE, self._open_from):
            self._output.append([json.loads(outcome) for _, outcome in held])
            with self._work.transaction():
                self._work.drop_outcomes(number for number, _ in held)
                self._work.note(output_size=self._output.size)
