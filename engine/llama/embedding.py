"""A llama.cpp context that turns texts into vectors or scores, many texts per pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from cellama.engine.backend import DecodeError
from cellama.engine.options import EngineOptions, Pooling

from .context import TokenBatch, end_threads, new_context, set_threads
from .model import LlamaModel

MAX_EMBED_TOKENS = 2048  # tokens of one text: it must fit into one micro-batch, whose buffers grow with it
MAX_TEXTS = 64  # texts in one batch: each has a sequence in the context, whose states take memory in recurrent models
POOLING: dict[Pooling, int] = {
    "none": lib.LLAMA_POOLING_TYPE_NONE,
    "mean": lib.LLAMA_POOLING_TYPE_MEAN,
    "cls": lib.LLAMA_POOLING_TYPE_CLS,
    "last": lib.LLAMA_POOLING_TYPE_LAST,
    "rank": lib.LLAMA_POOLING_TYPE_RANK,
}


class LlamaEmbeddingBackend:
    """The EmbeddingBackend on llama.cpp. With pooling by rank a vector holds the outputs of the classification head."""

    def __init__(self, model: LlamaModel, options: EngineOptions, pooling: Pooling) -> None:
        """Allocates the context; `pooling` is not "auto". Raises ModelLoadFailed."""
        self.max_tokens = min(model.info.n_ctx_train, MAX_EMBED_TOKENS)
        self.batch_tokens = min(options.pass_tokens, self.max_tokens)
        self.max_texts = min(MAX_TEXTS, self.max_tokens)
        self.per_token = pooling == "none"
        rank = pooling == "rank"
        size = lib.llama_model_n_cls_out(model.pointer) if rank else lib.llama_model_n_embd_out(model.pointer)
        self.n_embd: int = size
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
            pooling_type=POOLING[pooling],
        )
        self.threads: int = lib.llama_n_threads(self._context)
        self._memory = lib.llama_get_memory(self._context)  # None for an encoder
        self._batch = TokenBatch(self.max_tokens)

    @property
    def has_memory(self) -> bool:
        """False for an encoder, which has no cells."""
        return bool(self._memory)

    def set_threads(self, count: int) -> None:
        set_threads(self._context, count)
        self.threads = count

    def rest(self) -> None:
        end_threads()

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        self._batch.clear()
        for index, tokens in enumerate(texts):
            self._batch.add(index, 0, tokens, all_outputs=True)
        if self._memory:
            lib.llama_memory_clear(self._memory, False)  # what cells held is masked, and overwriting it takes longer
        code = lib.llama_decode(self._context, self._batch.batch)
        if code:
            raise DecodeError(code)
        return self._token_vectors(texts) if self.per_token else list(self._text_vectors(len(texts)))

    def _text_vectors(self, num_texts: int) -> NDArray[np.float32]:
        vectors = np.empty((num_texts, self.n_embd), dtype=np.float32)
        start, row_bytes = vectors.ctypes.data, vectors.strides[0]
        for index in range(num_texts):
            ctypes.memmove(start + index * row_bytes, self._address_of(index), row_bytes)
        return vectors

    def _address_of(self, text: int) -> ctypes._Pointer[ctypes.c_float]:
        pointer: ctypes._Pointer[ctypes.c_float] = lib.llama_get_embeddings_seq(self._context, text)
        if not pointer:
            raise DecodeError(-1)
        return pointer

    def _token_vectors(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """The rows of the pass, which are in the order of its tokens, text by text."""
        ends = np.cumsum([len(tokens) for tokens in texts])
        rows = np.ctypeslib.as_array(lib.llama_get_embeddings(self._context), (int(ends[-1]), self.n_embd))
        return np.split(rows.copy(), ends[:-1])

    def close(self) -> None:
        self._batch.close()
        lib.llama_free(self._context)


def own_pooling(model: LlamaModel) -> Pooling:
    """The pooling that the model's file names; the mean if it names none."""
    named = model.number("pooling_type")
    return next((name for name, code in POOLING.items() if code == named and name != "none"), "mean")
