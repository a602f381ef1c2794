"""How often drafts were right: what a mark of a source is worth, in general and for one sequence. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .sources import Draft

FADING = 0.98  # of what was seen, with each new observation of a mark
FIRST_TRIALS = 4.0  # that the first guess counts as
FORGIVING = 0.98  # of what was seen, with each look at what is not asked
OWN_TRIALS = 3.0  # that what holds in general counts as, for one sequence
FIRST_ODDS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.9)  # by mark


class Odds:
    """The share of right tokens by source and mark: a running mean that begins with `general`, or a guess."""

    def __init__(self, general: Odds | None = None) -> None:
        self._general = general
        self._counts: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])  # right, seen

    def of(self, source: str, mark: int) -> float:
        """The probability that a token with this mark is right, if those before it are."""
        right, seen = self._counts.get((source, mark), (0.0, 0.0))
        if self._general is None:
            return (right + FIRST_ODDS[min(mark, 7)] * FIRST_TRIALS) / (seen + FIRST_TRIALS)
        return (right + self._general.of(source, mark) * OWN_TRIALS) / (seen + OWN_TRIALS)

    def of_draft(self, draft: Draft) -> list[float]:
        """As `of`, of each of its tokens."""
        known: dict[int, float] = {}
        return [
            known[mark] if mark in known else known.setdefault(mark, self.of(draft.source, mark))
            for mark in draft.marks
        ]

    def observe(self, source: str, mark: int, *, is_right: bool) -> None:
        """A token with this mark, behind right ones, was right or not."""
        counts = self._counts[source, mark]
        counts[0] = counts[0] * FADING + is_right
        counts[1] = counts[1] * FADING + 1.0
        if self._general is not None:
            self._general.observe(source, mark, is_right=is_right)

    def fade(self, source: str, mark: int) -> None:
        """What was seen of a mark counts a little less: who was wrong gets another chance."""
        counts = self._counts[source, mark]
        counts[0], counts[1] = counts[0] * FORGIVING, counts[1] * FORGIVING

    def compare(self, draft: Draft, tokens: Sequence[int]) -> None:
        """The sequence went on with these tokens, whether the draft was decoded or not."""
        for guessed, mark, token in zip(draft.tokens, draft.marks, tokens, strict=False):
            self.observe(draft.source, mark, is_right=guessed == token)
            if guessed != token:
                break
