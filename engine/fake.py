"""Deterministic backends for tests.

The backends don't use llama.cpp, and strictly check that the engine calls them correctly. Each byte is a token, and
token 256 ends generation. The next token is a hash of *the contents of the slot's KV cache*. A wrong position, a lost
cell or swapped slots therefore change the generated text.
"""

from __future__ import annotations

import ast
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from cellama.config import limits
from cellama.engine.backend import AdapterKey, AdapterSet, Chunk, key_of

from .backend import DecodeError
from .errors import AdapterLoadFailed
from .request import SamplingParams, TokenLogprob

END = 256
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz     .,"


CellToken = int | tuple[int, AdapterKey]


class FakeVocabulary:
    """A vocabulary with one token per UTF-8 byte."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == END else bytes([token])

    def is_end(self, token: int) -> bool:
        return token == END


class Cell:
    """A KV cell. Slots that share a cell hold the same object.

    If the cell was computed with adapters, `token` is a pair of the token and the adapters' key.
    """

    __slots__ = ("token",)

    def __init__(self, token: CellToken) -> None:
        self.token = token


@dataclass(frozen=True)
class FakeState:
    """The saved state of a slot."""

    tokens: tuple[CellToken, ...]
    num_lost: int = 0  # leading positions that the sliding window has lost
    summary: int = 0

    @property
    def nbytes(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class FakeCheckpoint:
    """A saved recurrent state."""

    summary: int
    nbytes: int = 4


@dataclass
class FakeBackend:
    """A backend that stores the tokens of every slot as its KV cache.

    `failures` contains the return codes with which the next decode calls will fail.
    """

    n_slots: int = 4
    ctx_per_slot: int = 256
    n_batch: int = 64
    n_cells: int = 0  # 0 = as many as all slots can use
    unified: bool = False
    partial_reuse: bool = True
    window: int = 0  # size of the sliding window in positions; 0 = no window
    memory: int = 0  # number of cells that the next token depends on; 0 = all, so that no source can predict it
    end_every: int = 0  # mean number of tokens before an end token; 0 = texts never end
    failures: deque[int] = field(default_factory=deque)
    poison: int | None = None  # a token that makes every batch that contains it fail
    vocabulary: FakeVocabulary = field(default_factory=FakeVocabulary)
    n_vocab: int = 257
    cells: list[list[Cell]] = field(init=False)
    summaries: list[int] = field(init=False)  # hash of all tokens computed in each slot, if its state is recurrent
    num_lost: list[int] = field(init=False)  # leading positions of each slot that its sliding window has lost
    batches: list[list[Chunk]] = field(default_factory=list)  # the batch of every decode call
    adapter_sets: list[AdapterSet] = field(default_factory=list)  # the adapters of every decode call
    adapters: set[str] = field(default_factory=set)  # contents of the loaded files
    closed: bool = False
    threads: int = 1
    identity: bytes = b"fake"

    def __post_init__(self) -> None:
        self.cells = [[] for _ in range(self.n_slots)]
        self.summaries = [0] * self.n_slots
        self.num_lost = [0] * self.n_slots
        self.n_cells = self.n_cells or self.n_slots * self.ctx_per_slot
        self._logits: dict[int, tuple[int, int]] = {}  # slot → positions before its first row, rows
        self._aborted = False

    def set_threads(self, count: int) -> None:
        self.threads = count

    def rest(self) -> None: ...

    # KvMemory

    def first_cut(self, slot: int) -> int:
        if not self.partial_reuse:
            return len(self.cells[slot])
        return self.num_lost[slot] + self.window if self.num_lost[slot] else 0

    def first_saved_cut(self, num_tokens: int) -> int:
        return 0 if self.partial_reuse and (not self.window or num_tokens <= self.window) else num_tokens

    def lose_what_the_window_passed(self, slot: int) -> None:
        """Drop the cells before the sliding window, as if other slots had reused these cells."""
        if self.window:
            self.num_lost[slot] = max(self.num_lost[slot], len(self.cells[slot]) - self.window)

    def trim(self, slot: int, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        can = num_tokens == 0 or checkpoint is not None or num_tokens >= self.first_cut(slot)
        if checkpoint is not None:
            self.summaries[slot] = checkpoint.summary
        del self.cells[slot][num_tokens if can else 0 :]
        if not self.cells[slot]:
            self.num_lost[slot] = self.summaries[slot] = 0
        return can

    def copy(self, source: int, target: int, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        if self.cells[target]:
            raise AssertionError(f"slot {target} is not empty")
        copied = self.cells[source][: num_tokens if self.partial_reuse else None]
        self.cells[target] = copied if self.unified and self.partial_reuse else [Cell(cell.token) for cell in copied]
        self.num_lost[target], self.summaries[target] = self.num_lost[source], self.summaries[source]
        return self.trim(target, num_tokens, checkpoint)

    def state_bytes(self, slot: int) -> int:
        return len(self.cells[slot])

    def save(self, slot: int) -> FakeState:
        tokens = tuple(cell.token for cell in self.cells[slot])
        num_passed = max(0, len(tokens) - self.window) if self.window else 0
        return FakeState(tokens, max(self.num_lost[slot], num_passed), self.summaries[slot])

    def restore(self, slot: int, data: FakeState, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        if self.cells[slot]:
            raise AssertionError(f"slot {slot} is not empty")
        if self.num_used() + len(data.tokens) > self.n_cells:
            return False
        self.cells[slot] = [Cell(token) for token in data.tokens]
        self.num_lost[slot], self.summaries[slot] = data.num_lost, data.summary
        return self.trim(slot, num_tokens, checkpoint)

    def portable(self, data: FakeState | FakeCheckpoint, num_tokens: int, *, checkpoint: bool = False) -> bytes:
        parts = (data.summary,) if isinstance(data, FakeCheckpoint) else (data.tokens, data.num_lost, data.summary)
        return repr((num_tokens, parts)).encode()

    def from_portable(self, data: Buffer, *, checkpoint: bool = False) -> tuple[FakeState | FakeCheckpoint, int]:
        num_tokens, parts = ast.literal_eval(bytes(data).decode())
        return (FakeCheckpoint if checkpoint else FakeState)(*parts), num_tokens

    def checkpoint_bytes(self, slot: int) -> int:
        return FakeCheckpoint.nbytes

    def checkpoint(self, slot: int) -> FakeCheckpoint:
        return FakeCheckpoint(self.summaries[slot])

    def num_used(self) -> int:
        """Return the number of distinct cells across all slots."""
        return len({id(cell) for cells in self.cells for cell in cells})

    # Decoding

    def load_adapter(self, path: Path) -> str:
        text = path.read_text()
        if not text.startswith("adapter"):
            raise AdapterLoadFailed(f"{str(path)!r} is not an adapter")
        self.adapters.add(text)
        return text

    def free_adapter(self, handle: str) -> None:
        self.adapters.remove(handle)

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        self.batches.append(list(chunks))
        self.adapter_sets.append(adapters)
        if not {use.adapter.handle for use in adapters} <= self.adapters:
            raise AssertionError("decoding with a freed adapter would crash the process")
        if sum(len(chunk.tokens) for chunk in chunks) > self.n_batch:
            raise AssertionError("more tokens than n_batch would crash the process")
        self._logits.clear()
        code = self.failures.popleft() if self.failures else 0
        if self._aborted:
            code, self._aborted = 2, False
        if self.poison is not None and any(self.poison in chunk.tokens for chunk in chunks):
            code = -1
        if code == 0 and self.num_used() + sum(len(chunk.tokens) for chunk in chunks) > self.n_cells:
            code = 1
        if code:
            self._fail(chunks, code)
        for chunk in chunks:
            self._compute(chunk, key_of(adapters))

    def _fail(self, chunks: Sequence[Chunk], code: int) -> None:
        if code < -1:  # a fatal error keeps the chunks computed before it
            self._compute(chunks[0], ())
        raise DecodeError(code)

    def _compute(self, chunk: Chunk, key: AdapterKey) -> None:
        cells = self.cells[chunk.slot]
        if chunk.position != len(cells) or len(cells) + len(chunk.tokens) > self.ctx_per_slot:
            raise DecodeError(-1)
        if cells and len(cells) < self.first_cut(chunk.slot):
            raise AssertionError(f"slot {chunk.slot} has lost cells inside its sliding window")
        if not self.partial_reuse and self.summaries[chunk.slot] != _summary(cells):
            raise AssertionError(f"slot {chunk.slot} has a recurrent state that does not match its cells")
        cells.extend(Cell((token, key) if key else token) for token in chunk.tokens)
        self.summaries[chunk.slot] = 0 if self.partial_reuse else _summary(cells)
        if chunk.samples:
            num_rows = 1 + chunk.num_drafts
            first = chunk.position + 1 if chunk.decode else len(cells)
            self._logits[chunk.slot] = first, num_rows

    def abort(self) -> None:
        self._aborted = True

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> FakePlan:
        return FakePlan(params)

    def new_sampler(
        self,
        plan: FakePlan,
        seed: int,
        history: Sequence[int],
        *,
        ban_end: bool,
        num_sampled: int = 0,
        num_unbound: int | None = 0,
        mirostat_mu: float | None = None,
    ) -> FakeSampler:
        params = plan.params
        mu = (0.0 if mirostat_mu is None else mirostat_mu) if params.mirostat else None
        min_tokens = limits.MAX_COUNT if ban_end else params.min_tokens
        return FakeSampler(self, None if params.is_greedy else seed, min_tokens, num_sampled, mu)

    def presample(self, samplers: Sequence[tuple[FakeSampler, int]]) -> None: ...

    def next_token(self, slot: int, draw: int, ban_end: bool, row: int = 0) -> int:
        first, num_rows = self._logits.get(slot, (0, 0))
        if row >= num_rows:
            raise AssertionError(f"sampling row {row} of slot {slot} without logits would crash the process")
        seen = [cell.token for cell in self.cells[slot][: first + row]]
        value = zlib.crc32(repr((seen[-self.memory :], draw)).encode())
        if self.end_every and not ban_end and value % self.end_every == 0:
            return END
        return _ALPHABET[value % len(_ALPHABET)]

    def close(self) -> None:
        self.closed = True


def _summary(cells: Sequence[Cell]) -> int:
    return zlib.crc32(repr([cell.token for cell in cells]).encode()) if cells else 0


@dataclass(frozen=True)
class FakePlan:
    """The prepared parameters of a request. Constraints are ignored."""

    params: SamplingParams
    warnings: tuple[str, ...] = ()


@dataclass
class FakeSampler:
    """A sampler that is greedy if the request has no seed.

    With a seed, every token depends on the seed, the position and the mirostat state.
    """

    backend: FakeBackend
    seed: int | None
    min_tokens: int  # tokens before the first end token
    num_sampled: int = 0
    mirostat_mu: float | None = None  # sum of all tokens

    def sample(self, slot: int, forced: int | None = None, row: int = 0) -> tuple[int, TokenLogprob | None]:
        draw = 0 if self.seed is None else hash((self.seed, self.num_sampled, self.mirostat_mu or 0)) + 1
        token = self.backend.next_token(slot, draw, self.num_sampled < self.min_tokens, row)
        self.num_sampled += 1
        if self.mirostat_mu is not None:
            self.mirostat_mu += token
        return token if forced is None else forced, None

    def bind(self) -> None:
        pass

    def forced_tokens(self) -> list[int]:
        return []


@dataclass
class FakeEmbeddingBackend:
    """An embedding backend whose vectors are hashes of the tokens."""

    max_tokens: int = 64
    batch_tokens: int = 64
    max_texts: int = 8
    n_embd: int = 2
    per_token: bool = False
    poison: int | None = None  # a token that makes every call that contains it fail
    calls: list[list[tuple[int, ...]]] = field(default_factory=list)  # the texts of every call
    threads: int = 1

    def set_threads(self, count: int) -> None:
        self.threads = count

    def rest(self) -> None: ...

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        self.calls.append([tuple(text) for text in texts])
        if sum(map(len, texts)) > self.max_tokens:
            raise AssertionError("more tokens than max_tokens would crash the process")
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
