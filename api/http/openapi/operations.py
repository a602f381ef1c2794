"""The table of all gateway operations.

A test fails if an endpoint does not have a row. A row contains only properties that the endpoint's code doesn't define:
a summary, the shapes of the answers, the reasons for failures, and examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cellama.api.anthropic import shapes as anthropic
from cellama.api.anthropic.parameters import COUNT_TOKENS, COUNTED, MESSAGES, PARAMETERS as ANTHROPIC_PARAMETERS
from cellama.api.http.anthropic import VERSION
from cellama.api.http.batches.endpoints import BATCHES, MAX_PAGE as MAX_BATCH_PAGE, PAGE as BATCH_PAGE
from cellama.api.http.batches.service import BATCH_PARAMETERS
from cellama.api.http.files.endpoints import FILE_FIELDS, FILES, PAGE as FILE_PAGE
from cellama.api.http.models import MAX_PAGE as MAX_MODEL_PAGE, PAGE as MODEL_PAGE
from cellama.api.http.responses.endpoints import MAX_PAGE as MAX_ITEM_PAGE, ONE, PAGE as ITEM_PAGE
from cellama.api.http.tokens import DETOKENIZED, TOKENIZED_CHAT, TOKENIZED_TEXT
from cellama.api.openai import shapes as openai
from cellama.api.openai.parameters import CHAT, COMPLETIONS, EMBEDDINGS, OTHER_SERVERS, PARAMETERS, ParameterRule
from cellama.api.openai.reranking import KNOWN as RERANK_PARAMETERS, RERANK
from cellama.api.openai.responses import shapes as responses
from cellama.api.openai.responses.parameters import (
    COMPACT,
    COMPACTED,
    COUNTED as COUNTED_INPUT,
    INPUT_TOKENS,
    RESPONSES,
    RULES,
)
from cellama.tasks.contract.kinds import Kind
from cellama.tasks.contract.kinds.chat import CHAT as CHAT_KIND
from cellama.tasks.contract.kinds.embed import EMBED
from cellama.tasks.contract.kinds.generate import GENERATE
from cellama.tasks.contract.kinds.rerank import RERANK as RERANK_KIND
from cellama.tasks.contract.kinds.tokens import APPLY_CHAT_TEMPLATE, DETOKENIZE, TOKENIZE

from . import shapes
from .failures import BODY, CALLER, CHANGE, CHARGED, JOBS, ErrorStyle
from .schemas import BodyTable

Examples = Mapping[str, Any]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}
SHORT = {"model": "tiny", "max_tokens": 12, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Events:
    """A stream of server-sent events with JSON data.

    `has_end` is True if the stream ends with an event whose data is `[DONE]`.
    """

    data: Any
    has_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One HTTP method of a path.

    `answers` maps the media types of a successful response to their shapes: a type, `Events`, or None for bytes or
    text. `failures` contains error codes, and the statuses of errors without a code (`failures.py`).
    """

    tag: str
    summary: str
    answers: Mapping[str, Any]
    failures: tuple[str | int, ...] = ()
    body: BodyTable | tuple[BodyTable, ...] | None = None
    form: tuple[str, ...] = ()  # names of the fields of a form, instead of a JSON body
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[ErrorStyle, ...] = ("openai",)
    redirect: str = ""  # the reason for a redirect
    is_public: bool = False  # needs no API key
    is_idempotent: bool = False  # accepts the header Idempotency-Key
    examples: Examples = field(default_factory=dict)


def _json(type_: Any) -> dict[str, Any]:
    return {"application/json": type_}


def _json_or_events(type_: Any, events: Events) -> dict[str, Any]:
    return {"application/json": type_, "text/event-stream": events}


def _page(default: int, largest: int) -> dict[str, Any]:
    """Return a list's query parameters (`PageQuery`)."""
    return {
        "after": {"type": "string", "description": "Id of the object before the page."},
        "limit": {"type": "integer", "minimum": 1, "maximum": largest, "default": default},
        "order": {"enum": ["asc", "desc"], "default": "desc", "description": "Oldest or newest first."},
    }


