"""The checkpoints of states that can't be cut back to any length, within a quota of bytes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from cellama.engine.backend import KvMemory

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Checkpoint:
    """A state at an earlier length. States that were copied from each other share it."""

    num_tokens: int
    data: Any
    holders: set[Hashable] = field(default_factory=set)


class Checkpoints:
    """The lengths to which slots and saved states can be cut back, and what that takes. Engine thread only.

    The checkpoints of one holder have different lengths. A full quota evicts the least recently used.
    """

    def __init__(self, memory: KvMemory, quota_bytes: int) -> None:
        """A quota of 0 keeps none."""
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self._memory = memory
        self._of: dict[Hashable, dict[int, _Checkpoint]] = {}  # by length
        self._all: OrderedDict[_Checkpoint, None] = OrderedDict()  # least recently used first
        self._num_bytes = 0  # of the last one: they have one size at any length

    @property
    def are_kept(self) -> bool:
        """True if the quota has room for a checkpoint."""
        return 0 < self.quota_bytes >= self._num_bytes

    def take(self, slot: int, num_tokens: int) -> None:
        """Take a checkpoint of a slot that holds `num_tokens`, as far as the quota goes."""
        if not self.are_kept or num_tokens in self._of.get(slot, ()):
            return
        try:
            self._num_bytes = self._memory.checkpoint_bytes(slot)
            self._make_room(self._num_bytes)
            if self.are_kept:
                self._add(_Checkpoint(num_tokens, self._memory.checkpoint(slot)), slot)
        except Exception:  # no memory for it, for instance
            log.exception("can't take a checkpoint; what it is for is computed again")

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
        """Take a checkpoint from its holder; without holders it is dropped."""
        del self._of[holder][checkpoint.num_tokens]
        if not self._of[holder]:
            del self._of[holder]
        checkpoint.holders.remove(holder)
        if not checkpoint.holders:
            del self._all[checkpoint]
            self.used_bytes -= checkpoint.data.nbytes

    def longest(self, holder: Hashable, up_to: int) -> int:
        """Return the largest length up to `up_to` at which the holder has a checkpoint; 0 if there is none."""
        return max((length for length in self._of.get(holder, ()) if length <= up_to), default=0)

    def at(self, holder: Hashable, num_tokens: int) -> Any | None:
        """Return what it takes to cut the holder back to this length; None if there is no checkpoint."""
        checkpoint = self._of.get(holder, {}).get(num_tokens)
        if checkpoint is None:
            return None
        self._all.move_to_end(checkpoint)
        return checkpoint.data

    def inherit(self, heir: Hashable, source: Hashable, num_tokens: int) -> None:
        """Give the heir, which has the same first tokens and no checkpoints, those of the source in these."""
        for length, checkpoint in self._of.get(source, {}).items():
            if length <= num_tokens:
                self._hold(heir, checkpoint)

    def of(self, holder: Hashable) -> dict[int, Any]:
        """Return the holder's checkpoints by length."""
        return {length: checkpoint.data for length, checkpoint in self._of.get(holder, {}).items()}

    def lengths(self, holder: Hashable) -> list[int]:
        """Return the lengths at which the holder has checkpoints. Any thread."""
        return list(self._of.get(holder, ()))

    def adopt(self, holder: Hashable, num_tokens: int, data: Any) -> None:
        """Give the holder a checkpoint that was read from disk, as far as the quota goes."""
        if data.nbytes > self.quota_bytes:
            return
        self._make_room(data.nbytes)
        self._add(_Checkpoint(num_tokens, data), holder)

    def swap(self, one: Hashable, other: Hashable) -> None:
        """Exchange the checkpoints of two holders."""
        held = {holder: self._of.pop(holder, {}) for holder in (one, other)}
        for holder, checkpoints in held.items():
            for checkpoint in checkpoints.values():
                checkpoint.holders.remove(holder)
        for heir, source in ((one, other), (other, one)):
            for checkpoint in held[source].values():
                self._hold(heir, checkpoint)

    def cut(self, holder: Hashable, num_tokens: int) -> None:
        """Drop the checkpoints behind the holder's first `num_tokens`, which are all that it has left."""
        for length, checkpoint in list(self._of.get(holder, {}).items()):
            if length > num_tokens:
                self._release(holder, checkpoint)
