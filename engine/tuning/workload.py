"""The requests of a measurement: half of them have one length, the others have mixed lengths, and all come at once.

Requests of one length end at the same time, which real requests don't: a setup that is good for them alone may be poor
at what slots leave behind that end one by one. So half of the requests have lognormal lengths, and a third of these
starts with one of a few heads, as requests with the same instructions do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

MIN_REQUESTS = 32  # of a measurement; with many slots two for each, so that each is used a second time
NUM_HEADS = 3  # heads that requests share, each third of the mixed ones in turn
SPREAD = 0.6  # sigma of the lognormal lengths: an eighth has less than half of the median, an eighth more than twice


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of half of the requests; the others are about as long in the mean, and at most twice as long."""

    prompt_tokens: int = 64
    new_tokens: int = 32

    @property
    def max_tokens(self) -> int:
        """The context of the longest request, in tokens."""
        return 2 * (self.prompt_tokens + self.new_tokens)


def num_requests(slots: int) -> int:
    return max(MIN_REQUESTS, 2 * slots)


def requests(lengths: RequestLengths, count: int, n_vocab: int, round_: int = 0) -> list[tuple[tuple[int, ...], int]]:
    """Return the same prompts with their numbers of new tokens each time.

    Different rounds share no prefix, so that no prompt is cached from an earlier round.
    """
    rng = random.Random(f"0 {round_}")
    low = min(300, n_vocab // 2)  # below are control tokens and bytes in most vocabularies

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
