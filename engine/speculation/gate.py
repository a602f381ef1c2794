"""Choose the number of draft tokens in each decode call to maximize the tokens per second.

The benefit of drafts is calculated from the drafts' acceptance rates and the measured duration of passes that include
draft rows. Both the rates and the durations may be wrong, so a time budget tracks the time that drafts have saved and
lost. Drafts are not used while this budget is used up. At most a fraction EXPLORING of the time is spent on trying
options that have hardly been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from cellama.engine.scheduling.decode_costs import MAX_RATIO, DecodeCosts
from cellama.engine.scheduling.slot_layout import runs_of

LENGTHS = (1, 2, 3, 5, 7, 11, 15)  # drafts per slot: with the last token 2, 3, 4, 6 … rows, which suit the kernels
MAX_DRAFTS = LENGTHS[-1]  # draft tokens of a slot in one call
# Required ratios of tokens per second. Starting requires a higher ratio, so that noise does not start drafts.
TO_START, TO_CONTINUE = 1.08, 1.02
EXPLORING = 0.003  # share of the time that drafts may lose: "never slower" is measured within 2%
FIRST_STEPS = 5  # duration that drafts may lose at first, in steps without drafts: a few tries on a CPU
MAX_STEPS = 20  # duration that drafts may lose after they have saved a lot, in steps without drafts; then they stop
MIN_REMEASURED, MAX_REMEASURED = 8, 64  # steps with drafts before a step without; doubled while drafts pay off
HELD_STEPS = 8  # steps for which a choice is kept if the number of slots stays equal: a new one can take milliseconds
REST_STEPS = 16  # steps without drafts before they are considered again, because considering takes time
SIMILAR = 0.7  # required gain of another slot while a choice is kept, relative to the worst chosen slot


class Candidate(NamedTuple):
    """A decoding slot, and the probability that each draft token is accepted if all earlier tokens are accepted."""

    slot: int
    rates: Seq[float]  # empty if there are no drafts
    is_made: bool = False  # a draft model has to make the drafts first
    reading_s: float = 0.0  # seconds that the draft model needs once, to prefill unread tokens
    expected_tokens: float = 1.0  # tokens that the slot will still generate, over which this time is spread
    can_pad: bool = False  # without drafts, it may be padded to the rows of other slots


class DraftPlan(NamedTuple):
    """A choice of drafts, with the expected number of tokens and the expected durations."""

    lengths: Mapping[int, int]  # drafts to decode by slot
    pass_rows: list[int]
    num_tokens: float  # expected tokens
    length: int = 0  # drafts per slot
    min_gain: float = 0.0  # smallest gain of a slot with drafts
    is_padded: bool = False  # slots without drafts are padded, so that all slots are in one pass
    making_s: float = 0.0  # duration of the draft model before these passes
    reading_s: float = 0.0  # duration of its prefill, which serves all later steps
    reading_share_s: float = 0.0  # share of this step in reading_s


NO_DRAFTS = DraftPlan({}, [], 0.0)
Making = Callable[[int, int], float]  # (slots, tokens per slot) → seconds that a draft model takes


class _Offer:
    """The candidates of a step and the gains expected from their drafts."""

    def __init__(self, candidates: Seq[Candidate], making: Making) -> None:
        self.candidates = candidates
        self.making = making
        self.slots = [c.slot for c in candidates]
        self.to_pad = [c.slot for c in candidates if c.can_pad and not c.rates]
        # Expected tokens of 0, 1, 2 … drafts by slot.
        self._gains = {c.slot: [0.0, *accumulate(accumulate(c.rates, mul))] for c in candidates if c.rates}
        self.longest = max((len(gains) - 1 for gains in self._gains.values()), default=0)

    def num_drafts(self, slot: int) -> int:
        return len(self._gains[slot]) - 1

    def gains(self, length: int) -> dict[int, float]:
        """Return the expected tokens gained from at most `length` draft tokens, keyed by slot in descending order."""
        gains = [(slot, sums[min(length, len(sums) - 1)]) for slot, sums in self._gains.items()]
        return dict(sorted(gains, key=lambda pair: -pair[1]))


class Gate:
    """Decides whether the gain of drafts exceeds the cost of their rows.

    See `pass_rows_of` for the passes of a decode call.
    """

    def __init__(self, costs: DecodeCosts, max_rows: int, *, unified: bool) -> None:
        """Create a gate. `costs` are the costs of the model's passes, each of which has at most `max_rows` rows."""
        self._costs = costs
        self._max_rows = max_rows
        self._unified = unified
        self._may_lose = float(FIRST_STEPS)  # time budget, in steps without drafts
        self._token_s = 0.0  # seconds per token without drafts
        self._num_slots = 0  # number of slots in the last step
        self._num_rest = 0  # steps for which no source is asked
        self._choice = NO_DRAFTS  # the last choice
        self._expected_s = 0.0  # expected duration of the current step
        self._num_held = 0  # steps for which the last choice is kept
        self._num_drafted = 0  # steps since the last step without drafts
        self._remeasured_after = MIN_REMEASURED  # steps with drafts before the next step without drafts

    def begin_step(self, num_slots: int) -> bool:
        """Return whether this step should consider drafts.

        Some steps are skipped after drafts did not pay off, but fewer if there are now fewer slots. While drafts pay
        off, some steps are measured without them.
        """
        if num_slots != self._num_slots:
            self._num_slots, self._num_held = num_slots, 0
            self._num_rest = min(self._num_rest, min(num_slots, REST_STEPS) - 1)
        self._num_rest -= 1
        if self._num_rest >= 0:
            return False
        if self._num_drafted >= self._remeasured_after:
            self._num_drafted, self._remeasured_after = 0, min(MAX_REMEASURED, 2 * self._remeasured_after)
            return False
        return True

    def observe(self, seconds: float) -> None:
        """Record the duration of a decode call, which may include draft tokens."""
        self._earn(EXPLORING * seconds)

    def account(self, num_tokens: int, seconds: float) -> None:
        """Record the number of tokens and the duration of a step with drafts."""
        self._earn(num_tokens * self._token_s - min(seconds, MAX_RATIO * self._expected_s))

    def _earn(self, seconds: float) -> None:
        """Add time that drafts have saved to the budget, or subtract time that they have cost."""
        if self._token_s:
            steps = seconds / (self._token_s * max(1, self._num_slots))
            self._may_lose = min(MAX_STEPS, max(-MAX_STEPS, self._may_lose + steps))

    def choose(
        self, candidates: Seq[Candidate], max_s: float, making: Making = lambda _slots, _length: 0.0
    ) -> Mapping[int, int]:
        """Return the number of draft tokens to decode for each slot that has drafts.

        A call with drafts is expected to take at most `max_s`. `candidates` are sorted by slot. Unless cells are
        `unified`, all slots with drafts are padded to the same number of draft tokens. Slots without drafts are also
        padded if a single pass of all slots is faster than several passes.
        """
        offer = _Offer(candidates, making)
        none = self._plan(offer, 0, [])
        is_known = all(self._costs.is_known(rows) for rows in none.pass_rows)
        self._token_s = self._seconds(none) / len(candidates) if is_known else 0.0
        if not offer.longest or not is_known or self._may_lose <= 0:
            return self._decide(none)
        if self._num_held > 0 and (held := self._hold(offer)) is not None:
            self._num_held -= 1
            self._num_drafted += 1
            self._expected_s = self._seconds(held)
            return held.lengths
        rate = self._rate(none, self._costs.expected)
        plans = [none, *(plan for plan in self._plans(offer) if self._seconds(plan) + plan.making_s <= max_s)]
        best = max(plans, key=lambda plan: self._rate(plan, self._costs.expected))
        needed = TO_CONTINUE if self._choice.lengths else TO_START
        chosen = best if self._rate(best, self._costs.expected) >= needed * rate else none
        return self._decide(self._explore(plans, chosen))

    def fit(self, candidates: Seq[Candidate], max_s: float) -> Mapping[int, int]:
        """Return the number of existing draft tokens to decode, keyed by slot.

        Existing drafts cost only the time for computing their rows.
        """
        offer = _Offer(candidates, lambda _slots, _length: 0.0)
        plans = [plan for plan in self._plans(offer) if self._seconds(plan) <= max_s]
        plans = [self._plan(offer, 0, []), *plans]
        return max(plans, key=lambda plan: self._rate(plan, self._costs.optimistic)).lengths

    def skip(self) -> None:
        """Record that no source has proposed a draft, so that the step has none."""
        self._choice = NO_DRAFTS
        self._rest()

    def _rest(self) -> None:
        """Record a step without drafts, and skip some steps if there are many slots."""
        self._num_drafted, self._remeasured_after = 0, MIN_REMEASURED
        self._num_held, self._num_rest = 0, min(self._num_slots, REST_STEPS) - 1

    def _decide(self, plan: DraftPlan) -> Mapping[int, int]:
        self._choice = plan
        self._expected_s = self._seconds(plan) + plan.making_s
        self._num_held = 0 if plan.making_s else min(self._num_slots, HELD_STEPS) - 1
        if plan.lengths:
            self._num_drafted += 1
        else:
            self._rest()
        return plan.lengths

    def _hold(self, offer: _Offer) -> DraftPlan | None:
        """Apply the previous choice to this step's drafts.

        Return None if no slot qualifies, or if the step now needs more passes.
        """
        length, min_gain = self._choice.length, SIMILAR * self._choice.min_gain
        chosen = [slot for slot, gain in offer.gains(length).items() if gain >= min_gain]
        plan = self._plan(offer, length, chosen[: self._max_slots(length)], is_padded=self._choice.is_padded)
        return plan if chosen and len(plan.pass_rows) <= len(self._choice.pass_rows) else None

    def _explore(self, plans: Seq[DraftPlan], chosen: DraftPlan) -> DraftPlan:
        """Return a plan that may be better than `chosen`, or `chosen` if the budget can't cover the expected loss."""
        candidate = max(plans, key=lambda plan: self._rate(plan, self._costs.optimistic))
        expected_s = self._seconds(candidate) + candidate.making_s + candidate.reading_s
        loss_s = expected_s - candidate.num_tokens / self._rate(chosen, self._costs.expected)
        if candidate is chosen or loss_s > self._may_lose * self._token_s * self._num_slots:
            return chosen
        self._earn(-candidate.reading_s)  # lost if the drafts turn out to be wrong
        return candidate

    def _max_slots(self, length: int) -> int:
        return (self._max_rows - self._num_slots) // length

    def _plans(self, offer: _Offer) -> Iterator[DraftPlan]:
        """Yield plans for each length.

        The first plan includes all slots that have drafts, and each further plan includes only the better half of the
        previous plan's slots.
        """
        if not offer.longest:
            return
        for length in sorted({*(short for short in LENGTHS if short < offer.longest), min(offer.longest, MAX_DRAFTS)}):
            by_gain = list(offer.gains(length))
            is_all = len(by_gain) + len(offer.to_pad) == len(offer.slots)
            if offer.to_pad and is_all and len(offer.slots) <= self._max_slots(length):
                yield self._plan(offer, length, by_gain, is_padded=True)
            while by_gain:
                if len(by_gain) <= self._max_slots(length):
                    yield self._plan(offer, length, by_gain)
                by_gain = by_gain[: len(by_gain) // 2]

    def _plan(self, offer: _Offer, length: int, chosen: Seq[int], *, is_padded: bool = False) -> DraftPlan:
        """Return the plan with `length` draft tokens for each of the chosen slots, which are sorted by gain."""
        if self._unified:
            lengths = {slot: min(length, offer.num_drafts(slot)) for slot in chosen}
            pass_rows = [len(offer.slots) + sum(lengths.values())]
        else:
            lengths = dict.fromkeys([*chosen, *(offer.to_pad if is_padded else ())], length)
            drafted = [run.size * (1 + length) for run in runs_of([slot for slot in offer.slots if slot in lengths])]
            pass_rows = drafted + [run.size for run in runs_of([s for s in offer.slots if s not in lengths])]
        gains = offer.gains(length)
        num_tokens = len(offer.slots) + sum([gains[slot] for slot in chosen])
        plan = DraftPlan(
            lengths,
            pass_rows,
            num_tokens,
            length=length,
            min_gain=gains[chosen[-1]] if chosen else 0.0,
            is_padded=is_padded,
        )
        made = [c for c in offer.candidates if c.is_made and c.slot in lengths]
        if not made:
            return plan
        tokens_each = num_tokens / len(offer.slots)
        return plan._replace(
            making_s=offer.making(len(made), length),
            reading_s=sum([c.reading_s for c in made]),
            reading_share_s=sum([c.reading_s / c.expected_tokens for c in made]) * tokens_each,
        )

    def _seconds(self, plan: DraftPlan) -> float:
        return sum([self._costs.expected(rows) for rows in plan.pass_rows])

    def _rate(self, plan: DraftPlan, seconds_of: Callable[[int], float]) -> float:
        """Return the expected tokens per second."""
        seconds = sum([seconds_of(rows) for rows in plan.pass_rows])
        return plan.num_tokens / max(seconds + plan.making_s + plan.reading_share_s, 1e-9)
