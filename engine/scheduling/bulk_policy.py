"""How bulk requests share an engine with interactive ones: the `adaptive` strategy, and all constants of that policy.

While only bulk requests have slots, steps are as large as they may be, with prompts first. As soon as an interactive
request has a slot, every step serves the interactive requests first, and bulk work gets what keeps the gaps of streams
short: as many bulk rows as a decode call of 35 ms has time for, whole steps of bulk prefill in a fifth of the time, and
about 0.25 s of prefill in a step that also decodes. An interactive request that arrives takes the slot of a bulk
request, its prompt goes before bulk prompts that were admitted up to 20 s earlier, the bulk decode call that runs is
aborted, and bulk rows miss the step that prefills it. Whatever bulk work loses by that is limited to a few percent of
the time, so bulk work keeps its rate where interactive requests arrive often. Where rows cost little, as on a GPU, all
bulk rows take part in every step. Measurements are in docs/adr/011-reading-beside-decoding.md. Pure: no clock.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence as Seq
from dataclasses import dataclass
from enum import Enum

from .neighbours import by_nearness
from .sequence import Sequence
from .strategies import MIN_CHUNK, PrefillPriority, SlotView, Strategy, TokenAllocation, decode_first

# Steps. Their lengths in seconds become tokens by the measured prefill rate.
BULK_STEP_S = 0.3  # of bulk prefill alone: an arriving interactive request waits for it at most; whole steps gain 2 %
BESIDE_STEP_S = 0.25  # with prefill beside a stream, whose gap it is; shorter steps delay first tokens too much
QUIET_S = 30.0  # without an interactive request, after which bulk steps are whole: longer than a reader pauses

# Bulk rows that decode beside streams.
FLUENT_S = 0.035  # of a decode call: with the rest of the step a gap of 40 ms, 25 tokens per second, reads as fluent
STRETCH = 1.2  # times a step without bulk rows, if that is longer: a slow model serves bulk work, too
FAR_EVERY = 4  # steps, after which rows that are not next to the streams get a turn: they cost a pass of their own
FAR_STRETCH = 1.25  # times as long as other steps may that step be, so that one in four hardly shows in the median gap
FIRST_ROWS = 8  # before anything is measured: a CPU decodes them in 1.5 times the time of 2 (docs/adr/008-holes.md)
FEWER = 0.8  # times the rows after a step that was too long: the next gap is short again, while growth is row by row

# Bulk prefill beside streams.
PREFILL_S = 0.1  # of a step with bulk prefill counts as nothing: no reader notices such a gap now and then
PREFILL_SHARE = 0.2  # of the time is for what such steps take beyond that: slots that end are filled again in time
MAX_OWED_S = 2.0  # that one very long step can postpone the next one, or the first measurement would stop bulk work
OVERDUE_S = 2.0  # without bulk prefill, after which an older bulk prompt goes before an interactive one: no starvation

# What bulk work may lose to interactive requests, as shares of the time.
SKIPPED_SHARE = 0.05  # for steps in which bulk rows don't decode because an interactive prompt is prefilled
ABORTED_SHARE = 0.02  # for bulk decode calls that are aborted: their work is lost, so this is the smallest one
DEFERRED_SHARE = 0.05  # for bulk decode calls that are left to a later step
MAX_SAVED_S = 0.5  # of each share can be saved up: one or two whole steps, for a request that comes after a while

# Order and slots.
BULK_PATIENCE_S = 20.0  # a bulk prompt lets interactive ones go first that get a slot so much later: several steps
HOLD_S = 1.0  # a bulk request keeps its slot so long, and until it has a token more: each turn makes progress

WEIGHT = 0.2  # of a new value in a running mean: the last ten or so count


class TimeBudget:
    """Seconds that bulk work may lose: a share of the time that passes, of which MAX_SAVED_S can be saved up."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._left_s = MAX_SAVED_S

    @property
    def is_left(self) -> bool:
        return self._left_s > 0

    def spend(self, seconds: float) -> None:
        """Account bulk work that was lost or postponed."""
        self._left_s -= seconds

    def observe(self, seconds: float) -> None:
        """Account time that passed."""
        self._left_s = min(MAX_SAVED_S, self._left_s + self._share * seconds)