def _rules(own: Mapping[str, ParameterRule], kind: Kind) -> Mapping[str, ParameterRule]:
    """Return an endpoint's rules, and the rules for vLLM's and llama-server's parameters that its jobs support."""
    names = kind.payload.model_fields
    return {**{name: rule for name, rule in OTHER_SERVERS.items() if not rule.to or rule.to in names}, **own}


_ANTHROPIC_VERSION = {
    VERSION: {"type": "string", "description": "Anthropic's clients send it, and get answers in Anthropic's format."}
}
_GENERATION = (*JOBS, "too_many_bytes")
_COMMON_FAILURES_OF_OBJECTS = (*CALLER, "not_found")
_EVENTS_OF_RESPONSES = Events(responses.ResponseEvent)

OPERATIONS: Mapping[str, Operation] = {
    f"POST {CHAT}": Operation(
        tag="OpenAI",
        summary="Answer a chat",
        answers=_json_or_events(openai.ChatCompletion, Events(openai.ChatCompletionChunk, has_end=True)),
        failures=_GENERATION,
        body=BodyTable(
            own=openai.ChatParameters,
            kind=CHAT_KIND,
            rules=_rules(PARAMETERS[CHAT], CHAT_KIND),
            required=("model", "messages"),
        ),
        is_idempotent=True,
        examples={
            "question": {**SHORT, "messages": QUESTION},
            "stream": {**SHORT, "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}},
            "logprobs": {**SHORT, "messages": QUESTION, "logprobs": True, "top_logprobs": 2, "n": 2},
            "tool": {
                **SHORT,
                "messages": QUESTION,
                "max_tokens": 60,
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": "required",
            },
            "reasoning": {**SHORT, "messages": QUESTION, "enable_thinking": True, "thinking_budget": 4},
            "json": {
                **SHORT,
                "messages": QUESTION,
                "max_tokens": 40,
                "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER}},
            },
        },
    ),
    f"POST {COMPLETIONS}": Operation(
        tag="OpenAI",
        summary="Continue one or more prompts",
        answers=_json_or_events(openai.TextCompletion, Events(openai.TextCompletionChunk, has_end=True)),
        failures=_GENERATION,
        body=BodyTable(
            own=openai.CompletionParameters,
            kind=GENERATE,
            rules=_rules(PARAMETERS[COMPLETIONS], GENERATE),
            required=("model", "prompt"),
        ),
        is_idempotent=True,
        examples={
            "story": {**SHORT, "prompt": "Once upon a time"},
            "several": {**SHORT, "prompt": ["The fox", "The bee"], "logprobs": 1},
            "stream": {**SHORT, "prompt": "Once upon a time", "stream": True},
        },
    ),
    "POST /infill": Operation(
        tag="Tokens",
        summary="Generate the text between a prefix and a suffix",
        answers=_json_or_events(shapes.Infill, Events(shapes.InfillPiece)),
        failures=_GENERATION,
        body=BodyTable(
            own=shapes.InfillParameters,
            kind=GENERATE,
            rules=_rules(PARAMETERS[COMPLETIONS], GENERATE),
            required=("input_prefix", "input_suffix"),
        ),
        is_idempotent=True,
        examples={"middle": {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "max_tokens": 12}},
    ),
    f"POST {EMBEDDINGS}": Operation(
        tag="OpenAI",
        summary="Compute embeddings for texts",
        answers=_json(openai.EmbeddingList),
        failures=JOBS,
        body=BodyTable(
            own=openai.EmbeddingParameters, kind=EMBED, rules=PARAMETERS[EMBEDDINGS], required=("model", "input")
        ),
        is_idempotent=True,
        examples={
            "texts": {"model": "tiny", "input": ["The fox", "The bee"]},
            "base64": {"model": "tiny", "input": "The fox", "encoding_format": "base64"},
        },
    ),
    f"POST {RESPONSES}": Operation(
        tag="Responses",
        summary="Create a response",
        answers=_json_or_events(responses.ResponseObject, _EVENTS_OF_RESPONSES),
        failures=(*_GENERATION, "previous_response_not_found"),
        body=BodyTable(
            own=responses.ResponseParameters,
            kind=CHAT_KIND,
            rules=_rules(RULES, CHAT_KIND),
            required=("model", "input"),
        ),
        is_idempotent=True,
        examples={
            "question": {"model": "tiny", "input": "What is the capital of France?", "max_output_tokens": 12},
            "stream": {"model": "tiny", "input": QUESTION, "max_output_tokens": 12, "stream": True},
            "background": {"model": "tiny", "input": "Hello", "max_output_tokens": 4, "background": True},
            "tool": {
                "model": "tiny",
                "input": QUESTION,
                "max_output_tokens": 60,
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": "required",
                "stream": True,
            },
        },
    ),
    f"POST {INPUT_TOKENS}": Operation(
        tag="Responses",
        summary="Count the tokens of a response's input",
        answers=_json(responses.ResponseInputTokens),
        failures=(*JOBS, "previous_response_not_found"),
        body=BodyTable(
            own=responses.ResponseParameters, kind=CHAT_KIND, rules=RULES, names=COUNTED_INPUT, required=("input",)
        ),
        is_idempotent=True,
        examples={"question": {"model": "tiny", "input": "What is the capital of France?"}},
    ),
    f"POST {COMPACT}": Operation(
        tag="Responses",
        summary="Replace a conversation with a summary",
        answers=_json(responses.CompactedConversation),
        failures=(*_GENERATION, "previous_response_not_found"),
        body=BodyTable(
            own=responses.ResponseParameters, kind=CHAT_KIND, rules=RULES, names=COMPACTED, required=("model", "input")
        ),
        is_idempotent=True,
        examples={"conversation": {"model": "tiny", "input": QUESTION}},
    ),
    f"GET {ONE}": Operation(
        tag="Responses",
        summary="Retrieve a response, or stream its events again",
        answers=_json_or_events(responses.ResponseObject, _EVENTS_OF_RESPONSES),
        failures=(*_COMMON_FAILURES_OF_OBJECTS, 400, "events_gone", "timeout"),
        query={
            "stream": {"type": "boolean"},
            "starting_after": {
                "type": "integer",
                "minimum": 0,
                "description": "`sequence_number` of the last event that the client has received. Requires `stream`.",
            },
        },
    ),
    f"DELETE {ONE}": Operation(
        tag="Responses",
        summary="Delete a response",
        answers=_json(responses.DeletedResponse),
        failures=(*_COMMON_FAILURES_OF_OBJECTS, "origin_not_allowed", "not_ended", "timeout"),
    ),
    f"POST {ONE}/cancel": Operation(
        tag="Responses",
        summary="Cancel a background response",
        answers=_json(responses.ResponseObject),
        failures=(*_COMMON_FAILURES_OF_OBJECTS, "origin_not_allowed", 400, "timeout"),
    ),
    f"GET {ONE}/input_items": Operation(
        tag="Responses",
        summary="List the input items of a response",
        answers=_json(responses.InputItemList),
        failures=(*_COMMON_FAILURES_OF_OBJECTS, 400, "timeout"),
        query=_page(ITEM_PAGE, MAX_ITEM_PAGE),
    ),
    f"POST {MESSAGES}": Operation(
        tag="Anthropic",
        summary="Create a message",
        answers=_json_or_events(anthropic.AnthropicMessage, Events(anthropic.MessageEvent)),
        failures=_GENERATION,
        body=BodyTable(
            own=anthropic.MessageParameters,
            kind=CHAT_KIND,
            rules=_rules(ANTHROPIC_PARAMETERS, CHAT_KIND),
            required=("model", "messages", "max_tokens"),
        ),
        errors=("anthropic",),
        is_idempotent=True,
        examples={
            "question": {**SHORT, "messages": QUESTION},
            "stream": {**SHORT, "messages": QUESTION, "stream": True},
            "tool": {
                **SHORT,
                "messages": QUESTION,
                "max_tokens": 60,
                "tools": [{"name": "get_weather", "input_schema": WEATHER}],
                "tool_choice": {"type": "any"},
                "stream": True,
            },
            "thinking": {**SHORT, "messages": QUESTION, "thinking": {"type": "enabled", "budget_tokens": 4}},
        },
    ),
    f"POST {COUNT_TOKENS}": Operation(
        tag="Anthropic",
        summary="Count the tokens of a message's prompt",
        answers=_json(anthropic.InputTokens),
        failures=JOBS,
        body=BodyTable(
            own=anthropic.MessageParameters,
            kind=CHAT_KIND,
            rules=ANTHROPIC_PARAMETERS,
            names=COUNTED,
            required=("model", "messages"),
        ),
        errors=("anthropic",),
        is_idempotent=True,
        examples={"question": {"model": "tiny", "messages": QUESTION}},
    ),
    f"POST {RERANK}": Operation(
        tag="Reranking",
        summary="Rank documents by their relevance to a query",
        answers=_json(shapes.RerankResults),
        failures=JOBS,
        body=BodyTable(
            own=shapes.RerankParameters,
            kind=RERANK_KIND,
            names=RERANK_PARAMETERS,
            required=("model", "query", "documents"),
        ),
        is_idempotent=True,
        examples={"documents": {"model": "reranker", "query": "What is a fox?", "documents": ["an animal", "a city"]}},
    ),
    "POST /tokenize": Operation(
        tag="Tokens",
        summary="Convert a text or a chat into tokens",
        answers=_json(shapes.TokenCount),
        failures=JOBS,
        body=(
            *(
                BodyTable(own=shapes.TokenizeParameters, kind=TOKENIZE, names=TOKENIZED_TEXT, required=(text,))
                for text in ("content", "prompt")
            ),
            BodyTable(
                own=shapes.TokenizeParameters, kind=APPLY_CHAT_TEMPLATE, names=TOKENIZED_CHAT, required=("messages",)
            ),
        ),
        is_idempotent=True,
        examples={"text": {"content": "Hello"}, "chat": {"model": "tiny", "messages": QUESTION}},
    ),
    "POST /detokenize": Operation(
        tag="Tokens",
        summary="Convert tokens into a text",
        answers=_json(shapes.DetokenizedText),
        failures=JOBS,
        body=BodyTable(own=shapes.TokenizeParameters, kind=DETOKENIZE, names=DETOKENIZED, required=("tokens",)),
        is_idempotent=True,
        examples={"tokens": {"tokens": [72, 101]}},
    ),
    "GET /v1/models": Operation(
        tag="Models",
        summary="List the models",
        answers=_json(shapes.ModelList | anthropic.AnthropicModelPage),
        failures=(*CALLER, 400),
        query={
            "limit": {
                **_page(MODEL_PAGE, MAX_MODEL_PAGE)["limit"],
                "description": "Number of models per page in Anthropic's format.",
            },
            "after_id": {"type": "string", "description": "Id of the model before the page, in Anthropic's format."},
            "before_id": {"type": "string", "description": "Id of the model after the page, in Anthropic's format."},
        },
        headers=_ANTHROPIC_VERSION,
        errors=("openai", "anthropic"),
    ),
    "GET /v1/models/{model}": Operation(
        tag="Models",
        summary="Retrieve a model",
        answers=_json(shapes.ModelObject | anthropic.AnthropicModel),
        failures=(*CALLER, 400, "model_not_found", "model_not_allowed", "no_worker"),
        headers=_ANTHROPIC_VERSION,
        errors=("openai", "anthropic"),
    ),
    f"POST {FILES}": Operation(
        tag="Files",
        summary="Upload a file",
        answers=_json(shapes.FileObject),
        failures=(*CHARGED, 400, 413, 415, "slow_body", "file_quota_exceeded", "files_unavailable"),
        form=FILE_FIELDS,
    ),
    f"GET {FILES}": Operation(
        tag="Files",
        summary="List the files",
        answers=_json(shapes.FileList),
        failures=(*_COMMON_FAILURES_OF_OBJECTS, 400),
        query={**_page(FILE_PAGE, FILE_PAGE), "purpose": {"type": "string"}},
    ),
    f"GET {FILES}/{{id}}": Operation(
        tag="Files",
        summary="Retrieve a file",
        answers=_json(shapes.FileObject),
        failures=_COMMON_FAILURES_OF_OBJECTS,
    ),
    f"DELETE {FILES}/{{id}}": Operation(
        tag="Files",
        summary="Delete a file",
        answers=_json(shapes.DeletedFile),
        failures=(*_COMMON_FAILURES_OF_OBJECTS, "origin_not_allowed", "files_unavailable"),
    ),
    f"GET {FILES}/{{id}}/content": Operation(
        tag="Files",
        summary="Download a file",
        answers={"application/octet-stream": None},
        failures=(*_COMMON_FAILURES_OF_OBJECTS, "files_unavailable"),
    ),
    f"POST {BATCHES}": Operation(
        tag="Batches",
        summary="Create a batch",
        answers=_json(shapes.BatchObject),
        failures=(
            *BODY,
            "not_found",
            "adapter_not_allowed",
            "idempotency_key_reused",
            "too_many_batches",
            "files_unavailable",
        ),
        body=BodyTable(
            own=shapes.BatchParameters,
            kind=GENERATE,
            names=BATCH_PARAMETERS,
            required=("input_file_id", "endpoint", "completion_window"),
        ),
        is_idempotent=True,
        examples={
            "day": {
                "input_file_id": "file-0123456789abcdef0123456789abcdef",
                "endpoint": CHAT,
                "completion_window": "24h",
            }
        },
    ),
    f"GET {BATCHES}": Operation(
        tag="Batches",
        summary="List the batches",
        answers=_json(shapes.BatchList),
        failures=(*_COMMON_FAILURES_OF_OBJECTS, 400),
        query=_page(BATCH_PAGE, MAX_BATCH_PAGE),
    ),
    f"GET {BATCHES}/{{id}}": Operation(
        tag="Batches",
        summary="Retrieve a batch",
        answers=_json(shapes.BatchObject),
        failures=_COMMON_FAILURES_OF_OBJECTS,
    ),
    f"POST {BATCHES}/{{id}}/cancel": Operation(
        tag="Batches",
        summary="Cancel a batch",
        answers=_json(shapes.BatchObject),
        failures=(*_COMMON_FAILURES_OF_OBJECTS, *CHANGE, "batch_has_ended"),
    ),
    "GET /": Operation(
        tag="Operations",
        summary="Read the paths of the APIs",
        answers=_json(shapes.GatewayInfo),
        redirect="a browser is redirected to the console",
        is_public=True,
    ),
    "GET /health": Operation(
        tag="Operations",
        summary="Check that the gateway is running",
        answers=_json(shapes.Health),
        is_public=True,
    ),
    "GET /ready": Operation(
        tag="Operations",
        summary="Check that the gateway can serve requests",
        answers=_json(shapes.Readiness),
        failures=("not_ready", "internal_error"),
        is_public=True,
    ),
    "GET /metrics": Operation(
        tag="Operations",
        summary="Read the metrics for Prometheus",
        answers={"text/plain": None},
        failures=(401, 403),
        is_public=True,
    ),
    "GET /openapi.json": Operation(
        tag="Operations",
        summary="Read this document",
        answers=_json(dict[str, Any]),
        is_public=True,
    ),
}
