"""The reranker: scores of documents for a query, batched with those of other callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cellama.engine.errors import InvalidRequest, PromptTooLong

from .embedder import Embedder, EmbeddingHandle


class Pairs(Protocol):
    """Makes one text of a query and a document."""

    def join(self, query: str, document: str) -> list[int]: ...

    def join_cut(self, query: str, document: str, max_tokens: int) -> list[int]: ...


class Reranker:
    """Reads pairs of query and document; the first output of the classification head is the document's score."""

    def __init__(self, pairs: Pairs, embedder: Embedder) -> None:
        """`embedder` pools by rank. The reranker has no thread of its own: the embedder computes, counts and ends."""
        self._pairs = pairs
        self.embedder = embedder

    def submit(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> EmbeddingHandle:
        """Hands a query and its documents over; `scores_of` reads the result.

        `truncate` cuts documents that are too long beside the query instead of refusing them.
        Raises InvalidRequest, PromptTooLong, EngineStopped.
        """
        if not documents:
            raise InvalidRequest("there are no documents to rank; give at least one")
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


def scores_of(handle: EmbeddingHandle, timeout_s: float | None = None) -> list[float]:
    """One score per document, in order, as the model gives it: more is better, of no fixed range."""
    return [float(outputs[0]) for outputs in handle.result(timeout_s)]
