"""Which states have a prefix of given tokens: an index by blocks, then token by token. Pure; its owner guards it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

from .keys import BLOCK
from .states import Head, Match

MOST_CANDIDATES = 64  # per block: those that share as many blocks differ by little
MOST_COMPARED = 512  # in one search


class StateIndex:
    """States by their block keys. Fewer than BLOCK shared tokens are not found: they are computed faster."""

    def __init__(self) -> None:
        self._heads: dict[str, Head] = {}
        self._at: dict[bytes, dict[str, Head]] = {}  # block key → the states that begin so, the latest last
        self._cuts: dict[bytes, dict[str, Head]] = {}  # the same, of those that can be cut (only) at some length in it

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, key: object) -> bool:
        return key in self._heads

    def get(self, key: str) -> Head | None:
        return self._heads.get(key)

    def keys(self) -> list[str]:
        return list(self._heads)

    def heads(self) -> Iterable[Head]:
        return self._heads.values()

    def add(self, head: Head) -> None:
        """It can be found."""
        if head.key in self._heads:
            return
        self._heads[head.key] = head
        for block in head.blocks:
            self._at.setdefault(block, {})[head.key] = head
        for block in _blocks_of_cuts(head):
            self._cuts.setdefault(block, {})[head.key] = head

    def remove(self, key: str) -> None:
        """It can't be found any more."""
        head = self._heads.pop(key, None)
        if head is None:
            return
        for table, blocks in ((self._at, head.blocks), (self._cuts, _blocks_of_cuts(head))):
            for block in blocks:
                states = table.get(block, {})
                states.pop(key, None)
                if not states:
                    table.pop(block, None)

    def touch(self, key: str) -> None:
        """Where many share as much, it is looked at first."""
        head = self._heads.get(key)
        for block in head.blocks if head else ():
            states = self._at[block]
            del states[key]
            states[key] = self._heads[key]

    def longest(self, seed: bytes, tokens: array[int], blocks: list[bytes]) -> Match | None:
        """The state with the longest usable prefix of `tokens`, whose block keys are given; of equals the smallest."""
        best: Match | None = None
        for head, depth in islice(self._candidates(blocks), MOST_COMPARED):
            if best is not None and best.num_usable >= (depth + 1) * BLOCK:
                break  # what shares no more blocks than that has no more
            match = _match(head, seed, tokens, depth)
            if match.num_usable >= BLOCK and (best is None or _rank(match) > _rank(best)):
                best = match
        return best

    def prefixes(self, seed: bytes, tokens: array[int], blocks: list[bytes]) -> list[Head]:
        """States whose tokens all come first in `tokens`, but for `tokens` themselves; of many some."""
        found = []
        for depth, block in enumerate(blocks, start=1):
            for head in islice(reversed(self._at.get(block, {}).values()), MOST_CANDIDATES):
                is_shorter = len(head.blocks) == depth and len(head.tokens) < len(tokens)
                if is_shorter and _match(head, seed, tokens, depth).num_shared == len(head.tokens):
                    found.append(head)
        return found

    def _candidates(self, blocks: list[bytes]) -> Iterator[tuple[Head, int]]:
        """States with the number of blocks that they share, or can be cut in, the most first; each once."""
        seen: set[str] = set()
        for depth in range(len(blocks), 0, -1):
            for table in (self._cuts, self._at):
                for head in islice(reversed(table.get(blocks[depth - 1], {}).values()), MOST_CANDIDATES):
                    if head.key not in seen:
                        seen.add(head.key)
                        yield head, depth


def _blocks_of_cuts(head: Head) -> Iterable[bytes]:
    """The blocks after which it ends or can be cut, where not any length will do."""
    if head.first_cut == 0:
        return ()
    lengths = {len(head.tokens), head.first_cut, *head.checkpoints}
    return {head.blocks[length // BLOCK - 1] for length in lengths if length >= BLOCK}


def _rank(match: Match) -> tuple[int, int]:
    return match.num_usable, -match.num_bytes


def _match(head: Head, seed: bytes, tokens: array[int], depth: int) -> Match:
    shared = num_shared(head.tokens, tokens, depth * BLOCK) if head.seed == seed else 0
    return Match(head.key, len(head.tokens), shared, head.num_bytes, head.first_cut, head.checkpoints)


def num_shared(one: array[int], other: array[int], known: int) -> int:
    """How many first tokens are the same, of which the first `known` are likely to be."""
    if one[:known] != other[:known]:
        return 0  # two blocks with one SHA-256: it has never been seen
    most = min(len(one), len(other))
    count = known
    while count + BLOCK <= most and one[count : count + BLOCK] == other[count : count + BLOCK]:
        count += BLOCK
    while count < most and one[count] == other[count]:
        count += 1
    return count
