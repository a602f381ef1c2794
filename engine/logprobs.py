"""How likely a chosen token was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities, as the model gave them: before penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens and theirs, best first
