"""Decides which states are read and written, based on the seconds that a state on disk saves.

A state is read if reading it is faster than computing its tokens. A state is written if its expected saving is above
zero. The expected saving is the saving of one read, multiplied by the probability that a later request continues from
the state. All functions in this module are pure.
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
    """Return the probability that a later request continues from the state of a finished request."""
    if is_prefill:
        return PREFILL_REUSE
    if has_shared:
        return SHARED_REUSE
    return CHAT_REUSE if is_chat else OTHER_REUSE


def saved_s(num_tokens: int, num_bytes: int, prefill_tokens_per_s: float, read_bytes_per_s: float) -> float:
    """Return the seconds that reading a file saves over computing its tokens, negative if computing is faster."""
    return num_tokens / prefill_tokens_per_s - MARGIN * (OPEN_S + num_bytes / read_bytes_per_s)


class RunningRate:
    """A running mean of units per second that starts from an estimate. One thread adds to it, and any may read it."""

    def __init__(self, initial_per_s: float, initial_units: float, memory_units: float) -> None:
        """Start with `initial_per_s`, which counts like a measurement of `initial_units`.

        The weight of a measurement is halved after about every `memory_units / 2` further units.
        """
        self._units, self._seconds = float(initial_units), initial_units / initial_per_s
        self._memory_units = memory_units

    def add(self, num_units: float, seconds: float) -> None:
        """Add a measurement."""
        self._units += num_units
        self._seconds += max(seconds, 1e-9)
        if self._units > self._memory_units:
            self._units, self._seconds = self._units / 2, self._seconds / 2

    @property
    def per_s(self) -> float:
        """The mean number of units per second."""
        return self._units / self._seconds
