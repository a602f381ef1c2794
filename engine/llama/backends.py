"""The contexts that a model's capabilities ask for. Real and dry loads make them here, so that they are the same."""

from __future__ import annotations

import contextlib
from contextlib import closing
from dataclasses import dataclass

from cellama.engine.capabilities import Uses
from cellama.engine.options import EngineOptions

from .backend import LlamaBackend
from .embedding import LlamaEmbeddingBackend
from .model import LlamaModel


@dataclass(frozen=True, slots=True)
class Backends:
    """What runs a model; None where no capability asks for it."""

    generation: LlamaBackend | None
    embedding: LlamaEmbeddingBackend | None
    ranking: LlamaEmbeddingBackend | None

    @staticmethod
    def make(model: LlamaModel, options: EngineOptions, uses: Uses) -> Backends:
        """Allocates the contexts; a failure leaves none. Raises ModelLoadFailed, InvalidRequest."""
        with contextlib.ExitStack() as made:
            generation = made.enter_context(closing(LlamaBackend(model, options))) if uses.generates else None
            embedding = ranking = None
            if uses.embeds:
                embedding = made.enter_context(closing(LlamaEmbeddingBackend(model, options, uses.pooling)))
            if uses.ranks:
                ranking = made.enter_context(closing(LlamaEmbeddingBackend(model, options, "rank")))
            made.pop_all()
        return Backends(generation, embedding, ranking)

    @property
    def have_memory(self) -> bool:
        """True if a context has cells or states; an encoder's has none."""
        reading = [backend for backend in (self.embedding, self.ranking) if backend is not None]
        return self.generation is not None or any(backend.has_memory for backend in reading)

    def close(self) -> None:
        """Frees the contexts. No thread may use them."""
        for backend in (self.generation, self.embedding, self.ranking):
            if backend is not None:
                backend.close()
