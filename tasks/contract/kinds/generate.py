"""The kind `generate`, which generates the text that follows a prompt."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import BeforeValidator, Field, model_validator

from cellama.config import limits

from ..payloads import (
    GenerationJob,
    Name,
    Payload,
    Text,
    TextToComplete,
    TypedAs,
    no_more_than,
    text_of_result,
)
from ..shapes.results import CompletionChoice, RunResult
from . import Kind

TASK_GENERATE = "cellama.generate"


class OtherFilePayload(Payload):
    """Another file from the project, which the model reads before the text to complete."""

    filename: Name = "tmp"
    text: Text


class GenerateJob(GenerationJob):
    """Text that continues a prompt, or fills the gap before a suffix. The prompt is a string or a list of token ids."""

    prompt: Annotated[TextToComplete, BeforeValidator(text_of_result), TypedAs("Prompt")] = Field(
        description="Prompt to continue, as a string or a list of token ids."
    )
    suffix: Text | None = Field(
        default=None,
        description="Text that follows the generated text. Only models with fill-in-the-middle tokens support it.",
    )
    input_extra: Annotated[
        tuple[OtherFilePayload, ...], no_more_than(limits.MAX_EXTRA_FILES, "files"), TypedAs("Sequence[ExtraFile]")
    ] = Field(
        default=(),
        description="Other files from the project, each with a filename and a text. The model reads them before a "
        "prompt that has a suffix.",
    )

    @model_validator(mode="after")
    def _check_gap(self) -> GenerateJob:
        if self.suffix is None and self.prompt == "":
            raise ValueError("prompt is '': the text is empty; provide some text")
        if self.suffix is None and self.input_extra:
            raise ValueError("input_extra requires a suffix; add one, or put the files into the prompt")
        if self.suffix is not None and self.parent_key is not None:
            raise ValueError("suffix can't be combined with parent_key; remove one of them")
        return self


class GenerateResult(RunResult):
    """Result of `generate`: the first completion. If there are several completions, `choices` contains all of them."""

    choices: NotRequired[list[CompletionChoice]]


GENERATE = Kind(
    task=TASK_GENERATE,
    payload=GenerateJob,
    positional=("model", "prompt"),
    result=GenerateResult,
    completes=True,
    operation="text_completion",
)
