"""Batch strategies: how a step divides its token budget between decoding and prefilling slots.

The default strategy, `Adaptive`, contains the entire policy for bulk requests that share an engine with interactive
requests. While only bulk requests have slots, steps are as large as possible, and prefill takes precedence. While an
interactive request has a slot, every step serves interactive requests first. Bulk requests can use as many rows as fit
into a decode call of 35 ms. Steps that prefill bulk prompts can take up to a fifth of the time. A step that also
decodes contains about 0.25 s of prefill.

An arriving interactive request can preempt a bulk request. The interactive prompt is prefilled before bulk prompts that
were admitted up to 20 s earlier. The running bulk decode call is aborted, and bulk rows skip the step that prefills the
interactive prompt. The time that bulk work may lose in these ways is limited to a few percent, so bulk throughput
hardly changes even if interactive requests arrive often. If rows are cheap, as on a GPU, all bulk rows are decoded in
every step.

ADR 011 contains the measurements. This module doesn't read a clock.
"""

from __future__ import annotations

import math
import operator
import pkgutil
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from cellama.config.logging import event_logger
from cellama.engine.errors import InvalidRequest, nearest
from cellama.engine.request import INTERACTIVE_PRIORITY, PROTECTED_PRIORITY

from .decode_costs import DecodeCosts
from .sequence import Sequence
from .slot_layout import by_nearness, runs_of

log = event_logger(__name__)
T = TypeVar("T")

MIN_CHUNK = 128  # prompt tokens per slot and step: llama.cpp prefills shorter chunks more slowly (docs/adr/002)
TILE = 64  # rows that llama.cpp's attention on the CPU computes together: a chunk of whole tiles wastes none

# Durations of steps, in seconds. The measured prefill rate converts them to tokens.
BULK_STEP_S = 0.3  # bulk prefill alone: the longest wait of an arriving interactive request; full steps would gain 2%
MIXED_STEP_S = 0.25  # prefill in a step that also decodes streams; shorter steps would delay first tokens too much
QUIET_S = 30.0  # seconds without an interactive request after which bulk steps are whole: longer than a reader pauses

# Bulk rows that decode in the same steps as streams.
FLUENT_S = 0.035  # seconds per decode call: the gap is then 40 ms, or 25 tokens per second, which reads as fluent
STRETCH = 1.2  # allowed ratio to a step without bulk rows, if that is longer: even a slow model serves bulk work
FAR_EVERY = 4  # steps between turns of rows that are not adjacent to streams: these need a pass of their own
FAR_STRETCH = 1.25  # allowed ratio of these steps to others: one longer step in four hardly changes the median gap
FIRST_ROWS = 8  # rows before the first measurement: a CPU decodes 8 in 1.5 times the time of 2 (docs/adr/008-holes.md)
FEWER = 0.8  # factor for the rows after a step that was too long: a fast decrease, because they grow one by one

# Steps that decode protected streams. Long gaps should be less than 5 % of each stream's gaps.
GAP_STRETCH = 1.9  # allowed ratio of a short step's duration to that of a single row: gaps at most double, with noise
START_STEPS = 96  # short steps after the start of a protected stream: a stream of fewer tokens has no long gap
MIN_SHORT = 48  # short steps between long steps after that
MAX_SHORT = 400  # short steps after which a long step follows in any case, so that other work never stops

# Bulk prefill while streams decode.
PREFILL_S = 0.1  # seconds of a step with bulk prefill that are free: no reader notices an occasional gap of this length
PREFILL_SHARE = 0.2  # share of the time for the rest of such steps, which is enough to refill slots that finish
MAX_OWED_S = 2.0  # seconds by which one very long step can postpone the next, so that bulk work never stops
OVERDUE_S = 2.0  # seconds without bulk prefill after which an older bulk prompt precedes an interactive one

# Time that bulk work may lose to interactive requests, as shares of all time.
SKIPPED_SHARE = 0.05  # steps in which bulk rows don't decode because an interactive prompt is prefilled
ABORTED_SHARE = 0.02  # aborted bulk decode calls: the smallest share, because their work is lost
DEFERRED_SHARE = 0.05  # bulk decode calls that are postponed to a later step
MAX_SAVED_S = 0.5  # seconds of each share that can be saved: one or two whole steps

