"""The contexts that a model's capabilities ask for. Real and dry loads make them here, so that they are the same."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ..params import EngineOptions
from .context import LlamaBackend
from .embedding import LlamaEmbeddingBackend
from .model import LlamaModel


@dataclass(frozen=True, slots=True)
class Backends:
    """What runs a model; None where no capability asks for it."""

    generation: LlamaBackend | None
    embedding: LlamaEmbeddingBackend | None

    @staticmethod
    def make(model: LlamaModel, options: EngineOptions, capabilities: Set[str]) -> Backends:
        """Allocates the contexts; a failure leaves none. Raises ModelLoadFailed, InvalidRequest."""
        generation = LlamaBackend(model, options) if capabilities & {"generate", "chat"} else None
        try:
            embedding = LlamaEmbeddingBackend(model, options) if "embed" in capabilities else None
        except BaseException:
            if generation is not None:
                generation.close()
            raise
        return Backends(generation, embedding)

    def close(self) -> None:
        """Frees the contexts. No thread may use them."""
        for backend in (self.generation, self.embedding):
            if backend is not None:
                backend.close()
