"""Convert token bytes into text, and release text only once it is final."""

from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found in the text.

    `released` is the previously unreleased text before the stop string. If the stream keeps stop strings, `released`
    also includes the stop string.
    """

    released: str
    stop: str


class TextStream:
    """Releases text once it can no longer be part of a stop string or of an unfinished character.

    The result does not depend on how the bytes are split into tokens. The stop string that *ends* first wins. If
    several stop strings end at the same position, the longest of them wins. Invalid bytes become U+FFFD, and an
    unfinished character at the very end is dropped.
    """

    def __init__(self, stops: tuple[str, ...] = (), *, keeps_stop: bool = False) -> None:
        """Create a stream. With `keeps_stop`, the released text includes the stop string."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._held = ""

    def push(self, data: bytes, *, can_stop: bool = True) -> str | StopMatch:
        """Add a token's bytes, and return the text that is now final, which may be empty.

        If `can_stop` is false, a stop string that ends in this token is treated as ordinary text.
        """
        new = self._decoder.decode(data)
        if not self._stops:
            return new
        if not new:
            return ""
        self._held += new
        found = self._first_match() if can_stop else None
        if found is not None:
            start, stop = found
            return StopMatch(self._held[: start + len(stop) if self._keeps_stop else start], stop)
        return self._release(len(self._held) - partial_marker_length(self._held, self._stops))

    def flush(self) -> str:
        """End the stream, and return the text that was held back because it could have started a stop string."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released

    def _first_match(self) -> tuple[int, str] | None:
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop


def partial_marker_length(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