# Order and slots.
BULK_PATIENCE_S = 20.0  # seconds by which an interactive prompt may be admitted later than the bulk one it precedes
HOLD_S = 1.0  # seconds that a bulk request keeps its slot, and until its next token, so each turn makes progress

WEIGHT = 0.2  # weight of a new value in a running mean: about the last ten values count


class SlotView(NamedTuple):
    """A strategy's view of a slot: its index, and the number of tokens to compute before the next token is sampled.

    A decoding slot has exactly one pending token. A prefilling slot may also have only one pending token.
    """

    slot: int
    num_pending: int
    decoding: bool
    priority: int = 3  # priority of the request: 0 is the most urgent, 9 the least

    @property
    def is_interactive(self) -> bool:
        return self.priority <= INTERACTIVE_PRIORITY

    @property
    def is_protected(self) -> bool:
        return self.priority <= PROTECTED_PRIORITY


TokenAllocation = tuple[int, int]  # slot, number of its pending tokens in the batch of the step


class Strategy(ABC):
    """Allocates the tokens of a step to slots. To write your own strategy, subclass this class.

    The scheduler sets `costs` to the measured durations of decode calls on this machine.
    """

    costs = DecodeCosts()

    @abstractmethod
    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        """Return this step's allocations: at most one allocation per slot, and at most `budget` tokens in total.

        Prefilling slots should be served in the order of `slots`. A prefill chunk has at most `chunk_size` tokens.
        """

    def decodes_all(self, *, is_interactive: bool) -> bool:
        """Return whether the step decodes all slots, if all of them are decoding and belong to the same class.

        Only the built-in strategies are asked, instead of `build_batch`, because most steps are of this kind.
        """
        return True

    def observe(self, num_tokens: int, seconds: float) -> None:  # noqa: B027  (a hook)
        """Learn from a step, given the number of tokens in its batch and the duration of its decode calls.

        If the step decoded drafts, `num_tokens` is 0, because the duration then includes the time for the drafts.
        """

    def may_yield(self, num_tokens: int) -> bool:
        """Return whether an interactive request may abort a decode call with `num_tokens` tokens of bulk requests."""
        return False


def decode_first(
    slots: Seq[SlotView], budget: int, chunk_size: int, max_prefill: int | None = None
) -> list[TokenAllocation]:
    """Allocate one token to each decoding slot, and the rest of the budget to prefill chunks of equal size.

    If any slot is decoding, the prefill chunks have at most `max_prefill` tokens in total.
    """
    allocations = [(view.slot, 1) for view in slots if view.decoding][:budget]
    remaining = budget - len(allocations)
    if allocations and max_prefill is not None:
        remaining = min(remaining, max_prefill)
    return allocations + equal_chunks([view for view in slots if not view.decoding], remaining, chunk_size)


