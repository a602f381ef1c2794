"""The texts of one caller of an embedder, and what became of them."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellama.engine.errors import (
    EmbeddingCancelled,
)

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
