"""A bulk run's options, progress and summary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.typed_tasks import ChatParams, EmbedParams

from .formats import Format
from .lines import AsKind
from .sources import Source, source_of

TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
MIN_ELAPSED_S = 1e-6  # by which a rate divides, because the clock may not have advanced


@dataclass(slots=True)
class Progress:
    """A run's progress.

    The counts include all commands that have processed the run, but the rates include only the current command.
    """

    total: int = 0
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    in_flight: int = 0
    workers: int = 0
    ahead: int = 0  # jobs of others that get a slot before the first line
    notice: str = ""  # why the run is waiting, if it is
    started_at: float = field(default_factory=time.monotonic)
    already: int = 0  # lines that had finished or failed before this command
    finished_before: int = 0  # lines that earlier commands finished
    tokens_before: int = 0  # `completion_tokens` of earlier commands

    @property
    def left(self) -> int:
        """Return the number of lines that have neither finished nor failed."""
        return self.total - self.finished - self.failed

    @property
    def seconds(self) -> float:
        """Return the number of seconds since this command started."""
        return time.monotonic() - self.started_at

    @property
    def ended(self) -> int:
        """Return the number of lines that have finished or failed during this command."""
        return self.finished + self.failed - self.already

    @property
    def generated(self) -> int:
        """Return the number of tokens that this command has generated."""
        return self.completion_tokens - self.tokens_before

    @property
    def rate(self) -> float:
        """Return this command's generation rate in tokens per second."""
        return self.generated / max(MIN_ELAPSED_S, self.seconds)

    @property
    def line_rate(self) -> float:
        """Return this command's processing rate in lines per second."""
        return self.ended / max(MIN_ELAPSED_S, self.seconds)


NOT_RESUMED = ("output", "overwrite", "retry_failed")  # options that `resume` does not repeat
OutputForm = Literal["auto", "openai", "short"]


class BatchParams(ChatParams, EmbedParams, total=False):
    """The options of a run, and the default job parameters for its lines."""

    model: str | None
    ordered: bool
    errors: str | Path | None
    format: Format
    column: str | None
    id_column: str | None
    template: str | None
    as_kind: AsKind | None
    limit: int | None
    sample: int | None
    form: OutputForm
    deadline_s: float | None
    merge_identical: bool
    retry_failed: bool
    keep_work: bool
    overwrite: bool
    fairness_key: str | None


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of a run. The path `-` stands for stdin or stdout. The input may also be a URL."""

    input: Source
    output: Path
    errors: Path | None = None  # default: OUTPUT.errors.jsonl, next to the output
    format: Format = "auto"
    column: str | None = None  # column with the prompts of a table
    id_column: str | None = None  # column with the ids of a table
    template: str | None = None  # prompt of a row, with `{column}` in place of its values
    as_kind: AsKind | None = None  # what a row becomes: chat if there is a system message, or else prompt
    limit: int | None = None  # number of rows to run, from the start of the input
    sample: int | None = None  # number of rows to run, drawn from the whole input
    form: OutputForm = "auto"  # the format of each input line
    ordered: bool = False
    model: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None
    merge_identical: bool = False  # run lines that must have the same result only once
    retry_failed: bool = False
    keep_work: bool = False  # keep the work file of a completed run without failed lines
    overwrite: bool = False
    fairness_key: str | None = None  # tenant for which the run works (docs/fair-share.md)
    content: str = ""  # digest of the input if it is a temporary file

    @classmethod
    def of(cls, input: str | Path, output: str | Path, **given: Any) -> BatchOptions:
        """Create options from keyword arguments. Arguments that are not options become `params`. Raises InvalidJob."""
        options = {name: given.pop(name) for name in cls.__slots__ if name in given and name != "params"}
        for name, known in (
            ("format", get_args(Format)),
            ("form", get_args(OutputForm)),
            ("as_kind", get_args(AsKind)),
        ):
            if options.get(name, known[0]) not in (*known, None):
                raise InvalidJob(f"{name} is {options[name]!r}; it must be one of {', '.join(known)}")
        if options.get("errors") is not None:
            options["errors"] = Path(options["errors"])
        return cls(source_of(input), Path(output), params=given, **options)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's final state, progress and files."""

    id: str
    state: str
    progress: Progress
    errors: Path | None  # the error file, unless it is empty
