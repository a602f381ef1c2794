"""Compute embeddings and scores with llama.cpp for many texts per decode call, and format texts for rerankers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from cellama.engine.backend import DecodeError
from cellama.engine.options import EngineOptions, Pooling
from cellama.engine.text.markup import from_caller

from .backend import TokenBatch, end_threads, new_context, set_threads
from .model import LlamaModel

MAX_EMBED_TOKENS = 2048  # tokens of one text, which must fit into one micro-batch; buffers grow with the micro-batch
MAX_TEXTS = 64  # texts per batch; each is a sequence of the context, and recurrent models allocate a state for it
POOLING: dict[Pooling, int] = {
    "none": lib.LLAMA_POOLING_TYPE_NONE,
    "mean": lib.LLAMA_POOLING_TYPE_MEAN,
    "cls": lib.LLAMA_POOLING_TYPE_CLS,
    "last": lib.LLAMA_POOLING_TYPE_LAST,
    "rank": lib.LLAMA_POOLING_TYPE_RANK,
}


class LlamaEmbeddingBackend:
    """The engine's EmbeddingBackend, implemented with llama.cpp.

    With pooling "rank", each vector contains the outputs of the classification head.
    """

    def __init__(self, model: LlamaModel, options: EngineOptions, pooling: Pooling) -> None:
        """Allocate the context. `pooling` must not be "auto". Raises ModelLoadFailed."""
        self.max_tokens = min(model.info.n_ctx_train, MAX_EMBED_TOKENS)
        self.batch_tokens = min(options.pass_tokens, self.max_tokens)
        self.max_texts = min(MAX_TEXTS, self.max_tokens)
        self.per_token = pooling == "none"
        rank = pooling == "rank"
        size = lib.llama_model_n_cls_out(model.pointer) if rank else lib.llama_model_n_embd_out(model.pointer)
        self.n_embd: int = size
        # A pooled sequence must fit into one micro-batch, so batch, micro-batch and context have the same size.
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
        """Whether the context has cells or states. The context of an encoder has neither cells nor states."""
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
            lib.llama_memory_clear(self._memory, False)  # old contents are masked, and overwriting them takes longer
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
        """Return one array of shape (tokens, n_embd) per text. llama.cpp returns the rows in batch order."""
        ends = np.cumsum([len(tokens) for tokens in texts])
        rows = np.ctypeslib.as_array(lib.llama_get_embeddings(self._context), (int(ends[-1]), self.n_embd))
        return np.split(rows.copy(), ends[:-1])

    def close(self) -> None:
        self._batch.close()
        lib.llama_free(self._context)


def own_pooling(model: LlamaModel) -> Pooling:
    """Return the pooling type specified in the model's metadata, or "mean" if the metadata doesn't specify a type."""
    named = model.number("pooling_type")
    return next((name for name, code in POOLING.items() if code == named and name != "none"), "mean")


class PairFormat:
    """Joins a query and a document into a reranker input. This class is thread-safe.

    If the model has a template (tokenizer.chat_template.rerank, a string with `{query}` and `{document}`), the query
    and the document are inserted into the template, as in llama-server. Otherwise, the format is [start] query [end]
    [separator] document [end]. Each special token is included only if the vocabulary adds this token to texts. If the
    vocabulary adds only separators (WordPiece), a separator also follows the document, because the tokenizer adds a
    separator after every text.
    """

    def __init__(self, model: LlamaModel, *, control_tokens_in_text: bool = False) -> None:
        """Read the model's template and special tokens.

        With `control_tokens_in_text`, control tokens are recognised in queries and documents that are inserted into a
        template.
        """
        self._model = model
        self._control_tokens_in_text = control_tokens_in_text
        vocab = model.vocab
        template = lib.llama_model_chat_template(model.pointer, b"rerank")
        self._template = template.decode(errors="replace") if template else None
        separator = lib.llama_vocab_sep(vocab)
        end = lib.llama_vocab_eos(vocab)
        adds_end, adds_separator = lib.llama_vocab_get_add_eos(vocab), lib.llama_vocab_get_add_sep(vocab)
        self._begin = [lib.llama_vocab_bos(vocab)] if lib.llama_vocab_get_add_bos(vocab) else []
        ending = [end if end >= 0 else separator] if adds_end else []
        separating = [separator] if adds_separator else []
        self._middle = ending + separating
        self._end = ending or separating

    def join(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query-document pair."""
        if self._template is not None:
            return self._filled(self._template, {"{query}": query, "{document}": document})
        return [*self._head(query), *self._plain(document), *self._end]

    def join_cut(self, query: str, document: str, max_tokens: int) -> list[int]:
        """Return the tokens of a pair. The document is truncated so that the pair has at most `max_tokens` tokens.

        If the query alone exceeds the limit, the document is empty, and the result is longer than `max_tokens`.
        """
        if self._template is None:
            head, tail = self._head(query), self._end
        else:
            head, _, tail = (self._filled(part, {"{query}": query}) for part in self._template.partition("{document}"))
        num_remaining = max(0, max_tokens - len(head) - len(tail))
        return [*head, *self._plain(document)[:num_remaining], *tail]

    def _head(self, query: str) -> list[int]:
        return [*self._begin, *self._plain(query), *self._middle]

    def _filled(self, template: str, texts: Mapping[str, str]) -> list[int]:
        """Return the tokens of a template after inserting these texts.

        Control tokens in the texts are recognised only with `control_tokens_in_text`.
        """
        parts = re.split("({query}|{document})", template)
        text = "".join(texts.get(part, part) for part in parts)
        marked = text
        if not self._control_tokens_in_text:
            marked = "".join(from_caller(texts[part]) if part in texts else part for part in parts)
        return self._model.tokenize_marked(text, marked)

    def _plain(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False)