class Interruptions:
    """Whether a decode call of bulk requests alone ends, or does not start, when an interactive request arrives."""

    def __init__(self) -> None:
        self._aborted, self._deferred = TimeBudget(ABORTED_SHARE), TimeBudget(DEFERRED_SHARE)
        self._bulk_s = 0.0  # of the last bulk decode call: what a deferred one probably takes

    @property
    def are_affordable(self) -> bool:
        """True if even a short decode call may be interrupted."""
        return self._aborted.is_left and self._deferred.is_left

    def observe(self, seconds: float, *, is_bulk: bool) -> None:
        """Account a decode call that was finished."""
        self._aborted.observe(seconds)
        self._deferred.observe(seconds)
        if is_bulk:
            self._bulk_s = seconds

    def observe_aborted(self, seconds: float) -> None:
        """Account a decode call that was aborted after this time."""
        self._aborted.spend(seconds)

    def observe_deferred(self) -> None:
        """Account a decode call that did not start."""
        self._deferred.spend(self._bulk_s)


def prefill_order(sequence: Sequence) -> float:
    """Return the place of a sequence among the prompts that are prefilled; smaller is sooner."""
    return (sequence.admitted_at or 0.0) + (0.0 if sequence.request.is_interactive else BULK_PATIENCE_S)


def gives_way_though_older(victim: Sequence, sequence: Sequence, now: float) -> bool:
    """Return whether a bulk request that waited longer than an interactive one still loses its slot to it."""
    if victim.request.is_interactive or not sequence.request.is_interactive or victim.placed_at is None:
        return False
    return now - victim.placed_at >= HOLD_S and victim.num_output > victim.num_output_placed


class StepKind(Enum):
    """What `Adaptive` built last, by which it learns from the seconds of that step."""

    BULK = "only bulk requests have slots"
    DECODE = "decodes beside an interactive request"
    PREFILL = "prefills interactive prompts"
    PREFILL_SKIPPED = "prefills interactive prompts while bulk rows wait"
    PREFILL_BULK = "prefills bulk prompts beside an interactive request"


@dataclass(slots=True)
class _RowLimit:
    """How many bulk rows a step has time for: one more after each step that was short enough, a fifth fewer else."""

    max_rows: int = FIRST_ROWS

    def observe(self, *, is_too_long: bool, num_useful: int) -> None:
        """Learn from a step; more than `num_useful` rows are of no use."""
        limit = int(self.max_rows * FEWER) if is_too_long else self.max_rows + 1
        self.max_rows = min(limit, max(FIRST_ROWS, num_useful))


class BulkRows:
    """Which bulk rows decode in a step beside streams.

    Usually those next to the streams' slots, which llama.cpp computes in the same pass. Every FAR_EVERY steps a run of
    others, which have waited longest.
    """

    def __init__(self) -> None:
        self._near, self._far = _RowLimit(), _RowLimit()
        self._is_far = False  # the rows that were taken last are not next to the streams …
        self._num_rows = 0  # … and so many …
        self._num_bulk = 0  # … of so many bulk rows
        self._steps_since_far = 0
        self._last_far_slot = -1
        self.alone_s = 0.0  # mean seconds of a step without bulk rows

    def take(self, bulk: Collection[int], streams: Collection[int] = ()) -> list[int]:
        """Return the slots of the bulk rows that decode in the next step beside these streams."""
        rows = by_nearness(bulk, streams)[: self._near.max_rows]
        self._steps_since_far += 1
        self._is_far = len(rows) < len(bulk) and self._steps_since_far >= FAR_EVERY
        if self._is_far:
            far = sorted(set(bulk).difference(rows), key=lambda slot: (slot <= self._last_far_slot, slot))
            rows = far[: max(1, self._far.max_rows)]
            self._last_far_slot, self._steps_since_far = rows[-1], 0
        self._num_rows, self._num_bulk = len(rows), len(bulk)
        return rows

    def observe(self, seconds: float) -> None:
        """Learn from the seconds of a step with the rows that were taken last, and without prefill."""
        if not self._num_rows:
            self.alone_s += (seconds - self.alone_s) * (WEIGHT if self.alone_s else 1.0)
        longest_s = max(FLUENT_S, STRETCH * self.alone_s) * (FAR_STRETCH if self._is_far else 1.0)
        limit = self._far if self._is_far else self._near
        limit.observe(is_too_long=seconds > longest_s, num_useful=self._num_bulk)


