"""The OpenAI request and response shapes that the gateway accepts and returns.

The OpenAPI document is generated from these types. Each `…Parameters` type contains the endpoint's parameters that the
gateway maps (`ParameterRule.handling` is "mapped"). All other parameters have the shapes of the corresponding job
parameters.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from cellama.config import limits
from cellama.tasks.contract.shapes.parameters import Tool
from cellama.tasks.contract.shapes.results import Function

ServiceTier = Literal["flex", "default", "priority"]
RequestedTier = Literal["auto", "flex", "default", "priority"]
OpenAIFinishReason = Literal["stop", "length", "tool_calls"]
NumLogprobs = Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)]
FilledString = Annotated[str, Field(min_length=1)]
TokenIdList = Annotated[list[Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]], Field(min_length=1)]
Texts = FilledString | TokenIdList | Annotated[list[FilledString | TokenIdList], Field(min_length=1)]
CLOSED = ConfigDict(extra="forbid")  # for objects whose unknown members are rejected
CacheSalt = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS // 2)]


# Requests


class TextContentPart(TypedDict):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    """A refusal from the model, which counts as text."""

    type: Literal["refusal"]
    refusal: str


class SentToolCall(TypedDict):
    """A model's tool call, which a client sends back."""

    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: Function


class SystemMessage(TypedDict):
    """Instructions for the model."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]

    role: Literal["system", "developer"]
    content: str | list[TextContentPart]
    name: NotRequired[str | None]


class UserMessage(TypedDict):
    """A user message."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]

    role: Literal["user"]
    content: str | list[TextContentPart]
    name: NotRequired[str | None]


class SentReply(TypedDict):
    """A model's message, which a client sends back. Members that clients add, such as `parsed`, are ignored."""

    role: Literal["assistant"]
    content: NotRequired[str | list[TextContentPart | RefusalPart] | None]
    name: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    refusal: NotRequired[str | None]
    tool_calls: NotRequired[list[SentToolCall] | None]


class ToolMessage(TypedDict):
    """The result of a tool call."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]

    role: Literal["tool"]
    content: str | list[TextContentPart]
    tool_call_id: NotRequired[str | None]
    name: NotRequired[str | None]


SentMessage = SystemMessage | UserMessage | SentReply | ToolMessage


class StreamOptions(TypedDict, total=False):
    """Stream options, which require `stream: true`."""

    include_usage: bool | None


class TextFormat(TypedDict):
    """The format of unconstrained text."""

    type: Literal["text"]


class JsonObjectFormat(TypedDict):
    """A JSON object that conforms to a schema if one is given."""

    type: Literal["json_object"]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class NamedSchema(TypedDict):
    """A JSON Schema that the text must conform to."""

    name: NotRequired[str]
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class JsonSchemaFormat(TypedDict):
    """JSON that conforms to a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class NamedFunction(TypedDict):
    """A function name."""

    name: str


class NamedTool(TypedDict):
    """A tool, identified by its function's name."""

    type: Literal["function"]
    function: NamedFunction


class AllowedToolList(TypedDict):
    """A list of the tools that the model may or must call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(TypedDict):
    """A tool choice that allows several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class StructuredOutputs(TypedDict, total=False):
    """A constraint on the generated text, in vLLM's format."""

    json: dict[str, Any] | str | None
    regex: str | None
    choice: list[FilledString] | None
    grammar: str | None
    json_object: bool | None


class OtherServersParameters(TypedDict, total=False):
    chat_template_kwargs: dict[str, Any]
    structured_outputs: StructuredOutputs
    guided_json: dict[str, Any] | str
    guided_regex: str
    guided_choice: Annotated[list[FilledString], Field(min_length=1)]
    guided_grammar: str
    reasoning_effort: str


class GenerationParameters(TypedDict, total=False):
    stream: bool
    stream_options: StreamOptions
    service_tier: RequestedTier
    cache_salt: CacheSalt
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat


