"""Make drafts with a small model that has the large model's vocabulary and follows the large model's sequences.

For each seed, position and token, the draft model uses the same random number as the large model
(`sampling/sampler.py`). Therefore, if both models have similar probabilities, they sample the same token at any
temperature.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cellama.config.logging import event_logger
from cellama.engine.backend import Backend, Chunk, DecodeError, Sampler
from cellama.engine.errors import ModelLoadFailed
from cellama.engine.request import SamplingParams
from cellama.engine.scheduling.decode_costs import DecodeCosts
from cellama.engine.scheduling.sequence import Sequence

from .gate import Candidate
from .sources import AcceptanceRates, DraftTokens

log = event_logger(__name__)

NAME = "model"
BUCKETS = 8  # ranges of the probability of a token
ANY_BUCKET = BUCKETS  # bucket of all tokens together, for estimates before a draft is made
MIN_REACH = 0.25  # probability that a whole draft is accepted; below it, the draft is not extended
SURE_RATE = 0.8  # acceptance rate of another source's first token that the draft model can hardly exceed
READ_S = 0.05  # seconds of a step for prefilling unread tokens: a gap that readers hardly notice
MIN_READ = 32  # minimum number of tokens to prefill in a step: fewer take about as long
NUM_MEASURED = 4  # measured passes of one slot and of all slots after a load; the first of each is discarded
REST_STEPS = 16  # steps without the draft model after it did not pay off, because considering it takes time
MAX_FAILURES = 3  # consecutive failed decode calls after which the draft model is disabled
WEIGHT = 0.2  # weight of a new value in a running mean: about the last ten count
MAX_PLANS = 64  # cached sampling plans: requests usually have few different sampling parameters


@dataclass(slots=True, eq=False)
class DraftSlot:
    """A slot of the draft model, and the sequence that the slot follows."""

    index: int
    tokens: list[int] = field(default_factory=list)  # tokens in its cells
    sequence: Sequence | None = None
    scope: Hashable = None  # scope of the current or last sequence
    last_used: int = 0  # sequence number of the last use


class DraftModel:
    """Makes drafts with a separate backend. Only the engine thread may use it."""

    def __init__(self, backend: Backend, pass_tokens: int) -> None:
        """Create a draft model with as many slots as the large model, and passes of at most `pass_tokens` tokens.

        The constructor measures some passes, so their durations are known before the first request. Raises
        ModelLoadFailed if the model can't decode.
        """
        self.backend = backend
        self._pass_tokens = pass_tokens
        self._slots = [DraftSlot(index) for index in range(backend.n_slots)]
        self._slot_of: dict[Sequence, DraftSlot] = {}
        self._costs = DecodeCosts()  # costs of passes with one token per slot
        self._token_s = 0.0  # duration of prefilling one token, in seconds
        self._num_rest = 0  # steps for which the model is not considered
        self._num_failures = 0  # consecutive failures
        self._num_uses = 0
        self._plans: dict[SamplingParams, Any] = {}
        try:
            self._measure()
        except DecodeError as error:
            raise ModelLoadFailed(
                f"the draft model can't decode: {error}; remove the draft option, or choose another model"
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
        self.backend.rest()  # this thread, which loads the model, makes no more decode calls

    # Whether to use it

    def begin_step(self) -> None:
        """Count down the steps for which the draft model is paused.

        Call this method in each step that may use drafts.
        """
        self._num_rest -= 1

    @property
    def is_considered(self) -> bool:
        """True if the model may draft.

        The model pauses if drafts did not pay off, and stops after repeated failures.
        """
        return self._num_rest <= 0 and self._num_failures < MAX_FAILURES

    def offer(
        self, slot: int, sequence: Sequence, rates: AcceptanceRates, max_tokens: int, expected_tokens: float
    ) -> Candidate:
        """Start following a sequence, and return a candidate for a draft that the model could make.

        The sequence is expected to generate `expected_tokens` more tokens.
        """
        num_read = len(self._follow(sequence).tokens)
        return Candidate(
            slot,
            [rates.of(NAME, ANY_BUCKET)] * max_tokens,
            is_made=True,
            reading_s=self._token_s * (len(sequence.tokens) - num_read),
            expected_tokens=expected_tokens,
        )

    def seconds(self, num_slots: int, length: int) -> float:
        """Return the expected time in seconds for making drafts of `length` tokens, excluding the prefill."""
        return length * self._costs.expected(num_slots) if num_slots else 0.0

    def refuse(self, rates: list[AcceptanceRates]) -> None:
        """Disable the model for some steps, because its drafts don't pay off at these acceptance rates."""
        self._num_rest = REST_STEPS
        for each in rates:
            each.recover(NAME, ANY_BUCKET)

    # Drafts

    def draft(
        self, sequences: Mapping[Sequence, AcceptanceRates], length: int
    ) -> tuple[dict[Sequence, DraftTokens], float]:
        """Return drafts of at most `length` likely tokens, and the time in seconds spent making the drafts.

        If the draft model must first prefill many tokens of a sequence, the prefill takes several calls, and the
        sequence gets a draft afterwards. The returned time doesn't include this prefill.
        """
        try:
            made = self._draft(sequences, length)
        except DecodeError as error:
            self._num_failures += 1
            is_last = self._num_failures >= MAX_FAILURES
            detail = "the draft model is disabled until its model is loaded again" if is_last else ""
            log.warning("draft model failed", error=str(error), num_failures=self._num_failures, detail=detail)
            return {}, 0.0
        self._num_failures = 0
        return made

    def _draft(
        self, sequences: Mapping[Sequence, AcceptanceRates], length: int
    ) -> tuple[dict[Sequence, DraftTokens], float]:
        started = time.monotonic()
        ready, reading_s = self._read([s for s in sequences if len(s.tokens) < self.backend.ctx_per_slot], length)
        drafts = {sequence: DraftTokens(NAME, [], []) for sequence in ready}
        samplers = {sequence: self._sampler(sequence) for sequence in ready}
        reach = dict.fromkeys(ready, 1.0)
        growing = ready
        for number in range(length):
            if number:
                self._read_last_tokens({sequence: drafts[sequence] for sequence in growing})
            growing = [sequence for sequence in growing if self._grow(sequence, samplers[sequence], drafts[sequence])]
            for sequence in growing:
                reach[sequence] *= sequences[sequence].of(NAME, drafts[sequence].buckets[-1])
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
        """Add a token to a draft. Return False if no more tokens can be added."""
        slot = self._slot_of[sequence]
        token, report = sampler.sample(slot.index)
        if self.backend.vocabulary.is_end(token):
            return False
        probability = 1.0 if report is None else math.exp(min(0.0, report.logprob))
        draft.tokens.append(token)
        draft.buckets.append(min(BUCKETS - 1, int(probability * BUCKETS)))
        return len(slot.tokens) + 1 < self.backend.ctx_per_slot

    def _read(self, sequences: list[Sequence], length: int) -> tuple[list[Sequence], float]:
        """Prefill tokens that the draft model has not processed yet.

        Return the sequences that are fully prefilled. Also return the prefill time in seconds, or 0 if there were only
        a few tokens to prefill.
        """
        remaining = min(max(MIN_READ, len(sequences), int(READ_S / max(self._token_s, 1e-6))), self._pass_tokens)
        chunks: dict[Sequence, Chunk] = {}
        unread = {sequence: len(sequence.tokens) - len(self._follow(sequence).tokens) for sequence in sequences}
        for sequence in sorted(sequences, key=unread.__getitem__):
            slot = self._slot_of[sequence]
            first = len(slot.tokens)
            tokens = sequence.tokens[first : first + remaining]
            if tokens and max(tokens) < self.backend.n_vocab:  # the draft model may have a smaller vocabulary
                remaining -= len(tokens)
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
        self._costs.observe([len(chunks)], seconds)  # one or two tokens each, generated since the last draft
        return ready, 0.0

    def _decode(self, chunks: list[Chunk]) -> float:
        """Decode chunks, and return the duration in seconds. After an error, all slots are empty."""
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
        """Return a copy of the sequence's sampler without the processors that depend on earlier tokens."""
        params = sequence.request.sampling
        names = (
            *("temperature", "dynatemp_range", "dynatemp_exponent", "top_n_sigma", "top_k", "top_p", "min_p"),
            *("typical_p", "min_tokens", "stop_token_ids"),
        )
        plain = replace(SamplingParams(logprobs=0), **{name: getattr(params, name) for name in names})
        if plain not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[plain] = self.backend.prepare(plain)
        return self.backend.new_sampler(
            self._plans[plain],
            sequence.seed,
            (),
            ban_end=sequence.request.ignore_eos,
            num_sampled=sequence.num_output,
        )

    # Slots

    def _follow(self, sequence: Sequence) -> DraftSlot:
        """Return the slot of a sequence.

        The slot contains only leading tokens of the sequence, and never the sequence's last token.
        """
        slot = self._slot_of.get(sequence) or self._assign(sequence)
        num_shared = _num_shared(slot.tokens, sequence.tokens)
        if num_shared < len(slot.tokens):
            self._cut(slot, num_shared)
        return slot

    def _assign(self, sequence: Sequence) -> DraftSlot:
        """Assign the slot with the longest common prefix, or else the least recently used slot, to a sequence.

        If no slot is free, take the slot of a sequence that is waiting for a slot in the large model.
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
        """Release the slot of a finished sequence. A reusable state is kept for requests that continue the sequence."""
        if (slot := self._slot_of.pop(sequence, None)) is None:
            return
        self._num_uses += 1
        slot.sequence, slot.last_used = None, self._num_uses
        if not (sequence.request.cache_prompt and sequence.is_reusable):
            self._cut(slot, 0)

    def forget_idle(self) -> None:
        """Empty the slots that don't follow a sequence."""
        for slot in self._slots:
            if slot.sequence is None:
                self._cut(slot, 0)

    def _forget(self) -> None:
        for slot in self._slots:
            self._cut(slot, 0)


def _num_shared(held: list[int], tokens: list[int]) -> int:
    """Return how many of the slot's tokens match the start of a sequence, excluding the sequence's last token."""
    limit = min(len(held), len(tokens) - 1)
    if held[:limit] == tokens[:limit]:
        return limit
    return next(index for index in range(limit) if held[index] != tokens[index])
