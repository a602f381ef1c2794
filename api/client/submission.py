"""What clients submit: one job, or many at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from cellama.tasks.contract import names
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

from .core import Core
from .job import Job


class Submission:
    """The tasks, for `Client`."""

    _core: Core

    def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> Job[GenerateResult]:
        """Submits a generation. Raises InvalidJob, and UnknownModel if no worker serves the model (unless `wait`).

        With `idempotency_key=`, the same key gives the same job, as long as its result is kept.
        """
        return self._submit(names.TASK_GENERATE, model, prompt, wait, idempotency_key, params)

    def chat(
        self,
        model: str,
        messages: Messages,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[ChatParams],
    ) -> Job[ChatResult]:
        """Submits a chat turn; raises as `generate`."""
        return self._submit(names.TASK_CHAT, model, messages, wait, idempotency_key, params)

    def prefill(
        self,
        model: str,
        prompt: Prompt | None = None,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[PrefillParams],
    ) -> Job[PrefillResult]:
        """Submits what later jobs begin with, to be read into the cache: a prompt, or the `messages` (or the `system`)
        of a chat. The `finish_key` of its result is the `parent_key` of what follows. Raises as `generate`.
        """
        return self._submit(names.TASK_PREFILL, model, prompt, wait, idempotency_key, params)

    def embed(
        self,
        model: str,
        texts: TextsOrTokens,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[EmbedParams],
    ) -> Job[EmbedResult]:
        """Submits texts, or token ids, to embed; raises as `generate`."""
        return self._submit(names.TASK_EMBED, model, texts, wait, idempotency_key, params)

    def rerank(
        self,
        model: str,
        query: str,
        documents: Texts,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[RerankParams],
    ) -> Job[RerankResult]:
        """Submits documents to rank for a query; raises as `generate`."""
        return self._submit(names.TASK_RERANK, model, query, wait, idempotency_key, {"documents": documents, **params})

    def generate_many(
        self,
        model: str,
        prompts: Iterable[Prompt],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        **params: Unpack[GenerateParams],
    ) -> list[Job[GenerateResult]]:
        """Submits many generations with the same parameters, much faster than one by one; jobs in order of prompts.

        All are checked before any is queued: InvalidJob names the places of all that are wrong. With
        `idempotency_keys=`, one for each, the call may be repeated, for instance after RedisUnreachable.
        """
        return self._submit_many(names.TASK_GENERATE, model, prompts, wait, idempotency_keys, params)

    def chat_many(
        self,
        model: str,
        conversations: Iterable[Messages],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        **params: Unpack[ChatParams],
    ) -> list[Job[ChatResult]]:
        """Submits many chat turns, as `generate_many`."""
        return self._submit_many(names.TASK_CHAT, model, conversations, wait, idempotency_keys, params)

    def embed_many(
        self,
        model: str,
        texts: Iterable[TextsOrTokens],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        **params: Unpack[EmbedParams],
    ) -> list[Job[EmbedResult]]:
        """Submits a job for each of the texts, or lists of texts, as `generate_many`."""
        return self._submit_many(names.TASK_EMBED, model, texts, wait, idempotency_keys, params)

    def _submit(
        self, task: str, model: str, content: Any, wait: bool, key: str | None, params: Mapping[str, Any]
    ) -> Job[Any]:
        return Job(self._core, self._core.submit(task, model, content, wait, key, params).id)

    def _submit_many(
        self,
        task: str,
        model: str,
        contents: Iterable[Any],
        wait: bool,
        keys: Sequence[str] | None,
        params: Mapping[str, Any],
    ) -> list[Job[Any]]:
        return [Job(self._core, job_id) for job_id in self._core.submit_many(task, model, contents, wait, keys, params)]

    def tokenize(
        self,
        model: str,
        text: str,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[TokenizeParams],
    ) -> Job[TokenizeResult]:
        """Submits a text whose token ids are wanted; raises as `generate`."""
        return self._submit(names.TASK_TOKENIZE, model, text, wait, idempotency_key, params)

    def detokenize(
        self,
        model: str,
        tokens: list[int],
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[DetokenizeParams],
    ) -> Job[DetokenizeResult]:
        """Submits token ids whose text is wanted; raises as `generate`."""
        return self._submit(names.TASK_DETOKENIZE, model, tokens, wait, idempotency_key, params)

    def apply_chat_template(
        self,
        model: str,
        messages: Messages,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[TemplateParams],
    ) -> Job[TemplateResult]:
        """Submits a conversation whose prompt is wanted; raises as `generate`."""
        return self._submit(names.TASK_APPLY_CHAT_TEMPLATE, model, messages, wait, idempotency_key, params)
