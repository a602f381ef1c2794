"""Keep KV states and checkpoints in RAM within byte quotas, and find the tokens of recent contexts by key.

States and checkpoints have separate quotas. When a quota is full, its least recently used entries are evicted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import Any

from cellama.config.logging import event_logger
from cellama.engine.backend import KvMemory
from cellama.engine.events import CacheTier, Context
from cellama.engine.kvstore.benefit import CHAT_REUSE

from .prefix import PrefixIndex, Tokens

log = event_logger(__name__)

MAX_MATCHES = 64  # states per search, the longest first; further matches of equal length differ little
MAX_CONTEXTS = 256  # number of contexts: a lookup hashes each newer one, which takes a few ms; Redis has older ones
MAX_CONTEXT_TOKENS = 1 << 19  # tokens of all contexts together, mostly of prompts, which take tens of MB at most


@dataclass(eq=False, slots=True)
class _Checkpoint:
    """A recurrent state from an earlier point, when fewer tokens had been computed.

    Slots and saved states that were copied from each other share their checkpoints.
    """

    num_tokens: int
    data: Any
    holders: set[Hashable] = field(default_factory=set)


class Checkpoints:
    """The lengths to which slots and saved states can be truncated, and the data needed for truncating them.

    Only the engine thread may use this class, except for `lengths`. Checkpoints are needed only for models whose states
    can't be truncated to arbitrary lengths. A holder has at most one checkpoint per length.
    """

    def __init__(self, memory: KvMemory, quota_bytes: int) -> None:
        """Limit the total size of all checkpoints to `quota_bytes`. A quota of 0 disables checkpoints."""
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self._memory = memory
        self._of: dict[Hashable, dict[int, _Checkpoint]] = {}  # by holder, then by length
        self._all: OrderedDict[_Checkpoint, None] = OrderedDict()  # least recently used first
        self._num_bytes = 0  # size of the last checkpoint; all checkpoints of a model have the same size

    @property
    def is_enabled(self) -> bool:
        """Whether at least one checkpoint fits into the quota."""
        return 0 < self.quota_bytes >= self._num_bytes

    def take(self, slot: int, num_tokens: int) -> None:
        """Take a checkpoint of a slot that contains `num_tokens` tokens, if it fits into the quota."""
        if not self.is_enabled or num_tokens in self._of.get(slot, ()):
            return
        try:
            self._num_bytes = self._memory.checkpoint_bytes(slot)
            self._make_room(self._num_bytes)
            if self.is_enabled:
                self._add(_Checkpoint(num_tokens, self._memory.checkpoint(slot)), slot)
        except Exception:  # out of memory, for example
            log.exception("checkpoint not saved", slot=slot, detail="later requests may recompute the slot's tokens")

    def _make_room(self, num_bytes: int) -> None:
        while self._all and self.used_bytes + num_bytes > self.quota_bytes:
            self._drop(next(iter(self._all)))

    def _add(self, checkpoint: _Checkpoint, holder: Hashable) -> None:
        self._all[checkpoint] = None
        self.used_bytes += checkpoint.data.nbytes
        self._hold(holder, checkpoint)

    def _hold(self, holder: Hashable, checkpoint: _Checkpoint) -> None:
        checkpoint.holders.add(holder)
        self._of.setdefault(holder, {})[checkpoint.num_tokens] = checkpoint

    def _drop(self, checkpoint: _Checkpoint) -> None:
        for holder in list(checkpoint.holders):
            self._release(holder, checkpoint)

    def _release(self, holder: Hashable, checkpoint: _Checkpoint) -> None:
        """Remove a checkpoint from one of its holders. If the checkpoint has no other holder, discard it."""
        del self._of[holder][checkpoint.num_tokens]
        if not self._of[holder]:
            del self._of[holder]
        checkpoint.holders.remove(holder)
        if not checkpoint.holders:
            del self._all[checkpoint]
            self.used_bytes -= checkpoint.data.nbytes

    def longest(self, holder: Hashable, up_to: int) -> int:
        """Return the largest length, up to `up_to` tokens, at which the holder has a checkpoint, or 0."""
        return max((length for length in self._of.get(holder, ()) if length <= up_to), default=0)

    def at(self, holder: Hashable, num_tokens: int) -> Any | None:
        """Return the data for truncating the holder to this length, or None if no checkpoint has this length."""
        checkpoint = self._of.get(holder, {}).get(num_tokens)
        if checkpoint is None:
            return None
        self._all.move_to_end(checkpoint)
        return checkpoint.data

    def inherit(self, target: Hashable, source: Hashable, num_tokens: int) -> None:
        """Share the checkpoints of `source` up to `num_tokens` tokens with `target`.

        `target` must have the same tokens as `source` up to this length, and no checkpoints.
        """
        for length, checkpoint in self._of.get(source, {}).items():
            if length <= num_tokens:
                self._hold(target, checkpoint)

    def of(self, holder: Hashable) -> dict[int, Any]:
        """Return the data of the holder's checkpoints, keyed by length."""
        return {length: checkpoint.data for length, checkpoint in self._of.get(holder, {}).items()}

    def lengths(self, holder: Hashable) -> list[int]:
        """Return the lengths of the holder's checkpoints. Any thread may call this method."""
        return list(self._of.get(holder, ()))

    def adopt(self, holder: Hashable, num_tokens: int, data: Any) -> None:
        """Add a checkpoint that was read from disk, if it fits into the quota."""
        if data.nbytes > self.quota_bytes:
            return
        self._make_room(data.nbytes)
        self._add(_Checkpoint(num_tokens, data), holder)

    def swap(self, one: Hashable, other: Hashable) -> None:
        """Swap the checkpoints of two holders."""
        held = {holder: self._of.pop(holder, {}) for holder in (one, other)}
        for holder, checkpoints in held.items():
            for checkpoint in checkpoints.values():
                checkpoint.holders.remove(holder)
        for target, source in ((one, other), (other, one)):
            for checkpoint in held[source].values():
                self._hold(target, checkpoint)

    def cut(self, holder: Hashable, num_tokens: int) -> None:
        """Discard the checkpoints of a truncated holder beyond its first `num_tokens` tokens."""
        for length, checkpoint in list(self._of.get(holder, {}).items()):
            if length > num_tokens:
                self._release(holder, checkpoint)


