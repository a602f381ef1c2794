"""The states that are kept in RAM, within a quota of bytes: the least recently used are evicted."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any

from cellama.engine.backend import KvMemory
from cellama.engine.events import CacheTier
from cellama.engine.kvstore.benefit import CHAT_REUSE

from .checkpoints import Checkpoints
from .prefix import PrefixIndex, Tokens

log = logging.getLogger(__name__)

MAX_MATCHES = 64  # states that a search looks at: the longest come first, and equally long ones differ by little


@dataclass(frozen=True, slots=True)
class StateNote:
    """What the sequence that computed a state says of it."""

    next_token: int | None = None  # sampled after the state's tokens: with it they are the context that has a key
    reuse_probability: float = CHAT_REUSE  # that a later request continues from the state


@dataclass(eq=False, slots=True)
class SavedState:
    """The cells of one slot in RAM."""

    tokens: Tokens
    first_cut: int  # it can be taken over whole, or from this length on in part
    scope: Hashable
    data: Any
    tier: CacheTier = "ram"  # "disk" until it is taken over for the first time, if it was read from there
    note: StateNote = StateNote()
    from_disk: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)


Source = int | SavedState  # a slot, or a state in RAM


class RamTier:
    """Owns the saved states. Engine thread only, except for `states`, the one method that looks at all of them."""

    def __init__(self, memory: KvMemory, quota_bytes: int, checkpoints: Checkpoints) -> None:
        """A quota of 0 saves nothing. A saved state inherits the checkpoints of its slot."""
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.num_saves = 0  # since the start
        self.num_evictions = 0  # states dropped for the quota, since the start
        self.reserved_bytes = 0  # of the quota, for files that are being read
        self.on_saved: Callable[[SavedState], object] | None = None  # called with each state that was copied to RAM
        self._memory = memory
        self._checkpoints = checkpoints
        self._index: PrefixIndex[SavedState] = PrefixIndex()
        self._states: OrderedDict[SavedState, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._states)

    def matches(self, tokens: Sequence[int], scope: Hashable) -> Iterator[tuple[SavedState, int]]:
        """Yield states that share a prefix with `tokens`, and its length, the longest first; at most MAX_MATCHES.

        Where a state can't be cut back to any length, those are added whose tokens are all a prefix of `tokens`.
        """
        some = islice(self._index.matches(tokens, scope), MAX_MATCHES)
        if self._memory.first_saved_cut(self._memory.ctx_per_slot) == 0:
            return some
        return merge(some, self._index.whole_matches(tokens, scope), key=lambda match: -match[1])

    def save(self, slot: int, tokens: Sequence[int], scope: Hashable, note: StateNote | None = None) -> None:
        """Copy a slot's cells, which hold `tokens`, unless there is a copy, or it would be larger than the quota."""
        if self._has(tokens, scope):
            return
        try:
            self._save(slot, tokens, scope, note or StateNote())
        except Exception:  # no memory for it, for instance
            log.exception("can't save the state of a slot; it is computed again when it is needed")

    def _save(self, slot: int, tokens: Sequence[int], scope: Hashable, note: StateNote) -> None:
        size = self._memory.state_bytes(slot)
        if size > self.quota_bytes - self.reserved_bytes:
            return
        self._forget_shorter(tokens, scope)
        self._make_room(size)  # before the copy: both together are more than the quota
        first_cut = self._memory.first_saved_cut(len(tokens))
        state = SavedState(
            tokens=tuple(tokens), first_cut=first_cut, scope=scope, data=self._memory.save(slot), note=note
        )
        self._checkpoints.inherit(state, slot, len(tokens))
        self._add(state)
        self.num_saves += 1
        if self.on_saved is not None:
            self.on_saved(state)

    def adopt(self, state: SavedState, checkpoints: Mapping[int, Any]) -> None:
        """Keep a state that was read from disk, with its checkpoints, as `save` does."""
        if self._has(state.tokens, state.scope) or state.num_bytes > self.quota_bytes - self.reserved_bytes:
            return
        self._make_room(state.num_bytes)
        self._add(state)
        for num_tokens, data in checkpoints.items():
            self._checkpoints.adopt(state, num_tokens, data)

    def _add(self, state: SavedState) -> None:
        self._states[state] = None
        self.used_bytes += state.num_bytes
        self._index.insert(state, state.tokens, state.scope)

    def reserve(self, num_bytes: int) -> bool:
        """Reserve bytes of the quota for a file that is read; return False if the quota is too small."""
        if num_bytes > self.quota_bytes - self.reserved_bytes:
            return False
        self._make_room(num_bytes)
        self.reserved_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Give reserved bytes back."""
        self.reserved_bytes -= num_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Evict the least recently used states until so many bytes of the quota are free."""
        while self._states and self.used_bytes + self.reserved_bytes + num_bytes > self.quota_bytes:
            self.forget(next(iter(self._states)))
            self.num_evictions += 1

    def checkpoints_of(self, state: SavedState) -> dict[int, Any]:
        """Return the checkpoints of a state, by length."""
        return self._checkpoints.of(state)

    def states(self) -> list[SavedState]:
        """Return a copy of all of them, the least recently used first. Any thread."""
        return list(self._states)

    def _has(self, tokens: Sequence[int], scope: Hashable) -> bool:
        _, shared = next(self._index.matches(tokens, scope), (None, 0))
        return shared == len(tokens)

    def _forget_shorter(self, tokens: Sequence[int], scope: Hashable) -> None:
        """Drop states that a longer one makes superfluous: the turns of a conversation before the last."""
        first_cut = self._memory.first_saved_cut(len(tokens))
        for state, length in list(self._index.whole_matches(tokens, scope)):
            if length >= first_cut:
                self.forget(state)

    def touch(self, state: SavedState) -> None:
        """Make a state the most recently used one."""
        if state in self._states:
            self._states.move_to_end(state)

    def forget(self, state: SavedState) -> None:
        """Drop a state, if it is still there."""
        if state in self._states:
            del self._states[state]
            self.used_bytes -= state.num_bytes
            self._index.remove(state)
            self._checkpoints.cut(state, 0)

    def branches(self, tokens: Sequence[int], scope: Hashable) -> list[int]:
        """Return the lengths at which saved tokens part from these, or end."""
        return self._index.branches(tokens, scope)

    def forget_scope(self, scope: Hashable) -> None:
        """Drop the states of a scope that will not be asked for again."""
        for state in self._index.of_scope(scope):
            self.forget(state)
