"""The checkpoints of states that can't be cut back to any length: at most as many bytes as the quota allows."""

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
    """What a state was like at a length. States that were copied from each other share it."""

    num_tokens: int
    data: Any
    holders: set[Hashable] = field(default_factory=set)


class Checkpoints:
    """The lengths to which slots and saved states can be cut back, with what that takes. Engine thread only.

    Those of one holder have different lengths. When the quota is full the least recently used go.
    """

    def __init__(self, memory: KvMemory, quota_bytes: int) -> None:
        """A quota of 0 keeps none."""
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self._memory = memory
        self._of: dict[Hashable, dict[int, _Checkpoint]] = {}  # by length
        self._all: OrderedDict[_Checkpoint, None] = OrderedDict()  # least recently used first
        self._num_bytes = 0  # of one, as far as known

    @property
    def are_kept(self) -> bool:
        """True where a checkpoint that is taken can be used later."""
        return 0 < self.quota_bytes >= self._num_bytes

    def take(self, slot: int, num_tokens: int) -> None:
        """The slot, which holds so many tokens, can be cut back to them from now on, as far as the quota goes."""
        if not self.are_kept or num_tokens in self._of.get(slot, ()):
            return
        try:
            self._num_bytes = self._memory.checkpoint_bytes(slot)
            self._make_room(self._num_bytes)
            if self.are_kept:
                self._add(_Checkpoint(num_tokens, self._memory.checkpoint(slot)), slot)
        except Exception:  # no memory for it, for instance
            log.exception("a checkpoint could not be taken; what it is for is computed again")

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
        """The holder has it no more; if it was the last one, it is gone."""
        del self._of[holder][checkpoint.num_tokens]
        if not self._of[holder]:
            del self._of[holder]
        checkpoint.holders.remove(holder)
        if not checkpoint.holders:
            del self._all[checkpoint]
            self.used_bytes -= checkpoint.data.nbytes

    def longest(self, holder: Hashable, up_to: int) -> int:
        """The largest length up to `up_to` at which the holder has a checkpoint; 0 if there is none."""
        return max((length for length in self._of.get(holder, ()) if length <= up_to), default=0)

    def at(self, holder: Hashable, num_tokens: int) -> Any | None:
        """What it takes to cut the holder back to this length; None if there is no checkpoint."""
        checkpoint = self._of.get(holder, {}).get(num_tokens)
        if checkpoint is None:
            return None
        self._all.move_to_end(checkpoint)
        return checkpoint.data

    def inherit(self, heir: Hashable, source: Hashable, num_tokens: int) -> None:
        """The heir, which had none, has the same first tokens as the source, and its checkpoints in them."""
        for length, checkpoint in self._of.get(source, {}).items():
            if length <= num_tokens:
                self._hold(heir, checkpoint)

    def of(self, holder: Hashable) -> dict[int, Any]:
        """What the holder's checkpoints are, by length."""
        return {length: checkpoint.data for length, checkpoint in self._of.get(holder, {}).items()}

    def lengths(self, holder: Hashable) -> list[int]:
        """Where the holder has checkpoints. Any thread."""
        return list(self._of.get(holder, ()))

    def adopt(self, holder: Hashable, num_tokens: int, data: Any) -> None:
        """The holder, which has none of this length, has this checkpoint, as far as the quota goes."""
        if data.nbytes > self.quota_bytes:
            return
        self._make_room(data.nbytes)
        self._add(_Checkpoint(num_tokens, data), holder)

    def swap(self, one: Hashable, other: Hashable) -> None:
        """Each of two holders has the checkpoints of the other one."""
        held = {holder: self._of.pop(holder, {}) for holder in (one, other)}
        for holder, checkpoints in held.items():
            for checkpoint in checkpoints.values():
                checkpoint.holders.remove(holder)
        for heir, source in ((one, other), (other, one)):
            for checkpoint in held[source].values():
                self._hold(heir, checkpoint)

    def cut(self, holder: Hashable, num_tokens: int) -> None:
        """The holder has only its first tokens left, and the checkpoints in them."""
        for length, checkpoint in list(self._of.get(holder, {}).items()):
            if length > num_tokens:
                self._release(holder, checkpoint)
