"""A backend without llama.cpp, for tests: exact, deterministic, and strict about what it is asked.

A token is a byte; 256 ends a generation. The next token is a hash of *what the KV cache of the slot holds*, so a wrong
position, a lost cell or a mix-up of slots shows as a different text.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .backend import DecodeError
from .params import SamplingParams
from .scheduler import Chunk

END = 256
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz     .,"


class FakeVocabulary:
    """One token per byte of UTF-8."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == END else bytes([token])

    def is_end(self, token: int) -> bool:
        return token == END


@dataclass
class FakeBackend:
    """Keeps the tokens of every slot as its KV cache. `failures` are return codes for the next decode calls."""

    n_slots: int = 4
    ctx_per_slot: int = 256
    n_batch: int = 64
    end_every: int = 0  # about one token in so many ends the text; 0 = none does
    failures: deque[int] = field(default_factory=deque)
    poison: int | None = None  # a token that makes every batch that holds it fail
    vocabulary: FakeVocabulary = field(default_factory=FakeVocabulary)
    n_vocab: int = 257
    cells: list[list[int]] = field(init=False)
    batches: list[list[Chunk]] = field(default_factory=list)  # every batch that was asked for
    closed: bool = False

    def __post_init__(self) -> None:
        self.cells = [[] for _ in range(self.n_slots)]
        self._logits: set[int] = set()

    def decode(self, chunks: Sequence[Chunk]) -> None:
        self.batches.append(list(chunks))
        if sum(len(chunk.tokens) for chunk in chunks) > self.n_batch:
            raise AssertionError("more tokens than n_batch would kill the process")
        self._logits.clear()
        code = self.failures.popleft() if self.failures else 0
        if self.poison is not None and any(self.poison in chunk.tokens for chunk in chunks):
            code = -1
        if code:
            self._fail(chunks, code)
        for chunk in chunks:
            self._compute(chunk)

    def _fail(self, chunks: Sequence[Chunk], code: int) -> None:
        if code < -1:  # a fatal error leaves what was computed before it
            self._compute(chunks[0])
        raise DecodeError(code)

    def _compute(self, chunk: Chunk) -> None:
        cells = self.cells[chunk.slot]
        if chunk.position != len(cells) or len(cells) + len(chunk.tokens) > self.ctx_per_slot:
            raise DecodeError(-1)
        cells.extend(chunk.tokens)
        if chunk.samples:
            self._logits.add(chunk.slot)

    def new_sampler(self, params: SamplingParams, seed: int, history: Sequence[int], *, ban_end: bool) -> FakeSampler:
        return FakeSampler(self, params.is_greedy, random.Random(seed), ban_end)

    def next_token(self, slot: int, draw: int, ban_end: bool) -> int:
        if slot not in self._logits:
            raise AssertionError(f"sampling slot {slot} without logits would kill the process")
        value = zlib.crc32(repr((self.cells[slot], draw)).encode())
        if self.end_every and not ban_end and value % self.end_every == 0:
            return END
        return _ALPHABET[value % len(_ALPHABET)]

    def trim(self, slot: int, num_tokens: int) -> None:
        del self.cells[slot][num_tokens:]

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeSampler:
    """Greedy ignores the seed; otherwise every draw of the generator changes the token."""

    backend: FakeBackend
    greedy: bool
    generator: random.Random
    ban_end: bool

    def sample(self, slot: int) -> int:
        draw = 0 if self.greedy else self.generator.getrandbits(32)
        return self.backend.next_token(slot, draw, self.ban_end)

    def close(self) -> None:
        pass


@dataclass
class FakeEmbeddingBackend:
    """A vector is a hash of its text's tokens."""

    max_tokens: int = 64
    max_texts: int = 8
    calls: list[int] = field(default_factory=list)  # texts per call

    def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        self.calls.append(len(texts))
        return [[float(zlib.crc32(bytes(t % 256 for t in text)) % 1000), 1.0] for text in texts]

    def close(self) -> None:
        pass