@dataclass(frozen=True, slots=True)
class StateNote:
    """Properties of a state that depend on the sequence that computed the state."""

    next_token: int | None = None  # token sampled after the state's tokens; together, they form the context with a key
    reuse_probability: float = CHAT_REUSE  # probability that a later request continues from the state


@dataclass(eq=False, slots=True)
class SavedState:
    """The cells of one slot that were copied to RAM."""

    tokens: Tokens
    first_cut: int  # smallest length to which it can be truncated without a checkpoint
    scope: Hashable
    data: Any
    tier: CacheTier = "ram"  # a state that was read from disk has "disk" until it is first used
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
    """Owns the saved states. Only the engine thread may use this class, except for the method `states`."""

    def __init__(self, memory: KvMemory, quota_bytes: int, checkpoints: Checkpoints) -> None:
        """Limit the total size of all states to `quota_bytes`. If the quota is 0, no states are saved.

        A saved state shares its slot's checkpoints.
        """
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.num_saves = 0  # states that were saved since the start
        self.num_evictions = 0  # states that were dropped because of the quota, since the start
        self.reserved_bytes = 0  # part of the quota that is reserved for files that are being read
        self.on_saved: Callable[[SavedState], object] | None = None  # called with each state that was copied to RAM
        self._memory = memory
        self._checkpoints = checkpoints
        self._index: PrefixIndex[SavedState] = PrefixIndex()
        self._states: OrderedDict[SavedState, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._states)

    def matches(self, tokens: Sequence[int], scope: Hashable) -> Iterator[tuple[SavedState, int]]:
        """Yield up to MAX_MATCHES states that share a prefix with `tokens`, each with the prefix length, longest first.

        If states can't be truncated to arbitrary lengths, also yield all states whose tokens are a prefix of `tokens`.
        """
        first = islice(self._index.matches(tokens, scope), MAX_MATCHES)
        if self._memory.first_saved_cut(self._memory.ctx_per_slot) == 0:
            return first
        return merge(first, self._index.whole_matches(tokens, scope), key=lambda match: -match[1])

    def save(self, slot: int, tokens: Sequence[int], scope: Hashable, note: StateNote | None = None) -> None:
        """Copy a slot's cells, which contain `tokens`, unless a copy already exists or would not fit into the quota."""
        if self._has(tokens, scope):
            return
        try:
            self._save(slot, tokens, scope, note or StateNote())
        except Exception:  # out of memory, for example
            log.exception("KV state not copied", slot=slot, detail="the slot's tokens will be recomputed when needed")

    def _save(self, slot: int, tokens: Sequence[int], scope: Hashable, note: StateNote) -> None:
        size = self._memory.state_bytes(slot)
        if size > self.quota_bytes - self.reserved_bytes:
            return
        self._forget_shorter(tokens, scope)
        self._make_room(size)  # before the copy, so that the quota also holds during the copy
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
        """Add a state that was read from disk, with its checkpoints, under the same conditions as `save`."""
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
        """Reserve part of the quota for a file that will be read. Return False if the quota is too small."""
        if num_bytes > self.quota_bytes - self.reserved_bytes:
            return False
        self._make_room(num_bytes)
        self.reserved_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Release a reservation of this many bytes."""
        self.reserved_bytes -= num_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Evict the least recently used states until `num_bytes` of the quota are free."""
        while self._states and self.used_bytes + self.reserved_bytes + num_bytes > self.quota_bytes:
            self.forget(next(iter(self._states)))
            self.num_evictions += 1

    def checkpoints_of(self, state: SavedState) -> dict[int, Any]:
        """Return the data of a state's checkpoints, keyed by length."""
        return self._checkpoints.of(state)

    def states(self) -> list[SavedState]:
        """Return all states, least recently used first. Any thread may call this method."""
        return list(self._states)

    def _has(self, tokens: Sequence[int], scope: Hashable) -> bool:
        _, shared = next(self._index.matches(tokens, scope), (None, 0))
        return shared == len(tokens)

    def _forget_shorter(self, tokens: Sequence[int], scope: Hashable) -> None:
        """Discard states that a longer state makes redundant, such as earlier turns of a conversation."""
        first_cut = self._memory.first_saved_cut(len(tokens))
        for state, length in list(self._index.whole_matches(tokens, scope)):
            if length >= first_cut:
                self.forget(state)

    def touch(self, state: SavedState) -> None:
        """Mark a state as most recently used."""
        if state in self._states:
            self._states.move_to_end(state)

    def forget(self, state: SavedState) -> None:
        """Discard a state. Calling this method again has no effect."""
        if state in self._states:
            del self._states[state]
            self.used_bytes -= state.num_bytes
            self._index.remove(state)
            self._checkpoints.cut(state, 0)

    def branches(self, tokens: Sequence[int], scope: Hashable) -> list[int]:
        """Return the lengths at which the tokens of saved states diverge from `tokens` or end."""
        return self._index.branches(tokens, scope)

    def forget_scope(self, scope: Hashable) -> None:
        """Discard all states of a scope."""
        for state in self._index.of_scope(scope):
            self.forget(state)


class RecentContexts:
    """Stores the most recently finished contexts.

    With a context's key, a request can continue the context without sending the context's tokens. One thread adds
    contexts. Any thread may look up contexts. Keys are computed only when a lookup needs them.
    """

    def __init__(self) -> None:
        self._contexts: deque[Context] = deque()
        self._num_tokens = 0

    def add(self, context: Context) -> None:
        """Add a context and drop the oldest contexts if the limits are exceeded."""
        self._contexts.append(context)
        self._num_tokens += len(context)
        while len(self._contexts) > MAX_CONTEXTS or (self._num_tokens > MAX_CONTEXT_TOKENS and len(self._contexts) > 1):
            self._num_tokens -= len(self._contexts.popleft())

    def find(self, key: str, seed: bytes) -> tuple[int, ...] | None:
        """Return the tokens of the context with this key and seed, or None."""
        for context in reversed(list(self._contexts)):  # a copy, because the owner may add contexts at the same time
            if context.key == key and context.seed == seed:
                return context.tokens
        return None
