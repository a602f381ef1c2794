"""The embedder: one thread that packs the texts of many callers into full batches."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from .backend import DecodeError, EmbeddingBackend
from .errors import DecodeFailed, EmbeddingCancelled, EngineStopped, InvalidRequest, PromptTooLong

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
Vector = list[float]


@dataclass(eq=False)
class EmbeddingHandle:
    """The texts of one caller and what became of them."""

    texts: list[tuple[int, ...]]
    normalize: bool = True
    dimensions: int | None = None
    future: Future[list[Vector]] = field(default_factory=Future)
    vectors: list[Vector] = field(default_factory=list)

    def result(self, timeout_s: float | None = None) -> list[Vector]:
        """One vector per text, in order. Raises the EngineError of the request, or TimeoutError."""
        try:
            return self.future.result(timeout_s)
        except CancelledError:
            raise EmbeddingCancelled("the embedding request was cancelled") from None

    def cancel(self) -> None:
        """Ends the request; texts that are not in a running batch are not computed. Idempotent."""
        self.future.cancel()

    def finish(self, vector: Vector) -> Vector:
        """The first `dimensions` numbers of a vector, at unit length if wanted."""
        vector = vector[: self.dimensions]
        length = math.sqrt(math.fsum(number * number for number in vector)) if self.normalize else 0.0
        return [number / length for number in vector] if length > 0 else vector


class Embedder:
    """Embeds texts in the order of arrival; each batch is filled across callers."""

    def __init__(self, backend: EmbeddingBackend, name: str = "embedder") -> None:
        self._backend = backend
        self._inbox: queue.SimpleQueue[EmbeddingHandle | None] = queue.SimpleQueue()
        self._waiting: deque[tuple[EmbeddingHandle, tuple[int, ...]]] = deque()
        self._closed = False
        self._num_open = 0  # requests that have not ended
        self.last_submit = 0.0  # unix seconds
        self._hand_over = threading.Lock()  # nothing enters the inbox after `_closed`
        self._thread = threading.Thread(target=self._run, name=f"cellama-{name}-embed", daemon=True)
        self._thread.start()

    def submit(
        self,
        texts: Sequence[Sequence[int]],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> EmbeddingHandle:
        """Hands token ids of one or more texts over.

        `dimensions` keeps so many numbers of each vector (for models trained for that), then `normalize` gives it unit
        length. `truncate` cuts texts that are too long instead of refusing them.
        Raises InvalidRequest, PromptTooLong, EngineStopped.
        """
        if not texts:
            raise InvalidRequest("there are no texts to embed; give at least one")
        if dimensions is not None and not 1 <= dimensions <= self._backend.n_embd:
            raise InvalidRequest(f"dimensions is {dimensions}; the model's vectors have {self._backend.n_embd}")
        if truncate:
            texts = [text[: self._backend.max_tokens] for text in texts]
        for index, text in enumerate(texts):
            self._check(index, len(text))
        handle = EmbeddingHandle([tuple(text) for text in texts], normalize, dimensions)
        with self._hand_over:
            if self._closed:
                raise EngineStopped("the embedder is closed; the request was not taken")
            self._inbox.put(handle)
            self._num_open += 1
        self.last_submit = time.time()
        handle.future.add_done_callback(self._note_end)
        return handle

    def _note_end(self, _: Future[list[Vector]]) -> None:
        with self._hand_over:
            self._num_open -= 1

    @property
    def is_busy(self) -> bool:
        """True while requests have not ended."""
        return self._num_open > 0

    def _check(self, index: int, num_tokens: int) -> None:
        if num_tokens == 0:
            raise InvalidRequest(f"text {index} is empty; give it some text")
        if num_tokens > self._backend.max_tokens:
            raise PromptTooLong(
                f"text {index} has {num_tokens} tokens, the model embeds at most {self._backend.max_tokens}: "
                "split it, or set truncate"
            )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fails what waits with EngineStopped and frees the backend; False if a batch takes longer."""
        with self._hand_over:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The embedder thread

    def _run(self) -> None:
        reason = "the embedder was closed before the request ended"
        try:
            while self._receive():
                self._embed(self._next_batch())
        except Exception as error:
            log.exception("the embedder thread died")
            reason = f"the embedder thread died of {error!r}; restart the worker"
        with self._hand_over:
            self._closed = True
        while not self._inbox.empty():
            self._take(self._inbox.get())
        for handle, _ in self._waiting:
            _fail(handle, EngineStopped(reason))
        self._backend.close()

    def _receive(self) -> bool:
        while not self._inbox.empty() or not self._waiting:
            handle = self._inbox.get()
            if handle is None:
                return False
            self._take(handle)
        return True

    def _take(self, handle: EmbeddingHandle | None) -> None:
        if handle is not None:
            self._waiting.extend((handle, text) for text in handle.texts)

    def _next_batch(self) -> list[tuple[EmbeddingHandle, tuple[int, ...]]]:
        """As many waiting texts as one call takes, in order."""
        batch: list[tuple[EmbeddingHandle, tuple[int, ...]]] = []
        room = self._backend.max_tokens
        while self._waiting and len(batch) < self._backend.max_texts:
            handle, text = self._waiting[0]
            if handle.future.done():
                self._waiting.popleft()
                continue
            if len(text) > room:
                break
            batch.append(self._waiting.popleft())
            room -= len(text)
        return batch

    def _embed(self, batch: list[tuple[EmbeddingHandle, tuple[int, ...]]]) -> None:
        if not batch:
            return
        try:
            vectors = self._backend.embed([text for _, text in batch])
        except DecodeError as error:
            self._isolate(batch, error)
            return
        for (handle, _), vector in zip(batch, vectors, strict=True):
            handle.vectors.append(handle.finish(vector))
            if len(handle.vectors) == len(handle.texts) and handle.future.set_running_or_notify_cancel():
                handle.future.set_result(handle.vectors)

    def _isolate(self, batch: list[tuple[EmbeddingHandle, tuple[int, ...]]], error: DecodeError) -> None:
        """Tries each text alone; only what fails alone is failed."""
        if len(batch) > 1:
            log.warning("%s for a batch of %d texts; trying them one by one", error, len(batch))
            for entry in batch:
                self._embed([entry])
        else:
            _fail(batch[0][0], DecodeFailed(f"{error} for a text of this request"))


def _fail(handle: EmbeddingHandle, error: Exception) -> None:
    if not handle.future.done() and handle.future.set_running_or_notify_cancel():
        handle.future.set_exception(error)
