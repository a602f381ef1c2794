"""What the store accepts and returns: states, the heads of their files, matches, and why a file gives no state."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from typing_extensions import Buffer

from .keys import key_of


@dataclass(frozen=True, slots=True, eq=False)
class KeptState:
    """The cells of a context, in a form that does not depend on the number of slots. Nobody changes the bytes.

    The state can be cut to any length from `first_cut` on, and to the lengths of its checkpoints.
    """

    seed: bytes = field(repr=False)
    tokens: Sequence[int] = field(repr=False)
    first_cut: int
    data: Buffer = field(repr=False)
    checkpoints: Mapping[int, Buffer] = field(default_factory=dict, repr=False)  # by length in tokens
    scope: str = ""  # shown to people; the seed decides who may use the state

    @property
    def num_bytes(self) -> int:
        """Bytes of the cells and the checkpoints."""
        return sum(memoryview(part).nbytes for part in (self.data, *self.checkpoints.values()))

    @property
    def key(self) -> str:
        """The key, hashed anew each time: not for the engine thread."""
        return key_of(self.seed, self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class StatePart:
    """A part of a file: the cells, or a checkpoint."""

    num_tokens: int
    num_bytes: int
    digest: bytes


def usable(num_shared: int, num_tokens: int, first_cut: int, checkpoints: Sequence[int]) -> int:
    """Return to how many of the first `num_shared` tokens a state can be cut; 0 if to none of these lengths."""
    whole = min(num_shared, num_tokens)
    if whole and whole >= first_cut:
        return whole
    return max((length for length in checkpoints if length <= whole), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class StateHead:
    """What the head of a file says, and what follows from it. Its digest and its key were right."""

    key: str
    seed: bytes
    tokens: array[int]
    first_cut: int
    scope: str
    parts: tuple[StatePart, ...]  # the cells, then the checkpoints, the shortest first
    blocks: list[bytes]  # keys of the full blocks
    num_bytes: int  # of the file: all of it is read and verified, whatever length is used
    head_bytes: int

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(part.num_tokens for part in self.parts[1:])

    def usable(self, num_shared: int) -> int:
        """Return to how many of its first `num_shared` tokens the state can be cut; 0 if to none of these lengths."""
        return usable(num_shared, len(self.tokens), self.first_cut, self.checkpoints)


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file with a state, as its name and the file system describe it."""

    path: Path
    num_bytes: int
    last_used: float  # unix seconds
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
        """Return the longest shared prefix of at most `up_to` tokens to which the state can be cut, or 0."""
        return self.head.usable(min(up_to, self.num_shared))

    @property
    def num_usable(self) -> int:
        return self.head.usable(self.num_shared)


class Miss(StrEnum):
    """Why a file gives no state."""

    DAMAGED = "damaged"  # cut, half written, changed, renamed, or never one of ours
    FOREIGN = "foreign"  # of another user, open to others, a link, a directory, a device
    VERSION = "version"  # of another format
    VANISHED = "vanished"
    UNREADABLE = "unreadable"  # the system refused, or there is no memory for it
