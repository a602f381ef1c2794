"""What decoding and moving take on this machine, learned from what they took. Pure.

llama.cpp decodes slots with consecutive indices and equally many tokens, a *run*, in one pass. What a pass takes grows
with its rows, in steps: on a CPU most of it is for rows, on a GPU nearly all of it for the pass. So nothing is assumed
about the machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cellama.engine.backend import Chunk

from .neighbours import runs_of

PASS_ROWS = 16  # beyond what was measured a pass costs as much as so many rows: fewer on CPUs, more on GPUs
WEIGHT = 0.2  # of a new value in a running mean: the last ten or so count
MAX_RATIO = 2.0  # of a measurement to what was expected: beyond that another process had the machine
DOUBT = 0.6  # the share by which a size that was never measured may cost less: rows may be all that costs …
AGEING = 0.0004  # … and a measured one with each later decode call: what is twice as slow is tried again after 1250
TRUSTED = 4  # measurements of a size, until others are compared with it
MAX_FIRST_RATIO = 5.0  # the same, either way, for the first measurement of a size beside known ones: CPU against GPU
MIN_CALL_S = 1e-7  # of a decode call: a clock that stood still must not make passes free
MOVE_TOKENS = 64  # a move costs as much as moving so many tokens more: its fixed part, measured on a CPU
MOVED_TOKEN_S = 1e-5  # before the first move: a slow memory, so the first move has to be worth it
MOVE_WEIGHT = 0.3  # of a new value in a running mean: moves are rare, and their costs alike


@dataclass(slots=True)
class _Size:
    """A number of rows."""

    seconds: float  # of a pass
    num_measured: float = 0.0
    measured_at: float = 0.0  # decode call, counted from the first


class DecodeCosts:
    """Seconds of a pass by its rows: running means for some sizes, and straight lines between them.

    The sizes are 1, 2, 3, 4, 6, 8, 12, 16, 24 … rows, which are those of most passes with drafts. Each learns by
    itself: many rows of drafts must not change what one row is believed to cost (docs/adr/015-speculation.md). Slot
    layout and speculation share one instance.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._ordered: list[int] = []  # the sizes that were measured, ascending
        self._num_calls = 0

    @property
    def is_measured(self) -> bool:
        return bool(self._sizes)

    def is_known(self, rows: int) -> bool:
        """Return whether passes of so many rows were measured often enough to compare others with them."""
        return all(
            size in self._sizes and self._sizes[size].num_measured >= TRUSTED * share for size, share in _between(rows)
        )

    def expected(self, rows: int) -> float:
        """Return the seconds of a pass. Before the first measurement only ratios mean something."""
        if not self._ordered:
            return float(rows + PASS_ROWS)
        at = bisect_left(self._ordered, rows)
        if 0 < at < len(self._ordered):
            low, high = self._ordered[at - 1], self._ordered[at]
            share = (rows - low) / (high - low)
            return self._sizes[low].seconds * (1 - share) + self._sizes[high].seconds * share
        nearest = self._ordered[min(at, len(self._ordered) - 1)]
        return self._sizes[nearest].seconds * (rows + PASS_ROWS) / (nearest + PASS_ROWS)

    def hoped(self, rows: int) -> float:
        """Return the seconds if all is well: less than expected as far as they are hardly known, or out of date.

        Decisions by it try what may be better now and then, and learn.
        """
        doubt = sum([share * self._doubt(size) for size, share in _between(rows)])
        return self.expected(rows) * (1 - doubt)

    def _doubt(self, size: int) -> float:
        known = self._sizes.get(size)
        return DOUBT if known is None else min(DOUBT, AGEING * (self._num_calls - known.measured_at))

    def table(self, max_rows: int) -> list[float]:
        """Return the expected seconds of passes of 0, 1, 2 … rows, none of them below the one before."""
        seconds = [0.0]
        for rows in range(1, max_rows + 1):
            seconds.append(max(seconds[-1], self.expected(rows)))
        return seconds

    def observe(self, pass_rows: Seq[int], seconds: float) -> None:
        """Learn from a decode call of passes with these numbers of rows.

        Only the call was measured, so each size learns as much as its share of the call. Sizes that were never measured
        account for all of the difference to what was expected.
        """
        self._num_calls += 1
        total_s = sum([self.expected(rows) for rows in pass_rows])
        part_of: dict[int, float] = {}  # of this call, by size
        for rows in pass_rows:
            for size, share in _between(rows):
                part_of[size] = part_of.get(size, 0.0) + share * self.expected(rows) / total_s
        ratio = max(seconds, MIN_CALL_S) / total_s
        if new := part_of.keys() - self._sizes.keys():
            new_share = sum([part_of[size] for size in new])
            new_ratio = (ratio - 1 + new_share) / new_share
            if self._sizes:
                new_ratio = min(max(new_ratio, 1 / MAX_FIRST_RATIO), MAX_FIRST_RATIO)
            self._sizes |= {size: self._first(size, new_ratio, part_of[size]) for size in new}
            self._ordered = sorted(self._sizes)
            return
        for size, share in part_of.items():
            self._learn(self._sizes[size], min(ratio, MAX_RATIO), share)

    def _first(self, size: int, ratio: float, share: float) -> _Size:
        known = _Size(self.expected(size) * ratio, measured_at=self._num_calls - DOUBT / AGEING)
        self._learn(known, 1.0, share)
        return known

    def _learn(self, size: _Size, ratio: float, share: float) -> None:
        """Learn that passes of this size took `ratio` times as long as expected, from this share of a decode call."""
        size.num_measured += share
        size.seconds *= 1 + (ratio - 1) * share * max(WEIGHT, min(1.0, 1 / size.num_measured))
        size.measured_at += (self._num_calls - size.measured_at) * share


def pass_rows_of(chunks: Seq[Chunk], *, unified: bool) -> list[int]:
    """Return the rows of each pass of a decode call; `chunks` are in order of slots.

    With `unified` cells that is one pass. Else llama.cpp computes slots together that have consecutive indices and
    equally many tokens.
    """
    if unified:
        return [sum([len(chunk.tokens) for chunk in chunks])]
    slots: dict[int, list[int]] = {}
    for chunk in chunks:
        slots.setdefault(len(chunk.tokens), []).append(chunk.slot)
    return [length * run.size for length, of_length in slots.items() for run in runs_of(of_length)]


def _between(rows: int) -> list[tuple[int, float]]:
    """Return the sizes next to a number of rows, with the share of each: 5 → (4, 0.5), (6, 0.5); 6 → (6, 1.0)."""
    power = 1 << (rows.bit_length() - 1)  # sizes are 2, 3, 4, 6, 8, 12 …: powers of two, and 1.5 times these
    low, high = (power, power * 3 // 2) if 2 * rows < 3 * power or power == 1 else (power * 3 // 2, 2 * power)
    if rows == low:
        return [(low, 1.0)]
    share = (rows - low) / (high - low)
    return [(low, 1.0 - share), (high, share)]


class MoveCosts:
    """Seconds that it takes to move the cells of a slot to another one."""

    def __init__(self) -> None:
        self._token_s = MOVED_TOKEN_S

    def of(self, num_tokens: int) -> float:
        return self._token_s * (num_tokens + MOVE_TOKENS) if num_tokens else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn that moving so many tokens took this time."""
        if num_tokens > 0 and seconds >= 0:
            self._token_s += (seconds / (num_tokens + MOVE_TOKENS) - self._token_s) * MOVE_WEIGHT
