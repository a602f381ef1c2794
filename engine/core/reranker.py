"""The reranker: scores of documents for a query, batched with those of other callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cellama.engine.errors import InvalidRequest, PromptTooLong
from cellama.engine.snapshots import EmbedderSnapshot
from cellama.engine.system.watchdog import Pulse

from .embedder import Embedder
from .embedding_handle import EmbeddingHandle


class Pairs(Protocol):
    """Makes one text of a query and a document."""

    def join(self, query: str, document: str) -> list[int]: ...

    def join_cut(self, query: str, document: str, max_tokens: int) -> list[int]: ...


class Reranker:
    """Reads pairs of query and document; the first output of the classification head is the document's score."""

    def __init__(self, pairs: Pairs, embedder: Embedder) -> None:
        """`embedder` pools by rank; it belongs to the reranker from now on."""
        self._pairs = pairs
        self._embedder = embedder

    def submit(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> EmbeddingHandle:
        """Hands a query and its documents over; `scores_of` reads the result.

        `truncate` cuts documents that are too long beside the query instead of refusing them.
        Raises InvalidRequest, PromptTooLong, EngineStopped.
        """
        if not documents:
            raise InvalidRequest("there are no documents to rank; give at least one")
        pairs = [self._pair(query, document, index, truncate) for index, document in enumerate(documents)]
        return self._embedder.submit(pairs, normalize=False)

    def _pair(self, query: str, document: str, index: int, truncate: bool) -> list[int]:
        limit = self._embedder.max_tokens
        pair = self._pairs.join(query, document)
        num_tokens = len(pair)
        if num_tokens <= limit:
            return pair
        if not truncate:
            raise PromptTooLong(
                f"query and document {index} have {num_tokens} tokens, the model reads at most {limit}: split the "
                "document, or set truncate"
            )
        cut = self._pairs.join_cut(query, document, limit)
        if len(cut) > limit:
            raise PromptTooLong(f"the query leaves no room for documents: the model reads {limit} tokens; shorten it")
        return cut

    def scores(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> list[float]:
        """The score of each document, in order; raises as `submit`."""
        return scores_of(self.submit(query, documents, truncate=truncate))

    @property
    def pulse(self) -> Pulse:
        """Of its embedder's thread."""
        return self._embedder.pulse

    @property
    def last_submit(self) -> float:
        """Unix seconds of the last request; 0 before the first."""
        return self._embedder.last_submit

    @property
    def is_busy(self) -> bool:
        """True while requests have not ended."""
        return self._embedder.is_busy

    def wait_until_idle(self, timeout_s: float) -> bool:
        """As Embedder.wait_until_idle."""
        return self._embedder.wait_until_idle(timeout_s)

    def snapshot(self) -> EmbedderSnapshot:
        """As Embedder.snapshot, of pairs as texts."""
        return self._embedder.snapshot()

    @property
    def threads(self) -> int:
        """As Embedder.threads."""
        return self._embedder.threads

    def use_threads(self, count: int) -> None:
        """As Embedder.use_threads."""
        self._embedder.use_threads(count)

    def close(self) -> bool:
        """As Embedder.close."""
        return self._embedder.close()


def scores_of(handle: EmbeddingHandle, timeout_s: float | None = None) -> list[float]:
    """One score per document, in order, as the model gives it: more is better, of no fixed range."""
    return [float(outputs[0]) for outputs in handle.result(timeout_s)]
