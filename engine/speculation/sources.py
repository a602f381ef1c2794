"""Propose drafts from several sources, and track the share of each source's tokens that is accepted.

A source proposes a continuation that was seen before, or the only continuation that a grammar allows. Indexing a
growing text takes constant time and about 32 bytes of memory per token. In the index, the new position of a run of
tokens replaces the run's older position, and sometimes the position of another run. Therefore, each position is
verified before it is used.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence as Seq
from typing import NamedTuple, Protocol

from cellama.engine.scheduling.sequence import Sequence

# Lengths of the runs of tokens that are looked up: the continuation of 8 tokens is rarely wrong, and runs of 3 are
# found more often.
RUNS = (8, 3)
MAX_READ = 1024  # tokens that an index adds at once: more would be a gap in every stream
BUCKET_BOUNDS = (4, 6, 8, 12, 16, 24, 32)  # numbers of matched tokens at which the next bucket starts
# Buckets by the number of matched tokens, so that a lookup needs no search.
BUCKETS = [sum(matched >= bound for bound in BUCKET_BOUNDS) for matched in range(BUCKET_BOUNDS[-1] + 1)]
SURE = len(BUCKET_BOUNDS)  # the bucket of tokens that a grammar requires
POOL_TOKENS = 16384  # tokens of a pool: about 20 answers of 800 tokens
ALL_POOLS_TOKENS = 65536  # tokens of all pools, which take a few MB with their indexes
MAX_POOLS = 256  # number of pools, each of which takes at least 2 KB and time when a request starts
BREAK = -1  # separator between the texts of a pool; not a token


class DraftTokens(NamedTuple):
    """The next tokens that a source proposes for a sequence.

    Each token has a bucket, which represents the source's confidence in the token (see AcceptanceRates).
    """

    source: str
    tokens: list[int]
    buckets: list[int]


class Source(Protocol):
    """Proposes the next tokens of one sequence."""

    def draft(self, max_tokens: int) -> DraftTokens | None:
        """Return at most `max_tokens` tokens to follow the sequence, or None if the source has no proposal."""
        ...


class ForcedText:
    """A source that proposes the text that a sequence's grammar requires.

    The bytes are certain, but other tokens may represent the same bytes. Therefore, the proposed tokens are treated
    like other drafts.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def draft(self, max_tokens: int) -> DraftTokens | None:
        sampler = self._sequence.sampler
        tokens = [] if sampler is None else sampler.forced_tokens()[:max_tokens]
        return DraftTokens("grammar", tokens, [SURE] * len(tokens)) if tokens else None


class Index:
    """An index that maps each run of tokens to its last position in a growing text."""

    def __init__(self, tokens: list[int]) -> None:
        """Create an index of `tokens`, which the caller owns and extends."""
        self.tokens = tokens
        self._num_read = 0
        self._tables: list[array[int]] = []
        self._mask = 0
        self._resize()

    def _resize(self) -> None:
        size = 1 << max(8, (2 * len(self.tokens)).bit_length())
        self._tables, self._mask, self._num_read = [array("i", [-1]) * size for _ in RUNS], size - 1, 0

    def read(self, max_tokens: int = MAX_READ) -> None:
        """Add at most `max_tokens` new tokens of the text to the index."""
        tokens, mask = self.tokens, self._mask
        if len(tokens) > mask:
            self._resize()
            mask = self._mask
        end = min(len(tokens), self._num_read + max_tokens)
        for length, table in zip(RUNS, self._tables, strict=True):
            for at in range(max(self._num_read, length), end):
                table[hash(tuple(tokens[at - length : at])) & mask] = at
        self._num_read = end

    def find(self, text: Seq[int]) -> tuple[int, int] | None:
        """Return the position after the longest indexed run that ends `text`, and the length of this run, or None."""
        for length, table in zip(RUNS, self._tables, strict=True):
            tail = list(text[-length:])
            at = table[hash(tuple(tail)) & self._mask] if len(tail) == length else -1
            if at >= 0 and self.tokens[at - length : at] == tail:
                return at, length
        return None


