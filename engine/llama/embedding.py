"""A llama.cpp context that turns texts into vectors, many texts per pass."""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp.llama_cpp as lib
import numpy as np

from ..backend import DecodeError
from ..params import EngineOptions, Pooling
from .context import TokenBatch, new_context
from .model import LlamaModel

MAX_EMBED_TOKENS = 2048  # of one pass; a text must fit into one
MAX_TEXTS = 64
_POOLING: dict[str, int] = {
    "mean": lib.LLAMA_POOLING_TYPE_MEAN,
    "cls": lib.LLAMA_POOLING_TYPE_CLS,
    "last": lib.LLAMA_POOLING_TYPE_LAST,
}


class LlamaEmbeddingBackend:
    """The EmbeddingBackend on llama.cpp."""

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        """Allocates the context. Raises ModelLoadFailed."""
        self.max_tokens = min(model.info.n_ctx_train, MAX_EMBED_TOKENS)
        self.max_texts = MAX_TEXTS
        self.n_embd = model.info.n_embd
        # A pooled sequence must lie in one micro-batch, so batch, micro-batch and context are one size.
        self._context = new_context(
            model,
            options,
            n_ctx=self.max_tokens,
            n_batch=self.max_tokens,
            n_ubatch=self.max_tokens,
            n_seq_max=self.max_texts,
            kv_unified=True,
            embeddings=True,
            pooling_type=_pooling(model, options.pooling),
        )
        self._memory = lib.llama_get_memory(self._context)
        self._batch = TokenBatch(self.max_tokens)

    def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        self._batch.clear()
        for index, tokens in enumerate(texts):
            self._batch.add(index, 0, tokens, all_outputs=True)
        if self._memory:
            lib.llama_memory_clear(self._memory, True)
        code = lib.llama_decode(self._context, self._batch.batch)
        if code:
            raise DecodeError(code)
        return [self._vector(index) for index in range(len(texts))]

    def _vector(self, index: int) -> list[float]:
        pointer = lib.llama_get_embeddings_seq(self._context, index)
        vector: list[float] = np.ctypeslib.as_array(pointer, (self.n_embd,)).tolist()
        return vector

    def close(self) -> None:
        self._batch.close()
        lib.llama_free(self._context)


def _pooling(model: LlamaModel, wanted: Pooling) -> int:
    """llama.h's pooling type; for "auto" the model's own, or the mean if it has none."""
    if wanted != "auto":
        return _POOLING[wanted]
    if model.metadata(f"{model.info.architecture}.pooling_type") is None:
        return _POOLING["mean"]
    return int(lib.LLAMA_POOLING_TYPE_UNSPECIFIED)
