"""The exact number of KV cells in use: cells that slots share count once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Block:
    """Consecutive cells with the same owners."""

    size: int
    owners: int = 1


class Cells:
    """The cells of every slot, in the order of positions. With `shared`, several slots can own a prefix."""

    def __init__(self, n_slots: int, total: int, *, shared: bool) -> None:
        self.total = total
        self.shared = shared
        self.used = 0
        self._blocks: list[list[_Block]] = [[] for _ in range(n_slots)]

    @property
    def free(self) -> int:
        return self.total - self.used

    def of(self, slot: int) -> int:
        """Return how many positions the slot holds."""
        return sum(block.size for block in self._blocks[slot])

    def own(self, slot: int) -> int:
        """Return how many cells would be free without this slot."""
        return sum(block.size for block in self._blocks[slot] if block.owners == 1)

    def freed_by(self, slots: Collection[int]) -> int:
        """Return how many cells would be free without all of these slots."""
        owners: Counter[_Block] = Counter(block for slot in slots for block in self._blocks[slot])
        return sum(block.size for block, count in owners.items() if count == block.owners)

    def extend(self, slot: int, count: int) -> None:
        """Give the slot `count` new cells."""
        blocks = self._blocks[slot]
        if blocks and blocks[-1].owners == 1:
            blocks[-1].size += count
        else:
            blocks.append(_Block(count))
        self.used += count

    def trim(self, slot: int, count: int) -> None:
        """Keep the first `count` positions of a slot; cells behind them are free when no other slot has them."""
        kept = self._cut(slot, count)
        for block in self._blocks[slot][kept:]:
            block.owners -= 1
            if block.owners == 0:
                self.used -= block.size
        del self._blocks[slot][kept:]

    def copy(self, source: int, target: int, count: int) -> None:
        """Give the empty slot `target` the first `count` positions of `source`: the same cells, or new ones."""
        assert not self._blocks[target]
        if not self.shared:
            self.extend(target, count)
            return
        blocks = self._blocks[source][: self._cut(source, count)]
        for block in blocks:
            block.owners += 1
        self._blocks[target] = blocks

    def swap(self, one: int, other: int) -> None:
        """Exchange the cells of two slots."""
        self._blocks[one], self._blocks[other] = self._blocks[other], self._blocks[one]

    def _cut(self, slot: int, count: int) -> int:
        """Return how many blocks hold the first `count` positions; cut a block across that border in two."""
        position = 0
        for index, block in enumerate(self._blocks[slot]):
            if position >= count:
                return index
            if position + block.size > count:
                self._split(block, count - position)
                return index + 1
            position += block.size
        return len(self._blocks[slot])

    def _split(self, block: _Block, size: int) -> None:
        behind = _Block(block.size - size, block.owners)
        block.size = size
        for blocks in self._blocks:
            if block in blocks:  # by identity: blocks do not compare
                blocks.insert(blocks.index(block) + 1, behind)
