"""The embedder: one thread that packs the texts of many callers into full batches."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0  # seconds; closing waits for one batch, which takes at most a few seconds on a CPU
BATCH_S = 0.05  # seconds that a batch should take at most: other callers and engines wait no longer than that
BROKEN = 3  # texts that failed alone one after another, with none embedded between: then it is not their fault
MIN_BATCH_TOKENS = 64  # tokens that a batch has room for in any case: fewer pay on no machine

Vectors = list[NDArray[np.float32]]


@dataclass(eq=False)
class EmbeddingHandle:
    """The texts of one caller and what became of them."""

    texts: list[tuple[int, ...]]
    normalize: bool = True
    dimensions: int | None = None
    future: Future[Vectors] = field(default_factory=Future)
    vectors: Vectors = field(default_factory=list)
    num_taken: int = 0  # texts that went into a batch

    def result(self, timeout_s: float | None = None) -> Vectors:
        """One float32 array per text, in order: [n], or [tokens, n] where the model gives a vector per token.

        Raises the EngineError of the request, or TimeoutError.
        """
        try:
            return self.future.result(timeout_s)
        except CancelledError:
            raise EmbeddingCancelled("the embedding request was cancelled") from None

    def cancel(self) -> None:
        """Ends the request; texts that are not in a running batch are not computed. Idempotent."""
        self.future.cancel()

    def finished(self) -> Vectors:
        """The first `dimensions` numbers of each vector, at unit length if wanted; all vectors in one go."""
        rows = np.vstack(self.vectors)[:, : self.dimensions]
        if self.normalize:
            lengths = np.linalg.norm(rows, axis=1, keepdims=True)
            rows /= np.where(lengths > 0, lengths, 1).astype(np.float32)
        if self.vectors[0].ndim == 1:
            return list(rows)
        return np.split(rows, np.cumsum([len(vector) for vector in self.vectors])[:-1])


Batch = list[tuple[EmbeddingHandle, tuple[int, ...]]]


class Embedder:
    """Embeds texts; each batch is filled across callers, who take turns, so that a few texts never wait for many."""

    def __init__(self, backend: EmbeddingBackend, name: str = "embedder", ending: tuple[int, ...] = ()) -> None:
        """`ending` are the tokens behind every text of the vocabulary, which a text that is cut keeps."""
        self._backend = backend
        self._ending = ending
        self._inbox: Inbox[EmbeddingHandle] = Inbox()
        self._waiting: deque[EmbeddingHandle] = deque()  # the next one's turn is first
        self._batch: Batch = []  # that is computed
        self._rates = Rates(0)
        self._num_batches = self._num_texts = self._num_tokens = 0  # that were computed
        self._num_finished = self._num_failed = 0  # requests
        self._is_dead = False
        self._token_s: float | None = None  # seconds per token, as the last batches took
        self._threads = backend.threads  # for the next batch
        self._num_failed_alone = 0  # texts, since one was embedded
        self.pulse = Pulse(f"cellama-{name}-embed")
        self._thread = start_deep(self._run, self.pulse.name)

    @property
    def max_tokens(self) -> int:
        """The longest text, in tokens."""
        return self._backend.max_tokens

    @property
    def n_embd(self) -> int:
        """Numbers in a vector."""
        return self._backend.n_embd

    @property
    def per_token(self) -> bool:
        """True when texts become a vector per token."""
        return self._backend.per_token

    @property
    def is_closed(self) -> bool:
        """True when it takes no more requests."""
        return self._inbox.is_closed

    def submit(
        self,
        texts: Sequence[Sequence[int]],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> EmbeddingHandle:
        """Hands token ids of one or more texts over; the vectors are float32 of `n_embd` (EmbeddingHandle.result).

        `dimensions` keeps so many numbers of each vector (for models trained for that), then `normalize` gives it unit
        length. `truncate` cuts texts that are too long instead of refusing them.
        Raises InvalidRequest, PromptTooLong, EngineStopped.
        """
        if not texts:
            raise InvalidRequest("there are no texts to embed; give at least one")
        if dimensions is not None and not 1 <= dimensions <= self.n_embd:
            raise InvalidRequest(f"dimensions is {dimensions}; the model's vectors have {self.n_embd}")
        if truncate:
            texts = [self._cut(text) for text in texts]
        for index, text in enumerate(texts):
            self._check(index, len(text))
        handle = EmbeddingHandle([tuple(text) for text in texts], normalize, dimensions)
        if not self._inbox.submit(handle):
            raise EngineStopped("the embedder is closed; the request was not taken")
        handle.future.add_done_callback(lambda _: self._inbox.end())
        return handle

    def _cut(self, text: Sequence[int]) -> Sequence[int]:
        """The text, or so much of its beginning as leaves its ending in."""
        if len(text) <= self.max_tokens:
            return text
        ending = self._ending if tuple(text[len(text) - len(self._ending) :]) == self._ending else ()
        return [*text[: self.max_tokens - len(ending)], *ending]

    @property
    def is_busy(self) -> bool:
        """True while requests have not ended."""
        return self._inbox.is_busy

    def wait_until_idle(self, timeout_s: float) -> bool:
        """True as soon as every request has ended; False if one has not after `timeout_s`."""
        return self._inbox.wait_until_idle(timeout_s)

    @property
    def last_submit(self) -> float:
        """Unix seconds of the last request; 0 before the first."""
        return self._inbox.last_submit

    def snapshot(self) -> EmbedderSnapshot:
        """The state just now. Never waits for the embedder thread."""
        computing = [handle for handle, _ in list(self._batch)]
        waiting = [handle for handle in [*list(self._waiting), *self._inbox.waiting()] if not handle.future.done()]
        running = {id(handle) for handle in computing if not handle.future.done()}
        running |= {id(handle) for handle in waiting if handle.num_taken}
        phase: Phase = "stopped" if self._is_dead else "prefilling" if running else "idle"
        return EmbedderSnapshot(
            phase=phase,
            requests_running=len(running),
            requests_waiting=sum(not handle.num_taken for handle in waiting),
            texts_waiting=sum(len(handle.texts) - handle.num_taken for handle in waiting),
            steps=self._num_batches,
            texts=self._num_texts,
            prompt_tokens=self._num_tokens,
            requests_finished=self._num_finished,
            requests_failed=self._num_failed,
            prompt_rate=self._rates.per_s[0] if running or waiting else 0.0,
        )

    @property
    def threads(self) -> int:
        """With how many a batch is computed."""
        return self._threads

    def use_threads(self, count: int) -> None:
        """Batches are computed with so many threads, from the next one on."""
        self._threads = count

    def _check(self, index: int, num_tokens: int) -> None:
        if num_tokens == 0:
            raise InvalidRequest(f"text {index} is empty; give it some text")
        if num_tokens > self.max_tokens:
            raise PromptTooLong(
                f"text {index} has {num_tokens} tokens, the model embeds at most {self.max_tokens}: "
                "split it, or set truncate"
            )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fails what waits with EngineStopped and frees the backend; False if a batch takes longer."""
        self._inbox.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The embedder thread

    def _run(self) -> None:
        reason = "the embedder was closed before the request ended"
        try:
            while self._receive():
                self._fill_batch()
                self._embed(self._batch)
                self._batch = []  # a thread that waits for its next text keeps nothing of the last ones
        except BaseException as error:  # the boundary of the thread
            log.exception("the embedder thread died")
            self.pulse.die(repr(error))
            reason = f"the embedder thread died of {error!r}; restart the worker"
            self._is_dead = True
        self._inbox.close()
        for handle in [*(handle for handle, _ in self._batch), *self._waiting, *self._inbox.take()]:
            self._fail(handle, EngineStopped(reason))
        self._backend.close()
        self.pulse.close()

    def _receive(self) -> bool:
        """Waits for texts unless some wait already; False when the embedder is to end."""
        if not self._waiting and not self._inbox:
            self._backend.rest()
            self.pulse.rest()
            self._inbox.wait()
        if self._inbox.is_closed:
            return False
        self._waiting += self._inbox.take()
        return True

    def _fill_batch(self) -> None:
        """Takes as many waiting texts as one batch has room for, one of each caller in turn; a long one is alone."""
        batch = self._batch
        num_left = self._batch_tokens()
        while self._waiting and len(batch) < self._backend.max_texts:
            handle = self._waiting[0]
            if handle.future.done():
                self._waiting.popleft()
                continue
            text = handle.texts[handle.num_taken]
            if batch and len(text) > num_left:
                break
            batch.append((handle, text))
            num_left -= len(text)
            handle.num_taken += 1
            self._waiting.popleft()
            if handle.num_taken < len(handle.texts):
                self._waiting.append(handle)

    def _batch_tokens(self) -> int:
        """As many as BATCH_S allows at the speed of the last batches."""
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
                raise RuntimeError(f"{len(batch)} texts gave {len(vectors)} vectors")
        except DecodeError as error:
            self._isolate(batch, error)
            return
        except Exception as error:  # of one text, perhaps: its neighbours shall not pay
            log.exception("a batch of %d texts failed in an unforeseen way", len(batch))
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
            handle.vectors.append(vector)  # in order: batches are, and so are a caller's texts within one
            if len(handle.vectors) == len(handle.texts):
                self._finish(handle)

    def _note_speed(self, batch: Batch, seconds: float) -> None:
        num_tokens = sum(len(text) for _, text in batch)
        if num_tokens >= MIN_BATCH_TOKENS // 2:  # the cost per call would count for the tokens of smaller ones
            token_s = max(seconds, 1e-9) / num_tokens
            self._token_s = token_s if self._token_s is None else (self._token_s + token_s) / 2

    def _isolate(self, batch: Batch, error: Exception) -> None:
        """Tries each text alone; only what fails alone is failed. Raises when nothing can be embedded any more."""
        if len(batch) > 1:
            log.warning("%r for a batch of %d texts; trying them one by one", error, len(batch))
            for entry in batch:
                self._embed([entry])
            return
        self._num_failed_alone += 1
        if self._num_failed_alone >= BROKEN and self.pulse.is_watched:
            raise error
        self._fail(batch[0][0], DecodeFailed(f"{error} for a text of this request; the others were not affected"))

    def _finish(self, handle: EmbeddingHandle) -> None:
        try:
            vectors = handle.finished()
        except Exception as error:  # this caller's numbers only
            log.exception("the vectors of a request could not be put together")
            reason = f"{type(error).__name__}: {error}; the other requests were not affected"
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
