"""The store's records: states, file headers, files, matches, reasons for misses, and counters."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from typing_extensions import Buffer

from .keys import key_of


@dataclass(frozen=True, slots=True, eq=False)
class StoredState:
    """The cells of a context, in a format that doesn't depend on the number of slots. The bytes must not change.

    The state can be truncated to any length of at least `first_cut` tokens, and to the lengths of its checkpoints.
    """

    seed: bytes = field(repr=False)
    tokens: Sequence[int] = field(repr=False)
    first_cut: int
    data: Buffer = field(repr=False)
    checkpoints: Mapping[int, Buffer] = field(default_factory=dict, repr=False)  # by length in tokens
    scope: str = ""  # for display only, because the seed determines the scope

    @property
    def num_bytes(self) -> int:
        """The total size of the cells and the checkpoints in bytes."""
        return sum(memoryview(part).nbytes for part in (self.data, *self.checkpoints.values()))

    @property
    def key(self) -> str:
        """The key of the context.

        The key is computed on each access, which is too slow for the engine thread.
        """
        return key_of(self.seed, self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class StatePart:
    """A part of a file: the cells or a checkpoint."""

    num_tokens: int
    num_bytes: int
    digest: bytes


def usable(num_shared: int, num_tokens: int, first_cut: int, checkpoints: Sequence[int]) -> int:
    """Return the largest length, up to `num_shared` tokens, to which a state can be truncated, or 0."""
    whole = min(num_shared, num_tokens)
    if whole and whole >= first_cut:
        return whole
    return max((length for length in checkpoints if length <= whole), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class StateHead:
    """The header of a file whose digest and key have been verified."""

    key: str
    seed: bytes
    tokens: array[int]
    first_cut: int
    scope: str
    parts: tuple[StatePart, ...]  # the cells, then the checkpoints by increasing length
    blocks: list[bytes]  # keys of the full blocks
    num_bytes: int  # size of the file, which is read and verified completely, even if only a prefix is used
    head_bytes: int

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(part.num_tokens for part in self.parts[1:])

    def usable(self, num_shared: int) -> int:
        """Return the largest length, up to `num_shared` tokens, to which the state can be truncated, or 0."""
        return usable(num_shared, len(self.tokens), self.first_cut, self.checkpoints)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that contains a state, as described by its name and the file system."""

    path: Path
    num_bytes: int
    last_used: float  # Unix seconds
    is_pinned: bool

    @property
    def key(self) -> str:
        return self.path.stem

    @property
    def identity(self) -> str:
        return self.path.parent.name


@dataclass(frozen=True, slots=True)
class StateMatch:
    """A file whose state shares its first `num_shared` tokens with a request."""

    head: StateHead
    num_shared: int

    def usable(self, up_to: int) -> int:
        """Return the length of the longest usable prefix, up to `up_to` tokens, or 0.

        A prefix is usable if the request shares this prefix and the state can be truncated to its length.
        """
        return self.head.usable(min(up_to, self.num_shared))

    @property
    def num_usable(self) -> int:
        return self.head.usable(self.num_shared)


class Miss(StrEnum):
    """The reason why a file contains no usable state."""

    DAMAGED = "damaged"  # truncated, partly written, changed, renamed, or not a cellama file
    FOREIGN = "foreign"  # owned by another user, accessible to others, a link, a directory or a device
    VERSION = "version"  # written in another version of the format
    VANISHED = "vanished"
    UNREADABLE = "unreadable"  # refused by the file system, or too large for the memory


@dataclass(slots=True)
class StoreCounters:
    """Counters for reads, writes and evictions since the store was opened. Any thread may use this object."""

    hits: int = 0  # states that were read, verified and handed over
    misses: int = 0  # files without a usable state
    read_bytes: int = 0
    saves: int = 0
    written_bytes: int = 0
    drops: int = 0  # states that were offered and not written
    evictions: int = 0  # files that this store removed because of the quota
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        """Add each of these numbers to the counter with the same name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)
