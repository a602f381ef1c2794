"""A BERT encoder in numpy and float64, which computes reference vectors from the weights of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class BertReference:
    """Computes vectors and scores from an F32 file that tests/bert_model.py has written."""

    def __init__(self, path: Path, n_head: int) -> None:
        self._weights = {t.name: np.array(t.data, dtype=np.float64) for t in gguf.GGUFReader(path).tensors}
        self._n_head = n_head
        self._n_layer = sum(name.endswith("attn_q.weight") for name in self._weights)

    def rows(self, tokens: Sequence[int]) -> Array:
        """Return one vector per token, of shape (tokens, n_embd)."""
        w = self._weights
        x = w["token_embd.weight"][list(tokens)] + w["token_types.weight"][0] + w["position_embd.weight"][: len(tokens)]
        x = self._norm(x, "token_embd_norm")
        for i in range(self._n_layer):
            x = self._norm(x + self._attention(x, f"blk.{i}."), f"blk.{i}.attn_output_norm")
            inner = _gelu(self._linear(x, f"blk.{i}.ffn_up"))
            x = self._norm(x + self._linear(inner, f"blk.{i}.ffn_down"), f"blk.{i}.layer_output_norm")
        return x

    def pooled(self, tokens: Sequence[int], pooling: str) -> Array:
        """Return the vector of the text, of shape (n_embd,), or all rows for pooling "none"."""
        rows = self.rows(tokens)
        return {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1], "none": rows}[pooling]

    def score(self, tokens: Sequence[int]) -> float:
        """Return the output of the classification head for the first token."""
        return float(self._linear(np.tanh(self._linear(self.rows(tokens)[0], "cls")), "cls.output")[0])

    def _linear(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"])

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(centred.var(axis=-1, keepdims=True) + 1e-12)
        return np.asarray(scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"])

    def _attention(self, x: Array, layer: str) -> Array:
        n, width = x.shape
        q, k, v = (
            self._linear(x, f"{layer}attn_{part}").reshape(n, self._n_head, -1).transpose(1, 0, 2) for part in "qkv"
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(width / self._n_head)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weights / weights.sum(axis=-1, keepdims=True) @ v
        return self._linear(mixed.transpose(1, 0, 2).reshape(n, width), f"{layer}attn_output")


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
