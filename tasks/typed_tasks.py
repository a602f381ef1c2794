"""The tasks for type checkers: the parameters of a call, and the result of its job.

.ci/typed_tasks.py writes this file from the modules in tasks/contract/kinds. Do not edit it; run the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, Unpack

from typing_extensions import TypedDict

from .calls.task_types import QueuedJob, TypedTask
from .contract.kinds.chat import ChatResult
from .contract.kinds.embed import EmbedResult
from .contract.kinds.generate import GenerateResult
from .contract.kinds.prefill import PrefillResult
from .contract.kinds.rerank import RerankResult
from .contract.kinds.tokens import DetokenizeResult, TemplateResult, TokenizeResult
from .contract.shapes.parameters import (
    ExtraFile,
    JsonObject,
    Messages,
    Prediction,
    Prompt,
    Texts,
    TextsOrTokens,
    Tool,
    ToolChoice,
)
from .jobs import TASKS


class BaseParams(TypedDict, total=False):
    """The parameters that all kinds of jobs have."""

    priority: int
    timeout: float | None
    keep_alive_s: float | None


class ReadingParams(BaseParams, total=False):
    """The parameters of jobs that prefill a prompt."""

    parent_key: str | None
    cache_scope: str
    adapters: str | Mapping[str, float] | Sequence[str] | Sequence[tuple[str, float]] | None


class GenerationParams(ReadingParams, total=False):
    """The parameters of jobs that generate text."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    typical_p: float
    dynatemp_range: float
    dynatemp_exponent: float
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
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    min_tokens: int
    cache_prompt: bool
    return_tokens: bool
    ignore_eos: bool
    stream: bool
    prediction: Prompt | Prediction | None


class ConversationParams(BaseParams, total=False):
    """The parameters of jobs whose prompt consists of chat messages."""

    system: str | None
    tools: Sequence[Tool]
    tool_choice: str | ToolChoice
    enable_thinking: bool | None
    template_args: JsonObject
    chat_template: str | None


class RepliedParams(ConversationParams, total=False):
    """The parameters of jobs whose reply either follows the last message or continues the last message."""

    add_generation_prompt: bool
    continue_final_message: bool | None


class ChatParams(RepliedParams, GenerationParams, total=False):
    """Parameters of `chat`."""

    thinking_budget: int | None
    parallel_tool_calls: bool | None
    allowed_tools: Sequence[str] | None


class ChatCall(ChatParams, total=False):
    """A call of `chat` with all parameters by name."""

    model: str
    messages: Messages


class ChatTask(TypedTask[ChatCall | ChatParams, ChatResult], Protocol):
    """The assistant's next turn. `template_args` are variables of the model's chat template."""

    def delay(self, model: str, messages: Messages, **params: Unpack[ChatParams]) -> QueuedJob[ChatResult]: ...


class EmbedParams(BaseParams, total=False):
    """Parameters of `embed`."""

    normalize: bool
    dimensions: int | None
    truncate: bool
    encoding: Literal["list", "base64"]


class EmbedCall(EmbedParams, total=False):
    """A call of `embed` with all parameters by name."""

    model: str
    texts: TextsOrTokens


class EmbedTask(TypedTask[EmbedCall | EmbedParams, EmbedResult], Protocol):
    """One vector per string or list of token ids. Vectors have unit length unless `normalize` is false."""

    def delay(self, model: str, texts: TextsOrTokens, **params: Unpack[EmbedParams]) -> QueuedJob[EmbedResult]: ...


class GenerateParams(GenerationParams, total=False):
    """Parameters of `generate`."""

    suffix: str | None
    input_extra: Sequence[ExtraFile]


class GenerateCall(GenerateParams, total=False):
    """A call of `generate` with all parameters by name."""

    model: str
    prompt: Prompt


class GenerateTask(TypedTask[GenerateCall | GenerateParams, GenerateResult], Protocol):
    """Text that continues a prompt, or fills the gap before a suffix. The prompt is a string or a list of token ids."""

    def delay(self, model: str, prompt: Prompt, **params: Unpack[GenerateParams]) -> QueuedJob[GenerateResult]: ...


