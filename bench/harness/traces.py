"""Generate requests whose arrival times, lengths and shared token blocks resemble those of published traces.

The traces themselves are not included. Their statistics are:

- Mooncake's conversation trace (FAST'25, github.com/kvcache-ai/Mooncake): 12,031 requests in an hour, with 12,035
  prompt tokens and 343 generated tokens on average. A prompt is a list of hashes of 512-token blocks. With an unlimited
  cache, 37% of the blocks are found in an earlier prompt. 39% of the prompts continue an earlier prompt, after a median
  of 123 s. The other prompts share at most the first block. These figures were computed from the published file.
- Azure's conversation and code traces (Splitwise, ISCA 2024, github.com/Azure/AzurePublicDataset): medians of 1,020 and
  1,469 prompt tokens, and of 129 and 13 generated tokens. These traces contain no hashes, so the generated prompts
  share nothing. Here, 1,469 is rounded to 1,500.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

BLOCK = 512  # tokens
CHARS_PER_TOKEN = 4  # of English text


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A request whose prompt consists of the earlier turns and its own blocks. The last block may be shorter."""

    think_s: float  # from the end of the previous turn, or 0
    blocks: tuple[int, ...]  # new blocks of this turn, by numbers that are unique in the trace
    num_prompt: int  # tokens, including those of earlier turns
    num_new: int  # tokens to generate


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation or a single request, with its start time in seconds."""

    at: float
    turns: tuple[SessionTurn, ...]
    tenant: str = ""


Lengths = Callable[[random.Random], tuple[int, int]]  # returns the tokens of a prompt and of its completion


def conversations(num_requests: int, per_s: float, seed: int) -> list[Session]:
    """Return sessions that resemble Mooncake's conversation trace.

    `per_s` is the mean number of requests per second, provided that the fleet keeps up.
    """
    rng, numbers = random.Random(seed), itertools.count(1)
    mean_turns = 1 / (1 - CONTINUED)
    sessions: list[Session] = []
    now, num_left = 0.0, num_requests
    while num_left > 0:
        now += rng.expovariate(per_s / mean_turns)
        turns = tuple(itertools.islice(_turns(rng, numbers), num_left))
        sessions.append(Session(now, turns))
        num_left -= len(turns)
    return sessions


CONTINUED = 0.387  # share of the requests that continue another one
SYSTEM_BLOCK = 0  # the first block of all prompts


def _turns(rng: random.Random, numbers: Iterator[int]) -> Iterator[SessionTurn]:
    """Yield the turns of a conversation. Quantiles were fitted to the published file."""
    num_prompt, think_s = min(120_000, _lognormal(rng, 5264, 1.2)), 0.0
    num_blocks = 0
    while num_prompt <= 120_000:
        blocks = [next(numbers) for _ in range(math.ceil(num_prompt / BLOCK) - num_blocks)]
        if num_blocks == 0:
            blocks[0] = SYSTEM_BLOCK
        num_blocks += len(blocks)
        yield SessionTurn(think_s, tuple(blocks), num_prompt, max(10, round(rng.gauss(343, 230))))
        if rng.random() >= CONTINUED:
            return
        num_prompt = num_blocks * BLOCK + _lognormal(rng, 1000, 1.6)
        think_s = rng.lognormvariate(math.log(123), 1.03)


def azure_conversation(rng: random.Random) -> tuple[int, int]:
    """Return lengths with the medians of Azure's conversation trace."""
    return min(14_000, _lognormal(rng, 1020, 0.9)), min(1000, _lognormal(rng, 129, 1.1))


def azure_code(rng: random.Random) -> tuple[int, int]:
    """Return lengths with the medians of Azure's code trace."""
    return min(7500, _lognormal(rng, 1500, 0.9)), min(1000, _lognormal(rng, 13, 1.0))


def single_requests(lengths: Lengths, num_requests: int, per_s: float, seed: int) -> list[Session]:
    """Return requests without shared prefixes that arrive at random times."""
    rng, numbers, now = random.Random(seed), itertools.count(1), 0.0
    sessions = []
    for _ in range(num_requests):
        now += rng.expovariate(per_s)
        num_prompt, num_new = lengths(rng)
        blocks = tuple(itertools.islice(numbers, math.ceil(num_prompt / BLOCK)))
        sessions.append(Session(now, (SessionTurn(0.0, blocks, num_prompt, num_new),)))
    return sessions


def families(
    num_requests: int, num_families: int, num_shared: int, num_own: int, num_new: int, seed: int
) -> list[Session]:
    """Return requests that all arrive at the start in random order. Requests of a family share `num_shared` tokens."""
    rng, numbers = random.Random(seed), itertools.count(1)
    shared = [tuple(itertools.islice(numbers, num_shared // BLOCK)) for _ in range(num_families)]
    sessions = []
    for number in range(num_requests):
        own = tuple(itertools.islice(numbers, math.ceil(num_own / BLOCK)))
        turn = SessionTurn(0.0, shared[number % num_families] + own, num_shared // BLOCK * BLOCK + num_own, num_new)
        sessions.append(Session(0.0, (turn,)))
    rng.shuffle(sessions)
    return sessions


def _lognormal(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), sigma)))


def text_of(blocks: Sequence[int]) -> str:
    """Return a text that represents these blocks, with about as many characters as such blocks have on average."""
    return "".join(f"{block:08x}" * (BLOCK * CHARS_PER_TOKEN // 8) for block in blocks)
