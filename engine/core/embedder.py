"""The embedder and the reranker, which share one thread that packs texts from many callers into full batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellama.config.logging import event_logger
from cellama.engine.backend import DecodeError, EmbeddingBackend
from cellama.engine.errors import (
    DecodeFailed,
    EmbeddingCancelled,
    EngineStopped,
    InvalidRequest,
    PromptTooLong,
    RequestFailed,
)
from cellama.engine.snapshots import EmbedderSnapshot, Phase
from cellama.engine.system.inbox import Inbox
from cellama.engine.system.threads import start_deep
from cellama.engine.system.watchdog import FIRST_S, Pulse

from .telemetry import Rates

log = event_logger(__name__)

CLOSE_TIMEOUT_S = 30.0  # seconds for the running batch to finish, which takes at most a few seconds on a CPU
BATCH_S = 0.05  # target duration of a batch in seconds, which is how long other callers and engines wait
BROKEN = 3  # consecutive texts that fail alone before the backend counts as broken
MIN_BATCH_TOKENS = 64  # tokens that a batch may always have, because smaller batches are not faster on any machine

Vectors = list[NDArray[np.float32]]


@dataclass(eq=False)
class EmbeddingHandle:
    """The handle for one caller's texts. A handle is thread-safe."""

    texts: list[tuple[int, ...]]
    normalize: bool = True
    dimensions: int | None = None
    future: Future[Vectors] = field(default_factory=Future)
    vectors: Vectors = field(default_factory=list)
    num_batched: int = 0  # texts that are or were in a batch

    def result(self, timeout_s: float | None = None) -> Vectors:
        """Return one float32 array per text, in the order of the texts.

        Each array has the shape [n], or [tokens, n] if the model returns one vector per token. Raises the request's
        EngineError, or TimeoutError.
        """
        try:
            return self.future.result(timeout_s)
        except CancelledError:
            raise EmbeddingCancelled("the embedding request was cancelled") from None

    def cancel(self) -> None:
        """Cancel the request. Texts in the running batch are still computed. Repeated calls have no effect."""
        self.future.cancel()

    def finished(self) -> Vectors:
        """Return all vectors, truncated to `dimensions` dimensions.

        If `normalize` is true, the vectors are scaled to unit length.
        """
        rows = np.vstack(self.vectors)[:, : self.dimensions]
        if self.normalize:
            lengths = np.linalg.norm(rows, axis=1, keepdims=True)
            rows /= np.where(lengths > 0, lengths, 1).astype(np.float32)
        if self.vectors[0].ndim == 1:
            return list(rows)
        return np.split(rows, np.cumsum([len(vector) for vector in self.vectors])[:-1])


Batch = list[tuple[EmbeddingHandle, tuple[int, ...]]]


