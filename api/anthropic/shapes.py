"""The Anthropic request and response shapes that the gateway accepts and returns."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from cellama.api.openai.shapes import CLOSED, CacheSalt, OtherServersParameters

StopReason = Literal["end_turn", "stop_sequence", "tool_use", "max_tokens", "model_context_window_exceeded"]


# Requests


class TextBlock(TypedDict):
    """A block of text."""

    type: Literal["text"]
    text: str


class SentToolUse(TypedDict):
    """A model's tool call, which the client sends back."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class SentToolResult(TypedDict):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | list[TextBlock] | None]
    is_error: NotRequired[bool | None]


class SentThinking(TypedDict):
    """A model's reasoning, which the client sends back."""

    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[str | None]


class UserTurn(TypedDict):
    """A user message or a message with instructions."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]

    role: Literal["user", "system"]
    content: str | Annotated[list[TextBlock | SentToolResult], Field(min_length=1)]


class AssistantTurn(TypedDict):
    """A model's message, which the client sends back."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]

    role: Literal["assistant"]
    content: str | list[TextBlock | SentToolUse | SentThinking]


class AnthropicTool(TypedDict):
    """A tool that the client runs."""

    type: NotRequired[Literal["custom"] | None]
    name: str
    description: NotRequired[str | None]
    input_schema: dict[str, Any]
    strict: NotRequired[bool | None]


class AnthropicToolChoice(TypedDict):
    """The choice of tools. Type `tool` requires the `name` of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str]
    disable_parallel_tool_use: NotRequired[bool | None]


class Thinking(TypedDict):
    """The setting that determines whether the model reasons.

    Type `enabled` requires `budget_tokens` below `max_tokens`.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: NotRequired[int]
    display: NotRequired[Literal["summarized", "omitted", "updates"] | None]


class OutputSchema(TypedDict):
    """The JSON Schema that the text must conform to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(TypedDict, total=False):
    """The reasoning effort for the chat template, and the output format."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]

    effort: str | None
    format: OutputSchema | None


class MessageParameters(OtherServersParameters, total=False):
    messages: Annotated[list[UserTurn | AssistantTurn], Field(min_length=1)]
    system: str | list[TextBlock]
    stream: bool
    tools: list[AnthropicTool]
    tool_choice: AnthropicToolChoice
    thinking: Thinking
    output_config: OutputConfig
    service_tier: Literal["auto", "standard_only", "flex", "default", "priority"]
    cache_salt: CacheSalt


# Responses


class ToolUseBlock(TypedDict):
    """A tool call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(TypedDict):
    """The model's reasoning and its signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str


MessageBlock = TextBlock | ToolUseBlock | ThinkingBlock


class ThinkingTokens(TypedDict):
    """Details about the generated tokens."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """The token counts of a message. `input_tokens` excludes cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: NotRequired[Literal["batch", "standard", "priority"]]


class AnthropicMessage(TypedDict):
    """A message from the model. `warnings` lists the schema keywords that were not enforced."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: NotRequired[list[str]]


class AnthropicModel(TypedDict):
    """A model that accepts jobs."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    deprecated_at: None
    retires_at: None
    line: None
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None


class AnthropicModelPage(TypedDict):
    """A page of models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class InputTokens(TypedDict):
    """The number of tokens in a prompt."""

    input_tokens: int


class AnthropicErrorDetails(TypedDict):
    """An error code, and the request's unsupported features."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorObject(TypedDict):
    """An error's type, and its message, which describes the problem and the remedy."""

    type: str
    message: str
    details: NotRequired[AnthropicErrorDetails]


class AnthropicError(TypedDict):
    """The body of an error response."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


# Events of a stream


class MessagePing(TypedDict):
    """The event that keeps the stream open when no token has arrived for a while."""

    type: Literal["ping"]


class MessageStart(TypedDict):
    """The event that starts the message."""

    type: Literal["message_start"]
    message: AnthropicMessage


class BlockStart(TypedDict):
    """The event that starts a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: MessageBlock


class TextDelta(TypedDict):
    """A piece of a block's text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """A piece of a block's reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    """The signature of a reasoning block."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(TypedDict):
    """A piece of a tool call's JSON input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    """The event that adds a piece to a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(TypedDict):
    """The event that ends a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    """The reason the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """The event with the message's stop reason and usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage
    warnings: NotRequired[list[str]]


class MessageStop(TypedDict):
    """The event that ends the stream."""

    type: Literal["message_stop"]


MessageEvent = MessagePing | MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
