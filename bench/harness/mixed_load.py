"""Generate a load that resembles many users' requests, with mixed lengths, shared prefixes, and chats.

The whole load is drawn from a seed as token ids, so that all peers receive the same load. With `ignore_eos`, each
answer is exactly as long as drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .engines import FIRST_WORD, LAST_WORD
from .workloads import Line, trie_optimum

NUM_FAMILIES, SHARED_TOKENS = 5, 400  # a third of all requests starts with one of five prefixes
FAMILY_EVERY = 3
PROMPT_TOKENS, NEW_TOKENS = (16, 700), (8, 200)  # minimum and maximum
TYPICAL_PROMPT, TYPICAL_NEW, SPREAD = (
    80,
    48,
    0.8,
)  # medians and sigma of the lognormal distributions, without a family's prefix

Conversation = tuple[Line, ...]  # its turns: each prompt begins with the one before


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The numbers of requests, chats and turns in a load. `scale` shrinks all lengths for small models and machines."""

    num_requests: int
    num_chats: int = 0  # number of conversations among the requests …
    turns: int = 4  # … with this number of turns, each of which is a request
    scale: float = 1.0

    @property
    def longest(self) -> int:
        """Return the maximum number of tokens in a request outside chats."""
        return self.scaled(PROMPT_TOKENS[1]) + self.scaled(NEW_TOKENS[1])

    def scaled(self, count: int) -> int:
        return max(1, round(self.scale * count))

    def __post_init__(self) -> None:
        if not 0 <= self.num_chats * self.turns <= self.num_requests or self.turns < 1:
            raise ValueError(
                f"{self.num_chats} chats of {self.turns} turns don't fit into {self.num_requests} "
                "requests; choose fewer chats, or more requests"
            )


def conversations(shape: LoadShape, *, seed: int = 0) -> list[Conversation]:
    """Return shuffled conversations with `shape.num_requests` turns in total.

    Loads with different seeds share no prefixes. A chat's prompts contain the earlier turns. The assistant's turns are
    also drawn from the seed, because peers round differently and therefore generate different texts.
    """
    draw = _Draw(shape, seed)
    found = [draw.chat(f"chat-{number}") for number in range(shape.num_chats)]
    num_others = shape.num_requests - shape.num_chats * shape.turns
    found += [(draw.request(f"line-{number}", number % FAMILY_EVERY == 0),) for number in range(num_others)]
    draw.rng.shuffle(found)
    return found


def flat(found: Iterable[Conversation]) -> list[Line]:
    """Return all turns in order, for servers that receive all requests at once."""
    return [line for conversation in found for line in conversation]


class _Draw:
    """Generates random requests and chats from a seed."""

    def __init__(self, shape: LoadShape, seed: int) -> None:
        self.rng = random.Random(f"mixed load {seed}")
        self._shape = shape
        self._heads = [self._words(self._shape.scaled(SHARED_TOKENS)) for _ in range(NUM_FAMILIES)]
        self._num_of_families = 0

    def request(self, name: str, in_family: bool) -> Line:
        head: tuple[int, ...] = ()
        if in_family:
            head = self._heads[self._num_of_families % NUM_FAMILIES]
            self._num_of_families += 1
        return Line(name, self._prompt(head), self._num_new())

    def chat(self, name: str) -> Conversation:
        turns = [self.request(f"{name}-0", in_family=False)]
        for number in range(1, self._shape.turns):
            last = turns[-1]
            answered = last.prompt + self._words(last.num_new)
            turns.append(Line(f"{name}-{number}", self._prompt(answered), self._num_new()))
        return tuple(turns)

    def _prompt(self, head: tuple[int, ...]) -> tuple[int, ...]:
        least, most = PROMPT_TOKENS
        room = self._shape.scaled(most) - len(head)  # a chat that exceeds the maximum grows by the minimum
        return head + self._words(self._length(TYPICAL_PROMPT, least, room))

    def _num_new(self) -> int:
        least, most = NEW_TOKENS
        return self._length(TYPICAL_NEW, least, self._shape.scaled(most))

    def _length(self, typical: int, least: int, most: int) -> int:
        drawn = self._shape.scale * typical * self.rng.lognormvariate(0.0, SPREAD)
        return max(self._shape.scaled(least), min(round(drawn), most))

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(FIRST_WORD, LAST_WORD) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The number of requests in a load, and its total numbers of tokens."""

    requests: int
    prompt_tokens: int
    trie_tokens: int  # minimum number of tokens to compute: each distinct prefix once
    new_tokens: int
    longest: int  # prompt and answer of one request


def sizes(lines: Sequence[Line]) -> Sizes:
    """Return the number of requests and the total numbers of tokens in these lines."""
    return Sizes(
        requests=len(lines),
        prompt_tokens=sum(len(line.prompt) for line in lines),
        trie_tokens=trie_optimum(line.prompt for line in lines),
        new_tokens=sum(line.num_new for line in lines),
        longest=max(len(line.prompt) + line.num_new for line in lines),
    )
