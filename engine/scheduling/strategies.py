"""How the token budget of a step is split between slots that decode and slots that prefill. Pure."""

from __future__ import annotations

import importlib
import logging
import math
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from cellama.engine.errors import InvalidRequest, nearest
from cellama.engine.request import INTERACTIVE_PRIORITY

from .bulk_turns import BulkTurns

log = logging.getLogger(__name__)
T = TypeVar("T")


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
    """Allocates a step's tokens to slots. One that fails, or breaks the rules, is replaced for a while (Guarded)."""

    @abstractmethod
    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        """The allocations of this step, each slot at most once, together at most `budget` tokens.

        `slots` are in the order in which prefilling slots should be served; a prefill chunk is at most `chunk_size`.
        """

    def observe(self, num_tokens: int, seconds: float) -> None:  # noqa: B027  (a hook)
        """Is told what each step took: the tokens of its batch, and the seconds of its decode calls.

        0 tokens: there were drafts beside the batch, and the seconds say nothing of its costs.
        """

    def may_yield(self, num_tokens: int) -> bool:
        """True if a decode call for so many tokens, all of bulk requests, ends when an interactive request comes."""
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


BULK_STEP_S = 0.3
BESIDE_STEP_S = 0.25
QUIET_S = 30.0
RATE_WEIGHT = 0.2  # of a new value in a running mean


