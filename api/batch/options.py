"""What is asked of a bulk run, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.typed_tasks import ChatParams, EmbedParams

from .lines import Format
from .progress import Progress

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
