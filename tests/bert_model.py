"""BERT-shaped GGUF files with random weights: encoders for embeddings, and with a classification head for reranking."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import gguf
import numpy as np
from numpy.typing import NDArray

from cellama.bench.models.synthetic import Shape, Tensor

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = string.ascii_lowercase + string.digits
NUM_LETTER_TOKENS = 2 * len(LETTERS)  # each as the beginning of a word, and within one


@dataclass(frozen=True)
class BertShape(Shape):
    """A BERT encoder; the default is the shape of all-MiniLM-L6. `head` adds a classification head (a reranker)."""

    architecture: ClassVar[str] = "bert"
    n_embd: int = 384
    n_layer: int = 6
    n_head: int = 12
    n_head_kv: int = 12
    n_ff: int = 1536
    n_vocab: int = 30522
    n_ctx: int = 512
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN  # what the file says; None = nothing
    head: bool = False
    rerank_template: str | None = None

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head or self.n_head != self.n_head_kv:
            raise ValueError("n_head must divide n_embd, and n_head_kv must be the same")
        if self.n_vocab < len(SPECIAL) + NUM_LETTER_TOKENS:
            raise ValueError(f"n_vocab is {self.n_vocab}; it must be {len(SPECIAL) + NUM_LETTER_TOKENS} or more")

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_layer_norm_eps(1e-12)
        writer.add_causal_attention(False)
        writer.add_vocab_size(self.n_vocab)
        if self.rerank_template is not None:
            writer.add_string("tokenizer.chat_template.rerank", self.rerank_template)
        if self.pooling is not None:
            writer.add_pooling_type(self.pooling)

    def add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        """WordPiece: letters, then words w0, w1, … that fill the vocabulary. "▁" marks the beginning of a word."""
        tokens = [*SPECIAL, *(f"▁{letter}" for letter in LETTERS), *LETTERS]
        tokens += [f"▁w{i}" for i in range(self.n_vocab - len(tokens))]
        writer.add_tokenizer_model("bert")
        writer.add_token_type_count(2)
        writer.add_token_list(tokens)
        types = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (self.n_vocab - len(SPECIAL))
        writer.add_token_types(types)
        writer.add_pad_token_id(0)
        writer.add_unk_token_id(1)
        writer.add_bos_token_id(2)
        writer.add_sep_token_id(3)
        writer.add_mask_token_id(4)

    def kind_of(self, name: str, dims: tuple[int, ...], wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
        if name.startswith(("position_embd", "token_types", "cls")):  # as in converted models
            return gguf.GGMLQuantizationType.F32
        return super().kind_of(name, dims, wanted)

    def vector(self, rng: np.random.Generator, name: str, dims: tuple[int, ...]) -> NDArray[np.float32]:
        """Return scales near 1 and biases near 0, so that each of them affects the result."""
        values = 0.2 * rng.standard_normal(dims, dtype=np.float32)
        return values + np.float32(name.endswith("norm.weight"))

    def tensors(self) -> Iterator[Tensor]:
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        yield "token_types.weight", (2, self.n_embd)
        yield "position_embd.weight", (self.n_ctx, self.n_embd)
        yield from self._with_bias("token_embd_norm", (self.n_embd,))
        for i in range(self.n_layer):
            yield from self.attention(i)
            yield from self.feed_forward(i)
        if self.head:
            yield from self._with_bias("cls", (self.n_embd, self.n_embd))
            yield from self._with_bias("cls.output", (1, self.n_embd))

    def attention(self, i: int) -> Iterator[Tensor]:
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield from self._with_bias(f"blk.{i}.{name}", (self.n_embd, self.n_embd))
        yield from self._with_bias(f"blk.{i}.attn_output_norm", (self.n_embd,))

    def feed_forward(self, i: int) -> Iterator[Tensor]:
        yield from self._with_bias(f"blk.{i}.ffn_up", (self.n_ff, self.n_embd))
        yield from self._with_bias(f"blk.{i}.ffn_down", (self.n_embd, self.n_ff))
        yield from self._with_bias(f"blk.{i}.layer_output_norm", (self.n_embd,))

    @staticmethod
    def _with_bias(name: str, dims: tuple[int, ...]) -> Iterator[Tensor]:
        yield f"{name}.weight", dims
        yield f"{name}.bias", dims[:1]