class Adaptive(Strategy):
    """PrefillPriority while only bulk requests have slots, decode tokens first as soon as an interactive one does.

    An interactive request shall not wait long for the step that runs when it comes, nor for prompts that come after it:
    bulk prompts are read in steps of about `BULK_STEP_S`, and wait while an interactive one is read; where such come
    seldom, bulk rows stand still meanwhile. Beside a stream prompts get about `BESIDE_STEP_S` of a step, for that is a
    gap in it, bulk ones not of every step, and bulk requests that decode take turns (bulk_turns.py). When none has come
    for `QUIET_S` steps are as large as they may be, which is faster; the next one that comes ends such a step.
    """

    def __init__(self) -> None:
        self._bulk = PrefillPriority()
        self._rate = math.inf  # tokens per second of late, when prompts were read
        self._quiet_s = math.inf  # of steps since an interactive request had a slot
        self._turns = BulkTurns()
        self._tell: Callable[[float], None] | None = None  # who learns from the seconds of the step that was built last

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns how fast prompts are read, and what bulk work costs beside streams."""
        self._quiet_s += seconds
        self._turns.observe(seconds)
        if self._tell and num_tokens:
            self._tell(seconds)
        if num_tokens >= MIN_CHUNK and seconds > 0:
            rate = num_tokens / seconds
            self._rate = rate if math.isinf(self._rate) else self._rate + (rate - self._rate) * RATE_WEIGHT

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        if not any(view.is_interactive for view in slots):
            self._tell = None
            budget = budget if self._quiet_s >= QUIET_S else min(budget, self._num_read_in(BULK_STEP_S))
            return self._bulk.build_batch(slots, budget, chunk_size, queue_depth)
        self._quiet_s = 0.0
        prompts = self._prompts_beside([view for view in slots if not view.decoding])
        bulk = [view.slot for view in slots if view.decoding and not view.is_interactive]
        reads_bulk = not all(view.is_interactive for view in prompts)
        stand_still = bool(bulk and prompts) and not reads_bulk and self._turns.may_stand_still
        rows = set() if stand_still else set(self._turns.rows(bulk, [v.slot for v in slots if v.is_interactive]))
        decoding = [view for view in slots if view.decoding and (view.is_interactive or view.slot in rows)]
        if any(view.is_interactive for view in decoding) and not all(view.is_interactive for view in slots):
            budget = min(budget, len(decoding) + self._num_read_in(BESIDE_STEP_S))
        self._tell = partial(self._turns.observe_read, bulk=reads_bulk) if prompts else self._turns.observe_decode
        if stand_still:
            self._tell = self._turns.observe_still
        return decode_first([*decoding, *prompts], budget, chunk_size)

    def _prompts_beside(self, prompts: list[SlotView]) -> list[SlotView]:
        """Those that are read beside streams: the interactive ones with what goes before them, or bulk ones."""
        last = max((index for index, view in enumerate(prompts) if view.is_interactive), default=None)
        if last is None:
            return prompts if self._turns.may_read() else []
        bulk_too = self._turns.may_read(before_interactive=True)
        return [view for view in prompts[: last + 1] if bulk_too or view.is_interactive]

    def may_yield(self, num_tokens: int) -> bool:
        """True for what takes longer than an interactive request should wait."""
        return num_tokens > self._num_read_in(BULK_STEP_S)

    def _num_read_in(self, seconds: float) -> int:
        """Tokens of prompts: whole chunks of MIN_CHUNK, at least one."""
        return sys.maxsize if math.isinf(self._rate) else max(1, round(self._rate * seconds / MIN_CHUNK)) * MIN_CHUNK


MIN_CHUNK = 128  # tokens: docs/adr/002-prefill-chunks.md
TILE = 64  # rows that llama.cpp's attention on the CPU computes together


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


RETRY_STEPS = 1000  # without a strategy that failed: a permanent failure costs 0.1 % of the steps an exception


@dataclass(slots=True)
class _Candidate:
    """A strategy, and for how long it is left out."""

    strategy: Strategy
    pause_steps: int = 0
    last_failure: str = ""

    @property
    def name(self) -> str:
        return type(self.strategy).__name__


class Guarded(Strategy):
    """A strategy that is replaced for `RETRY_STEPS` steps when it fails, so that its failure stops no request.

    Adaptive replaces other strategies, and DecodeMaximal replaces Adaptive.
    """

    def __init__(self, strategy: Strategy) -> None:
        known = {Adaptive: [DecodeMaximal()], DecodeMaximal: []}
        fallbacks = known.get(type(strategy), [Adaptive(), DecodeMaximal()])
        self._candidates = [_Candidate(each) for each in (strategy, *fallbacks)]
        self.num_failures = 0

    @property
    def current(self) -> Strategy:
        """The strategy that builds the next batch, unless its pause ends with that batch."""
        return self._current().strategy

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        """Return the batch of the current strategy, checked."""

        def build(strategy: Strategy) -> list[TokenAllocation]:
            allocations = strategy.build_batch(list(slots), budget, chunk_size, queue_depth)
            return _checked(allocations, slots, budget, chunk_size)

        for candidate in self._candidates:
            candidate.pause_steps = max(0, candidate.pause_steps - 1)
        return self._ask(build)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """As Strategy.observe."""
        self._ask(lambda strategy: strategy.observe(num_tokens, seconds))

    def may_yield(self, num_tokens: int) -> bool:
        """As Strategy.may_yield."""
        return self._ask(lambda strategy: bool(strategy.may_yield(num_tokens)))

    def _current(self) -> _Candidate:
        return next(candidate for candidate in self._candidates if not candidate.pause_steps)

    def _ask(self, question: Callable[[Strategy], T]) -> T:
        candidate = self._current()
        try:
            return question(candidate.strategy)
        except Exception as error:  # a user's code, on the thread that serves all
            if candidate is self._candidates[-1]:
                raise
            self.num_failures += 1
            candidate.pause_steps = RETRY_STEPS
            if candidate.last_failure != repr(error):  # once, however often it fails in this way
                candidate.last_failure = repr(error)
                log.exception(
                    "batch strategy %s failed; %s replaces it for %d steps, then it is tried again",
                    *(candidate.name, self._current().name, RETRY_STEPS),
                )
        return self._ask(question)


def _checked(
    allocations: Seq[TokenAllocation], views: Seq[SlotView], budget: int, chunk_size: int
) -> list[TokenAllocation]:
    """The allocations as whole numbers. Raises ValueError or TypeError for what can't be a batch."""
    pending = {view.slot: min(view.num_pending, chunk_size) for view in views}
    whole = [(operator.index(slot), operator.index(count)) for slot, count in allocations]
    for slot, count in whole:
        allowed = pending.pop(slot, 0)  # a slot named twice has nothing left
        if not 1 <= count <= allowed:
            raise ValueError(f"it gave slot {slot} {count} tokens, which may have 1 to {allowed}")
    total = sum(count for _, count in whole)
    if not 1 <= total <= budget:
        raise ValueError(f"it chose {total} tokens, the budget is {budget}")
    return whole


STRATEGIES: dict[str, type[Strategy]] = {
    "adaptive": Adaptive,
    "balanced": Balanced,
    "decode_maximal": DecodeMaximal,
    "prefill_priority": PrefillPriority,
}


def make_strategy(name: str) -> Strategy:
    """The strategy of that name, or of an import path `package.module:Class`. Raises InvalidRequest."""
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
        raise InvalidRequest(f"batch_strategy {path!r} is no Strategy; derive it from {__name__}.Strategy")
    return strategy