def equal_chunks(slots: Seq[SlotView], budget: int, chunk_size: int) -> list[TokenAllocation]:
    """Allocate prefill chunks of equal size to as many slots as the budget allows, in the order of the slots.

    Short prompts get smaller chunks. The sizes should be equal because llama.cpp splits a batch with different lengths
    into passes of equal length. The remaining budget is allocated to the next slots, unless their chunks would be too
    small to be worth another pass.
    """
    allocations: list[TokenAllocation] = []
    min_part = TILE if budget > TILE else 1
    while slots and budget > 0:
        served, slots = slots[: max(1, budget // MIN_CHUNK)], slots[max(1, budget // MIN_CHUNK) :]
        needs = [min(view.num_pending, chunk_size) for view in served]
        size = _largest_equal_size(needs, budget)
        if TILE < size < max(needs):  # whole tiles, unless the chunk ends a prompt
            size -= size % TILE
        pairs = zip(served, needs, strict=True)
        parts = [(view.slot, min(need, size)) for view, need in pairs if size >= min(need, min_part)]
        allocations += parts
        budget -= sum(count for _, count in parts)
    return allocations


def _largest_equal_size(needs: list[int], budget: int) -> int:
    """Return the largest chunk size for which the chunks of all slots fit into the budget.

    A slot that needs fewer tokens gets a smaller chunk.
    """
    for index, need in enumerate(sorted(needs)):
        fair = budget // (len(needs) - index)
        if need > fair:
            return fair
        budget -= need
    return max(needs)


class DecodeMaximal(Strategy):
    """Decodes every slot in each step, and prefills at most MIN_CHUNK tokens to keep the gaps between tokens short."""

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        return decode_first(slots, budget, chunk_size, max_prefill=MIN_CHUNK)


class PrefillPriority(Strategy):
    """Maximizes throughput: it prefills first, and decodes with the remaining budget.

    No decoding slot starves, because every prefill finishes eventually.
    """

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        prefilling = [view for view in slots if not view.decoding]
        allocations = equal_chunks(prefilling, budget, chunk_size)
        remaining = budget - sum(count for _, count in allocations)
        return allocations + [(view.slot, 1) for view in slots if view.decoding][:remaining]


class Balanced(Strategy):
    """Splits the budget evenly between prefill and decoding.

    While slots are decoding, prefill gets at most half of the budget. While prompts are waiting, decoding gets at least
    half of the budget if it needs that much.
    """

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        needed = sum(min(view.num_pending, chunk_size) for view in slots if not view.decoding)
        num_decode = max(budget - needed, (budget + 1) // 2)
        decoding = [view for view in slots if view.decoding][:num_decode]
        prefilling = [view for view in slots if not view.decoding]
        return decode_first([*decoding, *prefilling], budget, chunk_size, max_prefill=max(1, budget // 2))


# Bulk requests alongside interactive ones


class TimeBudget:
    """The time that bulk work may lose, as a share of the elapsed time. At most MAX_SAVED_S seconds can accumulate."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._remaining_s = MAX_SAVED_S

    @property
    def is_available(self) -> bool:
        return self._remaining_s > 0

    def spend(self, seconds: float) -> None:
        """Record the duration of bulk work that was lost or postponed."""
        self._remaining_s -= seconds

    def observe(self, seconds: float) -> None:
        """Record elapsed time."""
        self._remaining_s = min(MAX_SAVED_S, self._remaining_s + self._share * seconds)


class Interruptions:
    """Decides whether an arriving interactive request aborts or postpones decode calls of bulk requests."""

    def __init__(self) -> None:
        self._aborted, self._deferred = TimeBudget(ABORTED_SHARE), TimeBudget(DEFERRED_SHARE)
        self._elapsed_s = 0.0  # time that is added to the budgets before they are next used
        self._bulk_s = 0.0  # duration of the last bulk decode call: the estimate for a deferred one

    @property
    def are_affordable(self) -> bool:
        """Return whether the time budgets allow another interruption."""
        self._observe_elapsed()
        return self._aborted.is_available and self._deferred.is_available

    def observe(self, seconds: float, *, is_bulk: bool) -> None:
        """Record a finished decode call."""
        self._elapsed_s += seconds
        if is_bulk:
            self._bulk_s = seconds

    def _observe_elapsed(self) -> None:
        self._aborted.observe(self._elapsed_s)
        self._deferred.observe(self._elapsed_s)
        self._elapsed_s = 0.0

    def observe_aborted(self, seconds: float) -> None:
        """Record a decode call that was aborted after this many seconds."""
        self._observe_elapsed()
        self._aborted.spend(seconds)

    def observe_deferred(self) -> None:
        """Record a decode call that was postponed."""
        self._observe_elapsed()
        self._deferred.spend(self._bulk_s)


def prefill_order(sequence: Sequence) -> float:
    """Return the sort key of a prefilling sequence. Sequences with smaller keys are prefilled first."""
    request = sequence.request
    return (sequence.admitted_at or 0.0) + BULK_PATIENCE_S * ((not request.is_interactive) - request.is_protected)


def yields_slot_despite_age(victim: Sequence, sequence: Sequence, now: float) -> bool:
    """Return whether a bulk request loses its slot to an interactive request that has waited for a shorter time."""
    if victim.request.is_interactive or not sequence.request.is_interactive or victim.placed_at is None:
        return False
    return now - victim.placed_at >= HOLD_S and victim.num_output > victim.num_output_placed


class StepKind(Enum):
    """The kind of the last step of `Adaptive`, which determines what the strategy learns from the step's duration."""

    BULK = "only bulk requests have slots"
    SHORT = "decodes protected streams, and as many other rows as fit"
    PROTECTED = "prefills protected prompts, and decodes the same rows"
    DECODE = "decodes while an interactive request has a slot"
    PREFILL = "prefills interactive prompts"
    PREFILL_SKIPPED = "prefills interactive prompts while bulk rows wait"
    PREFILL_BULK = "prefills bulk prompts while an interactive request has a slot"


@dataclass(slots=True)
class _RowLimit:
    """The maximum number of bulk rows per step.

    The limit increases by one after each step, and decreases by a fifth after a step that was too long.
    """

    max_rows: int = FIRST_ROWS

    def observe(self, *, is_too_long: bool, num_useful: int) -> None:
        """Adjust the limit after a step. The limit doesn't grow beyond `num_useful` rows."""
        limit = int(self.max_rows * FEWER) if is_too_long else self.max_rows + 1
        self.max_rows = min(limit, max(FIRST_ROWS, num_useful))


class BulkRows:
    """Chooses the bulk rows that are decoded in the same step as interactive streams.

    Usually, rows in slots next to the streams are chosen, because llama.cpp computes these rows in the same pass. Every
    FAR_EVERY steps, one step instead decodes bulk rows in other slots. These slots take turns.
    """

    def __init__(self) -> None:
        self._near, self._far = _RowLimit(), _RowLimit()
        self._is_far = False  # the last rows were not next to streams
        self._num_rows = 0  # number of the last rows
        self._num_bulk = 0  # number of all bulk rows in that step
        self._steps_since_far = 0
        self._last_far_slot = -1
        self.alone_s = 0.0  # mean duration of a step without bulk rows, in seconds

    def take(self, bulk: Collection[int], streams: Collection[int] = ()) -> list[int]:
        """Return the slots of the bulk rows that are decoded together with these streams in the next step."""
        rows = by_nearness(bulk, streams)[: self._near.max_rows]
        self._steps_since_far += 1
        self._is_far = len(rows) < len(bulk) and self._steps_since_far >= FAR_EVERY
        if self._is_far:
            far = sorted(set(bulk).difference(rows), key=lambda slot: (slot <= self._last_far_slot, slot))
            rows = far[: max(1, self._far.max_rows)]
            self._last_far_slot, self._steps_since_far = rows[-1], 0
        self._num_rows, self._num_bulk = len(rows), len(bulk)
        return rows

    def skip(self) -> None:
        """Record that the next step has no bulk rows."""
        self._steps_since_far += 1
        self._num_rows, self._num_bulk, self._is_far = 0, 0, False

    def observe(self, seconds: float) -> None:
        """Learn from the duration of a step that decoded the last chosen rows without any prefill."""
        if not self._num_rows:
            self.alone_s += (seconds - self.alone_s) * (WEIGHT if self.alone_s else 1.0)
        longest_s = max(FLUENT_S, STRETCH * self.alone_s) * (FAR_STRETCH if self._is_far else 1.0)
        limit = self._far if self._is_far else self._near
        limit.observe(is_too_long=seconds > longest_s, num_useful=self._num_bulk)


class BulkPrefill:
    """Decides when bulk prompts are prefilled while interactive requests have slots."""

    def __init__(self) -> None:
        self._owed_s = 0.0  # duration of steps without bulk prefill until the next one with it is allowed
        self._since_s = 0.0  # duration of steps since the last bulk prefill

    @property
    def is_due(self) -> bool:
        return self._owed_s <= 0

    @property
    def is_overdue(self) -> bool:
        """Return whether older bulk prompts take precedence even over interactive prompts."""
        return self.is_due and self._since_s > OVERDUE_S

    def observe(self, seconds: float, *, has_bulk: bool = False) -> None:
        """Record a step during which interactive requests had slots.

        `has_bulk` is true if the step prefilled bulk prompts.
        """
        self._owed_s = max(0.0, self._owed_s - seconds)
        self._since_s += seconds
        if has_bulk:
            excess_s = max(0.0, seconds - PREFILL_S)
            self._owed_s = min(MAX_OWED_S, excess_s * (1 - PREFILL_SHARE) / PREFILL_SHARE)
            self._since_s = 0.0


class LongGaps:
    """Decides which steps may cause long gaps in protected streams. Only steps that decode such streams are counted."""

    def __init__(self) -> None:
        self._since_start = 0  # short steps since a protected prompt was prefilled
        self._since_long = 0  # short steps since everything was served
        self._since_prefill_s = 0.0  # duration of the short steps since the last prefill

    @property
    def is_long_step_due(self) -> bool:
        """Return whether the next step may serve everything."""
        return self._since_long >= MAX_SHORT or (self._since_start >= START_STEPS and self._since_long >= MIN_SHORT)

    def allows_prompt(self, prefill_s: float) -> bool:
        """Return whether the next step may prefill a protected prompt, which takes `prefill_s` seconds.

        A prompt waits no longer than its prefill takes, so prompts that arrive soon after each other share a gap.
        """
        return self._since_prefill_s >= prefill_s

    def observe(self, kind: StepKind, seconds: float) -> None:
        """Record a step."""
        if kind is StepKind.SHORT:
            self._since_start, self._since_long = self._since_start + 1, self._since_long + 1
            self._since_prefill_s += seconds
        else:
            self._since_prefill_s = 0.0
            if kind is StepKind.PROTECTED:
                self._since_start = 0
            else:
                self._since_long = 0


def fluent_rows(slots: Seq[int], costs: DecodeCosts) -> Seq[int]:
    """Return the first of these slots, as many as can be decoded within GAP_STRETCH times the duration of one row."""

    def seconds_of(num_rows: int) -> float:
        return sum([costs.optimistic(run.size) for run in runs_of(sorted(slots[:num_rows]))])

    return slots[: max(1, bisect_right(range(1, len(slots) + 1), GAP_STRETCH * costs.expected(1), key=seconds_of))]


class Adaptive(Strategy):
    """Uses PrefillPriority while only bulk requests have slots, and decodes first otherwise."""

    def __init__(self) -> None:
        self._bulk = PrefillPriority()
        self._rate = math.inf  # recent tokens per second in steps with prefill
        self._quiet_s = math.inf  # duration of steps since an interactive request had a slot
        self._rows = BulkRows()
        self._prefill = BulkPrefill()
        self._skipping = TimeBudget(SKIPPED_SHARE)
        self._long_gaps = LongGaps()
        self._kind = StepKind.BULK  # kind of the step that was built last

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        if not any(view.is_interactive for view in slots):
            self._kind = StepKind.BULK
            budget = budget if self._quiet_s >= QUIET_S else min(budget, self._tokens_in(BULK_STEP_S))
            return self._bulk.build_batch(slots, budget, chunk_size, queue_depth)
        self._quiet_s = 0.0
        has_protected = any(view.is_protected for view in slots)
        if has_protected and self.costs.is_measured and (rows := self._serve_protected(slots, budget, chunk_size)):
            return rows
        prompts = self._prompts_to_prefill([view for view in slots if not view.decoding])
        bulk = [view.slot for view in slots if view.decoding and not view.is_interactive]
        self._kind = self._kind_of(prompts, has_bulk_rows=bool(bulk))
        bulk_rows: set[int] = set()
        if self._kind is not StepKind.PREFILL_SKIPPED:
            bulk_rows.update(self._rows.take(bulk, [view.slot for view in slots if view.is_interactive]))
        decoding = [view for view in slots if view.decoding and (view.is_interactive or view.slot in bulk_rows)]
        num_protected = sum(view.num_pending for view in prompts if view.is_protected)
        is_mixed = any(view.is_interactive for view in decoding) and not all(view.is_interactive for view in slots)
        if is_mixed or any(view.is_protected for view in slots):
            budget = min(budget, len(decoding) + max(self._tokens_in(MIXED_STEP_S), num_protected))
        return decode_first([*decoding, *prompts], budget, chunk_size)

    def decodes_all(self, *, is_interactive: bool) -> bool:
        self._kind = StepKind.BULK
        if is_interactive:
            self._quiet_s, self._kind = 0.0, StepKind.DECODE
            self._rows.skip()
        return True

    def _serve_protected(self, slots: Seq[SlotView], budget: int, chunk_size: int) -> list[TokenAllocation]:
        """Return a short step, or a step that prefills protected prompts. Return an empty list for a long step."""
        protected = [view.slot for view in slots if view.is_protected and view.decoding]
        prompts = [view for view in slots if view.is_protected and not view.decoding]
        streams = [view.slot for view in slots if view.is_interactive and not view.is_protected and view.decoding]
        bulk = [view.slot for view in slots if not view.is_interactive and view.decoding]
        others = [*by_nearness(streams, protected), *by_nearness(bulk, [*protected, *streams])]
        num_chunk = min(prompts[0].num_pending, budget, chunk_size) if prompts else 0
        if protected:
            rows = fluent_rows([*protected, *others], self.costs)
        else:  # other rows skip a single step, but don't wait for a long prompt
            rows = others if num_chunk < prompts[0].num_pending else []
        allocations = [(slot, 1) for slot in rows[: max(1, budget // 2)]]
        if prompts and (not protected or self._long_gaps.allows_prompt(num_chunk / self._rate)):
            self._kind = StepKind.PROTECTED
            return allocations + equal_chunks(prompts, budget - len(allocations), chunk_size)
        if len(rows) < len(slots) and self._long_gaps.is_long_step_due:
            return []
        self._kind = StepKind.SHORT
        return allocations

    def _prompts_to_prefill(self, prompts: list[SlotView]) -> list[SlotView]:
        """Return the prompts to prefill while interactive requests have slots.

        The result contains the interactive prompts and, if bulk prefill is overdue, the bulk prompts that precede the
        last interactive prompt. If no interactive prompts are waiting, the result contains all bulk prompts if bulk
        prefill is due, and is empty otherwise.
        """
        last = max((index for index, view in enumerate(prompts) if view.is_interactive), default=None)
        if last is None:
            return prompts if self._prefill.is_due else []
        return [view for view in prompts[: last + 1] if view.is_interactive or self._prefill.is_overdue]

    def _kind_of(self, prompts: list[SlotView], *, has_bulk_rows: bool) -> StepKind:
        if not prompts:
            return StepKind.DECODE
        if not all(view.is_interactive for view in prompts):
            return StepKind.PREFILL_BULK
        # Bulk rows would be a pass of their own and delay the first token after the prompt.
        return StepKind.PREFILL_SKIPPED if has_bulk_rows and self._skipping.is_available else StepKind.PREFILL

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn the prefill rate, and the cost of bulk work while streams are decoded."""
        self._quiet_s += seconds
        self._long_gaps.observe(self._kind, seconds)
        self._skipping.observe(seconds)
        if num_tokens and self._kind is not StepKind.BULK:
            self._prefill.observe(seconds, has_bulk=self._kind is StepKind.PREFILL_BULK)
            if self._kind is StepKind.DECODE:
                self._rows.observe(seconds)
            elif self._kind is StepKind.PREFILL_SKIPPED:
                self._skipping.spend(seconds)
        if num_tokens >= MIN_CHUNK and seconds > 0:
            rate = num_tokens / seconds
            self._rate = rate if math.isinf(self._rate) else self._rate + (rate - self._rate) * WEIGHT

    def may_yield(self, num_tokens: int) -> bool:
        """Return whether a bulk decode call of this size would take longer than an interactive request should wait."""
        return num_tokens > self._tokens_in(BULK_STEP_S)

    def _tokens_in(self, seconds: float) -> int:
        """Return the number of prompt tokens that can be prefilled in this time, as a multiple of MIN_CHUNK."""
        return sys.maxsize if math.isinf(self._rate) else max(1, round(self._rate * seconds / MIN_CHUNK)) * MIN_CHUNK


# Strategies by name

STRATEGIES: dict[str, type[Strategy]] = {
    "adaptive": Adaptive,
    "balanced": Balanced,
    "decode_maximal": DecodeMaximal,
    "prefill_priority": PrefillPriority,
}


def make_strategy(name: str) -> Strategy:
    """Create a strategy from its built-in name or its import path `package.module:Class`. Raises InvalidRequest."""
    if name in STRATEGIES:
        return STRATEGIES[name]()
    if ":" not in name:
        raise InvalidRequest(
            f"batch_strategy: {name!r} is unknown; {nearest(name, STRATEGIES)}, or use the import path of your own "
            "strategy (module:Class)"
        )
    try:
        strategy = pkgutil.resolve_name(name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"batch_strategy: {name!r} can't be created: {error}; check the import path") from None
    if not isinstance(strategy, Strategy):
        base = f"{Strategy.__module__}.{Strategy.__name__}"
        raise InvalidRequest(f"batch_strategy: {name!r} is not a Strategy; use a subclass of {base}")
    return strategy


class Guarded(Strategy):
    """Calls a strategy, and uses DecodeMaximal instead in every step in which the strategy fails.

    As a result, a broken strategy can't stop requests from being served.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.num_failures = 0  # the metric cellama_batch_strategy_failures_total
        self._is_built_in = type(strategy) in STRATEGIES.values()
        self._fallback = DecodeMaximal()

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        """Return the strategy's batch if it is valid, and the batch of DecodeMaximal otherwise."""

        def build() -> list[TokenAllocation]:
            allocations = self.strategy.build_batch(list(slots), budget, chunk_size, queue_depth)
            return _checked(allocations, slots, budget, chunk_size)

        return self._call(build) or self._fallback.build_batch(slots, budget, chunk_size, queue_depth)

    def decodes_all(self, *, is_interactive: bool) -> bool:
        """Return the result of a built-in strategy's method, or False."""
        return self._is_built_in and self.strategy.decodes_all(is_interactive=is_interactive)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Pass a step's size and duration on to the strategy."""
        try:
            self.strategy.observe(num_tokens, seconds)
        except Exception:  # as in `_call`, which would take longer than most calls
            self._note_failure()

    def may_yield(self, num_tokens: int) -> bool:
        """Return the result of the strategy's method, or False if the method raises an exception."""
        return bool(self._call(lambda: self.strategy.may_yield(num_tokens)))

    def _call(self, function: Callable[[], T]) -> T | None:
        """Call the function and return its result, or None if it raises an exception."""
        try:
            return function()
        except Exception:  # a user's code, on the thread that serves all requests
            self._note_failure()
        return None

    def _note_failure(self) -> None:
        self.num_failures += 1
        if self.num_failures & (self.num_failures - 1) == 0:  # the 1st, 2nd, 4th, 8th …, to limit the log
            log.exception(
                "batch strategy failed",
                strategy=type(self.strategy).__name__,
                num_failures=self.num_failures,
                detail="decode_maximal is used in every step in which the strategy fails",
            )


def _checked(
    allocations: Seq[TokenAllocation], views: Seq[SlotView], budget: int, chunk_size: int
) -> list[TokenAllocation]:
    """Return the allocations as integers. Raises ValueError or TypeError if the batch is invalid."""
    allowed = {view.slot: min(view.num_pending, chunk_size) for view in views}
    whole = [(operator.index(slot), operator.index(count)) for slot, count in allocations]
    for slot, count in whole:
        limit = allowed.pop(slot, 0)  # no tokens remain for a slot that occurs twice
        if not 1 <= count <= limit:
            raise ValueError(f"slot {slot} has {count} tokens in the batch, but must have 1 to {limit}")
    total = sum(count for _, count in whole)
    if not 1 <= total <= budget:
        raise ValueError(f"the batch has {total} tokens, but the budget is {budget}")
    return whole
