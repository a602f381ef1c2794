"""The kind `chat`, which generates the assistant's next turn."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field, StrictBool, model_validator

from cellama.config import limits

from ..payloads import Count, GenerationJob, Name, RepliedJob, no_more_than
from ..shapes.results import AssistantMessage, CompletionChoice, RunResult
from . import Kind

TASK_CHAT = "cellama.chat"


class ChatJob(RepliedJob, GenerationJob):
    """The assistant's next turn. `template_args` are variables of the model's chat template."""

    thinking_budget: Count | None = Field(default=None, ge=0, description="Maximum number of reasoning tokens.")
    parallel_tool_calls: StrictBool | None = Field(
        default=None,
        description="Allow several tool calls, even if a call is forced. If false, allow at most one call.",
    )
    allowed_tools: Annotated[tuple[Name, ...], Field(min_length=1), no_more_than(limits.MAX_TOOLS, "names")] | None = (
        Field(
            default=None,
            description="Names of the tools that the model may call. The prompt still describes all tools. Can be "
            "repeated.",
        )
    )

    @model_validator(mode="after")
    def _check_allowed(self) -> ChatJob:
        if self.allowed_tools is None:
            return self
        names = [tool.function.name for tool in self.tools]
        for name in self.allowed_tools:
            if name not in names:
                known = ", ".join(sorted(names)) or "none"
                raise ValueError(f"allowed_tools: {name!r} is not a tool of this job; the tools are: {known}")
        if self.tool_choice not in ("auto", "none", "required", *self.allowed_tools):
            raise ValueError(f"tool_choice: {self.tool_choice!r} is not in allowed_tools; add it there")
        return self


class ChatChoice(CompletionChoice):
    """One of several completions of a chat."""

    message: AssistantMessage


class ChatResult(RunResult):
    """Result of `chat`."""

    message: AssistantMessage
    choices: NotRequired[list[ChatChoice]]


def with_messages(result: Any) -> ChatResult:
    """Add the assistant's message to the result of a chat, in a format that can be sent back."""
    for choice in [result, *result.get("choices", [])]:
        if "message" in choice:
            continue
        fields = {name: choice.pop(name) for name in ("reasoning", "signature", "tool_calls") if name in choice}
        choice["message"] = {"role": "assistant", "content": choice["text"], **fields}
    chat: ChatResult = result
    return chat


CHAT = Kind(
    task=TASK_CHAT,
    payload=ChatJob,
    positional=("model", "messages"),
    result=ChatResult,
    completes=True,
    shape=with_messages,
    operation="chat",
)
