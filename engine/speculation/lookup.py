"""Drafts from texts: what followed the last few tokens where they were seen before.

A text is indexed while it grows: a constant time for each token, some 32 bytes of memory. Old places of a run of tokens
give way to new ones, and to others by chance: a place is compared before it is believed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from .sources import Draft

RUNS = (8, 3)  # tokens that are looked up, the longer ones first
MOST_READ = 1024  # tokens that an index reads at once: more would be a gap in every stream
MARK_BOUNDS = (4, 6, 8, 12, 16, 24, 32)  # matched tokens at which the mark of a draft's token goes up
MARKS = [sum(matched >= bound for bound in MARK_BOUNDS) for matched in range(MARK_BOUNDS[-1] + 1)]
POOL_TOKENS = 16384  # of a scope
POOLED_TOKENS = 65536  # of all scopes together …
MOST_POOLS = 256  # … which are no more: each takes 2 KB, and is looked at with every request that begins
BREAK = -1  # in a pool, between texts


class Index:
    """Where runs of tokens ended last in a text that only grows. It reads on with each call of `find`."""

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

    def read(self, most: int = MOST_READ) -> None:
        """Learns what was added to the text, up to so many tokens of it."""
        tokens, mask = self.tokens, self._mask
        if len(tokens) > mask:
            self._resize()
            mask = self._mask
        end = min(len(tokens), self._num_read + most)
        for length, table in zip(RUNS, self._tables, strict=True):
            for at in range(max(self._num_read, length), end):
                table[hash(tuple(tokens[at - length : at])) & mask] = at
        self._num_read = end

    def find(self, text: Sequence[int]) -> tuple[int, int] | None:
        """The place that followed the last tokens of `text`, and how many of these it followed; the longest first."""
        for length, table in zip(RUNS, self._tables, strict=True):
            tail = list(text[-length:])
            at = table[hash(tuple(tail)) & self._mask] if len(tail) == length else -1
            if at >= 0 and self.tokens[at - length : at] == tail:
                return at, length
        return None


class Follower:
    """A Source: how one text goes on as another one, or itself, did before."""

    def __init__(self, name: str, index: Index, text: list[int]) -> None:
        """`text` is what is to be guessed, and grows; `index` may be of the same list."""
        self.name = name
        self._index = index
        self._text = text
        self._is_own = index.tokens is text
        self._at = -1  # in the index's text: what should come next
        self._matched = 0
        self._num_seen = len(text)

    def expect(self, at: int) -> None:
        """The text goes on as the other one from its place `at`, as far as is known."""
        self._at, self._matched = at, RUNS[0]

    def draft(self, most: int) -> Draft | None:
        self._index.read()
        self._catch_up()
        if self._at < 0 and (found := self._index.find(self._text)) is not None:
            self._at, self._matched = found
        if self._at < 0 or not (tokens := self._following(most)):
            return None
        last = len(MARKS) - 1
        return Draft(self.name, tokens, [MARKS[min(self._matched + i, last)] for i in range(len(tokens))])

    def _catch_up(self) -> None:
        """Goes on where the text went as expected; what went otherwise is looked up anew."""
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
    """Texts of late, one behind the other. The older half goes when it is full."""

    def __init__(self) -> None:
        self.index = Index([])

    def add(self, text: Sequence[int]) -> None:
        """The text can be followed from now on; of a long one its end. Who follows an older index goes on with it."""
        text = text[-POOL_TOKENS // 2 :]
        if len(self.index.tokens) + len(text) >= POOL_TOKENS:
            kept = self.index.tokens[-POOL_TOKENS // 4 :]
            self.index = Index([BREAK, *kept, BREAK, *text])
            return
        self.index.tokens.append(BREAK)
        self.index.tokens.extend(text)


class Pools:
    """A pool for each scope that generated something lately: what one scope wrote is not told to another one."""

    def __init__(self) -> None:
        self._pools: OrderedDict[Hashable, Pool] = OrderedDict()

    def of(self, scope: Hashable) -> Pool:
        pool = self._pools.setdefault(scope, Pool())
        self._pools.move_to_end(scope)
        while len(self._pools) > 1 and (len(self._pools) > MOST_POOLS or self.num_tokens > POOLED_TOKENS):
            self._pools.popitem(last=False)
        return pool

    @property
    def num_tokens(self) -> int:
        """That all pools hold."""
        return sum(len(pool.index.tokens) for pool in self._pools.values())
