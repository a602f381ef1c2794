"""Where a prefill stops for a checkpoint, in memory that can't be cut back: what others share must end there. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cellama.engine.kvcache.manager import KvCache

from .sequence import Sequence, State
from .slots import SlotTable
from .waiting_queue import WaitingQueue

APART_TOKENS = 64  # between two cuts: fewer tokens are computed again faster than a checkpoint is restored
MAX_CUTS = 8  # of a prompt when it gets a slot, each a pass more; as many again for requests that arrive meanwhile
TURN_END_TOKENS = 4  # at the end of a chat's prompt that its next turn may lack, such as an opened reasoning block


class CutPlanner:
    """Plans the cuts of sequences where memory can't be cut back, so that others can take over a part of a state."""

    def __init__(self, cache: KvCache, queue: WaitingQueue, slots: SlotTable) -> None:
        self._cache = cache
        self._queue = queue
        self._slots = slots

    @property
    def _is_idle(self) -> bool:
        return not self._cache.checkpoints.are_kept

    def plan(self, sequence: Sequence, num_taken_over: int) -> None:
        """Plan the cuts of a sequence that gets a slot: where other prompts part from it, and near its end."""
        sequence.cuts = ()
        if self._is_idle or not sequence.request.cache_prompt:
            return
        tokens, scope = sequence.tokens, sequence.scope
        lengths = {*self._queue.branches(sequence), *self._cache.branches(tokens, scope)}
        sequence.cuts = _cuts(lengths, num_taken_over, len(tokens) - 1)
        if sequence.request.prefill_only:  # it is prefilled for others, all of it
            sequence.cuts = (*sequence.cuts, sequence.num_prompt)
        elif sequence.request.reply is not None:
            end = sequence.num_prompt - TURN_END_TOKENS
            if end - max((num_taken_over, *sequence.cuts)) >= APART_TOKENS:
                sequence.cuts = (*sequence.cuts, end)

    def cut_for(self, sequence: Sequence) -> None:
        """Cut a sequence that prefills what a new sequence shares with it where that ends, if it is not too late."""
        if self._is_idle:
            return
        for slot, shared in self._cache.prefixes_in_progress(sequence.tokens, sequence.scope):
            holder = self._slots[slot]
            if shared < APART_TOKENS:
                break  # the longest come first
            if holder is not None and holder.state is State.PREFILLING and shared > holder.num_computed:
                below = max((cut for cut in holder.cuts if cut <= shared), default=0)
                if shared - below >= APART_TOKENS and len(holder.cuts) < 2 * MAX_CUTS:
                    holder.cuts = tuple(sorted((*holder.cuts, shared)))
                break


def _cuts(lengths: Iterable[int], start: int, most: int) -> tuple[int, ...]:
    """Return the cuts. A request that shares a length that is left out finds a cut not far below it."""
    ordered = sorted({min(length, most) for length in lengths})
    apart = APART_TOKENS
    while len(cuts := _apart(ordered, start, apart)) > MAX_CUTS:
        apart *= 2
    return tuple(cuts)


def _apart(lengths: list[int], start: int, apart: int) -> list[int]:
    cuts: list[int] = []
    for length in lengths:
        if length - (cuts[-1] if cuts else start) >= apart:
            cuts.append(length)
    return cuts
