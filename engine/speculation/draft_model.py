"""Drafts of a small model with the same vocabulary, in slots of its own, which follow the sequences.

It draws as the large model does, with the same numbers for seed, place and token (`sampling/draws.py`), so where their
probabilities are alike they draw the same token, at any temperature.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cellama.engine.backend import Backend, Chunk, DecodeError, Sampler
from cellama.engine.errors import ModelLoadFailed
from cellama.engine.request import SamplingParams
from cellama.engine.scheduling.decode_costs import DecodeCosts
from cellama.engine.scheduling.sequence import Sequence

from .acceptance import AcceptanceRates
from .gate import Candidate
from .sources import DraftTokens

log = logging.getLogger(__name__)

NAME = "model"
BUCKETS = 8  # of the probability that it gives a token
ANY_BUCKET = BUCKETS  # of all its tokens, whatever their probability: what is known before it is asked
MIN_REACH = 0.25  # the probability that a whole draft is accepted, below which it is not made longer
SURE_RATE = 0.8  # of the first token that another source proposes: then the model could hardly do better
READ_S = 0.05  # of a step for reading what it has not read: a gap in every stream, hardly noticed
MIN_READ = 32  # tokens that it reads in a step at least: fewer take about as long
NUM_MEASURED = 4  # passes of a token, of one slot and of all slots, when it is loaded; the first of them doesn't count
REST_STEPS = 16  # for which it is not considered after it did not pay: considering it takes time, too
MAX_FAILURES = 3  # decode calls that fail one after another, after which it is not asked any more
WEIGHT = 0.2  # of a new value in a running mean: the last ten or so count
MAX_PLANS = 64  # of samplers that are kept: usually requests have few different sampling parameters


@dataclass(slots=True, eq=False)
class DraftSlot:
    """A slot of the small model, and the sequence that it follows."""

    index: int
    tokens: list[int] = field(default_factory=list)  # in its cells
    sequence: Sequence | None = None
    scope: Hashable = None  # of the sequence that it follows, or followed last
    last_used: int = 0  # larger is later


class DraftModel:
    """A backend that makes drafts for another one. Engine thread only."""

    def __init__(self, backend: Backend, pass_tokens: int) -> None:
        """It has as many slots as the backend that it makes drafts for; its passes have at most `pass_tokens`.

        Some passes are computed here, so that their time is known before a request waits for one. Raises
        ModelLoadFailed.
        """
        self.backend = backend
        self._pass_tokens = pass_tokens
        self._slots = [DraftSlot(index) for index in range(backend.n_slots)]
        self._slot_of: dict[Sequence, DraftSlot] = {}
        self._costs = DecodeCosts()  # of passes with a token of each slot
        self._token_s = 0.0  # that reading a token takes
        self._num_rest = 0  # steps for which it is not considered
        self._num_failures = 0  # one after another
        self._num_uses = 0
        self._plans: dict[SamplingParams, Any] = {}
        try:
            self._measure()
        except DecodeError as error:
            raise ModelLoadFailed(
                f"the draft model can't decode: {error}; leave out draft, or choose another"
            ) from None

    def _measure(self) -> None:
        first, num_tokens = self._slots[0], min(MIN_READ, self._pass_tokens, self.backend.ctx_per_slot // 2)
        for _ in range(2):  # the first pass of a context takes longer than later ones
            self._cut(first, 0)
            self._token_s = self._decode([Chunk(0, 0, [0] * num_tokens, True)]) / num_tokens
        for slots in (self._slots[:1], self._slots):
            for number in range(min(NUM_MEASURED, self.backend.ctx_per_slot // 4)):
                seconds = self._decode([Chunk(slot.index, len(slot.tokens), [0], True, True) for slot in slots])
                if number:
                    self._costs.observe([len(slots)], seconds)
        self._forget()
        self.backend.rest()  # the thread that loads computes no more

    # Whether to ask it

    def begin_step(self) -> None:
        """Count a step in which drafts are looked at."""
        self._num_rest -= 1

    @property
    def is_considered(self) -> bool:
        """False for a while after it did not pay, and for good after it failed."""
        return self._num_rest <= 0 and self._num_failures < MAX_FAILURES

    def offer(
        self, slot: int, sequence: Sequence, rates: AcceptanceRates, max_tokens: int, num_left: float
    ) -> Candidate:
        """Follow a sequence that has `num_left` tokens to generate, and return what the model could propose."""
        read = len(self._follow(sequence).tokens)
        return Candidate(
            slot,
            [rates.of(NAME, ANY_BUCKET)] * max_tokens,
            is_made=True,
            reading_s=self._token_s * (len(sequence.tokens) - read),
            num_left=num_left,
        )

    def seconds(self, num_slots: int, length: int) -> float:
        """Return what drafts of so many tokens for so many slots take, without what has to be read before."""
        return length * self._costs.expected(num_slots) if num_slots else 0.0

    def refuse(self, rates: list[AcceptanceRates]) -> None:
        """It does not pay for the sequences of these rates, and is considered again later, with a little more trust."""
        self._num_rest = REST_STEPS
        for each in rates:
            each.forgive(NAME, ANY_BUCKET)

    # Drafts

    def draft(
        self, asked: Mapping[Sequence, AcceptanceRates], length: int
    ) -> tuple[dict[Sequence, DraftTokens], float]:
        """Return drafts of up to so many tokens, as long as they are likely, and the seconds that making them took.

        A sequence of which much is unread is read over several calls, and has a draft after that. The time of that
        reading is not in the seconds.
        """
        try:
            made = self._draft(asked, length)
        except DecodeError as error:
            self._num_failures += 1
            is_last = self._num_failures >= MAX_FAILURES
            log.warning("the draft model can't decode (%s)%s", error, "; it is not asked any more" if is_last else "")
            return {}, 0.0
        self._num_failures = 0
        return made

    def _draft(
        self, asked: Mapping[Sequence, AcceptanceRates], length: int
    ) -> tuple[dict[Sequence, DraftTokens], float]:
        started = time.monotonic()
        ready, reading_s = self._read([s for s in asked if len(s.tokens) < self.backend.ctx_per_slot], length)
        drafts = {sequence: DraftTokens(NAME, [], []) for sequence in ready}
        samplers = {sequence: self._sampler(sequence) for sequence in ready}
        reach = dict.fromkeys(ready, 1.0)
        growing = ready
        for number in range(length):
            if number:
                self._read_last_tokens({sequence: drafts[sequence] for sequence in growing})
            growing = [sequence for sequence in growing if self._grow(sequence, samplers[sequence], drafts[sequence])]
            for sequence in growing:
                reach[sequence] *= asked[sequence].of(NAME, drafts[sequence].buckets[-1])
            growing = [sequence for sequence in growing if reach[sequence] >= MIN_REACH]
            if not growing:
                break
        made = {sequence: draft for sequence, draft in drafts.items() if draft.tokens}
        return made, time.monotonic() - started - reading_s

    def _read_last_tokens(self, drafts: Mapping[Sequence, DraftTokens]) -> None:
        chunks = []
        for sequence, draft in drafts.items():
            slot = self._slot_of[sequence]
            chunks.append(Chunk(slot.index, len(slot.tokens), draft.tokens[-1:], True, True))
        self._costs.observe([len(chunks)], self._decode(chunks))

    def _grow(self, sequence: Sequence, sampler: Sampler, draft: DraftTokens) -> bool:
        """Add a token to a draft; False if none can follow it."""
        slot = self._slot_of[sequence]
        token, report = sampler.sample(slot.index)
        if self.backend.vocabulary.is_end(token):
            return False
        probability = 1.0 if report is None else math.exp(min(0.0, report.logprob))
        draft.tokens.append(token)
        draft.buckets.append(min(BUCKETS - 1, int(probability * BUCKETS)))
        return len(slot.tokens) + 1 < self.backend.ctx_per_slot

    def _read(self, asked: list[Sequence], length: int) -> tuple[list[Sequence], float]:
        """Read what is unread of sequences; return those that are at their ends now, and the seconds if it was much."""
        left = min(max(MIN_READ, len(asked), int(READ_S / max(self._token_s, 1e-6))), self._pass_tokens)
        chunks: dict[Sequence, Chunk] = {}
        unread = {sequence: len(sequence.tokens) - len(self._follow(sequence).tokens) for sequence in asked}
        for sequence in sorted(asked, key=unread.__getitem__):
            slot = self._slot_of[sequence]
            first = len(slot.tokens)
            tokens = sequence.tokens[first : first + left]
            if tokens and max(tokens) < self.backend.n_vocab:  # it may have fewer
                left -= len(tokens)
                chunks[sequence] = Chunk(slot.index, first, tokens, first + len(tokens) == len(sequence.tokens))
        if not chunks:
            return [], 0.0
        seconds = self._decode(list(chunks.values()))
        ready = [sequence for sequence, chunk in chunks.items() if chunk.samples]
        num_tokens = sum([len(chunk.tokens) for chunk in chunks.values()])
        if num_tokens >= MIN_READ:
            self._token_s += (seconds / num_tokens - self._token_s) * WEIGHT
        if num_tokens > 2 * len(chunks):
            return ready, seconds
        self._costs.observe([len(chunks)], seconds)  # one or two tokens each, that were generated since the last draft
        return ready, 0.0

    def _decode(self, chunks: list[Chunk]) -> float:
        """Decode chunks, and return the seconds that it took. After an error no slot holds anything."""
        started = time.monotonic()
        try:
            self.backend.decode(sorted(chunks))
        except Exception:
            self._forget()
            raise
        for chunk in chunks:
            self._slots[chunk.slot].tokens += chunk.tokens
        return time.monotonic() - started

    def _sampler(self, sequence: Sequence) -> Sampler:
        """Return one that draws as the sequence's own, except for what depends on earlier tokens."""
        params = sequence.request.sampling
        kept = ("temperature", "top_k", "top_p", "min_p", "typical_p")
        plain = replace(SamplingParams(logprobs=0), **{name: getattr(params, name) for name in kept})
        if plain not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[plain] = self.backend.prepare(plain)
        ban_end, place = sequence.request.ignore_eos, sequence.num_output
        return self.backend.new_sampler(self._plans[plain], sequence.seed, (), ban_end=ban_end, num_sampled=place)

    # Its slots

    def _follow(self, sequence: Sequence) -> DraftSlot:
        """Return the slot of a sequence, which holds nothing but its first tokens, without the last one."""
        slot = self._slot_of.get(sequence) or self._assign(sequence)
        num_shared = _num_shared(slot.tokens, sequence.tokens)
        if num_shared < len(slot.tokens):
            self._cut(slot, num_shared)
        return slot

    def _assign(self, sequence: Sequence) -> DraftSlot:
        """Give a sequence the slot whose tokens it begins with, else the one that is unused for longest.

        Where no slot is free, a sequence that waits for a slot of the large model loses its slot here.
        """
        free = [slot for slot in self._slots if slot.sequence is None] or [
            slot for slot in self._slots if slot.sequence is not None and slot.sequence.slot is None
        ]
        scope = sequence.scope
        shared = {slot: _num_shared(slot.tokens, sequence.tokens) if slot.scope == scope else 0 for slot in free}
        slot = max(free, key=lambda slot: (shared[slot], not slot.tokens, -slot.last_used))
        if slot.sequence is not None:
            del self._slot_of[slot.sequence]
        self._cut(slot, shared[slot])
        slot.sequence, slot.scope = sequence, scope
        self._slot_of[sequence] = slot
        return slot

    def _cut(self, slot: DraftSlot, length: int) -> None:
        del slot.tokens[length if self.backend.trim(slot.index, length) else 0 :]

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended. What is worth keeping stays for a request that continues it."""
        if (slot := self._slot_of.pop(sequence, None)) is None:
            return
        self._num_uses += 1
        slot.sequence, slot.last_used = None, self._num_uses
        if not (sequence.request.cache_prompt and sequence.is_reusable):
            self._cut(slot, 0)

    def forget_idle(self) -> None:
        """Empty the slots without a sequence."""
        for slot in self._slots:
            if slot.sequence is None:
                self._cut(slot, 0)

    def _forget(self) -> None:
        for slot in self._slots:
            self._cut(slot, 0)


def _num_shared(held: list[int], tokens: list[int]) -> int:
    """Return how many of the held tokens a sequence begins with, at most all but its last one."""
    most = min(len(held), len(tokens) - 1)
    if held[:most] == tokens[:most]:
        return most
    return next(at for at in range(most) if held[at] != tokens[at])
