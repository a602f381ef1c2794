"""Decide which states to read and write, based on how much time a state on disk saves.

A state is read if reading it is faster than computing its tokens. A state is written if its expected saving is greater
than zero. The expected saving is the time that one read saves, multiplied by the probability that a later request
continues from the state. All functions in this module are pure.
"""

from __future__ import annotations

OPEN_S = 0.001  # seconds to find and open a file and to hand over its state, in addition to reading the bytes
MARGIN = 1.25  # factor by which reading must be faster than computing, because both rates are averages

# The probability that a later request continues from a state. The values are assumptions, not measurements. Among
# states that save the same time, they decide which is written first. For a state that saves little time, they decide
# whether it is written at all.
PREFILL_REUSE = 1.0  # a caller computed this prefix in advance, to use it later
SHARED_REUSE = 0.7  # the request itself reused a prefix
CHAT_REUSE = 0.5  # the next turn may follow; or the request is still running, and may continue on another worker
OTHER_REUSE = 0.1


def reuse_probability(*, is_prefill: bool, has_shared: bool, is_chat: bool) -> float:
    """Return the probability that a later request will continue from a finished request's state."""
    if is_prefill:
        return PREFILL_REUSE
    if has_shared:
        return SHARED_REUSE
    return CHAT_REUSE if is_chat else OTHER_REUSE


def saved_s(num_tokens: int, num_bytes: int, prefill_tokens_per_s: float, read_bytes_per_s: float) -> float:
    """Return the time in seconds that is saved by reading a file instead of computing its tokens.

    The result is negative if computing the tokens is faster.
    """
    return num_tokens / prefill_tokens_per_s - MARGIN * (OPEN_S + num_bytes / read_bytes_per_s)


class RunningRate:
    """A running mean of units per second that starts with an estimate.

    One thread adds measurements, and any thread may read the mean.
    """

    def __init__(self, initial_per_s: float, initial_units: float, memory_units: float) -> None:
        """Start with the rate `initial_per_s`, which is weighted like a measurement of `initial_units` units.

        A measurement's weight is halved about every `memory_units / 2` units.
        """
        self._units, self._seconds = float(initial_units), initial_units / initial_per_s
        self._memory_units = memory_units

    def add(self, num_units: float, seconds: float) -> None:
        """Add a measurement of `num_units` units in this many seconds."""
        self._units += num_units
        self._seconds += max(seconds, 1e-9)
        if self._units > self._memory_units:
            self._units, self._seconds = self._units / 2, self._seconds / 2

    @property
    def per_s(self) -> float:
        """The mean number of units per second."""
        return self._units / self._seconds
