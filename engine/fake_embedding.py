"""An embedding backend without llama.cpp, for tests: strict about what it is asked."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .backend import DecodeError


@dataclass
class FakeEmbeddingBackend:
    """A vector is a hash of its text's tokens."""

    max_tokens: int = 64
    batch_tokens: int = 64
    max_texts: int = 8
    n_embd: int = 2
    per_token: bool = False
    poison: int | None = None  # a token that makes every call that holds it fail
    calls: list[list[tuple[int, ...]]] = field(default_factory=list)  # the texts of every call
    threads: int = 1

    def set_threads(self, count: int) -> None:
        self.threads = count

    def rest(self) -> None: ...

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        self.calls.append([tuple(text) for text in texts])
        if sum(map(len, texts)) > self.max_tokens:
            raise AssertionError("more tokens than max_tokens would kill the process")
        if self.poison is not None and any(self.poison in text for text in texts):
            raise DecodeError(-1)
        if self.per_token:
            return [np.stack([self._vector([token]) for token in text]) for text in texts]
        return [self._vector(text) for text in texts]

    @staticmethod
    def _vector(tokens: Sequence[int]) -> NDArray[np.float32]:
        return np.array([zlib.crc32(bytes(t % 256 for t in tokens)) % 1000, 1.0], dtype=np.float32)

    def close(self) -> None:
        pass
