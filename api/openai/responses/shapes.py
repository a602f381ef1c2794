"""The shapes for `/v1/responses`: the mapped parameters, the response object, and the stream's events."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from cellama.api.openai.shapes import (
    CachedTokens,
    CacheSalt,
    JsonObjectFormat,
    NumLogprobs,
    OtherServersParameters,
    OutputLogprob,
    RefusalPart,
    RequestedTier,
    ServiceTier,
    TextFormat,
)

ResponseStatusName = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


# Requests


class InputTextPart(TypedDict):
    """A text part of an item."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


InputPart = InputTextPart | RefusalPart


class InputMessage(TypedDict):
    """A message of the conversation."""

    type: NotRequired[Literal["message"]]
    id: NotRequired[str]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]


class InputFunctionCall(TypedDict):
    """A model's tool call, which the client sends back."""

    type: Literal["function_call"]
    id: NotRequired[str]
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    arguments: str


class InputFunctionOutput(TypedDict):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    id: NotRequired[str]
    call_id: str
    output: str | list[InputPart]


class InputReasoning(TypedDict):
    """A model's reasoning, which the client sends back."""

    type: Literal["reasoning"]
    id: NotRequired[str]
    content: NotRequired[str | list[InputPart] | None]
    encrypted_content: NotRequired[str | None]


InputItem = InputMessage | InputFunctionCall | InputFunctionOutput | InputReasoning


class SchemaTextFormat(TypedDict):
    """JSON that conforms to a schema."""

    type: Literal["json_schema"]
    name: NotRequired[str]
    schema: dict[str, Any]
    strict: NotRequired[bool | None]


class ResponseTextOptions(TypedDict, total=False):
    """The text format. `verbosity` is ignored."""

    format: TextFormat | JsonObjectFormat | SchemaTextFormat | None
    verbosity: str | None


class ReasoningOptions(TypedDict, total=False):
    """The reasoning effort for the chat template. `none` disables reasoning, and `low` and higher efforts enable it."""

    effort: str | None
    summary: str | None


class ResponseFunctionTool(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class ResponseNamespaceTool(TypedDict):
    """Functions with a common namespace."""

    type: Literal["namespace"]
    name: str
    description: NotRequired[str | None]
    tools: list[ResponseFunctionTool]


class ResponseNamedTool(TypedDict):
    """A tool, identified by its function's name."""

    type: Literal["function"]
    name: str
    namespace: NotRequired[str]


class ResponseAllowedTools(TypedDict):
    """A tool choice that allows several tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseNamedTool], Field(min_length=1)]


class ResponseParameters(OtherServersParameters, total=False):
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str
    previous_response_id: str
    tools: list[ResponseFunctionTool | ResponseNamespaceTool]
    tool_choice: Literal["auto", "none", "required"] | ResponseNamedTool | ResponseAllowedTools
    text: ResponseTextOptions
    reasoning: ReasoningOptions
    top_logprobs: NumLogprobs
    max_tool_calls: Annotated[int, Field(ge=1)]
    include: list[str]
    metadata: Annotated[dict[str, str], Field(max_length=16)]
    store: bool
    background: bool
    stream: bool
    service_tier: RequestedTier
    cache_salt: CacheSalt


# Responses


class ReasoningPart(TypedDict):
    """A text part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputTextPart(TypedDict):
    """A text part of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: NotRequired[list[OutputLogprob]]


class ReasoningItem(TypedDict):
    """The model's reasoning. `encrypted_content` is the reasoning's signature."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    content: list[ReasoningPart]
    summary: list[Any]
    encrypted_content: NotRequired[str]


class MessageItem(TypedDict):
    """A message from the model."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputTextPart]


class FunctionCallItem(TypedDict):
    """A tool call by the model. `arguments` is a JSON object as text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CompactionItem(TypedDict):
    """A summary of a conversation."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class StoredPart(TypedDict):
    """One part of a stored item."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]


class StoredInputItem(TypedDict):
    """An input item as it was stored. The members depend on the item's type."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    status: NotRequired[Literal["completed"]]
    role: NotRequired[Literal["user", "assistant", "system", "developer"]]
    content: NotRequired[list[StoredPart]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    output: NotRequired[str]
    summary: NotRequired[list[Any]]
    encrypted_content: NotRequired[str]


class InputItemList(TypedDict):
    """A page of a response's input items."""

    object: Literal["list"]
    data: list[StoredInputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ReasoningTokens(TypedDict):
    """Details about the generated tokens."""

    reasoning_tokens: int


class InputTokensDetails(CachedTokens):
    """Details about the prompt tokens."""

    cache_write_tokens: int


class ResponseUsage(TypedDict):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseFailure(TypedDict):
    """The error of a failed response. The message starts with the job's error code."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(TypedDict):
    """Details about why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ReportedReasoning(TypedDict):
    """The reasoning options of the request."""

    effort: str | None
    summary: str | None


class ReportedText(TypedDict):
    """The text format chosen in the request."""

    format: dict[str, Any]


class ReportedTool(TypedDict):
    """A function defined in the request."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ReportedNamespace(TypedDict):
    """A namespace defined in the request, with its functions."""

    type: Literal["namespace"]
    name: str
    description: str | None
    tools: list[ReportedTool]


class ResponseObject(TypedDict):
    """A response, including values from its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatusName
    background: bool
    store: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    service_tier: ServiceTier
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReportedReasoning
    temperature: float | None
    text: ReportedText
    tool_choice: str | dict[str, Any]
    tools: list[ReportedTool | ReportedNamespace]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    max_tool_calls: NotRequired[int | None]
    presence_penalty: NotRequired[float]
    frequency_penalty: NotRequired[float]
    user: NotRequired[str | None]
    safety_identifier: NotRequired[str | None]
    prompt_cache_key: NotRequired[str | None]
    warnings: NotRequired[list[str]]


class DeletedResponse(TypedDict):
    """A deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


# Events of a stream, each with the number at which a reader can resume


class ResponseStateEvent(TypedDict):
    """The event for a response that has reached a new status."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
    ]
    response: ResponseObject
    sequence_number: int


class CompactedConversation(TypedDict):
    """The user's messages, followed by a summary of the conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[StoredInputItem | CompactionItem]
    usage: ResponseUsage


class ResponseInputTokens(TypedDict):
    """The number of tokens that a response would prefill."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class OutputItemEvent(TypedDict):
    """The event for an item that was added or completed."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem
    sequence_number: int


class ContentPartEvent(TypedDict):
    """The event for an item part that was added or completed."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputTextPart | ReasoningPart
    sequence_number: int


class OutputTextDeltaEvent(TypedDict):
    """A piece of the answer's text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[OutputLogprob]
    sequence_number: int


class OutputTextDoneEvent(TypedDict):
    """The answer's complete text."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[OutputLogprob]
    sequence_number: int


class ReasoningDeltaEvent(TypedDict):
    """A piece of the reasoning text."""

    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    sequence_number: int


class ReasoningDoneEvent(TypedDict):
    """The complete reasoning text."""

    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    sequence_number: int


class ArgumentsDeltaEvent(TypedDict):
    """A piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int


class ArgumentsDoneEvent(TypedDict):
    """The complete arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int


ResponseEvent = (
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDeltaEvent
    | OutputTextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)
