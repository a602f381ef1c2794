"""Drafts from a grammar or a schema: tokens that it leaves no choice about.

Which bytes come is certain, which tokens they are is not: the model may spell a word in several ways. So these are
drafts like any others.
"""

from __future__ import annotations

from cellama.engine.scheduling.sequence import Sequence

from .sources import Draft

SURE = 7  # the mark of all of them


class ForcedText:
    """A Source: what the grammar of a sequence leaves no choice about."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def draft(self, most: int) -> Draft | None:
        sampler = self._sequence.sampler
        tokens = [] if sampler is None else sampler.forced_tokens()[:most]
        return Draft("grammar", tokens, [SURE] * len(tokens)) if tokens else None