class Embedder:
    """Embeds texts.

    Callers take turns in each batch, so a caller with a few texts doesn't wait behind a caller with many texts.
    """

    def __init__(self, backend: EmbeddingBackend, name: str = "embedder", ending: tuple[int, ...] = ()) -> None:
        """Create an embedder.

        `ending` contains the tokens that end every text. A truncated text also ends with these tokens.
        """
        self._backend = backend
        self._ending = ending
        self._inbox: Inbox[EmbeddingHandle] = Inbox()
        self._waiting: deque[EmbeddingHandle] = deque()  # in order of turns
        self._batch: Batch = []  # the running batch
        self._rates = Rates(0)
        self._num_batches = self._num_texts = self._num_tokens = 0  # computed so far
        self._num_finished = self._num_failed = 0  # requests
        self._is_stopped = False
        self._token_s: float | None = None  # recent duration per token, in seconds
        self._threads = backend.threads  # number of threads for the next batch
        self._num_failed_alone = 0  # consecutive texts that failed alone
        self.pulse = Pulse(f"cellama-{name}-embed")
        self._thread = start_deep(self._run, self.pulse.name)

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens per text."""
        return self._backend.max_tokens

    @property
    def n_embd(self) -> int:
        """The number of dimensions per vector."""
        return self._backend.n_embd

    @property
    def per_token(self) -> bool:
        """Whether the model returns one vector per token, instead of one per text."""
        return self._backend.per_token

    @property
    def is_closed(self) -> bool:
        """Whether the embedder rejects new requests."""
        return self._inbox.is_closed

    def submit(
        self,
        texts: Sequence[Sequence[int]],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> EmbeddingHandle:
        """Submit the token ids of one or more texts.

        The vectors are float32 arrays with `n_embd` dimensions. If `dimensions` is given, each vector is truncated to
        this number of dimensions, which is useful only if the model was trained to produce truncatable vectors.
        `normalize` then scales each vector to unit length. `truncate` shortens texts that exceed the limit, instead of
        rejecting them. Raises InvalidRequest, PromptTooLong and EngineStopped.
        """
        if not texts:
            raise InvalidRequest("texts: the list is empty; pass at least one text")
        if dimensions is not None and not 1 <= dimensions <= self.n_embd:
            raise InvalidRequest(f"dimensions is {dimensions}; it must be from 1 to {self.n_embd} for this model")
        if truncate:
            texts = [self._truncated(text) for text in texts]
        for index, text in enumerate(texts):
            self._check(index, len(text))
        handle = EmbeddingHandle([tuple(text) for text in texts], normalize, dimensions)
        if not self._inbox.submit(handle):
            raise EngineStopped("the embedder is closed; load the model again")
        handle.future.add_done_callback(lambda _: self._inbox.end())
        return handle

    def _truncated(self, text: Sequence[int]) -> Sequence[int]:
        """Return the text's tokens, truncated to `max_tokens` if necessary. A truncated text keeps its end tokens."""
        if len(text) <= self.max_tokens:
            return text
        ending = self._ending if tuple(text[len(text) - len(self._ending) :]) == self._ending else ()
        return [*text[: self.max_tokens - len(ending)], *ending]

    @property
    def is_busy(self) -> bool:
        """Whether any request is still unfinished."""
        return self._inbox.is_busy

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until every request has finished. Return False if a request is still unfinished after `timeout_s`."""
        return self._inbox.wait_until_idle(timeout_s)

    @property
    def last_submit(self) -> float:
        """The Unix time of the last submission, or 0 if no request has been submitted."""
        return self._inbox.last_submit

    def snapshot(self) -> EmbedderSnapshot:
        """Return a snapshot of the current state without waiting for the embedder thread."""
        computing = [handle for handle, _ in list(self._batch)]
        waiting = [handle for handle in [*list(self._waiting), *self._inbox.waiting()] if not handle.future.done()]
        running = {id(handle) for handle in computing if not handle.future.done()}
        running |= {id(handle) for handle in waiting if handle.num_batched}
        phase: Phase = "stopped" if self._is_stopped else "prefilling" if running else "idle"
        return EmbedderSnapshot(
            phase=phase,
            requests_running=len(running),
            requests_waiting=sum(not handle.num_batched for handle in waiting),
            texts_waiting=sum(len(handle.texts) - handle.num_batched for handle in waiting),
            steps=self._num_batches,
            texts=self._num_texts,
            prompt_tokens=self._num_tokens,
            requests_finished=self._num_finished,
            requests_failed=self._num_failed,
            prompt_rate=self._rates.per_s[0] if running or waiting else 0.0,
        )

    @property
    def threads(self) -> int:
        """The number of threads that compute a batch."""
        return self._threads

    def use_threads(self, count: int) -> None:
        """Set the number of threads, starting with the next batch."""
        self._threads = count

    def _check(self, index: int, num_tokens: int) -> None:
        if num_tokens == 0:
            raise InvalidRequest(f"texts.{index} is empty; add some text")
        if num_tokens > self.max_tokens:
            raise PromptTooLong(
                f"texts.{index} has {num_tokens} tokens, but the model's limit is {self.max_tokens}; "
                "split the text or set truncate"
            )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fail waiting requests with EngineStopped and free the backend.

        Return False if the running batch has not finished after `timeout_s`.
        """
        self._inbox.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The embedder thread

    def _run(self) -> None:
        reason = "the embedder was closed before the request finished"
        try:
            while self._receive():
                self._fill_batch()
                self._embed(self._batch)
                self._batch = []  # a waiting thread keeps no texts in memory
        except BaseException as error:  # the boundary of the thread
            log.exception("embedder thread failed", thread=self.pulse.name, detail="all requests to this embedder fail")
            self.pulse.die(repr(error))
            reason = f"the embedder thread failed: {error!r}; restart the worker"
            self._is_stopped = True
        self._inbox.close()
        for handle in [*(handle for handle, _ in self._batch), *self._waiting, *self._inbox.take()]:
            self._fail(handle, EngineStopped(reason))
        self._backend.close()
        self.pulse.close()

    def _receive(self) -> bool:
        """Wait until texts are available. Return False if the embedder must stop."""
        if not self._waiting and not self._inbox:
            self._backend.rest()
            self.pulse.rest()
            self._inbox.wait()
        if self._inbox.is_closed:
            return False
        self._waiting += self._inbox.take()
        return True

    def _fill_batch(self) -> None:
        """Fill a batch with waiting texts, one from each caller in turn.

        A text that exceeds the batch limit gets a batch of its own.
        """
        batch = self._batch
        num_remaining = self._batch_tokens()
        while self._waiting and len(batch) < self._backend.max_texts:
            handle = self._waiting[0]
            if handle.future.done():
                self._waiting.popleft()
                continue
            text = handle.texts[handle.num_batched]
            if batch and len(text) > num_remaining:
                break
            batch.append((handle, text))
            num_remaining -= len(text)
            handle.num_batched += 1
            self._waiting.popleft()
            if handle.num_batched < len(handle.texts):
                self._waiting.append(handle)

    def _batch_tokens(self) -> int:
        """Return the number of tokens that can be computed in about BATCH_S."""
        affordable = 0 if self._token_s is None else int(BATCH_S / self._token_s)
        return min(max(affordable, MIN_BATCH_TOKENS), self._backend.batch_tokens)

    def _embed(self, batch: Batch) -> None:
        if not batch:
            return
        if self._threads != self._backend.threads:
            self._backend.set_threads(self._threads)
        self.pulse.beat("embed", size=sum(len(text) for _, text in batch), first_s=FIRST_S)
        started = time.perf_counter()
        try:
            vectors = self._backend.embed([text for _, text in batch])
            if len(vectors) != len(batch):
                raise RuntimeError(f"the backend returned {len(vectors)} vectors for {len(batch)} texts")
        except DecodeError as error:
            self._isolate(batch, error)
            return
        except Exception as error:  # one text may be the cause, and the others must not fail
            log.exception("embedding batch failed", num_texts=len(batch), detail="unexpected error")
            self._isolate(batch, error)
            return
        self.pulse.beat("finish")
        self._num_failed_alone = 0
        self._note_speed(batch, time.perf_counter() - started)
        self._num_batches += 1
        self._num_texts += len(batch)
        self._num_tokens += sum(len(text) for _, text in batch)
        self._rates.measure(self._num_tokens, idle=not (self._waiting or self._inbox))
        for (handle, _), vector in zip(batch, vectors, strict=True):
            handle.vectors.append(vector)  # in order, because batches and the texts within a batch are in order
            if len(handle.vectors) == len(handle.texts):
                self._finish(handle)

    def _note_speed(self, batch: Batch, seconds: float) -> None:
        num_tokens = sum(len(text) for _, text in batch)
        if num_tokens >= MIN_BATCH_TOKENS // 2:  # in smaller batches, the fixed cost of a call would distort the rate
            token_s = max(seconds, 1e-9) / num_tokens
            self._token_s = token_s if self._token_s is None else (self._token_s + token_s) / 2

    def _isolate(self, batch: Batch, error: Exception) -> None:
        """Retry each text of a failed batch individually. A request fails only if one of its texts fails again.

        Raises `error` if the backend is broken.
        """
        if len(batch) > 1:
            log.warning(
                "embedding batch failed",
                error=repr(error),
                num_texts=len(batch),
                detail="each text will be retried individually",
            )
            for entry in batch:
                self._embed([entry])
            return
        self._num_failed_alone += 1
        if self._num_failed_alone >= BROKEN and self.pulse.is_watched:
            raise error
        self._fail(batch[0][0], DecodeFailed(f"{error} for a text of this request; other requests were not affected"))

    def _finish(self, handle: EmbeddingHandle) -> None:
        try:
            vectors = handle.finished()
        except Exception as error:  # affects only this caller
            log.exception("vectors not assembled")
            reason = f"{type(error).__name__}: {error}; other requests were not affected"
            self._fail(handle, RequestFailed(reason))
            return
        finally:
            handle.vectors = []
        if handle.future.set_running_or_notify_cancel():
            self._num_finished += 1
            handle.future.set_result(vectors)

    def _fail(self, handle: EmbeddingHandle, error: Exception) -> None:
        if not handle.future.done() and handle.future.set_running_or_notify_cancel():
            self._num_failed += 1
            handle.future.set_exception(error)


