"""The requests of a measurement: half of them have one length, the others have mixed lengths, and all start together.

Requests of one length end at the same time, unlike real requests. A setup that is good for them may be slow when slots
become free one by one. So half of the requests have lognormal lengths, and a third of these start with one of a few
shared prefixes, like requests with the same instructions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

MIN_REQUESTS = 32  # per measurement; with many slots two for each, so that each slot is used twice
NUM_HEADS = 3  # shared prefixes, which a third of the mixed requests use in turn
SPREAD = 0.6  # sigma of the lognormal lengths: an eighth is below half of the median, an eighth above its double


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of half of the requests. The others have about this mean, and at most twice this length."""

    prompt_tokens: int = 64
    new_tokens: int = 32

    @property
    def max_tokens(self) -> int:
        """The context of the longest request, in tokens."""
        return 2 * (self.prompt_tokens + self.new_tokens)


def num_requests(slots: int) -> int:
    return max(MIN_REQUESTS, 2 * slots)


def requests(lengths: RequestLengths, count: int, n_vocab: int, round_: int = 0) -> list[tuple[tuple[int, ...], int]]:
    """Return prompts with their numbers of new tokens, always the same ones for the same arguments.

    Different rounds share no prefix, so that no prompt is cached from an earlier round.
    """
    rng = random.Random(f"0 {round_}")
    low = min(300, n_vocab // 2)  # in most vocabularies, smaller ids are control tokens and bytes

    def words(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, n_vocab) for _ in range(length))

    def mixed(mean: int) -> int:
        return max(1, min(round(mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)), 2 * mean))

    prompt_tokens, new_tokens = lengths.prompt_tokens, lengths.new_tokens
    heads = [words(prompt_tokens) for _ in range(NUM_HEADS)]
    found: list[tuple[tuple[int, ...], int]] = []
    for index in range(count):
        number, is_mixed = divmod(index, 2)
        if not is_mixed:
            found.append((words(prompt_tokens), new_tokens))
        elif number % 3:
            found.append((words(mixed(prompt_tokens)), mixed(new_tokens)))
        else:
            head = heads[number // 3 % NUM_HEADS]
            found.append((head + words(mixed((prompt_tokens + 1) // 2)), mixed(new_tokens)))
    return found
