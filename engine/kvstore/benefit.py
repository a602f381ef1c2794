"""What a state on disk is worth: the seconds that reading it saves over computing its tokens. Pure.

This is the only rule of what is read and what is written. A state is read if that saves anything. It is written if it
may be expected to save anything: what reading it saves, times the probability that a later request continues from it.
"""

from __future__ import annotations

OPEN_S = 0.001  # to find, open and hand over a file, in addition to reading its bytes
MARGIN = 1.25  # reading must be clearly faster than computing, because both rates are means

# The probability that a later request continues from a state. These are guesses, not measurements: between states that
# save as much, their order decides which is written, and for a state that saves little whether it is worth a file.
PREFILL_REUSE = 1.0  # a caller asked for the prefix alone, to use it later
SHARED_REUSE = 0.7  # the request took a prefix over itself
CHAT_REUSE = 0.5  # the next turn may follow; or the request still runs, and may continue on another worker
OTHER_REUSE = 0.1


def reuse_probability(*, is_prefill: bool, has_shared: bool, is_chat: bool) -> float:
    """Return the probability that a later request continues from the state of a request that ended."""
    if is_prefill:
        return PREFILL_REUSE
    if has_shared:
        return SHARED_REUSE
    return CHAT_REUSE if is_chat else OTHER_REUSE


def saved_s(num_tokens: int, num_bytes: int, prefill_tokens_per_s: float, read_bytes_per_s: float) -> float:
    """Return the seconds that reading a file saves over computing its tokens; negative where computing is faster."""
    return num_tokens / prefill_tokens_per_s - MARGIN * (OPEN_S + num_bytes / read_bytes_per_s)


class RunningRate:
    """A running mean of units per second, which starts with a guess. One thread adds, any thread reads."""

    def __init__(self, guess_per_s: float, guess_units: float, memory_units: float) -> None:
        """The guess counts as if `guess_units` had been measured. Older measurements count less and less.

        What was measured more than `memory_units` ago hardly counts.
        """
        self._units, self._seconds = float(guess_units), guess_units / guess_per_s
        self._memory_units = memory_units

    def add(self, num_units: float, seconds: float) -> None:
        """Add a measurement."""
        self._units += num_units
        self._seconds += max(seconds, 1e-9)
        if self._units > self._memory_units:
            self._units, self._seconds = self._units / 2, self._seconds / 2

    @property
    def per_s(self) -> float:
        """The mean, in units per second."""
        return self._units / self._seconds
