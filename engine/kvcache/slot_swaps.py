"""Two slots change places: their cells, their tokens, and when they were used. Engine thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

from cellama.engine.backend import KvMemory

from .cells import Cells
from .checkpoints import Checkpoints
from .prefix import PrefixIndex

log = logging.getLogger(__name__)

Records = tuple[dict[int, Hashable], dict[int, None], list[int]]  # scopes, unsaved, last used: of slots


class SlotSwaps:
    """Moves states between slots on behalf of the cache, whose books it shares."""

    def __init__(
        self, memory: KvMemory, cells: Cells, index: PrefixIndex[int], checkpoints: Checkpoints, records: Records
    ) -> None:
        self._memory = memory
        self._cells = cells
        self._index = index
        self._checkpoints = checkpoints
        self._scopes, self._unsaved, self._last_used = records

    def swap(self, slot: int, other: int) -> bool:
        """Each of two slots, which share no cells, has what the other one had, or nothing where that fails.

        What `slot` had is a copy with all that can be taken over from it, what `other` had a saved state. False:
        nothing has changed. When it raises, what the two hold is unknown.
        """
        num_tokens = self._cells.of(slot)
        try:
            state = self._memory.save(other) if self._cells.of(other) else None
        except Exception:  # no memory for the buffers, for instance
            log.exception("two slots could not change places; they stay as they are")
            return False
        self._memory.trim(other, 0)
        if num_tokens and not self._fills(other, self._memory.copy, slot, other, num_tokens):
            self._forget(slot)
        self._memory.trim(slot, 0)
        if state is not None and not self._fills(slot, self._memory.restore, slot, state, self._cells.of(other)):
            self._forget(other)
            self._unsaved.pop(other, None)
        self._cells.swap(slot, other)
        self._checkpoints.swap(slot, other)
        self._swap_records(slot, other)
        return True

    def _forget(self, slot: int) -> None:
        """What the slot had is lost."""
        self._cells.trim(slot, 0)
        self._checkpoints.cut(slot, 0)

    def _fills(self, slot: int, action: Callable[..., bool], *args: Any) -> bool:
        try:
            return action(*args)
        except Exception:
            log.exception("a state could not be moved; it is computed again when it is needed")
            self._memory.trim(slot, 0)
            return False

    def _swap_records(self, one: int, other: int) -> None:
        new_name = {one: other, other: one}
        held = [slot for slot in (one, other) if slot in self._index]
        entries = [(slot, self._index.tokens_of(slot), self._scopes.pop(slot)) for slot in held]
        for slot, _, _ in entries:
            self._index.remove(slot)
        for slot, tokens, scope in entries:
            self._index.insert(new_name[slot], tokens, scope)
            self._scopes[new_name[slot]] = scope
        unsaved = [new_name.get(slot, slot) for slot in self._unsaved]
        self._unsaved.clear()
        self._unsaved.update(dict.fromkeys(unsaved))
        used = self._last_used
        used[one], used[other] = used[other], used[one]
