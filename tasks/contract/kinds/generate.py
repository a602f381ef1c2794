"""`generate`: the text that follows a prompt."""

from __future__ import annotations

from typing import NotRequired

from ..kind import Kind
from ..payloads import GenerationJob, Prompt
from ..shapes.results import CompletionChoice, RunResult

TASK_GENERATE = "cellama.generate"


class GenerateJob(GenerationJob):
    """Text that follows a prompt: text, or token ids."""

    prompt: Prompt


class GenerateResult(RunResult):
    """Result of `generate`: the first completion, and all of them as `choices` if there are several."""

    choices: NotRequired[list[CompletionChoice]]


GENERATE = Kind(
    task=TASK_GENERATE,
    payload=GenerateJob,
    positional=("model", "prompt"),
    result=GenerateResult,
    completes=True,
    operation="text_completion",
)
