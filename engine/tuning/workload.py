"""What a measurement asks of an engine: requests of one length, and others of mixed lengths, all at once.

Requests of one length end together, which real ones don't: a setup that is good for those alone may be poor at what
slots that end one by one leave behind. So half of them have lognormal lengths, and a third of these begins with one of
a few heads, as requests with the same instructions do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LEAST_REQUESTS = 32  # of a measurement; with many slots two for each, so that each is filled a second time
NUM_FAMILIES, MIXED_PER_FAMILY = 3, 3
SPREAD = 0.6  # sigma of the lognormal lengths
SEED = 0

Asked = tuple[tuple[int, ...], int]  # a prompt, and how many tokens are generated for it


@dataclass(frozen=True, slots=True)
class Work:
    """Lengths of half of the requests; the others are about as long in the mean, and twice as long at most."""

    prompt_tokens: int = 64
    new_tokens: int = 32

    @property
    def most_tokens(self) -> int:
        """Of one request."""
        return 2 * (self.prompt_tokens + self.new_tokens)


def num_requests(slots: int) -> int:
    return max(LEAST_REQUESTS, 2 * slots)


def random_texts(count: int, length: int, n_vocab: int) -> list[tuple[int, ...]]:
    """Seeded texts of one length, for embedding models."""
    words = _words(random.Random(SEED), n_vocab)
    return [words(length) for _ in range(count)]


def requests(work: Work, count: int, n_vocab: int, round_: int = 0) -> list[Asked]:
    """Seeded. Other rounds share nothing, so that no prompt is in a cache from before."""
    rng = random.Random(f"{SEED} {round_}")
    words = _words(rng, n_vocab)

    def length(mean: int) -> int:
        return max(1, min(round(mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)), 2 * mean))

    heads = [words(work.prompt_tokens) for _ in range(NUM_FAMILIES)]
    found: list[Asked] = []
    for index in range(count):
        number, is_mixed = divmod(index, 2)
        if not is_mixed:
            found.append((words(work.prompt_tokens), work.new_tokens))
        elif number % MIXED_PER_FAMILY:
            found.append((words(length(work.prompt_tokens)), length(work.new_tokens)))
        else:
            head = heads[number // MIXED_PER_FAMILY % NUM_FAMILIES]
            found.append((head + words(length((work.prompt_tokens + 1) // 2)), length(work.new_tokens)))
    return found


def _words(rng: random.Random, n_vocab: int) -> Callable[[int], tuple[int, ...]]:
    """What gives so many tokens that are neither control tokens nor bytes in most vocabularies."""
    low = min(300, n_vocab // 2)
    return lambda length: tuple(rng.randrange(low, n_vocab) for _ in range(length))
