"""The tasks as type checkers see them: what a call takes, and what its job gives. Celery has no types of its own.

`cellama.tasks` exports its tasks under these types; what a canvas is made of (signatures, groups) stays Celery's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal, Protocol, TypeVar, Unpack, overload

from celery.canvas import Signature, group
from typing_extensions import TypedDict

from cellama.tasks.contract.shapes.parameters import (
    ChatParams,
    DetokenizeParams,
    EmbedParams,
    GenerateParams,
    Messages,
    PrefillParams,
    Prompt,
    RerankParams,
    TemplateParams,
    Texts,
    TextsOrTokens,
    TokenizeParams,
)
from cellama.tasks.contract.shapes.results import (
    ChatResult,
    DetokenizeResult,
    EmbedResult,
    GenerateResult,
    PrefillResult,
    RerankResult,
    TemplateResult,
    TokenizeResult,
)

R = TypeVar("R", covariant=True)
C = TypeVar("C", contravariant=True)


class QueuedJob(Protocol[R]):
    """A job that was queued: Celery's AsyncResult of it. Its `id` is what `Client.job` and `cellama jobs` take."""

    id: str

    @property
    def state(self) -> str:
        """PENDING until it has ended, then SUCCESS, FAILURE or REVOKED; `Client.position` knows more."""

    def ready(self) -> bool:
        """Whether it has ended."""

    def successful(self) -> bool:
        """Whether it has ended well."""

    def failed(self) -> bool:
        """Whether it has ended with an error."""

    @overload
    def get(self, timeout: float | None = None, *, interval: float = 0.5, disable_sync_subtasks: bool = True) -> R: ...

    @overload
    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        interval: float = 0.5,
        *,
        disable_sync_subtasks: bool = True,
    ) -> R | BaseException: ...

    def revoke(self, *, terminate: bool = False) -> None:
        """Ends it wherever it is; with one of ours `terminate` makes no difference."""

    def forget(self) -> None:
        """Deletes its result."""


class CallOptions(TypedDict, total=False):
    """Of `apply_async` (docs/canvas.md): how the job is queued, not what it does. Seconds, if they are numbers."""

    idempotency_key: str | None
    idempotency_scope: str
    task_id: str | None
    queue: object  # a name, or a kombu.Queue
    priority: int | None
    countdown: float | None
    eta: datetime | None
    expires: float | datetime | None
    ignore_result: bool
    link: object  # a signature, or a list of them
    link_error: object
    retry: bool
    retry_policy: Mapping[str, float | None]
    headers: Mapping[str, object]
    compression: str | None
    serializer: Literal["json"]
    shadow: str | None
    time_limit: float | None
    soft_time_limit: float | None


class _Task(Protocol[C, R]):
    """What all tasks have. `C` is what a call may be given by name, `R` the result."""

    name: str

    def apply_async(
        self, args: Sequence[object] | None = None, kwargs: C | None = None, **options: Unpack[CallOptions]
    ) -> QueuedJob[R]:
        """Queues a job with options of Celery. Raises InvalidJob, RedisUnreachable, RedisRefused."""

    def s(self, *args: object, **kwargs: object) -> Signature:
        """A step of a canvas; `model` must be given by name where a parent's result comes first."""

    def si(self, *args: object, **kwargs: object) -> Signature:
        """A step that takes nothing of its parent."""

    def map(self, it: Iterable[object]) -> group:
        """One job for each, side by side."""

    def starmap(self, it: Iterable[Sequence[object]]) -> group:
        """One job for each, with its arguments."""


class GenerateCall(GenerateParams, total=False):
    """A call of `generate`, by name."""

    model: str
    prompt: Prompt


class ChatCall(ChatParams, total=False):
    """A call of `chat`, by name."""

    model: str
    messages: Messages


class PrefillCall(PrefillParams, total=False):
    """A call of `prefill`, by name."""

    model: str
    prompt: Prompt | None


class EmbedCall(EmbedParams, total=False):
    """A call of `embed`, by name."""

    model: str
    texts: TextsOrTokens


class RerankCall(RerankParams, total=False):
    """A call of `rerank`, by name."""

    model: str
    query: str
    documents: Texts


class TokenizeCall(TokenizeParams, total=False):
    """A call of `tokenize`, by name."""

    model: str
    text: str


class DetokenizeCall(DetokenizeParams, total=False):
    """A call of `detokenize`, by name."""

    model: str
    tokens: list[int]


class TemplateCall(TemplateParams, total=False):
    """A call of `apply_chat_template`, by name."""

    model: str
    messages: Messages


class GenerateTask(_Task[GenerateCall | GenerateParams, GenerateResult], Protocol):
    """The text that follows a prompt (a text, or token ids)."""

    def delay(self, model: str, prompt: Prompt, **params: Unpack[GenerateParams]) -> QueuedJob[GenerateResult]: ...


class ChatTask(_Task[ChatCall | ChatParams, ChatResult], Protocol):
    """The assistant's next turn."""

    def delay(self, model: str, messages: Messages, **params: Unpack[ChatParams]) -> QueuedJob[ChatResult]: ...


class PrefillTask(_Task[PrefillCall | PrefillParams, PrefillResult], Protocol):
    """What later jobs begin with, read into the cache: a prompt, or the messages of a chat."""

    def delay(
        self, model: str, prompt: Prompt | None = None, **params: Unpack[PrefillParams]
    ) -> QueuedJob[PrefillResult]: ...


class EmbedTask(_Task[EmbedCall | EmbedParams, EmbedResult], Protocol):
    """One vector per text (a text, or token ids), of unit length unless `normalize=False`."""

    def delay(self, model: str, texts: TextsOrTokens, **params: Unpack[EmbedParams]) -> QueuedJob[EmbedResult]: ...


class RerankTask(_Task[RerankCall | RerankParams, RerankResult], Protocol):
    """The documents' indices and scores, the best first."""

    def delay(
        self, model: str, query: str, documents: Texts, **params: Unpack[RerankParams]
    ) -> QueuedJob[RerankResult]: ...


class TokenizeTask(_Task[TokenizeCall | TokenizeParams, TokenizeResult], Protocol):
    """The token ids of a text."""

    def delay(self, model: str, text: str, **params: Unpack[TokenizeParams]) -> QueuedJob[TokenizeResult]: ...


class DetokenizeTask(_Task[DetokenizeCall | DetokenizeParams, DetokenizeResult], Protocol):
    """The text of token ids."""

    def delay(
        self, model: str, tokens: list[int], **params: Unpack[DetokenizeParams]
    ) -> QueuedJob[DetokenizeResult]: ...


class TemplateTask(_Task[TemplateCall | TemplateParams, TemplateResult], Protocol):
    """The prompt that `chat` would give to the model."""

    def delay(self, model: str, messages: Messages, **params: Unpack[TemplateParams]) -> QueuedJob[TemplateResult]: ...
