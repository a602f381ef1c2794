"""How the token budget of a step is split between slots that decode and slots that prefill. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from .errors import InvalidRequest, nearest


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a strategy sees of a slot: its index, and the tokens to decode before it can sample.

    A slot that decodes has exactly one; a slot that prefills may have one left, too.
    """

    slot: int
    num_pending: int
    decoding: bool


Share = tuple[int, int]  # slot, number of its pending tokens in this step's batch


class Strategy(Protocol):
    """A pure function of the slots; the scheduler checks what it returns."""

    def build_batch(self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int) -> list[Share]:
        """The shares of this step, each slot at most once, together at most `budget` tokens.

        `slots` are in the order in which prefilling slots should be served; a chunk is at most `chunk_size`.
        """
        ...


class DecodeMaximal:
    """Every decode token first, then equal prefill chunks from what is left of the budget."""

    def build_batch(self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int) -> list[Share]:
        shares = [(view.slot, 1) for view in slots if view.decoding][:budget]
        prefilling = [view for view in slots if not view.decoding]
        return shares + equal_chunks(prefilling, budget - len(shares), chunk_size)


MIN_CHUNK = 128  # tokens: docs/adr/002-prefill-chunks.md


def equal_chunks(slots: Seq[SlotView], budget: int, chunk_size: int) -> list[Share]:
    """Chunks of one size for as many slots as the budget serves well, in their order; short prompts take less.

    Equal sizes matter: llama.cpp splits a batch of sequences of different lengths into passes of equal length.
    """
    shares: list[Share] = []
    while slots and budget > 0:
        served, slots = slots[: max(1, budget // MIN_CHUNK)], slots[max(1, budget // MIN_CHUNK) :]
        needs = [min(view.num_pending, chunk_size) for view in served]
        size = _largest_equal_size(needs, budget)
        takes = [(view.slot, min(need, size)) for view, need in zip(served, needs, strict=True) if size]
        shares += takes
        budget -= sum(count for _, count in takes)
    return shares


def _largest_equal_size(needs: list[int], budget: int) -> int:
    """The largest size for which everybody can take it, or all of a smaller need, within the budget."""
    for position, need in enumerate(sorted(needs)):
        fair = budget // (len(needs) - position)
        if need > fair:
            return fair
        budget -= need
    return max(needs)


STRATEGIES: dict[str, type[Strategy]] = {"decode_maximal": DecodeMaximal}


def make_strategy(name: str) -> Strategy:
    """The strategy of that name. Raises InvalidRequest with the nearest known name."""
    if name not in STRATEGIES:
        raise InvalidRequest(f"batch_strategy is {name!r}; {nearest(name, STRATEGIES)}")
    return STRATEGIES[name]()
