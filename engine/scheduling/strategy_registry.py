"""The batch strategy of an engine: by name or import path, and guarded against its own failures."""

from __future__ import annotations

import importlib
import logging
import operator
from collections.abc import Callable, Sequence as Seq
from typing import TypeVar

from cellama.engine.errors import InvalidRequest, nearest

from .bulk_policy import Adaptive
from .strategies import Balanced, DecodeMaximal, PrefillPriority, SlotView, Strategy, TokenAllocation

log = logging.getLogger(__name__)
T = TypeVar("T")

STRATEGIES: dict[str, type[Strategy]] = {
    "adaptive": Adaptive,
    "balanced": Balanced,
    "decode_maximal": DecodeMaximal,
    "prefill_priority": PrefillPriority,
}


def make_strategy(name: str) -> Strategy:
    """Return the strategy of that name, or of an import path `package.module:Class`. Raises InvalidRequest."""
    if ":" in name:
        return _import_strategy(name)
    if name not in STRATEGIES:
        raise InvalidRequest(
            f"batch_strategy is {name!r}; {nearest(name, STRATEGIES)}, or the import path of your own (module:Class)"
        )
    return STRATEGIES[name]()


def _import_strategy(path: str) -> Strategy:
    module, _, attribute = path.partition(":")
    try:
        strategy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"batch_strategy {path!r} can't be made: {error}") from None
    if not isinstance(strategy, Strategy):
        base = f"{Strategy.__module__}.{Strategy.__name__}"
        raise InvalidRequest(f"batch_strategy {path!r} is not a Strategy; derive it from {base}")
    return strategy


class Guarded(Strategy):
    """Uses a strategy, and DecodeMaximal for each step for which it fails, so that its failure stops no request."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.num_failures = 0  # the metric cellama_batch_strategy_failures_total
        self._fallback = DecodeMaximal()

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        """Return the batch of the strategy if it is possible, else that of DecodeMaximal."""

        def build() -> list[TokenAllocation]:
            allocations = self.strategy.build_batch(list(slots), budget, chunk_size, queue_depth)
            return _checked(allocations, slots, budget, chunk_size)

        return self._ask(build) or self._fallback.build_batch(slots, budget, chunk_size, queue_depth)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """As Strategy.observe."""
        self._ask(lambda: self.strategy.observe(num_tokens, seconds))

    def may_yield(self, num_tokens: int) -> bool:
        """As Strategy.may_yield."""
        return bool(self._ask(lambda: self.strategy.may_yield(num_tokens)))

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the answer of the strategy, None if it fails."""
        try:
            return question()
        except Exception:  # a user's code, on the thread that serves all requests
            self.num_failures += 1
            if self.num_failures & (self.num_failures - 1) == 0:  # the 1st, 2nd, 4th, 8th …: steps come by the hundred
                log.exception(
                    "batch strategy %s: failure %d; decode_maximal replaces it in each step for which it fails",
                    type(self.strategy).__name__,
                    self.num_failures,
                )
        return None


def _checked(
    allocations: Seq[TokenAllocation], views: Seq[SlotView], budget: int, chunk_size: int
) -> list[TokenAllocation]:
    """Return the allocations as whole numbers. Raises ValueError or TypeError for an impossible batch."""
    allowed = {view.slot: min(view.num_pending, chunk_size) for view in views}
    whole = [(operator.index(slot), operator.index(count)) for slot, count in allocations]
    for slot, count in whole:
        limit = allowed.pop(slot, 0)  # a slot that is named twice has nothing left
        if not 1 <= count <= limit:
            raise ValueError(f"slot {slot} has {count} tokens in the batch; it may have 1 to {limit}")
    total = sum(count for _, count in whole)
    if not 1 <= total <= budget:
        raise ValueError(f"the batch has {total} tokens; the budget is {budget}")
    return whole
