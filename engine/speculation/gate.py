"""How many draft tokens a decode call takes along: as many as bring more tokens per second than none. Pure.

What drafts are worth is their acceptance rate against the measured seconds of their rows. Both may be wrong, so an
account holds the time that drafts saved and lost: without credit there are none, and trying what is hardly known may
cost EXPLORING of the time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from cellama.engine.scheduling.decode_costs import DecodeCosts
from cellama.engine.scheduling.slot_layout import runs_of

LENGTHS = (1, 2, 3, 5, 7, 11, 15)  # drafts of a slot: with its last token 2, 3, 4, 6 … rows, which kernels compute well
MAX_DRAFTS = LENGTHS[-1]  # draft tokens of a slot in one call: the longest of these lengths
TO_START, TO_CONTINUE = 1.08, 1.02  # times the tokens per second without drafts: two values, so that noise starts none
EXPLORING = 0.003  # of the time that drafts may lose: "never slower" is measured within 2 %
FIRST_S = 0.03  # that drafts may lose at first: a few tries on a CPU
MAX_S = 0.2  # that drafts may lose after they saved much: what turns bad is stopped within some ten steps
HELD_STEPS = 8  # that a choice holds with as many slots: weighing all choices for 64 slots takes milliseconds
REST_STEPS = 16  # without drafts before they are looked at again, with as many slots: looking takes time, too
SIMILAR = 0.7  # times the gain of the worst slot that was chosen, at least, for another slot while a choice holds


class Candidate(NamedTuple):
    """A slot that decodes, and the probability of each of its drafts if those before it are accepted; maybe none."""

    slot: int
    rates: Seq[float]
    is_made: bool = False  # a draft model has to make them first, which takes time …
    reading_s: float = 0.0  # … as does what it has to read before, once for …
    num_left: float = 1.0  # … the tokens that are still to come
    can_pad: bool = False  # without drafts it may get as many rows as others have, to be in one pass with them


class DraftPlan(NamedTuple):
    """A choice with its expected tokens and seconds."""

    lengths: Mapping[int, int]  # slot → drafts that are decoded
    pass_rows: list[int]
    num_tokens: float  # expected
    length: int = 0  # of the drafts of a slot
    least_gain: float = 0.0  # of a slot that gets drafts
    is_padded: bool = False  # slots without drafts get as many rows: all are one pass
    making_s: float = 0.0  # of the draft model, before these passes
    reading_s: float = 0.0  # of the draft model, once for all steps to come …
    reading_share_s: float = 0.0  # … and the share of this step


Making = Callable[[int, int], float]  # slots, tokens of each → seconds that a draft model takes for them


class _Offer:
    """What a step could decode."""

    def __init__(self, candidates: Seq[Candidate], making: Making) -> None:
        self.candidates = candidates
        self.making = making
        self.slots = [c.slot for c in candidates]
        self.to_pad = [c.slot for c in candidates if c.can_pad and not c.rates]
        # The expected tokens of 0, 1, 2 … drafts, by slot.
        self._gains = {c.slot: [0.0, *accumulate(accumulate(c.rates, mul))] for c in candidates if c.rates}
        self.longest = max((len(gains) - 1 for gains in self._gains.values()), default=0)

    def num_drafts(self, slot: int) -> int:
        return len(self._gains[slot]) - 1

    def gains(self, length: int) -> dict[int, float]:
        """Return the expected tokens of up to so many drafts, by slot, the most first."""
        gains = [(slot, sums[min(length, len(sums) - 1)]) for slot, sums in self._gains.items()]
        return dict(sorted(gains, key=lambda pair: -pair[1]))


class Gate:
    """Weighs drafts against their rows. With `unified` cells any rows are one pass, else equal ones of neighbours."""

    def __init__(self, costs: DecodeCosts, max_rows: int, *, unified: bool) -> None:
        """`costs` are those of the model's passes, which have at most `max_rows`."""
        self._costs = costs
        self._max_rows = max_rows
        self._unified = unified
        self._may_lose_s = FIRST_S
        self._token_s = 0.0  # that a token takes without drafts
        self._num_slots = 0  # in the last step
        self._num_rest = 0  # steps for which no source need be asked
        self._choice = DraftPlan({}, [], 0.0)  # the last one, which …
        self._num_held = 0  # … holds for so many steps more

    def begin_step(self, num_slots: int) -> bool:
        """Return whether drafts are looked at in this step; they are not for a while after they didn't pay."""
        if num_slots != self._num_slots:
            self._num_slots, self._num_rest, self._num_held = num_slots, 0, 0
        self._num_rest -= 1
        return self._num_rest < 0

    def observe(self, seconds: float) -> None:
        """Account the time of a decode call of single tokens and drafts."""
        self._may_lose_s = min(MAX_S, self._may_lose_s + EXPLORING * seconds)

    def account(self, num_tokens: int, seconds: float) -> None:
        """Account a step with drafts, which brought so many tokens in all, and took so long."""
        self._may_lose_s = min(MAX_S, self._may_lose_s + num_tokens * self._token_s - seconds)

    def choose(
        self, candidates: Seq[Candidate], max_s: float, making: Making = lambda _slots, _length: 0.0
    ) -> Mapping[int, int]:
        """Return how many drafts of each slot to decode, by slot; slots with none are not in it.

        A call with drafts takes no longer than `max_s`, as far as is known. `candidates` are in order of slots.
        Without `unified` all that have drafts get equally many: what a slot lacks is padded. So are slots without any,
        if one pass of all takes less than two or more.
        """
        offer = _Offer(candidates, making)
        none = self._plan(offer, 0, [])
        is_known = all(self._costs.is_known(rows) for rows in none.pass_rows)
        if not offer.longest or not is_known or self._may_lose_s <= 0:
            return self._decide(none)
        self._token_s = self._seconds(none) / len(candidates)
        if self._num_held > 0 and (held := self._hold(offer)) is not None:
            self._num_held -= 1
            return held.lengths
        rate = self._rate(none, self._costs.expected)
        plans = [none, *(plan for plan in self._plans(offer) if self._seconds(plan) + plan.making_s <= max_s)]
        best = max(plans, key=lambda plan: self._rate(plan, self._costs.expected))
        needed = TO_CONTINUE if self._choice.lengths else TO_START
        chosen = best if self._rate(best, self._costs.expected) >= needed * rate else none
        return self._decide(self._explore(plans, chosen))

    def fit(self, candidates: Seq[Candidate], max_s: float) -> Mapping[int, int]:
        """Return the same for drafts that were made for the last choice: only their rows still cost time."""
        offer = _Offer(candidates, lambda _slots, _length: 0.0)
        plans = [plan for plan in self._plans(offer) if self._seconds(plan) <= max_s]
        return max(
            [self._plan(offer, 0, []), *plans], key=lambda plan: self._rate(plan, self._costs.optimistic)
        ).lengths

    def _decide(self, plan: DraftPlan) -> Mapping[int, int]:
        self._choice = plan
        self._num_held = 0 if plan.making_s else min(self._num_slots, HELD_STEPS) - 1
        if not plan.lengths:
            self._num_held, self._num_rest = 0, min(self._num_slots, REST_STEPS) - 1
        return plan.lengths

    def _hold(self, offer: _Offer) -> DraftPlan | None:
        """Return the last choice for the drafts of this step; None if that is none, or more passes than it had."""
        length, least_gain = self._choice.length, SIMILAR * self._choice.least_gain
        chosen = [slot for slot, gain in offer.gains(length).items() if gain >= least_gain]
        plan = self._plan(offer, length, chosen[: self._max_slots(length)], is_padded=self._choice.is_padded)
        return plan if chosen and len(plan.pass_rows) <= len(self._choice.pass_rows) else None

    def _explore(self, plans: Seq[DraftPlan], chosen: DraftPlan) -> DraftPlan:
        """Return what may well be better than the chosen plan, if the account has what it would lose otherwise."""
        hopeful = max(plans, key=lambda plan: self._rate(plan, self._costs.optimistic))
        expected_s = self._seconds(hopeful) + hopeful.making_s + hopeful.reading_s
        loss_s = expected_s - hopeful.num_tokens / self._rate(chosen, self._costs.expected)
        if hopeful is chosen or loss_s > self._may_lose_s:
            return chosen
        self._may_lose_s -= hopeful.reading_s  # which no later token pays if the drafts turn out to be wrong
        return hopeful

    def _max_slots(self, length: int) -> int:
        return (self._max_rows - self._num_slots) // length

    def _plans(self, offer: _Offer) -> Iterator[DraftPlan]:
        """Yield plans for each length, and for all slots with drafts, the better half of them, of these the half …"""
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
        """Return the plan with so many drafts for these slots, which are the best first."""
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
            least_gain=gains[chosen[-1]] if chosen else 0.0,
            is_padded=is_padded,
        )
        made = [c for c in offer.candidates if c.is_made and c.slot in lengths]
        if not made:
            return plan
        tokens_each = num_tokens / len(offer.slots)
        return plan._replace(
            making_s=offer.making(len(made), length),
            reading_s=sum([c.reading_s for c in made]),
            reading_share_s=sum([c.reading_s / c.num_left for c in made]) * tokens_each,
        )

    def _seconds(self, plan: DraftPlan) -> float:
        return sum([self._costs.expected(rows) for rows in plan.pass_rows])

    def _rate(self, plan: DraftPlan, seconds_of: Callable[[int], float]) -> float:
        """Return tokens per second."""
        seconds = sum([seconds_of(rows) for rows in plan.pass_rows])
        return plan.num_tokens / max(seconds + plan.making_s + plan.reading_share_s, 1e-9)
