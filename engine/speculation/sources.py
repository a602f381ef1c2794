"""What proposes how a sequence goes on."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """Tokens that may come next, and for each a mark of how much speaks for it: `odds.py` learns what it is worth."""

    source: str
    tokens: list[int]
    marks: list[int]  # small numbers, of the source's own meaning


class Source(Protocol):
    """Guesses the next tokens of one sequence."""

    def draft(self, most: int) -> Draft | None:
        """Up to `most` tokens, as the sequence stands now; None if it has nothing to say."""
        ...