class Follower:
    """A source that proposes the tokens that followed an earlier occurrence of a sequence's last tokens."""

    def __init__(self, name: str, index: Index, text: list[int]) -> None:
        """Create a follower.

        `text` contains the growing tokens of the sequence. `index` may be an index of the same list.
        """
        self.name = name
        self._index = index
        self._text = text
        self._is_own = index.tokens is text
        self._at = -1  # position of the next expected token in the text of the index
        self._matched = 0
        self._num_seen = len(text)

    def expect(self, at: int) -> None:
        """Propose the indexed tokens, starting at position `at`.

        The sequence must match the indexed tokens before `at`.
        """
        self._at, self._matched = at, RUNS[0]

    def draft(self, max_tokens: int) -> DraftTokens | None:
        self._index.read()
        self._catch_up()
        if self._at < 0 and (found := self._index.find(self._text)) is not None:
            self._at, self._matched = found
        if self._at < 0 or not (tokens := self._following(max_tokens)):
            return None
        last = len(BUCKETS) - 1
        return DraftTokens(self.name, tokens, [BUCKETS[min(self._matched + i, last)] for i in range(len(tokens))])

    def _catch_up(self) -> None:
        """Advance over new tokens that match the proposal.

        If a token doesn't match, the next draft searches the index again.
        """
        known = self._index.tokens
        for token in self._text[self._num_seen :]:
            if not 0 <= self._at < len(known) or known[self._at] != token:
                self._at = -1
                break
            self._at, self._matched = self._at + 1, self._matched + 1
        self._num_seen = len(self._text)

    def _following(self, max_tokens: int) -> list[int]:
        tokens = self._index.tokens[self._at : self._at + max_tokens]
        if self._is_own:  # a repetition at the end of the text continues
            while tokens and len(tokens) < max_tokens:
                tokens += tokens[: max_tokens - len(tokens)]
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens


class Pool:
    """The recently generated texts of one scope, concatenated. A full pool drops its older texts."""

    def __init__(self) -> None:
        self.index = Index([])

    def add(self, text: Seq[int]) -> None:
        """Add a generated text. If the text is long, only its end is added.

        If the index is replaced, existing followers keep the old index.
        """
        text = text[-POOL_TOKENS // 2 :]
        if len(self.index.tokens) + len(text) >= POOL_TOKENS:
            recent = self.index.tokens[-POOL_TOKENS // 4 :]
            self.index = Index([BREAK, *recent, BREAK, *text])
            return
        self.index.tokens.append(BREAK)
        self.index.tokens.extend(text)


class Pools:
    """The pools of all scopes that have generated text recently.

    Drafts for a scope come only from texts of the same scope.
    """

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
        """The number of tokens in all pools."""
        return sum(len(pool.index.tokens) for pool in self._pools.values())


FADING = 0.98  # share of earlier observations of a bucket that remains with each new one: about the last 50 count
FIRST_TRIALS = 4.0  # weight of the initial rate in observations: a few observations outweigh it
SEQUENCE_TRIALS = 3.0  # weight of the general rate in observations of one sequence, whose text may differ
RECOVERY = 0.98  # share of observations that remains when a rejected source is considered: 100 times forget nearly all
FIRST_RATES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.9)  # initial rates by bucket


class AcceptanceRates:
    """The share of accepted tokens for each source and bucket, as a running mean.

    The mean starts at the rates from `general`, or at initial rates if `general` is None.
    """

    def __init__(self, general: AcceptanceRates | None = None) -> None:
        self._general = general
        self._counts: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])  # accepted, seen

    def of(self, source: str, bucket: int) -> float:
        """Return the probability that a token in this bucket is accepted if all earlier draft tokens are accepted."""
        accepted, seen = self._counts.get((source, bucket), (0.0, 0.0))
        if self._general is None:
            initial = FIRST_RATES[min(bucket, len(FIRST_RATES) - 1)]
            return (accepted + initial * FIRST_TRIALS) / (seen + FIRST_TRIALS)
        return (accepted + self._general.of(source, bucket) * SEQUENCE_TRIALS) / (seen + SEQUENCE_TRIALS)

    def of_draft(self, draft: DraftTokens) -> list[float]:
        """Return the acceptance probability of each token in a draft."""
        rates = {bucket: self.of(draft.source, bucket) for bucket in set(draft.buckets)}
        return [rates[bucket] for bucket in draft.buckets]

    def observe(self, draft: DraftTokens, tokens: Seq[int]) -> None:
        """Update the rates with the tokens that continued the sequence, even if the draft was not decoded."""
        for drafted, bucket, token in zip(draft.tokens, draft.buckets, tokens, strict=False):
            self._count(draft.source, bucket, is_accepted=drafted == token)
            if drafted != token:
                break

    def _count(self, source: str, bucket: int, *, is_accepted: bool) -> None:
        counts = self._counts[source, bucket]
        counts[0] = counts[0] * FADING + is_accepted
        counts[1] = counts[1] * FADING + 1.0
        if self._general is not None:
            self._general._count(source, bucket, is_accepted=is_accepted)

    def recover(self, source: str, bucket: int) -> None:
        """Reduce the weight of observations, so a source with a low rate is eventually retried."""
        counts = self._counts[source, bucket]
        counts[0], counts[1] = counts[0] * RECOVERY, counts[1] * RECOVERY