class Pairs(Protocol):
    """Joins a query and a document into one tokenized text."""

    def join(self, query: str, document: str) -> list[int]: ...

    def join_cut(self, query: str, document: str, max_tokens: int) -> list[int]: ...


class Reranker:
    """Scores the relevance of documents to a query.

    A document's score is the first output of the model's classification head.
    """

    def __init__(self, pairs: Pairs, embedder: Embedder) -> None:
        """Create a reranker.

        The embedder's pooling must be "rank". The embedder's thread computes the scores.
        """
        self._pairs = pairs
        self.embedder = embedder

    def submit(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> EmbeddingHandle:
        """Submit a query and its documents. Pass the handle to `scores_of` to get the scores.

        If a document and the query together exceed the token limit, `truncate` shortens the document instead of
        rejecting it. Raises InvalidRequest, PromptTooLong and EngineStopped.
        """
        if not documents:
            raise InvalidRequest("documents: the list is empty; pass at least one document")
        pairs = [self._pair(query, document, index, truncate) for index, document in enumerate(documents)]
        return self.embedder.submit(pairs, normalize=False)

    def _pair(self, query: str, document: str, index: int, truncate: bool) -> list[int]:
        limit = self.embedder.max_tokens
        pair = self._pairs.join(query, document)
        num_tokens = len(pair)
        if num_tokens <= limit:
            return pair
        if not truncate:
            raise PromptTooLong(
                f"documents.{index}: query and document have {num_tokens} tokens, but the limit is {limit}; split the "
                "document or set truncate"
            )
        cut = self._pairs.join_cut(query, document, limit)
        if len(cut) > limit:
            raise PromptTooLong(f"the query leaves no room for documents within {limit} tokens; shorten the query")
        return cut

    def scores(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> list[float]:
        """Return one score per document, in the order of the documents. Raises the same errors as `submit`."""
        return scores_of(self.submit(query, documents, truncate=truncate))


def scores_of(handle: EmbeddingHandle, timeout_s: float | None = None) -> list[float]:
    """Return the model's raw score for each document, in the order of the documents.

    Higher scores mean higher relevance. Scores have no fixed range.
    """
    return [float(outputs[0]) for outputs in handle.result(timeout_s)]
