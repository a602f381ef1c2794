"""Messages and tools of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    model_validator,
)

from cellama.config import limits

from .fields import (
    Name,
    Text,
    at_most,
    check_schema,
    join_parts,
    no_more_than,
    to_json,
)
from .json_values import check_escapes, json_text


class Payload(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolCallFunctionPayload(Payload):
    """What is called, and with what: a JSON object as text."""

    name: Name
    arguments: Annotated[Text, AfterValidator(check_escapes), BeforeValidator(to_json)] = "{}"


class ToolCallPayload(Payload):
    """A call of a tool in an assistant's message, as a result has it."""

    id: Annotated[Text, at_most(limits.MAX_NAME_CHARS)] | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunctionPayload
    partial: StrictBool | None = None


class MessagePayload(Payload):
    """One turn of a conversation. An assistant's may be the `message` of a result, a tool's is the answer to a call."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[Text | None, BeforeValidator(join_parts)] = None
    reasoning: Text | None = None
    signature: Text | None = None
    tool_calls: (
        Annotated[tuple[ToolCallPayload, ...], Field(min_length=1), no_more_than(limits.MAX_TOOL_CALLS, "tool calls")]
        | None
    ) = None
    tool_call_id: Annotated[Text, at_most(limits.MAX_NAME_CHARS)] | None = None
    name: Annotated[Text, at_most(limits.MAX_NAME_CHARS)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> MessagePayload:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing; only an assistant's message with tool_calls may have none")
        if self.role != "assistant" and (self.tool_calls or self.reasoning or self.signature):
            raise ValueError(f"a {self.role}'s message has no tool_calls, reasoning or signature")
        return self


class ToolFunctionPayload(Payload):
    """What a model may call; `parameters` is a JSON Schema of type object."""

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(check_schema)] | None = None
    strict: StrictBool | None = None


class ToolPayload(Payload):
    """A tool in the OpenAI form."""

    type: Literal["function"]
    function: ToolFunctionPayload


def check_args(value: Any) -> Any:
    if isinstance(value, dict):
        json_text(value, limits.MAX_JSON_CHARS)
    return value


def check_names(tools: tuple[ToolPayload, ...]) -> tuple[ToolPayload, ...]:
    names = [tool.function.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: given twice; names of tools must differ")
    return tools
