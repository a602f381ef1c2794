"""The parameters of jobs as type checkers see them; `payloads` checks them, and a test compares the two."""

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


class JobParams(TypedDict, total=False):
    """Of every job."""

    priority: int
    timeout: float | None


class ReadingParams(JobParams, total=False):
    """Of what reads a prompt into the cache."""

    parent_key: str | None
    cache_scope: str
    adapters: str | Mapping[str, float] | Sequence[str] | Sequence[tuple[str, float]] | None


class GenerateParams(ReadingParams, total=False):
    """Of `generate`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int | None
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    repeat_last_n: int
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Texts
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    json_schema: str | JsonObject | bool | None
    strict_schema: bool
    regex: str | None
    lark: str | None
    grammar: str | None
    grammar_root: str
    logprobs: int | None
    n: int
    stop: Texts
    cache_prompt: bool
    return_tokens: bool
    ignore_eos: bool
    stream: bool
    prediction: str | list[int] | Prediction | None


class TemplateParams(JobParams, total=False):
    """Of `apply_chat_template`."""

    system: str | None
    tools: Sequence[Tool]
    tool_choice: str | ToolChoice
    enable_thinking: bool | None
    template_args: JsonObject


class ChatParams(TemplateParams, GenerateParams, total=False):
    """Of `chat`."""

    thinking_budget: int | None
    parallel_tool_calls: bool | None
    allowed_tools: Sequence[str] | None


class PrefillParams(TemplateParams, ReadingParams, total=False):
    """Of `prefill`."""

    messages: Messages


class EmbedParams(JobParams, total=False):
    """Of `embed`."""

    normalize: bool
    dimensions: int | None
    truncate: bool
    encoding: Literal["list", "base64"]


class RerankParams(JobParams, total=False):
    """Of `rerank`."""

    top_n: int | None
    truncate: bool


class TokenizeParams(JobParams, total=False):
    """Of `tokenize`."""

    add_special: bool
    parse_special: bool


class DetokenizeParams(JobParams, total=False):
    """Of `detokenize`."""
