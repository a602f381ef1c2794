"""How the token budget of a step is split between slots that decode and slots that prefill. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple

from cellama.engine.request import INTERACTIVE_PRIORITY

MIN_CHUNK = 128  # prompt tokens of a slot in a step, at least: below, llama.cpp prefills slower (docs/adr/002)
TILE = 64  # rows that llama.cpp's attention on the CPU computes together: a chunk of whole tiles wastes none


class SlotView(NamedTuple):
    """What a strategy sees of a slot: its index, and the tokens to decode before it can sample.

    A slot that decodes has exactly one; a slot that prefills may have one left, too.
    """

    slot: int
    num_pending: int
    decoding: bool
    priority: int = 3  # of its request: 0 is the most urgent, 9 the least

    @property
    def is_interactive(self) -> bool:
        """As Request.is_interactive."""
        return self.priority <= INTERACTIVE_PRIORITY


TokenAllocation = tuple[int, int]  # slot, number of its pending tokens in this step's batch


class Strategy(ABC):
    """Allocates the tokens of a step to slots. A user's own strategy derives from this class (strategy_registry.py)."""

    @abstractmethod
    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        """The allocations of this step, each slot at most once, together at most `budget` tokens.

        `slots` are in the order in which prefilling slots should be served; a prefill chunk is at most `chunk_size`.
        """

    def observe(self, num_tokens: int, seconds: float) -> None:  # noqa: B027  (a hook)
        """Learn from a step: the tokens of its batch, and the seconds of its decode calls.

        `num_tokens` is 0 if drafts were decoded in the step, because then its seconds don't measure the batch.
        """

    def may_yield(self, num_tokens: int) -> bool:
        """Return whether a decode call for so many tokens of bulk requests is aborted for an interactive request."""
        return False


class DecodeMaximal(Strategy):
    """Every decode token, and beside them one chunk of MIN_CHUNK prompt tokens: for the shortest gaps."""

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        return decode_first(slots, budget, chunk_size, beside=MIN_CHUNK)


class PrefillPriority(Strategy):
    """Prefill chunks first, decode tokens from what is left: for throughput. Prefill ends, so no decode starves."""

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        prefilling = [view for view in slots if not view.decoding]
        allocations = equal_chunks(prefilling, budget, chunk_size)
        left = budget - sum(count for _, count in allocations)
        return allocations + [(view.slot, 1) for view in slots if view.decoding][:left]


class Balanced(Strategy):
    """Half of the budget at most for prefill while others decode, and half for those if prompts need the other one."""

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        needed = sum(min(view.num_pending, chunk_size) for view in slots if not view.decoding)
        num_decode = max(budget - needed, (budget + 1) // 2)
        decoding = [view for view in slots if view.decoding][:num_decode]
        prefilling = [view for view in slots if not view.decoding]
        return decode_first([*decoding, *prefilling], budget, chunk_size, beside=max(1, budget // 2))


def decode_first(
    slots: Seq[SlotView], budget: int, chunk_size: int, beside: int | None = None
) -> list[TokenAllocation]:
    """Every decode token, then equal prefill chunks from what is left: beside decode tokens at most `beside` tokens."""
    allocations = [(view.slot, 1) for view in slots if view.decoding][:budget]
    left = budget - len(allocations)
    if allocations and beside is not None:
        left = min(left, beside)
    return allocations + equal_chunks([view for view in slots if not view.decoding], left, chunk_size)


def equal_chunks(slots: Seq[SlotView], budget: int, chunk_size: int) -> list[TokenAllocation]:
    """Chunks of one size for as many slots as the budget serves well, in their order; short prompts take less.

    Equal sizes matter: llama.cpp splits a batch of sequences of different lengths into passes of equal length. What is
    left of the budget goes to the next in order, but never as a crumb, which would be a pass of its own.
    """
    allocations: list[TokenAllocation] = []
    crumb = TILE if budget > TILE else 1
    while slots and budget > 0:
        served, slots = slots[: max(1, budget // MIN_CHUNK)], slots[max(1, budget // MIN_CHUNK) :]
        needs = [min(view.num_pending, chunk_size) for view in served]
        size = _largest_equal_size(needs, budget)
        if TILE < size < max(needs):  # whole tiles, as long as they are not the ends of prompts
            size -= size % TILE
        pairs = zip(served, needs, strict=True)
        takes = [(view.slot, min(need, size)) for view, need in pairs if size >= min(need, crumb)]
        allocations += takes
        budget -= sum(count for _, count in takes)
    return allocations


def _largest_equal_size(needs: list[int], budget: int) -> int:
    """The largest size that every slot can take, or all of a smaller need, within the budget."""
    for position, need in enumerate(sorted(needs)):
        fair = budget // (len(needs) - position)
        if need > fair:
            return fair
        budget -= need
    return max(needs)
