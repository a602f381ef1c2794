"""A gate for tests: drafts are made and decoded whatever they cost, which depends on the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from cellama.engine.speculation.gate import Candidate


class Eager:
    """Takes a random number of drafts of most slots: equally many, as a stream of cells per slot wants it.

    Slots without drafts are padded.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def begin_step(self, num_slots: int) -> bool:
        return True

    def skip(self) -> None:
        pass

    def observe(self, seconds: float) -> None:
        pass

    def account(self, num_tokens: int, seconds: float) -> None:
        pass

    def choose(self, candidates: Sequence[Candidate], max_s: float, making: object = None) -> Mapping[int, int]:
        length = self._random.randint(1, 4)
        chosen = {c.slot: length for c in candidates if c.rates and self._random.random() < 0.8}
        return chosen and {c.slot: length for c in candidates if c.slot in chosen or (c.can_pad and not c.rates)}

    def fit(self, candidates: Sequence[Candidate], max_s: float) -> Mapping[int, int]:
        length = max((len(c.rates) for c in candidates), default=0)
        return {c.slot: length for c in candidates if c.rates}