class ChatParameters(GenerationParameters, OtherServersParameters, total=False):
    messages: Annotated[list[SentMessage], Field(min_length=1)]
    logprobs: bool
    top_logprobs: NumLogprobs
    tool_choice: Literal["auto", "none", "required"] | NamedTool | AllowedTools
    tools: list[Tool]
    reasoning_effort: str


class CompletionParameters(GenerationParameters, OtherServersParameters, total=False):
    prompt: Texts


class EmbeddingParameters(TypedDict, total=False):
    input: Texts
    encoding_format: Literal["float", "base64"]
    service_tier: RequestedTier


# Responses


class CachedTokens(TypedDict):
    """Details about the prompt tokens."""

    cached_tokens: int
    audio_tokens: NotRequired[int]


class CompletionTokens(TypedDict):
    """Details about the generated tokens. Streams and results of text completions may omit `reasoning_tokens`."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    audio_tokens: NotRequired[int]
    reasoning_tokens: NotRequired[int]


class CompletionUsage(TypedDict):
    """The token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens


class InputUsage(TypedDict):
    """The token counts of a request that doesn't generate text."""

    prompt_tokens: int
    total_tokens: int


class AlternativeToken(TypedDict):
    """An alternative token that could have been generated."""

    token: str
    bytes: list[int]
    logprob: float


class OutputLogprob(AlternativeToken):
    """A generated token, and the most likely tokens at its position."""

    top_logprobs: list[AlternativeToken]


class ChatLogprobs(TypedDict):
    """The log probabilities of the tokens in a chat's answer."""

    content: list[OutputLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """The log probabilities of the tokens in a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ReturnedToolCall(TypedDict):
    """A tool call by the model. The function's `arguments` is a JSON object as text."""

    id: str
    type: Literal["function"]
    function: Function


class ChatReply(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ReturnedToolCall]]


class ChatCompletionChoice(TypedDict):
    """One of the answers to a chat."""

    index: int
    finish_reason: OpenAIFinishReason
    message: ChatReply
    logprobs: ChatLogprobs | None


class ChatCompletion(TypedDict):
    """The answer to a chat. `warnings` lists the schema keywords that were not enforced."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionChoice]
    usage: CompletionUsage
    service_tier: ServiceTier
    system_fingerprint: NotRequired[str]
    warnings: NotRequired[list[str]]


class FunctionPiece(TypedDict):
    """A part of a call's arguments. The first part also includes the function name."""

    name: NotRequired[str]
    arguments: str


class ToolCallPiece(TypedDict):
    """A part of a tool call. `index` identifies the call."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: NotRequired[FunctionPiece]


class ChatDelta(TypedDict, total=False):
    """The part of a message that is added by a chunk."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str
    tool_calls: list[ToolCallPiece]


class ChunkChoice(TypedDict):
    """The part of an answer that is added by a chunk. An answer's last chunk includes its finish reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason | None


class ChatCompletionChunk(TypedDict):
    """A chunk of a streamed chat. Only the chunk with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    service_tier: ServiceTier
    system_fingerprint: NotRequired[str]
    usage: NotRequired[CompletionUsage | None]
    warnings: NotRequired[list[str]]


class TextChoice(TypedDict):
    """A completion, or the text that a chunk of a stream adds to a completion."""

    index: int
    finish_reason: OpenAIFinishReason | None
    text: str
    logprobs: TextLogprobs | None


class TextCompletion(TypedDict):
    """The completions of one or more prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    service_tier: ServiceTier
    system_fingerprint: NotRequired[str]
    warnings: NotRequired[list[str]]


class TextCompletionChunk(TypedDict):
    """A chunk of streamed completions. Only the chunk with the usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    service_tier: ServiceTier
    system_fingerprint: NotRequired[str]
    usage: NotRequired[CompletionUsage | None]
    warnings: NotRequired[list[str]]


class Embedding(TypedDict):
    """The embedding of one text, or the embeddings of its tokens if the model doesn't pool them.

    Base64 strings encode float32 values.
    """

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str | list[list[float]]


class EmbeddingList(TypedDict):
    """The embeddings of all texts, in the order of the request."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: InputUsage
