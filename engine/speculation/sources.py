"""What proposes how a sequence continues: texts that were seen before, and grammars that leave no choice.

A text is indexed while it grows, at a constant time for each token and some 32 bytes of memory. A new place of a run of
tokens replaces an older one in the index, and by chance that of another run, so a place is compared before it is used.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence as Seq
from typing import NamedTuple, Protocol

from cellama.engine.scheduling.sequence import Sequence

# Lengths of the runs of tokens that are looked up: what follows 8 is seldom wrong, 3 are found more often.
RUNS = (8, 3)
MAX_READ = 1024  # tokens that an index reads at once: more would be a gap in every stream
BUCKET_BOUNDS = (4, 6, 8, 12, 16, 24, 32)  # matched tokens from which on a draft token is in the next bucket
# The bucket by the number of matched tokens, so that a lookup needs no search.
BUCKETS = [sum(matched >= bound for bound in BUCKET_BOUNDS) for matched in range(BUCKET_BOUNDS[-1] + 1)]
SURE = len(BUCKET_BOUNDS)  # the bucket of what a grammar leaves no choice about
POOL_TOKENS = 16384  # of a scope: some 20 answers of 800 tokens
ALL_POOLS_TOKENS = 65536  # of all scopes together, which take a few MB with their indexes …
MAX_POOLS = 256  # … which are no more: each takes 2 KB at least, and is looked at with every request that starts
BREAK = -1  # between the texts of a pool; not a token


class DraftTokens(NamedTuple):
    """Tokens that may come next, and for each the bucket of the source's confidence (acceptance.py)."""

    source: str
    tokens: list[int]
    buckets: list[int]


class Source(Protocol):
    """Proposes the next tokens of one sequence."""

    def draft(self, most: int) -> DraftTokens | None:
        """Return up to `most` tokens, as the sequence stands now; None without a proposal."""
        ...


class ForcedText:
    """A Source: what the grammar of a sequence leaves no choice about.

    Which bytes come is certain. Which tokens spell them is not, so these are drafts like any others.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def draft(self, most: int) -> DraftTokens | None:
        sampler = self._sequence.sampler
        tokens = [] if sampler is None else sampler.forced_tokens()[:most]
        return DraftTokens("grammar", tokens, [SURE] * len(tokens)) if tokens else None


class Index:
    """Where runs of tokens ended last in a text that only grows."""

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` belongs to its caller."""
        self.tokens = tokens
        self._num_read = 0
        self._tables: list[array[int]] = []
        self._mask = 0
        self._resize()

    def _resize(self) -> None:
        size = 1 << max(8, (2 * len(self.tokens)).bit_length())
        self._tables, self._mask, self._num_read = [array("i", [-1]) * size for _ in RUNS], size - 1, 0

    def read(self, most: int = MAX_READ) -> None:
        """Index what was added to the text, up to so many tokens of it."""
        tokens, mask = self.tokens, self._mask
        if len(tokens) > mask:
            self._resize()
            mask = self._mask
        end = min(len(tokens), self._num_read + most)
        for length, table in zip(RUNS, self._tables, strict=True):
            for at in range(max(self._num_read, length), end):
                table[hash(tuple(tokens[at - length : at])) & mask] = at
        self._num_read = end

    def find(self, text: Seq[int]) -> tuple[int, int] | None:
        """Return the place behind the last tokens of `text`, and how many of these were found; longer runs first."""
        for length, table in zip(RUNS, self._tables, strict=True):
            tail = list(text[-length:])
            at = table[hash(tuple(tail)) & self._mask] if len(tail) == length else -1
            if at >= 0 and self.tokens[at - length : at] == tail:
                return at, length
        return None


class Follower:
    """A Source: what followed the last tokens of a sequence where they were seen before."""

    def __init__(self, name: str, index: Index, text: list[int]) -> None:
        """`text` has the sequence's tokens, and grows; `index` may be of the same list."""
        self.name = name
        self._index = index
        self._text = text
        self._is_own = index.tokens is text
        self._at = -1  # in the index's text: what should come next
        self._matched = 0
        self._num_seen = len(text)

    def expect(self, at: int) -> None:
        """Propose the tokens from the place `at` of the index on: the text is known to follow it."""
        self._at, self._matched = at, RUNS[0]

    def draft(self, most: int) -> DraftTokens | None:
        self._index.read()
        self._catch_up()
        if self._at < 0 and (found := self._index.find(self._text)) is not None:
            self._at, self._matched = found
        if self._at < 0 or not (tokens := self._following(most)):
            return None
        last = len(BUCKETS) - 1
        return DraftTokens(self.name, tokens, [BUCKETS[min(self._matched + i, last)] for i in range(len(tokens))])

    def _catch_up(self) -> None:
        """Follow the text as far as it went as proposed; else the next draft looks it up again."""
        known = self._index.tokens
        for token in self._text[self._num_seen :]:
            if not 0 <= self._at < len(known) or known[self._at] != token:
                self._at = -1
                break
            self._at, self._matched = self._at + 1, self._matched + 1
        self._num_seen = len(self._text)

    def _following(self, most: int) -> list[int]:
        tokens = self._index.tokens[self._at : self._at + most]
        if self._is_own:  # its end repeats itself
            while tokens and len(tokens) < most:
                tokens += tokens[: most - len(tokens)]
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens


class Pool:
    """Texts of one scope that were generated lately, one behind the other. A full pool drops its older texts."""

    def __init__(self) -> None:
        self.index = Index([])

    def add(self, text: Seq[int]) -> None:
        """Add a text, or the end of a long one. A Follower of an older index keeps that index."""
        text = text[-POOL_TOKENS // 2 :]
        if len(self.index.tokens) + len(text) >= POOL_TOKENS:
            kept = self.index.tokens[-POOL_TOKENS // 4 :]
            self.index = Index([BREAK, *kept, BREAK, *text])
            return
        self.index.tokens.append(BREAK)
        self.index.tokens.extend(text)


class Pools:
    """A pool for each scope that generated something lately: no scope gets drafts from the texts of another one."""

    def __init__(self) -> None:
        self._pools: OrderedDict[Hashable, Pool] = OrderedDict()

    def of(self, scope: Hashable) -> Pool:
        pool = self._pools.setdefault(scope, Pool())
        self._pools.move_to_end(scope)
        while len(self._pools) > 1 and (len(self._pools) > MAX_POOLS or self.num_tokens > ALL_POOLS_TOKENS):
            self._pools.popitem(last=False)
        return pool

    @property
    def num_tokens(self) -> int:
        """Tokens in all pools."""
        return sum(len(pool.index.tokens) for pool in self._pools.values())
