"""How often drafts were accepted, by source and confidence, in general and for one sequence. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .sources import DraftTokens

FADING = 0.98  # of what was seen remains with each new observation of a bucket: the last 50 or so count
FIRST_TRIALS = 4.0  # that the first guess counts as: a few observations outweigh it
OWN_TRIALS = 3.0  # that the general rate counts as for one sequence, whose text may differ
FORGIVING = 0.98  # of what was seen remains with each look at a source that is not asked: some 100 looks forget it
FIRST_RATES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.9)  # by bucket, before anything was seen


class AcceptanceRates:
    """The share of accepted tokens by source and bucket: a running mean that starts with `general`, or with a guess."""

    def __init__(self, general: AcceptanceRates | None = None) -> None:
        self._general = general
        self._counts: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])  # accepted, seen

    def of(self, source: str, bucket: int) -> float:
        """Return the probability that a token of this bucket is accepted if those before it are."""
        accepted, seen = self._counts.get((source, bucket), (0.0, 0.0))
        if self._general is None:
            guess = FIRST_RATES[min(bucket, len(FIRST_RATES) - 1)]
            return (accepted + guess * FIRST_TRIALS) / (seen + FIRST_TRIALS)
        return (accepted + self._general.of(source, bucket) * OWN_TRIALS) / (seen + OWN_TRIALS)

    def of_draft(self, draft: DraftTokens) -> list[float]:
        """Return the same for each of its tokens."""
        rates = {bucket: self.of(draft.source, bucket) for bucket in set(draft.buckets)}
        return [rates[bucket] for bucket in draft.buckets]

    def observe(self, draft: DraftTokens, tokens: Sequence[int]) -> None:
        """Learn from the tokens with which the sequence continued, whether the draft was decoded or not."""
        for drafted, bucket, token in zip(draft.tokens, draft.buckets, tokens, strict=False):
            self._count(draft.source, bucket, is_accepted=drafted == token)
            if drafted != token:
                break

    def _count(self, source: str, bucket: int, *, is_accepted: bool) -> None:
        counts = self._counts[source, bucket]
        counts[0] = counts[0] * FADING + is_accepted
        counts[1] = counts[1] * FADING + 1.0
        if self._general is not None:
            self._general._count(source, bucket, is_accepted=is_accepted)

    def forgive(self, source: str, bucket: int) -> None:
        """Let what was seen of a bucket count a little less, so that a source that was wrong is asked again."""
        counts = self._counts[source, bucket]
        counts[0], counts[1] = counts[0] * FORGIVING, counts[1] * FORGIVING
