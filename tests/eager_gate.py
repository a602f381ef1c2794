"""A gate for tests: drafts are decoded whatever they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from cellama.engine.speculation.gate import Candidate


class Eager:
    """Takes a random number of drafts of each slot: equally many, as a stream per slot wants it."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def is_resting(self, num_slots: int) -> bool:
        return False

    def observe(self, passes: Sequence[int], seconds: float) -> None:
        pass

    def account(self, num_tokens: int, seconds: float) -> None:
        pass

    def choose(self, candidates: Sequence[Candidate], most_s: float) -> Mapping[int, int]:
        length = self._random.randint(1, 4)
        return {c.slot: length for c in candidates if c.odds and self._random.random() < 0.8}
