"""The shapes for endpoints that don't belong to OpenAI's or Anthropic's generation APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from cellama.api.http.batches.input_check import ENDPOINTS
from cellama.api.http.files.service import MAX_LIFE_S, MIN_LIFE_S
from cellama.api.openai.shapes import (
    CLOSED,
    FilledString,
    GenerationParameters,
    InputUsage,
    OtherServersParameters,
    RequestedTier,
)
from cellama.config.settings import Capability
from cellama.tasks.contract.shapes.parameters import ChatMessage, Tool


class ErrorObject(TypedDict):
    """An error, whose message describes the problem and the remedy.

    `param` is the invalid parameter, and `code` is the reason.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of an error response, or the data of a failed stream's last event."""

    error: ErrorObject


# Models and health


class ModelObject(TypedDict):
    """A model that accepts jobs. `context_length` is the maximum number of tokens in a prompt and its answer."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    capabilities: list[Capability]
    context_length: NotRequired[int]
    architecture: NotRequired[str]
    n_params: NotRequired[int]


class ModelList(TypedDict):
    """All models that accept jobs and may be used with the API key."""

    object: Literal["list"]
    data: list[ModelObject]


class GatewayInfo(TypedDict):
    """The base paths of the gateway's APIs. `console` is missing if the console is disabled."""

    service: Literal["cellama"]
    openai: str
    anthropic: str
    health: str
    console: NotRequired[str]


class Health(TypedDict):
    """The status of a running gateway."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """The status of a gateway that is ready: Redis is reachable, and a model accepts jobs."""

    status: Literal["ready"]


# Tokens


class TokenizeParameters(TypedDict, total=False):
    content: str
    prompt: str
    add_special_tokens: bool
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool]
    chat_template_kwargs: dict[str, Any]
    with_pieces: bool
    return_token_strs: bool


class TokenPiece(TypedDict):
    """A token and its text, or the text's bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenCount(TypedDict):
    """The tokens of a text or chat."""

    tokens: list[int] | list[TokenPiece]
    token_strs: NotRequired[list[str]]
    count: int
    model: str
    max_model_len: int | None


class DetokenizedText(TypedDict):
    """The text of the tokens, once under llama-server's member name and once under vLLM's."""

    content: str
    prompt: str
    model: str


# Infill


class InfillExtra(TypedDict):
    """A file that the model uses as context."""

    filename: NotRequired[str]
    text: str


class InfillParameters(GenerationParameters, OtherServersParameters, total=False):
    input_prefix: str
    input_suffix: str
    input_extra: list[InfillExtra]
    prompt: str


class Infill(TypedDict):
    """The text between the prefix and the suffix, in llama-server's format."""

    content: str
    stop: Literal[True]
    model: str
    stop_type: Literal["limit", "eos", "word"]
    stopping_word: str
    truncated: Literal[False]
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int


class StreamedInfill(TypedDict):
    """A chunk of the streamed text."""

    content: str
    tokens: list[int]
    stop: Literal[False]


InfillPiece = StreamedInfill | Infill


# Reranking


class RerankDocument(TypedDict):
    """A document that is given as an object."""

    text: str


class RerankParameters(TypedDict, total=False):
    query: FilledString
    documents: Annotated[list[FilledString | RerankDocument], Field(min_length=1)]
    return_documents: bool
    service_tier: RequestedTier


class RankedDocument(TypedDict):
    """A document's score. `index` is the document's index in the request."""

    index: int
    relevance_score: float
    document: NotRequired[RerankDocument]


class RerankResults(TypedDict):
    """The documents with their scores, best first."""

    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: InputUsage


# Files and batches


class FileLife(TypedDict):
    """The lifetime of a file."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)]


class FileObject(TypedDict):
    """A file stored by the gateway."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(TypedDict):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchParameters(TypedDict, total=False):
    input_file_id: str
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    completion_window: Annotated[str, Field(pattern="^[0-9]{1,5}[mhd]$")]
    metadata: Annotated[dict[str, str], Field(max_length=16)]
    output_expires_after: FileLife


class BatchProblem(TypedDict):
    """An error in a batch's input file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(TypedDict):
    """The errors in a batch's input file."""

    object: Literal["list"]
    data: list[BatchProblem]


class RequestCountsOfBatch(TypedDict):
    """The total, completed and failed request counts of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None
    output_file_id: str | None
    error_file_id: str | None
    usage: dict[str, Any] | None
    model: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    errors: BatchProblems | None
    request_counts: RequestCountsOfBatch


class BatchList(TypedDict):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
