"""Bytes of tokens become text, which is released only when it is final."""

from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found; `released` is the text before it that was not yet released."""

    released: str
    stop: str


class TextStream:
    """Releases text that can no longer be part of a stop string or of an unfinished character.

    The result does not depend on how the bytes are split: the match that *ends* first wins, and among those the
    longest. Invalid bytes become U+FFFD; an unfinished character at the very end is dropped.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = stops
        self._held = ""

    def push(self, data: bytes) -> str | StopMatch:
        """Takes the bytes of one token; returns what is final now, possibly nothing."""
        new = self._decoder.decode(data)
        if not self._stops:
            return new
        if not new:
            return ""
        self._held += new
        found = self._first_match()
        if found is not None:
            start, stop = found
            return StopMatch(self._held[:start], stop)
        return self._release(len(self._held) - possible_marker(self._held, self._stops))

    def flush(self) -> str:
        """Ends the stream without a stop string; returns the text that was held back for one."""
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


def possible_marker(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest tail of `text` that a marker begins with; a whole marker does not count."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
