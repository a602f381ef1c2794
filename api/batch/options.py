"""What is asked of a bulk run, where it is, and how it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.typed_tasks import ChatParams, EmbedParams

from .lines import Format

TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
CLOCK_S = 1e-6  # the least time that a rate divides by: a clock may not have moved yet


@dataclass(slots=True)
class Progress:
    """Where a run is. Lines and tokens are those of all its commands, rates those of this one."""

    total: int = 0
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    in_flight: int = 0
    workers: int = 0
    ahead: int = 0  # jobs that get a slot before the first line
    notice: str = ""  # what it waits for, if it waits
    started_at: float = field(default_factory=time.monotonic)
    already: int = 0  # lines that had ended before this command sent any
    finished_before: int = 0  # of `finished`, those of earlier commands
    tokens_before: int = 0  # of `completion_tokens`, those of earlier commands

    @property
    def left(self) -> int:
        """Lines that have not ended."""
        return self.total - self.finished - self.failed

    @property
    def seconds(self) -> float:
        """Since this command began."""
        return time.monotonic() - self.started_at

    @property
    def ended(self) -> int:
        """Lines that this command has brought to an end."""
        return self.finished + self.failed - self.already

    @property
    def generated(self) -> int:
        """Tokens that this command has generated."""
        return self.completion_tokens - self.tokens_before

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return self.generated / max(CLOCK_S, self.seconds)

    @property
    def line_rate(self) -> float:
        """Lines per second."""
        return self.ended / max(CLOCK_S, self.seconds)


STANDARD = Path("-")
ONCE = ("output", "overwrite", "retry_failed")  # options that `resume` does not take over
OutputForm = Literal["auto", "openai", "short"]


class BatchParams(ChatParams, EmbedParams, total=False):
    """Options of the run, and parameters for lines that do not say otherwise."""

    model: str | None
    ordered: bool
    errors: str | Path | None
    format: Format
    column: str | None
    id_column: str | None
    form: OutputForm
    deadline_s: float | None
    merge_identical: bool
    retry_failed: bool
    overwrite: bool


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What a run is asked to do. `-` as input is stdin, as output stdout."""

    input: Path
    output: Path
    errors: Path | None = None  # default: beside the output
    format: Format = "auto"
    column: str | None = None  # of a table: where the prompts are
    id_column: str | None = None  # and the ids
    form: OutputForm = "auto"  # as each line came
    ordered: bool = False
    model: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None
    merge_identical: bool = False  # lines that must have the same result are run once
    retry_failed: bool = False
    overwrite: bool = False

    @classmethod
    def of(cls, input: str | Path, output: str | Path, **given: Any) -> BatchOptions:
        """The options among the keywords; all others are parameters for the lines. Raises InvalidJob."""
        own = {name: given.pop(name) for name in cls.__slots__ if name in given and name != "params"}
        for name, known in (("format", get_args(Format)), ("form", get_args(OutputForm))):
            if own.get(name, "auto") not in known:
                raise InvalidJob(f"{name} is {own[name]!r}; it must be one of {', '.join(known)}")
        if own.get("errors") is not None:
            own["errors"] = Path(own["errors"])
        return cls(Path(input), Path(output), params=given, **own)


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended."""

    id: str
    state: str
    progress: Progress
    errors: Path | None  # the error file, if there is one with something in it
