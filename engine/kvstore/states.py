"""What the store takes and gives: states, the heads of their files, matches, and why there is none."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from typing_extensions import Buffer

from .keys import key_of


@dataclass(frozen=True, slots=True, eq=False)
class KeptState:
    """A context's cells in a form that does not depend on the number of slots. Who offers it never changes the bytes.

    It can be cut to any length from `first_cut` on, and to those of its checkpoints.
    """

    seed: bytes = field(repr=False)
    tokens: Sequence[int] = field(repr=False)
    first_cut: int
    data: Buffer = field(repr=False)
    checkpoints: Mapping[int, Buffer] = field(default_factory=dict, repr=False)  # by length
    scope: str = ""  # told to people and to `clear`; who may see the state is in the seed

    @property
    def num_bytes(self) -> int:
        """Of the cells and the checkpoints."""
        return sum(memoryview(part).nbytes for part in (self.data, *self.checkpoints.values()))

    @property
    def key(self) -> str:
        """Computed anew each time: not for the engine thread."""
        return key_of(self.seed, self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Where bytes lie in a file: the cells, or a checkpoint."""

    num_tokens: int
    num_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What a file says of itself, and what follows from that; its digest and its key were right."""

    key: str
    seed: bytes
    tokens: array[int]
    first_cut: int
    scope: str
    parts: tuple[Part, ...]  # the cells, then the checkpoints, the shortest first
    blocks: list[bytes]  # keys of the full blocks
    num_bytes: int  # of the file
    head_bytes: int

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(part.num_tokens for part in self.parts[1:])


def usable(num_shared: int, num_tokens: int, first_cut: int, checkpoints: Sequence[int]) -> int:
    """How many of the first `num_shared` tokens a state can be cut to; 0 if to none of these lengths."""
    whole = min(num_shared, num_tokens)
    if whole and whole >= first_cut:
        return whole
    return max((length for length in checkpoints if length <= whole), default=0)


@dataclass(frozen=True, slots=True)
class Match:
    """A file that has a prefix of the tokens that were asked for."""

    key: str
    num_tokens: int  # that the file holds
    num_shared: int  # of them are the same
    num_bytes: int  # to read, whatever the length that is used: all of it is verified
    first_cut: int
    checkpoints: tuple[int, ...]

    def usable(self, up_to: int) -> int:
        """The longest shared prefix of at most `up_to` tokens to which it can be cut; 0 if there is none."""
        return usable(min(up_to, self.num_shared), self.num_tokens, self.first_cut, self.checkpoints)

    @property
    def num_usable(self) -> int:
        return self.usable(self.num_shared)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The shortest length from which on any will do, and single ones below."""
        return (self.first_cut, *self.checkpoints)


class Miss(StrEnum):
    """Why a file gives no state."""

    DAMAGED = "damaged"  # cut, half written, changed, renamed, or never one of ours
    FOREIGN = "foreign"  # of another user, open to others, a link, a folder, a device
    VERSION = "version"  # of another format
    VANISHED = "vanished"
    UNREADABLE = "unreadable"  # the system refused, or there is no memory for it