class PrefillParams(ConversationParams, ReadingParams, total=False):
    """Parameters of `prefill`."""

    messages: Messages


class PrefillCall(PrefillParams, total=False):
    """A call of `prefill` with all parameters by name."""

    model: str
    prompt: Prompt | None


class PrefillTask(TypedTask[PrefillCall | PrefillParams, PrefillResult], Protocol):
    """A prompt, or a chat's messages or system message, prefilled into the cache as the prefix of later jobs."""

    def delay(
        self, model: str, prompt: Prompt | None = None, **params: Unpack[PrefillParams]
    ) -> QueuedJob[PrefillResult]: ...


class RerankParams(BaseParams, total=False):
    """Parameters of `rerank`."""

    top_n: int | None
    truncate: bool


class RerankCall(RerankParams, total=False):
    """A call of `rerank` with all parameters by name."""

    model: str
    query: str
    documents: Texts


class RerankTask(TypedTask[RerankCall | RerankParams, RerankResult], Protocol):
    """Indices and scores of documents, sorted by how well they answer a query, best first."""

    def delay(
        self, model: str, query: str, documents: Texts, **params: Unpack[RerankParams]
    ) -> QueuedJob[RerankResult]: ...


class TokenizeParams(BaseParams, total=False):
    """Parameters of `tokenize`."""

    add_special: bool
    parse_special: bool
    return_pieces: bool


class TokenizeCall(TokenizeParams, total=False):
    """A call of `tokenize` with all parameters by name."""

    model: str
    text: str


class TokenizeTask(TypedTask[TokenizeCall | TokenizeParams, TokenizeResult], Protocol):
    """The token ids of a text."""

    def delay(self, model: str, text: str, **params: Unpack[TokenizeParams]) -> QueuedJob[TokenizeResult]: ...


class DetokenizeParams(BaseParams, total=False):
    """Parameters of `detokenize`."""


class DetokenizeCall(DetokenizeParams, total=False):
    """A call of `detokenize` with all parameters by name."""

    model: str
    tokens: list[int]


class DetokenizeTask(TypedTask[DetokenizeCall | DetokenizeParams, DetokenizeResult], Protocol):
    """Text decoded from a list of token ids."""

    def delay(
        self, model: str, tokens: list[int], **params: Unpack[DetokenizeParams]
    ) -> QueuedJob[DetokenizeResult]: ...


class TemplateParams(RepliedParams, total=False):
    """Parameters of `apply_chat_template`."""

    return_pieces: bool


class TemplateCall(TemplateParams, total=False):
    """A call of `apply_chat_template` with all parameters by name."""

    model: str
    messages: Messages


class TemplateTask(TypedTask[TemplateCall | TemplateParams, TemplateResult], Protocol):
    """The prompt of a conversation, as text and as token ids."""

    def delay(self, model: str, messages: Messages, **params: Unpack[TemplateParams]) -> QueuedJob[TemplateResult]: ...


chat: ChatTask = TASKS["cellama.chat"]
embed: EmbedTask = TASKS["cellama.embed"]
generate: GenerateTask = TASKS["cellama.generate"]
prefill: PrefillTask = TASKS["cellama.prefill"]
rerank: RerankTask = TASKS["cellama.rerank"]
tokenize: TokenizeTask = TASKS["cellama.tokenize"]
detokenize: DetokenizeTask = TASKS["cellama.detokenize"]
apply_chat_template: TemplateTask = TASKS["cellama.apply_chat_template"]

__all__ = [
    "ChatParams",
    "ChatResult",
    "ChatTask",
    "DetokenizeParams",
    "DetokenizeResult",
    "DetokenizeTask",
    "EmbedParams",
    "EmbedResult",
    "EmbedTask",
    "GenerateParams",
    "GenerateResult",
    "GenerateTask",
    "PrefillParams",
    "PrefillResult",
    "PrefillTask",
    "RerankParams",
    "RerankResult",
    "RerankTask",
    "TemplateParams",
    "TemplateResult",
    "TemplateTask",
    "TokenizeParams",
    "TokenizeResult",
    "TokenizeTask",
    "apply_chat_template",
    "chat",
    "detokenize",
    "embed",
    "generate",
    "prefill",
    "rerank",
    "tokenize",
]
