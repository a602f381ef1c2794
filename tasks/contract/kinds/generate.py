"""The kind `generate`, which generates the text that follows a prompt."""

from __future__ import annotations

from typing import NotRequired

from ..payloads import GenerationJob, Prompt
from ..shapes.results import CompletionChoice, RunResult
from . import Kind

TASK_GENERATE = "cellama.generate"


class GenerateJob(GenerationJob):
    """Text that continues a prompt, which is a text or a list of token ids."""

    prompt: Prompt


class GenerateResult(RunResult):
    """Result of `generate`, which is the first completion. If there are several, all of them are in `choices`."""

    choices: NotRequired[list[CompletionChoice]]


GENERATE = Kind(
    task=TASK_GENERATE,
    payload=GenerateJob,
    positional=("model", "prompt"),
    result=GenerateResult,
    completes=True,
    operation="text_completion",
)
