"""Where a prefill stops for a checkpoint: what others share has to end there, where a state can't be cut back. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from cellama.engine.kvcache.manager import KvCache

from .sequence import Sequence, State
from .waiting_queue import WaitingQueue

APART_TOKENS = 64  # fewer are faster computed again
MAX_CUTS = 8  # in one prompt when it gets a slot; as many again for those that come while it is read
TURN_END_TOKENS = 4  # of a chat's prompt that its next turn may not have, for instance an opened block of thinking


class CutPlanner:
    """Plans the cuts of sequences of which no other one could take over a part otherwise, and of none else."""

    def __init__(self, cache: KvCache, queue: WaitingQueue, slots: Seq[Sequence | None]) -> None:
        """`slots` is the scheduler's own list."""
        self._cache = cache
        self._queue = queue
        self._slots = slots

    @property
    def _is_idle(self) -> bool:
        return not self._cache.checkpoints.are_kept

    def plan(self, sequence: Sequence, num_taken_over: int) -> None:
        """A sequence that still waits gets a slot: it is cut where others leave its path, and at a chat's end."""
        sequence.cuts = ()
        if self._is_idle or not sequence.request.cache_prompt:
            return
        tokens, scope = sequence.tokens, sequence.scope
        lengths = {*self._queue.branches(sequence), *self._cache.branches(tokens, scope)}
        sequence.cuts = _cuts(lengths, num_taken_over, len(tokens) - 1)
        if sequence.request.prefill_only:  # it is read for others, all of it
            sequence.cuts = (*sequence.cuts, sequence.num_prompt)
        elif sequence.request.reply is not None:
            end = sequence.num_prompt - TURN_END_TOKENS
            if end - max((num_taken_over, *sequence.cuts)) >= APART_TOKENS:
                sequence.cuts = (*sequence.cuts, end)

    def ask(self, sequence: Sequence) -> None:
        """A sequence begins to wait: whoever reads what it begins with is cut there, if it is not too late."""
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
    """The shortest first: who shares a length that is left out finds a cut not far below it."""
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