class BulkPrefill:
    """When bulk prompts are prefilled beside interactive requests."""

    def __init__(self) -> None:
        self._owed_s = 0.0  # of steps without bulk prefill, until there may be one
        self._since_s = 0.0  # of steps since the last one

    @property
    def is_due(self) -> bool:
        return self._owed_s <= 0

    @property
    def is_overdue(self) -> bool:
        """True if even interactive prompts wait for older bulk ones."""
        return self.is_due and self._since_s > OVERDUE_S

    def observe(self, seconds: float, *, has_bulk: bool = False) -> None:
        """Account a step beside interactive requests; with `has_bulk` it prefilled bulk prompts."""
        self._owed_s = max(0.0, self._owed_s - seconds)
        self._since_s += seconds
        if has_bulk:
            beyond_s = max(0.0, seconds - PREFILL_S)
            self._owed_s = min(MAX_OWED_S, beyond_s * (1 - PREFILL_SHARE) / PREFILL_SHARE)
            self._since_s = 0.0


class Adaptive(Strategy):
    """PrefillPriority while only bulk requests have slots, and decode tokens first while an interactive one has one."""

    def __init__(self) -> None:
        self._bulk = PrefillPriority()
        self._rate = math.inf  # tokens per second of late in steps with prefill
        self._quiet_s = math.inf  # of steps since an interactive request had a slot
        self._rows = BulkRows()
        self._prefill = BulkPrefill()
        self._skipping = TimeBudget(SKIPPED_SHARE)
        self._kind = StepKind.BULK  # of the step that was built last

    def build_batch(
        self, slots: Seq[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        if not any(view.is_interactive for view in slots):
            self._kind = StepKind.BULK
            budget = budget if self._quiet_s >= QUIET_S else min(budget, self._tokens_in(BULK_STEP_S))
            return self._bulk.build_batch(slots, budget, chunk_size, queue_depth)
        self._quiet_s = 0.0
        prompts = self._prompts_beside([view for view in slots if not view.decoding])
        bulk = [view.slot for view in slots if view.decoding and not view.is_interactive]
        self._kind = self._kind_of(prompts, has_bulk_rows=bool(bulk))
        rows: set[int] = set()
        if self._kind is not StepKind.PREFILL_SKIPPED:
            rows.update(self._rows.take(bulk, [view.slot for view in slots if view.is_interactive]))
        decoding = [view for view in slots if view.decoding and (view.is_interactive or view.slot in rows)]
        if any(view.is_interactive for view in decoding) and not all(view.is_interactive for view in slots):
            budget = min(budget, len(decoding) + self._tokens_in(BESIDE_STEP_S))
        return decode_first([*decoding, *prompts], budget, chunk_size)

    def _prompts_beside(self, prompts: list[SlotView]) -> list[SlotView]:
        """Return the prompts to prefill: interactive ones, with older bulk ones if these are overdue; or bulk ones."""
        last = max((index for index, view in enumerate(prompts) if view.is_interactive), default=None)
        if last is None:
            return prompts if self._prefill.is_due else []
        return [view for view in prompts[: last + 1] if view.is_interactive or self._prefill.is_overdue]

    def _kind_of(self, prompts: list[SlotView], *, has_bulk_rows: bool) -> StepKind:
        if not prompts:
            return StepKind.DECODE
        if not all(view.is_interactive for view in prompts):
            return StepKind.PREFILL_BULK
        # Bulk rows would be a pass of their own, for which the prompt's end waits.
        return StepKind.PREFILL_SKIPPED if has_bulk_rows and self._skipping.is_left else StepKind.PREFILL

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn the prefill rate, and what bulk work costs beside streams."""
        self._quiet_s += seconds
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
        """Return whether a bulk decode call takes longer than an interactive request should wait."""
        return num_tokens > self._tokens_in(BULK_STEP_S)

    def _tokens_in(self, seconds: float) -> int:
        """Return the prompt tokens that are prefilled in this time: whole chunks of MIN_CHUNK, at least one."""
        return sys.maxsize if math.isinf(self._rate) else max(1, round(self._rate * seconds / MIN_CHUNK)) * MIN_CHUNK
