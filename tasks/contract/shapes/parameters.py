"""The types of parameters that callers can pass, for type checkers.

`payloads` validates and converts the parameters.
"""

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
    """One turn of a conversation. A message with role `tool` is the result of the call `tool_call_id`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: NotRequired[str | list[TextPart] | None]
    reasoning: NotRequired[str | None]
    signature: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall] | None]
    tool_call_id: NotRequired[str | None]
    name: NotRequired[str | None]


Messages = Sequence[ChatMessage | AssistantMessage]


class Prediction(TypedDict):
    """An expected output, in the OpenAI format."""

    type: Literal["content"]
    content: str | list[TextPart]


class ExtraFile(TypedDict):
    """Another file from the project, which the model reads before the text to complete."""

    filename: NotRequired[str]
    text: str


class ToolFunction(TypedDict):
    """A function that a model may call. `parameters` is a JSON Schema of type object."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[JsonObject | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """A tool in the OpenAI format."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(TypedDict):
    """The name of the tool that must be called."""

    name: str


class ToolChoice(TypedDict):
    """A tool choice that names one tool, in the OpenAI format."""

    type: Literal["function"]
    function: FunctionName
