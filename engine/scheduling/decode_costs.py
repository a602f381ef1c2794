"""The costs of decode calls and slot moves on this machine, learned from measured durations.

A run consists of slots that have consecutive indices and the same number of tokens. llama.cpp decodes a run in one
pass. The duration of a pass increases stepwise with the number of rows. On a CPU, the duration depends mostly on the
number of rows. On a GPU, most of the duration is a fixed cost per pass. Therefore, this module makes no assumptions
about the machine.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass

PASS_ROWS = 16  # fixed cost of a pass in rows, for unmeasured sizes: less on CPUs, more on GPUs
WEIGHT = 0.2  # weight of a new value in a running mean: about the last ten count
MAX_RATIO = 2.0  # highest ratio of a measurement to its expectation: a higher one means that another process interfered
# Share of a measurement's deviation that is attributed to the speed of the whole machine, which affects all sizes.
# Another process that takes a core would otherwise make only the sizes that run at that time look slow.
COMMON = 0.7
DOUBT = 0.6  # share by which an unmeasured size may cost less than expected, because rows may be the whole cost
AGEING = 0.0004  # growth of DOUBT per decode call: a size at twice the cost is retried after 1250 calls
TRUSTED = 4  # measurements of a size before other sizes are compared with it
MAX_FIRST_RATIO = 5.0  # highest ratio, in both directions, for the first measurement of a size if others are known
MIN_CALL_S = 1e-7  # shortest duration of a decode call, so that a clock that stood still doesn't make passes free
MOVE_TOKENS = 64  # fixed cost of a move, in tokens to move, as measured on a CPU
MOVED_TOKEN_S = 1e-5  # seconds per token before the first move: a slow memory, so that the first move must pay
MOVE_WEIGHT = 0.3  # weight of a new value in the running mean: moves are rare, and their costs vary little


@dataclass(slots=True)
class _Size:
    """The measured duration of passes with a certain number of rows."""

    seconds: float  # duration of a pass
    num_measured: float = 0.0
    measured_at: float = 0.0  # number of the decode call


class DecodeCosts:
    """Learns how long passes take, depending on their number of rows.

    A running mean is kept for each of the sizes 1, 2, 3, 4, 6, 8, 12, 16, 24 … rows, because most passes with drafts
    have these sizes. Durations for other sizes are interpolated linearly. The durations of the sizes are learned
    separately, relative to a common factor for the current speed of the machine (docs/adr/015-speculation.md). The slot
    layout and speculation share one instance.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._slowness = 1.0  # current duration of passes, relative to `_sizes`
        self._ordered: list[int] = []  # measured sizes, ascending
        self._num_calls = 0

    @property
    def is_measured(self) -> bool:
        return bool(self._sizes)

    def is_known(self, rows: int) -> bool:
        """Return whether passes with this number of rows have been measured often enough for comparisons."""
        return all(
            size in self._sizes and self._sizes[size].num_measured >= TRUSTED * share for size, share in _between(rows)
        )

    def expected(self, rows: int) -> float:
        """Return the expected duration of a pass with this number of rows.

        Before the first measurement, the results are not in seconds, and only their ratios are meaningful.
        """
        if not self._ordered:
            return float(rows + PASS_ROWS)
        at = bisect_left(self._ordered, rows)
        if 0 < at < len(self._ordered):
            low, high = self._ordered[at - 1], self._ordered[at]
            share = (rows - low) / (high - low)
            seconds = self._sizes[low].seconds * (1 - share) + self._sizes[high].seconds * share
        else:
            nearest = self._ordered[min(at, len(self._ordered) - 1)]
            seconds = self._sizes[nearest].seconds * (rows + PASS_ROWS) / (nearest + PASS_ROWS)
        return seconds * self._slowness

    def optimistic(self, rows: int) -> float:
        """Return the lowest plausible duration of a pass with this number of rows.

        For sizes that have not been measured recently or at all, the result is lower than the expected duration.
        Therefore, decisions that use this duration occasionally try an option that may be better, and learn from its
        measured duration.
        """
        doubt = sum([share * self._doubt(size) for size, share in _between(rows)])
        return self.expected(rows) * (1 - doubt)

    def _doubt(self, size: int) -> float:
        known = self._sizes.get(size)
        return DOUBT if known is None else min(DOUBT, AGEING * (self._num_calls - known.measured_at))

    def table(self, max_rows: int) -> list[float]:
        """Return the expected durations of passes with 0, 1, 2 … rows, as a non-decreasing list."""
        seconds = [0.0]
        for rows in range(1, max_rows + 1):
            seconds.append(max(seconds[-1], self.expected(rows)))
        return seconds

    def observe(self, pass_rows: Seq[int], seconds: float) -> None:
        """Learn from a decode call that consisted of passes with these numbers of rows.

        Only the duration of the whole call is measured, so the duration of each size is corrected in proportion to the
        size's share of the call. If some sizes have not been measured before, the whole difference from the expected
        duration is attributed to these sizes.
        """
        self._num_calls += 1
        known = self._sizes.get(pass_rows[0]) if len(pass_rows) == 1 else None
        if known is not None and known.num_measured >= TRUSTED:  # a short form of the rest, for most calls
            ratio = max(seconds, MIN_CALL_S) / (known.seconds * self._slowness)
            self._learn(known, self._learn_slowness(min(ratio, MAX_RATIO)), 1.0)
            return
        expected_s = [self.expected(rows) for rows in pass_rows]
        total_s = sum(expected_s)
        part_of: dict[int, float] = {}  # share of the call, by size
        for rows, pass_s in zip(pass_rows, expected_s, strict=True):
            for size, share in _between(rows):
                part_of[size] = part_of.get(size, 0.0) + share * pass_s / total_s
        ratio = max(seconds, MIN_CALL_S) / total_s
        if new := part_of.keys() - self._sizes.keys():
            new_share = sum([part_of[size] for size in new])
            new_ratio = (ratio - 1 + new_share) / new_share
            if self._sizes:
                new_ratio = min(max(new_ratio, 1 / MAX_FIRST_RATIO), MAX_FIRST_RATIO)
            self._sizes |= {size: self._first(size, new_ratio, part_of[size]) for size in new}
            self._ordered = sorted(self._sizes)
            return
        ratio = min(ratio, MAX_RATIO)
        if all(self._sizes[size].num_measured >= TRUSTED for size in part_of):
            ratio = self._learn_slowness(ratio)
        for size, share in part_of.items():
            self._learn(self._sizes[size], ratio, share)

    def _learn_slowness(self, ratio: float) -> float:
        """Attribute a part of a measurement's deviation to the whole machine, and return the remaining ratio."""
        common: float = ratio**COMMON
        self._slowness *= 1 + (common - 1) * WEIGHT
        return ratio / common

    def _first(self, size: int, ratio: float, share: float) -> _Size:
        known = _Size(self.expected(size) / self._slowness * ratio, measured_at=self._num_calls - DOUBT / AGEING)
        self._learn(known, 1.0, share)
        return known

    def _learn(self, size: _Size, ratio: float, share: float) -> None:
        """Record that passes of this size took `ratio` times as long as expected.

        `share` is the part of the decode call that these passes account for.
        """
        size.num_measured += share
        size.seconds *= 1 + (ratio - 1) * share * max(WEIGHT, min(1.0, 1 / size.num_measured))
        size.measured_at += (self._num_calls - size.measured_at) * share


@functools.cache
def _between(rows: int) -> tuple[tuple[int, float], ...]:
    """Return the nearest sizes, each with its weight for interpolation, such as ((4, 0.5), (6, 0.5)) for 5 rows."""
    power = 1 << (rows.bit_length() - 1)  # sizes are powers of two, and 1.5 times these: 2, 3, 4, 6, 8, 12 …
    low, high = (power, power * 3 // 2) if 2 * rows < 3 * power or power == 1 else (power * 3 // 2, 2 * power)
    if rows == low:
        return ((low, 1.0),)
    share = (rows - low) / (high - low)
    return (low, 1.0 - share), (high, share)


class MoveCosts:
    """Learns how long it takes to move a slot's cells to another slot."""

    def __init__(self) -> None:
        self._token_s = MOVED_TOKEN_S

    def of(self, num_tokens: int) -> float:
        return self._token_s * (num_tokens + MOVE_TOKENS) if num_tokens else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from the measured duration of moving this many tokens."""
        if num_tokens > 0 and seconds >= 0:
            self._token_s += (seconds / (num_tokens + MOVE_TOKENS) - self._token_s) * MOVE_WEIGHT
