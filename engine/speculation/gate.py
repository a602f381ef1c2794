"""How many drafts a decode call takes along: as many as bring more tokens per second than none. Pure.

What a pass takes by its rows is learnt from decode calls: without drafts before there are any, and again now and then.
There is an account of the time that drafts have saved and lost: who has lost may go on at EXPLORING of the time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from cellama.engine.scheduling.neighbours import runs_of

from .curve import Curve

LENGTHS = (1, 2, 3, 5, 7, 11, 15)  # drafts of a slot; with the last token these are rows that kernels like
MOST_DRAFTS = LENGTHS[-1]
TO_BEGIN, TO_GO_ON = 1.08, 1.02  # times as many tokens per second as without: what it must bring
EXPLORING = 0.003  # of the time, that drafts may lose
FIRST_S, MOST_S = 0.03, 0.2  # that they may lose at the beginning, and when they have saved much
KEPT = 8  # steps for which a choice holds, if there are as many slots
PATIENCE = 16  # steps without drafts for a look at them, with as many slots or more
COMPARED = 128  # steps with drafts for one without, which shows what that takes now


class Candidate(NamedTuple):
    """A slot that decodes, and the probability of each of its drafts if those before it are right; maybe none."""

    slot: int
    odds: Seq[float]
    is_made: bool = False  # they have to be made first, which takes time …
    reading_s: float = 0.0  # … as does reading what came before, for so many tokens that are still to come
    num_left: float = 1.0
    can_pad: bool = False  # without drafts it may get as many rows as others have, to be in one pass with them


class Plan(NamedTuple):
    """A choice, weighed."""

    lengths: Mapping[int, int]  # slot → drafts that are decoded
    passes: list[int]  # rows of each
    tokens: float  # that it is expected to bring
    is_made: bool = False  # some of its drafts are not there yet
    making_s: float = 0.0  # before these passes
    reading_s: float = 0.0  # the same, but for all steps to come …
    reading_share_s: float = 0.0  # … and of that the share of this one
    length: int = 0
    least_gain: float = 0.0  # of a slot that gets drafts
    padded: Seq[int] = ()  # slots that have none, but as many rows: all are one pass


Gains = Mapping[int, Seq[float]]
Making = Callable[[int, int], float]  # slots, tokens of each → the seconds that making these drafts takes


def _nothing(num_slots: int, length: int) -> float:
    return 0.0


class Gate:
    """Weighs drafts against their rows. With `unified` cells any rows are one pass, else equal ones of neighbours."""

    def __init__(self, most_rows: int, *, unified: bool) -> None:
        self._most_rows = most_rows
        self._unified = unified
        self._curve = Curve()
        self._may_lose_s = FIRST_S
        self._token_s = 0.0  # that a token takes without drafts
        self._num_slots = 0  # in the last step
        self._rest = 0  # steps for which no source need be asked
        self._kept = Plan({}, [], 0.0)  # the last choice, and …
        self._num_kept = 0  # … for how many steps it holds
        self._num_on = 0  # steps with drafts since the last one without
        self.compares = False  # the last choice has no drafts only to see what that takes

    def is_resting(self, num_slots: int) -> bool:
        """True if drafts need not even be asked for in this step: they did not pay lately."""
        if num_slots != self._num_slots:
            self._num_slots, self._rest, self._num_kept = num_slots, 0, 0
        self._rest -= 1
        return self._rest >= 0

    def observe(self, passes: Seq[int], seconds: float) -> None:
        """A decode call of single tokens and drafts had these passes, and took so long."""
        self._may_lose_s = min(MOST_S, self._may_lose_s + EXPLORING * seconds)
        if len(passes) == 1:
            self._curve.observe(passes[0], seconds)
            return
        expected = self._seconds(passes)
        for rows in passes:
            self._curve.observe(rows, seconds * self._curve.expected(rows) / expected)

    def account(self, num_tokens: int, seconds: float) -> None:
        """The last choice had drafts, brought so many tokens in all, and took so long."""
        self._may_lose_s = min(MOST_S, self._may_lose_s + num_tokens * self._token_s - seconds)

    def choose(self, candidates: Seq[Candidate], most_s: float, making: Making = _nothing) -> Mapping[int, int]:
        """How many drafts of each slot to decode, by slot; slots with none are not in it.

        A call with drafts takes no longer than `most_s`, as far as is known. `candidates` are in order of slots.
        Without `unified` all that have drafts get equally many: what a slot lacks is padded. So are slots without any,
        if one pass of all takes less than two or more.
        """
        gains = _gains(candidates)
        slots = [c.slot for c in candidates]
        self.compares = False
        none = self._plan(slots, {}, 0.0)
        is_known = all(self._curve.is_known(rows) for rows in none.passes)
        if not gains or not is_known or self._may_lose_s <= 0:
            return self._decide(none)
        self._token_s = self._seconds(none.passes) / len(slots)
        self._num_kept -= 1
        padded = [c.slot for c in candidates if c.can_pad and not c.odds]
        if self._kept.lengths and self._num_kept > 0 and (lengths := self._as_before(slots, gains, padded)):
            return lengths
        with_making = partial(_with_making, candidates=candidates, making=making)
        plans = self._possible(slots, gains, padded, most_s, with_making)
        if not plans:
            return self._decide(none)
        rate = self._rate(none, self._curve.expected)
        best = max(plans, key=lambda plan: self._rate(plan, self._curve.expected))
        needed = TO_GO_ON if self._kept.lengths else TO_BEGIN
        chosen = best if self._rate(best, self._curve.expected) >= needed * rate else none
        if chosen is best and self._num_on >= COMPARED:
            self._num_on, self.compares = 0, True
            return {}
        return self._decide(self._explore([none, *plans], chosen))

    def fit(self, candidates: Seq[Candidate], most_s: float) -> Mapping[int, int]:
        """The same for drafts that have been made for the last choice: only their rows are weighed by now."""
        gains, slots = _gains(candidates), [c.slot for c in candidates]
        plans = self._possible(slots, gains, [], most_s) if gains else []
        return max([self._plan(slots, {}, 0.0), *plans], key=lambda plan: self._rate(plan, self._curve.hoped)).lengths

    def _possible(
        self,
        slots: Seq[int],
        gains: Gains,
        padded: Seq[int],
        most_s: float,
        changed: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> list[Plan]:
        plans = [changed(plan) for plan in self._plans(slots, gains, padded) if sum(plan.passes) <= self._most_rows]
        return [plan for plan in plans if self._seconds(plan.passes) + plan.making_s <= most_s]

    def _decide(self, plan: Plan) -> Mapping[int, int]:
        self._kept = plan
        if plan.lengths:
            self._num_kept = 1 if plan.is_made else min(self._num_slots, KEPT)
            self._num_on += 1
        else:
            self._rest = min(self._num_slots, PATIENCE) - 1
            self._num_on = 0
        return plan.lengths

    def _as_before(self, slots: Seq[int], gains: Gains, padded: Seq[int]) -> Mapping[int, int]:
        """The last choice for the drafts that there are now; nothing if these would be more passes than it had."""
        length, least = self._kept.length, self._kept.least_gain
        gain = {slot: sums[min(length, len(sums) - 1)] for slot, sums in gains.items()}
        chosen = sorted((slot for slot in gain if gain[slot] >= least), key=lambda slot: -gain[slot])
        lengths = self._lengths(chosen[: (self._most_rows - self._num_slots) // length], length, gains)
        if lengths and self._kept.padded:
            lengths |= dict.fromkeys(padded, length)
        if len(self._plan(slots, lengths, 0.0).passes) > len(self._kept.passes):
            return {}
        self._num_on += 1
        return lengths

    def _explore(self, plans: Seq[Plan], chosen: Plan) -> Plan:
        """What may well be better than the chosen one, if the time that it would lose otherwise may be lost."""
        hopeful = max(plans, key=lambda plan: self._rate(plan, self._curve.hoped))
        if hopeful is chosen:
            return chosen
        expected_s = self._seconds(hopeful.passes) + hopeful.making_s + hopeful.reading_s
        loss_s = expected_s - hopeful.tokens / self._rate(chosen, self._curve.expected)
        return hopeful if loss_s <= self._may_lose_s else chosen

    def _plans(self, slots: Seq[int], gains: Gains, padded: Seq[int]) -> Iterator[Plan]:
        is_one_pass = bool(padded) and len(padded) + len(gains) == len(slots)
        longest = max(len(sums) - 1 for sums in gains.values())
        for length in sorted({*(short for short in LENGTHS if short < longest), min(longest, MOST_DRAFTS)}):
            gain = {slot: sums[min(length, len(sums) - 1)] for slot, sums in gains.items()}
            by_gain = sorted(gain, key=lambda slot: -gain[slot])
            for count in _counts(len(by_gain)):
                chosen = by_gain[:count]
                plan = self._plan(slots, self._lengths(chosen, length, gains), sum([gain[slot] for slot in chosen]))
                yield plan._replace(length=length, least_gain=0.7 * gain[chosen[-1]])
            if is_one_pass:
                plan = self._plan(slots, dict.fromkeys(slots, length), sum(gain.values()))
                yield plan._replace(length=length, padded=padded)

    def _lengths(self, chosen: Seq[int], length: int, gains: Gains) -> dict[int, int]:
        if self._unified:
            return {slot: min(length, len(gains[slot]) - 1) for slot in chosen}
        return dict.fromkeys(chosen, length)

    def _plan(self, slots: Seq[int], lengths: Mapping[int, int], gain: float) -> Plan:
        tokens = len(slots) + gain
        if self._unified:
            return Plan(lengths, [len(slots) + sum(lengths.values())], tokens)
        rows = [run.size * (1 + lengths[run.first]) for run in runs_of([slot for slot in slots if slot in lengths])]
        return Plan(lengths, rows + [run.size for run in runs_of([s for s in slots if s not in lengths])], tokens)

    def _seconds(self, passes: Seq[int]) -> float:
        return sum([self._curve.expected(rows) for rows in passes])

    def _rate(self, plan: Plan, seconds_of: Callable[[int], float]) -> float:
        """Tokens per second."""
        seconds = sum([seconds_of(rows) for rows in plan.passes])
        return plan.tokens / max(seconds + plan.making_s + plan.reading_share_s, 1e-9)


def _gains(candidates: Seq[Candidate]) -> dict[int, list[float]]:
    """The tokens that drafts of each length bring, by slot."""
    return {c.slot: [0.0, *accumulate(accumulate(c.odds, mul))] for c in candidates if c.odds}


def _with_making(plan: Plan, candidates: Seq[Candidate], making: Making) -> Plan:
    """The plan with what its drafts take before they are there."""
    made = [c for c in candidates if c.is_made and c.slot in plan.lengths]
    if not made:
        return plan
    share_s = sum([c.reading_s / c.num_left for c in made]) * plan.tokens / len(candidates)
    making_s, reading_s = making(len(made), plan.length), sum([c.reading_s for c in made])
    return plan._replace(is_made=True, making_s=making_s, reading_s=reading_s, reading_share_s=share_s)


def _counts(most: int) -> list[int]:
    """How many slots get drafts: all, half of them, …"""
    counts = []
    while most > 0:
        counts.append(most)
        most //= 2
    return counts
