"""The forms in which callers may give parameters, as type checkers see them; `payloads` checks and converts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from .results import AssistantMessage, ToolCall

Prompt = str | list[int]
Texts = str | Sequence[str]
TextsOrTokens = str | list[int] | Sequence[str | list[int]]
JsonObject = Mapping[str, object]  # a JSON Schema, the variables of a template


class TextPart(TypedDict):
    """A part of a message's content, as in the OpenAI API."""

    type: Literal["text"]
    text: str


class ChatMessage(TypedDict):
    """One turn of a conversation; a tool's answers the call `tool_call_id`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: NotRequired[str | list[TextPart] | None]
    reasoning: NotRequired[str | None]
    signature: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall] | None]
    tool_call_id: NotRequired[str | None]
    name: NotRequired[str | None]


Messages = Sequence[ChatMessage | AssistantMessage]


class Prediction(TypedDict):
    """What an output may be, in the OpenAI form."""

    type: Literal["content"]
    content: str | list[TextPart]


class ToolFunction(TypedDict):
    """What a model may call; `parameters` is a JSON Schema of type object."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[JsonObject | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """A tool in the OpenAI form."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(TypedDict):
    """Of the tool that must be called."""

    name: str


class ToolChoice(TypedDict):
    """The OpenAI form of a tool's name."""

    type: Literal["function"]
    function: FunctionName
