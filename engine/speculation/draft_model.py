"""Drafts of a small model with the same vocabulary, in slots of its own, which follow the sequences.

It draws as the large model does, with the same numbers for seed, place and token (`sampling/draws.py`): where the two
think alike they draw alike, at any temperature.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cellama.engine.backend import Backend, Chunk, DecodeError, Sampler
from cellama.engine.errors import ModelLoadFailed
from cellama.engine.sampling_params import SamplingParams
from cellama.engine.scheduling.sequence import Sequence

from .curve import Curve
from .odds import Odds
from .sources import Draft

NAME = "model"
MARKS = 8  # by the probability that it gives a token
ANY_MARK = MARKS  # of all its tokens, whatever their marks: what is known before it is asked
LEAST_REACH = 0.25  # the odds that all of a draft is right, below which it is not made longer
READ_S, LEAST_READ = 0.05, 32  # what it reads of prompts in a step, in all: seconds, and tokens at least
NUM_MEASURED = 4  # passes of a token, of one slot and of all, at the beginning
PARDON = 0.998  # of what it is believed to take, with each look at it that it is not asked after
WEIGHT = 0.2  # of a new value in a running mean
MOST_PLANS = 64  # of samplers that are kept


@dataclass(slots=True, eq=False)
class Place:
    """A slot of the small model, and whose tokens it holds."""

    slot: int
    tokens: list[int] = field(default_factory=list)  # in its cells
    num_agreed: int = 0  # of these, the first ones that are known to be its sequence's
    sequence: Sequence | None = None
    scope: Hashable = None  # of the sequence that it holds, or held last
    used: int = 0  # the larger, the later


class Made(NamedTuple):
    """What came of a call."""

    drafts: dict[Sequence, Draft]  # of those whose tokens are read
    seconds: float  # that making them took
    reading_s: dict[Sequence, float]  # what reading tokens of theirs took before


class DraftModel:
    """A backend that guesses for another one. Engine thread only."""

    def __init__(self, backend: Backend, pass_tokens: int) -> None:
        """It has as many slots as the one that it guesses for; a pass of it has at most `pass_tokens`.

        Some are computed here, so that it is known what they take before a request waits for one. Raises
        ModelLoadFailed.
        """
        self.backend = backend
        self._pass_tokens = pass_tokens
        self._places = [Place(slot) for slot in range(backend.n_slots)]
        self._place_of: dict[Sequence, Place] = {}
        self._curve = Curve()  # of passes with a token of each slot
        self._token_s = 0.0  # that reading a token takes
        self._mercy = 1.0
        self._num_uses = 0
        self._plans: dict[SamplingParams, Any] = {}
        try:
            self._measure()
        except DecodeError as error:
            raise ModelLoadFailed(
                f"the draft model can't decode: {error}; leave out draft, or choose another"
            ) from None

    def _measure(self) -> None:
        place, most = self._places[0], min(LEAST_READ, self._pass_tokens, self.backend.ctx_per_slot // 2)
        for _ in range(2):  # the first pass of a context says nothing of those to come
            self._cut(place, 0)
            self._token_s = self._decode([Chunk(0, 0, [0] * most, True)]) / most
        for places in (self._places[:1], self._places):
            for number in range(min(NUM_MEASURED, self.backend.ctx_per_slot // 4)):
                seconds = self._decode([Chunk(place.slot, len(place.tokens), [0], True, True) for place in places])
                if number:
                    self._curve.observe(len(places), seconds)
        self.forget()
        self.backend.rest()  # the thread that loads computes no more

    # What it would take

    def seconds(self, num_slots: int, length: int) -> float:
        """What drafts of so many tokens for so many slots take, without what has to be read before."""
        return self._mercy * length * self._curve.expected(num_slots) if num_slots else 0.0

    def reading_s(self, sequence: Sequence) -> float:
        """What it takes to read all that it has not yet read of a sequence."""
        place = self._follow(sequence)
        return self._mercy * self._token_s * (len(sequence.tokens) - len(place.tokens))

    def pardon(self) -> None:
        """It was looked at, and not asked: what it was seen to take may be wrong."""
        self._mercy *= PARDON

    # Drafts

    def draft(self, asked: Mapping[Sequence, Odds], most: int) -> Made:
        """Up to `most` tokens for each sequence, as long as its odds are good.

        What is long is read over several calls, and then drafted from. Raises DecodeError; then nothing is held.
        """
        self._mercy = 1.0
        started = time.monotonic()
        ready, reading_s = self._read([s for s in asked if len(s.tokens) < self.backend.ctx_per_slot], most)
        drafts = {sequence: Draft(NAME, [], []) for sequence in ready}
        samplers = {sequence: self._sampler(sequence) for sequence in ready}
        reach = dict.fromkeys(ready, 1.0)
        growing = ready
        for number in range(most):
            if number:
                self._read_drafts(growing, drafts)
            growing = [sequence for sequence in growing if self._grow(sequence, samplers[sequence], drafts[sequence])]
            for sequence in growing:
                reach[sequence] *= asked[sequence].of(NAME, drafts[sequence].marks[-1])
            growing = [sequence for sequence in growing if reach[sequence] >= LEAST_REACH]
            if not growing:
                break
        seconds = time.monotonic() - started - sum(reading_s.values())
        return Made({sequence: draft for sequence, draft in drafts.items() if draft.tokens}, seconds, reading_s)

    def _read_drafts(self, growing: list[Sequence], drafts: Mapping[Sequence, Draft]) -> None:
        """Reads the last token of each draft."""
        chunks = []
        for sequence in growing:
            place = self._place_of[sequence]
            chunks.append(Chunk(place.slot, len(place.tokens), [drafts[sequence].tokens[-1]], True, True))
        self._curve.observe(len(chunks), self._decode(chunks))

    def _grow(self, sequence: Sequence, sampler: Sampler, draft: Draft) -> bool:
        """Adds a token to a draft; False if none can follow it."""
        place = self._place_of[sequence]
        token, report = sampler.sample(place.slot)
        if self.backend.vocabulary.is_end(token):
            return False
        probability = 1.0 if report is None else math.exp(min(0.0, report.logprob))
        draft.tokens.append(token)
        draft.marks.append(min(MARKS - 1, int(probability * MARKS)))
        return len(place.tokens) + 1 < self.backend.ctx_per_slot

    def _read(self, asked: list[Sequence], most: int) -> tuple[list[Sequence], dict[Sequence, float]]:
        """Brings slots to where their sequences are; those that are there now, and the seconds of what was long."""
        left = min(max(LEAST_READ, len(asked), int(READ_S / max(self._token_s, 1e-6))), self._pass_tokens)
        parts: dict[Sequence, Chunk] = {}
        missing = {sequence: len(sequence.tokens) - len(self._follow(sequence).tokens) for sequence in asked}
        free = self._num_free(sum(missing.values()) + most * len(asked))
        for sequence in sorted(asked, key=missing.__getitem__):
            place = self._place_of[sequence]
            first = len(place.tokens)
            tokens = sequence.tokens[first : first + left]
            if tokens and len(tokens) + most <= free and max(tokens) < self.backend.n_vocab:  # some have fewer
                left -= len(tokens)
                free -= len(tokens) + most
                parts[sequence] = Chunk(place.slot, first, tokens, first + len(tokens) == len(sequence.tokens))
        seconds = self._decode(list(parts.values())) if parts else 0.0
        num_tokens = sum([len(part.tokens) for part in parts.values()])
        if num_tokens >= LEAST_READ:
            self._token_s += (seconds / num_tokens - self._token_s) * WEIGHT
        elif 0 < num_tokens <= 2 * len(parts):  # what was decided since the last draft
            self._curve.observe(len(parts), seconds)
        long = {sequence for sequence, part in parts.items() if len(part.tokens) > 2}
        spent = {sequence: seconds * len(parts[sequence].tokens) / num_tokens for sequence in long}
        return [sequence for sequence, part in parts.items() if part.samples], spent

    def _decode(self, chunks: list[Chunk]) -> float:
        """Fills the slots; returns the seconds that it took."""
        began = time.monotonic()
        try:
            self.backend.decode(sorted(chunks))
        except Exception:
            self.forget()
            raise
        for chunk in chunks:
            self._places[chunk.slot].tokens += chunk.tokens
        return time.monotonic() - began

    def _sampler(self, sequence: Sequence) -> Sampler:
        """One that draws as the sequence's own, but for what depends on the tokens before, and tells probabilities."""
        params = sequence.request.sampling
        kept = ("temperature", "top_k", "top_p", "min_p", "typical_p")
        plain = replace(SamplingParams(logprobs=0), **{name: getattr(params, name) for name in kept})
        if plain not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[plain] = self.backend.prepare(plain)
        ban_end, place = sequence.request.ignore_eos, sequence.num_output
        return self.backend.new_sampler(self._plans[plain], sequence.seed, (), ban_end=ban_end, num_sampled=place)

    # Its slots

    def _follow(self, sequence: Sequence) -> Place:
        """The place of a sequence, which holds nothing but its first tokens, without the last one."""
        place = self._place_of.get(sequence) or self._take(sequence)
        held, tokens = place.tokens, sequence.tokens
        at, most = place.num_agreed, min(len(held), len(tokens) - 1)
        while at < most and held[at] == tokens[at]:
            at += 1
        place.num_agreed = at
        if at < len(held):
            self._cut(place, at)
        return place

    def _cut(self, place: Place, length: int) -> None:
        length = length if self.backend.trim(place.slot, length) else 0
        del place.tokens[length:]
        place.num_agreed = min(place.num_agreed, length)

    def _num_free(self, wanted: int) -> int:
        """Free cells; where they are fewer than wanted, those of sequences that have ended are given up."""
        free = self.backend.n_cells - sum([len(place.tokens) for place in self._places])
        if free >= wanted:
            return free
        self.forget_idle()
        return self.backend.n_cells - sum([len(place.tokens) for place in self._places])

    def _take(self, sequence: Sequence) -> Place:
        """A place for a sequence: one whose tokens it begins with, else the one that is longest unused.

        Those that wait for a slot of the large model have to give theirs up where no other one is free.
        """
        free = [place for place in self._places if place.sequence is None]
        if not free:
            free = [place for place in self._places if place.sequence is not None and place.sequence.slot is None]
        scope = sequence.scope
        shared = {place.slot: _shared(place, sequence) if place.scope == scope else 0 for place in free}
        place = max(free, key=lambda place: (shared[place.slot], not place.tokens, -place.used))
        if place.sequence is not None:
            del self._place_of[place.sequence]
        place.num_agreed = shared[place.slot]
        self._cut(place, place.num_agreed)
        place.sequence, place.scope = sequence, scope
        self._place_of[sequence] = place
        return place

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended. What is worth keeping stays for one that goes on from there."""
        if (place := self._place_of.pop(sequence, None)) is None:
            return
        self._num_uses += 1
        place.sequence, place.used = None, self._num_uses
        if not (sequence.request.cache_prompt and sequence.is_worth_keeping):
            self._cut(place, 0)
            place.scope = None

    def forget(self) -> None:
        """No slot holds anything."""
        for place in self._places:
            self._cut(place, 0)

    def forget_idle(self) -> None:
        """No slot without a sequence holds anything."""
        for place in self._places:
            if place.sequence is None:
                self._cut(place, 0)


def _shared(place: Place, sequence: Sequence) -> int:
    """Tokens that a place holds and a sequence begins with, but for its last."""
    most = min(len(place.tokens), len(sequence.tokens) - 1)
    if place.tokens[:most] == sequence.tokens[:most]:
        return most
    return next(at for at in range(most) if place.tokens[at] != sequence.tokens[at])
