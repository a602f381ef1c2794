"""What a model's chat template gets of a job."""

from __future__ import annotations

from dataclasses import replace

from cellama.engine import ChatOptions, Message
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.kinds.tokens import TemplateJob


def conversation_of(job: ChatJob | TemplateJob | PrefillJob) -> tuple[list[Message], ChatOptions]:
    """What a model's template gets."""
    messages: list[Message] = [message.model_dump(exclude_none=True) for message in job.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in job.tools]
    options = ChatOptions(
        tools,
        tool_choice=job.tool_choice,
        enable_thinking=job.enable_thinking,
        template_args=job.template_args,
        system=job.system,
    )
    if not isinstance(job, ChatJob):
        return messages, options
    return messages, replace(
        options,
        thinking_budget=job.thinking_budget,
        parallel_tool_calls=job.parallel_tool_calls,
        allowed_tools=job.allowed_tools,
    )
