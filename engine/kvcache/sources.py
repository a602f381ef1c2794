"""Where a prefix can be taken over from, and what that costs. Pure.

Looks at no more sources than it must: the longest prefixes come first, and what can't be better is not looked at.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from cellama.engine.backend import KvMemory

from .cells import Cells
from .checkpoints import Checkpoints
from .prefix import PrefixIndex, Tokens
from .ram_tier import RamTier, SavedState, Source

MOVE_COST_TOKENS = 16  # a copy or a restore takes about as long as so many tokens of prefill
MOVED_PER_TOKEN = 32  # and as one more for so many that are moved: between 20 and 80, by model and length of the stream


class Sources:
    """The slots with the tokens that they have or will have, and the states in RAM. Changes nothing."""

    def __init__(
        self, memory: KvMemory, cells: Cells, slots: PrefixIndex[int], ram: RamTier, checkpoints: Checkpoints
    ) -> None:
        self._memory = memory
        self._cells = cells
        self._slots = slots
        self._ram = ram
        self._checkpoints = checkpoints

    def held(self, source: Source) -> int:
        """Positions that are computed."""
        return source.num_tokens if isinstance(source, SavedState) else self._cells.of(source)

    def usable(self, source: Source, shared: int) -> int:
        """How many tokens can be taken over where so many are the same."""
        count = min(shared, self.held(source))
        return count if count >= self._first_cut(source) else self._checkpoints.longest(source, count)

    def _first_cut(self, source: Source) -> int:
        return source.first_cut if isinstance(source, SavedState) else self._memory.first_cut(source)

    def checkpoint_for(self, source: Source, count: int) -> Any | None:
        """What it takes to cut the source back to so many tokens, or to copy them; None if nothing."""
        return None if count >= self._first_cut(source) else self._checkpoints.at(source, count)

    def shares_cells(self, source: Source) -> bool:
        """True if a copy takes no cells."""
        return self._memory.unified and not isinstance(source, SavedState) and self._memory.partial_reuse

    def longest(self, tokens: Sequence[int], scope: Hashable) -> int:
        """The most tokens that can be taken over from anywhere; at least one is left to compute."""
        best, limit = 0, len(tokens) - 1
        for matches in (self._slots.matches(tokens, scope), self._ram.matches(tokens, scope)):
            for source, shared in matches:
                if min(shared, limit) <= best:
                    break
                best = max(best, self.usable(source, min(shared, limit)))
        return best

    def in_progress(self, tokens: Sequence[int], scope: Hashable) -> Iterator[tuple[int, int]]:
        """Slots whose planned tokens share a prefix with `tokens`, and its length, the longest first."""
        limit = len(tokens) - 1
        return ((slot, min(shared, limit)) for slot, shared in self._slots.matches(tokens, scope))

    def best(self, tokens: Sequence[int], scope: Hashable, idle: Sequence[int]) -> tuple[Source, int] | None:
        """The source that saves most, all in all, and how much can be taken over from it; None if nothing is saved.

        Of those that have to be moved it may be one that costs MOVE_COST_TOKENS more than another.
        """
        limit = len(tokens) - 1
        best: tuple[Source, int] | None = None
        best_gain = 0
        for slot, shared in self._slots.shared_by(idle, tokens, scope):
            count = self.usable(slot, min(shared, limit))
            if count > best_gain:
                best, best_gain = (slot, count), count
        found, places = best, frozenset(idle)
        for matches in (self._slots.matches(tokens, scope), self._ram.matches(tokens, scope)):
            for source, shared in matches:
                shared = min(shared, limit)
                moved = 0 if self.shares_cells(source) else shared  # at least
                if shared - _cost(moved) - (0 if best is found else MOVE_COST_TOKENS) <= best_gain:
                    break
                if source in places:
                    continue
                count = self.usable(source, shared)
                gain = count - _cost(0 if self.shares_cells(source) else self.held(source))
                if count and gain > best_gain:
                    best, best_gain = (source, count), gain
        return best

    def has_another(self, slot: int, tokens: Tokens, scope: Hashable, length: int) -> bool:
        """True if another source than `slot` has so many of these tokens, too."""
        for matches in (self._slots.matches(tokens, scope), self._ram.matches(tokens, scope)):
            for source, shared in matches:
                if shared < length:
                    break
                if source != slot and self.usable(source, shared) >= length:
                    return True
        return False


def _cost(num_moved: int) -> int:
    """Tokens of prefill that could be computed meanwhile. A state is moved as a whole, however little is taken over."""
    return MOVE_COST_TOKENS + num_moved // MOVED_PER_TOKEN
