"""What decoding and moving take on this machine, learnt from what they took. Pure.

llama.cpp decodes slots with consecutive indices, a *run*, in one pass. What a pass takes grows with its rows, in steps:
on a CPU most of it is for rows, on a GPU nearly all of it for the pass. So nothing is assumed but that it never falls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PASS_ROWS = 16  # before anything is known, a pass costs as much as so many rows; on CPUs it is fewer, on GPUs more
DOUBT = 0.7  # the share by which the first guess may be wrong
NOISE = 0.15  # the share by which a measurement may be wrong
FORGETTING = 0.003  # of what was learnt, with each measurement: contexts grow, threads come and go
SHORTEST_S = 1e-7  # that a decode call takes
MOVE_TOKENS = 64  # a move costs as much as moving so many tokens more
MOVED_TOKEN_S = 1e-5  # before the first move
WEIGHT = 0.3  # of a new value in a running mean


class DecodeCosts:
    """Seconds of a pass by its number of rows: values at powers of two, straight lines between them.

    A Kalman filter: a decode call tells the sum of its passes, and what is known about near sizes changes with it.
    """

    def __init__(self, most_rows: int) -> None:
        self._sizes = np.array([2**k for k in range(max(most_rows - 1, 1).bit_length() + 1)], np.float64)
        self._seconds = self._sizes + PASS_ROWS  # in no unit until the first measurement
        position = np.arange(len(self._sizes))
        self._likeness = 0.7 ** abs(position[:, None] - position[None, :])
        self._covariance = self._first_doubt()
        self._rows = np.arange(most_rows + 1)
        self._expected: list[float] | None = None
        self.is_measured = False

    def _first_doubt(self) -> NDArray[np.float64]:
        return np.outer(self._seconds, self._seconds) * self._likeness * DOUBT**2

    def expected(self) -> list[float]:
        """Seconds of a pass of 0, 1, 2 … rows; they never fall. Before a measurement only ratios mean something."""
        if self._expected is None:
            table = np.interp(self._rows, self._sizes, np.maximum.accumulate(self._seconds)).tolist()
            self._expected = [0.0, *table[1:]]
        return self._expected

    def hoped(self, run_sizes: Sequence[int]) -> float:
        """Seconds of a decode call of such passes if all is well: less than expected as far as they are hardly known.

        Who chooses by it tries what may be better now and then, and learns.
        """
        parts = self._parts(run_sizes)
        doubt = math.sqrt(max(0.0, float(parts @ self._covariance @ parts)))
        expected = float(parts @ self._seconds)
        return expected - doubt

    def observe(self, run_sizes: Sequence[int], seconds: float) -> None:
        """A decode call of passes with these numbers of rows took so long."""
        parts = self._parts(run_sizes)
        expected = float(parts @ self._seconds)
        seconds = max(seconds, SHORTEST_S)
        if not self.is_measured:
            self.is_measured = True
            self._seconds *= seconds / expected
            self._covariance = self._first_doubt()
            expected = seconds
        self._covariance += FORGETTING * (self._first_doubt() - self._covariance)
        carried = self._covariance @ parts
        variance = float(parts @ carried) + (NOISE * expected) ** 2
        surprise = float(np.clip(seconds - expected, -2 * variance**0.5, 2 * variance**0.5))  # the machine was busy
        self._seconds = np.maximum(self._seconds + carried * (surprise / variance), expected * 1e-4)
        self._covariance -= np.outer(carried, carried) / variance
        self._expected = None

    def _parts(self, run_sizes: Sequence[int]) -> NDArray[np.float64]:
        """How much each value has to do with these passes: those that a size lies between, by how near it is."""
        parts = np.zeros(len(self._sizes))
        for size in run_sizes:
            above = max(1, min((size - 1).bit_length(), len(parts) - 1))
            low, high = self._sizes[above - 1], self._sizes[above]
            nearness = min(1.0, (size - low) / (high - low))
            parts[above - 1] += 1.0 - nearness
            parts[above] += nearness
        return parts


class MoveCosts:
    """Seconds that the cells of a slot take to another one."""

    def __init__(self) -> None:
        self._token_s = MOVED_TOKEN_S

    def of(self, num_tokens: int) -> float:
        return self._token_s * (num_tokens + MOVE_TOKENS) if num_tokens else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """So many tokens were moved in this time."""
        if num_tokens > 0 and seconds >= 0:
            self._token_s += (seconds / (num_tokens + MOVE_TOKENS) - self._token_s) * WEIGHT
