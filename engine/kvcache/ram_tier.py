"""The states that are kept in RAM: at most as many bytes as the quota allows, the least recently used go first."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any

from cellama.engine.backend import KvMemory
from cellama.engine.events import CacheTier

from .checkpoints import Checkpoints
from .prefix import PrefixIndex

log = logging.getLogger(__name__)

MOST_MATCHES = 64  # states that a search looks at: those that share as much differ by what a move costs


@dataclass(eq=False, slots=True)
class SavedState:
    """The cells of one slot in RAM."""

    num_tokens: int
    first_cut: int  # it can be taken over whole, or from this length on in part
    scope: Hashable
    data: Any
    tier: CacheTier = "ram"  # "disk" until it is taken over for the first time, if it was read from there

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)


Source = int | SavedState  # a slot, or a state in RAM


class RamTier:
    """Owns the saved states. Engine thread only. However many there are, none of its methods looks at all of them."""

    def __init__(self, memory: KvMemory, quota_bytes: int, checkpoints: Checkpoints) -> None:
        """A quota of 0 saves nothing. What is saved has the checkpoints of its slot."""
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.num_saves = 0  # since the start
        self.num_evictions = 0  # states dropped for the quota, since the start
        self._memory = memory
        self._checkpoints = checkpoints
        self._index: PrefixIndex[SavedState] = PrefixIndex()
        self._states: OrderedDict[SavedState, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._states)

    def matches(self, tokens: Sequence[int], scope: Hashable) -> Iterator[tuple[SavedState, int]]:
        """States that share a prefix with `tokens`, and its length, the longest first; of many some.

        Where not every state can be cut back to any length, all that `tokens` begin with are among them.
        """
        some = islice(self._index.matches(tokens, scope), MOST_MATCHES)
        if self._memory.first_saved_cut(self._memory.ctx_per_slot) == 0:
            return some
        return merge(some, self._index.whole_matches(tokens, scope), key=lambda match: -match[1])

    def save(self, slot: int, tokens: Sequence[int], scope: Hashable) -> None:
        """Keeps a copy of a slot's cells, which hold `tokens`, unless there is one, or it is larger than the quota."""
        if self._has(tokens, scope):
            return
        try:
            self._save(slot, tokens, scope)
        except Exception:  # no memory for it, for instance
            log.exception("the state of a slot could not be saved; it is computed again when it is needed")

    def _save(self, slot: int, tokens: Sequence[int], scope: Hashable) -> None:
        size = self._memory.state_bytes(slot)
        if size > self.quota_bytes:
            return
        self._forget_shorter(tokens, scope)
        while self.used_bytes + size > self.quota_bytes:  # before the copy: both together are more than the quota
            self.forget(next(iter(self._states)))
            self.num_evictions += 1
        first_cut = self._memory.first_saved_cut(len(tokens))
        state = SavedState(len(tokens), first_cut, scope, self._memory.save(slot))
        self._states[state] = None
        self._checkpoints.inherit(state, slot, len(tokens))
        self.used_bytes += state.num_bytes
        self._index.insert(state, tokens, scope)
        self.num_saves += 1

    def _has(self, tokens: Sequence[int], scope: Hashable) -> bool:
        _, shared = next(self._index.matches(tokens, scope), (None, 0))
        return shared == len(tokens)

    def _forget_shorter(self, tokens: Sequence[int], scope: Hashable) -> None:
        """Drops states that a longer one makes superfluous: the turns of a conversation before the last."""
        first_cut = self._memory.first_saved_cut(len(tokens))
        for state, length in list(self._index.whole_matches(tokens, scope)):
            if length >= first_cut:
                self.forget(state)

    def touch(self, state: SavedState) -> None:
        """A state is used: others go before it."""
        if state in self._states:
            self._states.move_to_end(state)

    def forget(self, state: SavedState) -> None:
        """Drops a state, if it is still there."""
        if state in self._states:
            del self._states[state]
            self.used_bytes -= state.num_bytes
            self._index.remove(state)
            self._checkpoints.cut(state, 0)

    def branches(self, tokens: Sequence[int], scope: Hashable) -> list[int]:
        """The lengths at which saved tokens part from these, or end."""
        return self._index.branches(tokens, scope)

    def forget_scope(self, scope: Hashable) -> None:
        """Drops the states of a scope that will not be asked for again."""
        for state in self._index.of_scope(scope):
            self.forget(state)
