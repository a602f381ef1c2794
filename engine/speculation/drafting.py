"""Decide which drafts a step decodes, and record which of their tokens are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass

from cellama.config.logging import event_logger
from cellama.engine.backend import Chunk
from cellama.engine.kvcache.manager import KvCache
from cellama.engine.options import EngineOptions
from cellama.engine.scheduling.decode_costs import DecodeCosts
from cellama.engine.scheduling.sequence import Sequence, SlotWork
from cellama.engine.scheduling.slot_layout import SlotLayout
from cellama.engine.scheduling.strategies import BULK_STEP_S, GAP_STRETCH, MIXED_STEP_S
from cellama.engine.snapshots import SourceDrafts

from .draft_model import ANY_BUCKET, NAME, SURE_RATE, DraftModel
from .gate import MAX_DRAFTS, Candidate, Gate
from .sources import AcceptanceRates, DraftTokens, Follower, ForcedText, Index, Pool, Pools, Source

log = event_logger(__name__)


@dataclass(slots=True)
class DraftedSequence:
    """The drafting state of one sequence."""

    sources: list[Source]
    rates: AcceptanceRates
    pool: Pool | None
    num_tokens: int = -1  # number of tokens of the sequence when its draft was made
    draft: DraftTokens | None = None  # the last draft, even if it was not decoded
    max_drafts: int = 0
    num_unverified: int = 0  # positions in the slot beyond the recorded ones


@dataclass(slots=True)
class StepAccount:
    """The result of a step whose drafts were planned by the gate."""

    num_tokens: int = 0  # tokens of the step; 0 if it had no drafts
    seconds: float = 0.0


class Drafting:
    """Owns the drafts of all sequences. Only the engine thread may use it.

    begin_step ─► take_checks, plan_calls ─► decode ─► begin_verifying ─► (sample, accept)* ─► end_verifying
    """

    def __init__(
        self,
        cache: KvCache,
        layout: SlotLayout,
        costs: DecodeCosts,
        options: EngineOptions,
        model: DraftModel | None = None,
    ) -> None:
        """Manage an engine's drafts.

        The options enable drafts, and limit the number of rows with logits in a decode call.
        """
        self._costs = costs
        self.gate = Gate(costs, options.logit_rows, unified=cache.memory.unified)
        self.counts: dict[str, SourceDrafts] = {}  # totals by source
        self._cache = cache
        self._layout = layout
        self._max_rows = options.logit_rows
        self._can_truncate = cache.memory.partial_reuse
        self.is_active = self._can_truncate and options.speculation != "off"
        self._rates = AcceptanceRates()
        self._pools = Pools()
        self._drafted: dict[Sequence, DraftedSequence] = {}
        self._step: StepAccount | None = None  # a step that the gate has planned; None for other steps
        self._model = model

    # Before a decode call

    def begin_step(self) -> None:
        """Record the result of the previous step if the step decoded drafts."""
        if self._step is not None and self._step.num_tokens and self._step.seconds:
            self.gate.account(self._step.num_tokens, self._step.seconds)
        self._step = None

    def take_checks(self, works: list[SlotWork]) -> tuple[list[SlotWork], list[SlotWork]]:
        """Return the work of requests that only check candidate tokens (Engine.verify), and the remaining work.

        The candidates are added to the work as drafts. These drafts are decoded regardless of their cost, because
        checking candidates is the purpose of these requests.
        """
        candidates = [work for work in works if work.sequence.request.only_checks]
        if not candidates:
            return [], works
        checks = {work.sequence: check for work in candidates if (check := self._with_candidates(work, len(works)))}
        if checks:
            works = [work for work in works if work.sequence not in checks]
        return list(checks.values()), works

    def _with_candidates(self, work: SlotWork, num_works: int) -> SlotWork | None:
        sequence, chunk = work
        request, memory = sequence.request, self._cache.memory
        if not (chunk.decode and self._can_truncate):
            return None
        limit = min(self._max_rows - 1, self._max_drafts(sequence))
        if memory.unified:
            limit = min(limit, self._cache.cells.free - num_works)
        tokens = list(request.prediction[sequence.num_output : sequence.num_output + max(0, limit)])
        if not tokens:
            return None
        drafted = self._drafted.setdefault(sequence, DraftedSequence([], AcceptanceRates(self._rates), None))
        drafted.num_tokens, drafted.draft = len(sequence.tokens), DraftTokens("prediction", tokens, [])
        return SlotWork(sequence, chunk._replace(tokens=[*chunk.tokens, *tokens], num_drafts=len(tokens)))

    def _max_drafts(self, sequence: Sequence) -> int:
        """Return how many draft tokens fit into a sequence's slot and output, or 0 if the slot can't be truncated."""
        memory, slot = self._cache.memory, sequence.slot
        assert slot is not None
        if memory.first_cut(slot) > sequence.num_computed:
            return 0
        return min(memory.ctx_per_slot - len(sequence.tokens), sequence.request.max_tokens - sequence.num_output - 1)

    def plan_calls(self, works: list[SlotWork]) -> list[list[SlotWork]]:
        """Plan the decode calls for single-token work, and add drafts if they pay off."""
        if len(works) > self._max_rows:
            return [works]
        try:
            return self._calls_with_drafts(works)
        except Exception:  # the boundary between drafts and requests, which continue without drafts
            log.exception("drafting failed", detail="speculation is disabled until the model is loaded again")
            self.is_active = False
            return [works]

    def _calls_with_drafts(self, works: list[SlotWork]) -> list[list[SlotWork]]:
        self._step = StepAccount()
        if not self.gate.begin_step(len(works)):
            return [works]
        for work in works:
            self._ask_sources(work.sequence)
        if self._model is None and not any(self._drafted[work.sequence].draft for work in works):
            self.gate.skip()
            return [works]
        max_s = self._max_step_s(works)
        if self._model is None:
            lengths = self.gate.choose([self._candidate(work) for work in works], max_s)
        else:
            lengths = self._choose_with_model(self._model, works, max_s)
        if not lengths or not self._fit(works, lengths):
            return [works]
        self._step.num_tokens = len(works)
        with_drafts = [self._with_draft(work, lengths.get(work.chunk.slot, 0)) for work in works]
        if self._cache.memory.unified:
            return [with_drafts]
        parts = [
            [w for w in with_drafts if len(w.chunk.tokens) > 1],
            [w for w in with_drafts if len(w.chunk.tokens) == 1],
        ]
        return [part for part in parts if part]

    def _max_step_s(self, works: Seq[SlotWork]) -> float:
        """Return the maximum expected duration of a decode call with drafts, in seconds."""
        requests = [work.sequence.request for work in works]
        if len(requests) > 1 and any(request.is_protected for request in requests):
            return GAP_STRETCH * self._costs.expected(1)  # the drafts of one request would lengthen the gaps of others
        return MIXED_STEP_S if any(request.is_interactive for request in requests) else BULK_STEP_S

    def _ask_sources(self, sequence: Sequence) -> None:
        """Store the draft from the source with the highest acceptance rate for the first token."""
        drafted = self._drafted.get(sequence) or self._begin(sequence)
        drafted.num_tokens, drafted.draft = len(sequence.tokens), None
        drafted.max_drafts = max(0, min(MAX_DRAFTS, self._max_drafts(sequence)))
        if drafted.max_drafts:
            drafts = [draft for source in drafted.sources if (draft := source.draft(drafted.max_drafts)) is not None]
            best = max(drafts, key=lambda draft: drafted.rates.of(draft.source, draft.buckets[0]), default=None)
            drafted.draft = best

    def _begin(self, sequence: Sequence) -> DraftedSequence:
        sources: list[Source] = []
        if sequence.request.sampling.is_constrained:
            sources.append(ForcedText(sequence))
        # The prediction is limited, because its index takes memory.
        if prediction := sequence.request.prediction[: self._cache.memory.ctx_per_slot]:
            expected = Follower("prediction", Index(list(prediction)), sequence.tokens)
            if sequence.tokens[sequence.num_prompt :] == list(prediction[: sequence.num_output]):
                expected.expect(sequence.num_output)
            sources.append(expected)
        sources.append(Follower("prompt", Index(sequence.tokens), sequence.tokens))
        pool = None
        if sequence.request.cache_prompt:
            pool = self._pools.of(sequence.scope)
            sources.append(Follower("pool", pool.index, sequence.tokens))
        drafted = self._drafted[sequence] = DraftedSequence(sources, AcceptanceRates(self._rates), pool)
        return drafted

    def _candidate(self, work: SlotWork) -> Candidate:
        """Return a candidate that represents a slot and its current draft."""
        drafted, slot = self._drafted[work.sequence], work.chunk.slot
        rates = [] if drafted.draft is None else drafted.rates.of_draft(drafted.draft)
        memory = self._cache.memory
        can_pad = not memory.unified and memory.first_cut(slot) <= work.sequence.num_computed
        return Candidate(slot, rates, can_pad=can_pad)

    def _choose_with_model(self, model: DraftModel, works: Seq[SlotWork], max_s: float) -> Mapping[int, int]:
        """Let the draft model make the drafts that the gate chooses.

        Return the number of draft tokens to decode, keyed by slot.
        """
        model.begin_step()
        candidates = [self._offer_of_model(model, work) for work in works]
        lengths = self.gate.choose(candidates, max_s, model.seconds)
        offered = {candidate.slot for candidate in candidates if candidate.is_made}
        chosen = [work.sequence for work in works if work.chunk.slot in offered & lengths.keys()]
        if not chosen:
            if offered:
                sequences = [work.sequence for work in works if work.chunk.slot in offered]
                model.refuse([self._rates, *(self._drafted[sequence].rates for sequence in sequences)])
            return lengths
        rates = {sequence: self._drafted[sequence].rates for sequence in chosen}
        drafts, seconds = model.draft(rates, max(lengths.values()))
        for sequence, draft in drafts.items():
            drafted = self._drafted[sequence]
            tokens, buckets = draft.tokens[: drafted.max_drafts], draft.buckets[: drafted.max_drafts]
            drafted.draft = draft._replace(tokens=tokens, buckets=buckets)
        self._step = StepAccount(len(works), seconds)  # the time is spent, even if nothing is decoded now
        return self.gate.fit([self._candidate(work) for work in works], max_s - seconds)

    def _offer_of_model(self, model: DraftModel, work: SlotWork) -> Candidate:
        """Return a candidate for the current draft if it is good enough, or else for a draft from the draft model."""
        candidate, drafted = self._candidate(work), self._drafted[work.sequence]
        likely = drafted.rates.of(NAME, ANY_BUCKET)
        is_good = bool(candidate.rates) and candidate.rates[0] >= min(likely, SURE_RATE)
        if is_good or not drafted.max_drafts or not model.is_considered:
            return candidate
        expected_tokens = max(1.0, self._layout.expected_steps(work.sequence))
        return model.offer(candidate.slot, work.sequence, drafted.rates, drafted.max_drafts, expected_tokens)

    def _fit(self, works: Seq[SlotWork], lengths: Mapping[int, int]) -> bool:
        """Return True if there are enough free cells for all drafts."""
        memory = self._cache.memory
        if memory.unified:
            return self._cache.cells.free >= len(works) + sum(lengths.values())
        return all(self._cache.cells.of(slot) + 1 + length <= memory.ctx_per_slot for slot, length in lengths.items())

    def _with_draft(self, work: SlotWork, length: int) -> SlotWork:
        """Return the work with its draft, padded to `length`. All slots in a pass need the same number of rows."""
        sequence, chunk = work
        if not length:
            return work
        draft = self._drafted[sequence].draft
        tokens = [] if draft is None else draft.tokens[:length]
        padding = [(tokens or chunk.tokens)[-1]] * (length - len(tokens))
        return SlotWork(sequence, chunk._replace(tokens=[*chunk.tokens, *tokens, *padding], num_drafts=len(tokens)))

    # After a decode call

    def observe(self, chunks: Seq[Chunk], seconds: float) -> None:
        """Record the duration of a decode call, which may include draft tokens."""
        if not self.is_active or not all(chunk.decode for chunk in chunks):
            return
        if self._step is not None:
            self._step.seconds += seconds
        self.gate.observe(seconds)

    def begin_verifying(self, work: SlotWork) -> None:
        """Start verifying a decoded chunk, whose first token is recorded and is followed by drafts in the slot."""
        sequence, chunk = work
        if (drafted := self._drafted.get(sequence)) is None:
            return
        drafted.num_unverified = len(chunk.tokens) - 1
        if chunk.num_drafts and drafted.draft is not None:
            sequence.num_drafted += chunk.num_drafts
            self._count(drafted.draft.source, drafted=chunk.num_drafts, drafts=1)

    def _count(self, source: str, *, drafted: int = 0, accepted: int = 0, drafts: int = 0) -> None:
        """Update a source's counts in a new dictionary, because other threads may be reading the current dictionary."""
        before = self.counts.get(source, SourceDrafts(0, 0, 0))
        now = SourceDrafts(before.drafted + drafted, before.accepted + accepted, before.drafts + drafts)
        self.counts = {**self.counts, source: now}

    def accept(self, sequence: Sequence) -> None:
        """Record that the model has sampled the next draft token."""
        drafted = self._drafted[sequence]
        assert sequence.slot is not None
        assert drafted.draft is not None
        if self._step is not None:
            self._step.num_tokens += 1
        drafted.num_unverified -= 1
        sequence.num_computed += 1
        sequence.num_accepted += 1
        self._count(drafted.draft.source, accepted=1)
        self._cache.extend(sequence.slot, 1)

    def end_verifying(self, sequence: Sequence) -> None:
        """Truncate the slot to its recorded positions, and update the acceptance rates with the sampled tokens."""
        if (drafted := self._drafted.get(sequence)) is None:
            return
        if drafted.num_unverified and sequence.slot is not None:
            drafted.num_unverified = 0
            sequence.truncate(self._cache.truncate(sequence.slot, sequence.num_computed))
        if (draft := drafted.draft) is not None:
            tokens = sequence.tokens[drafted.num_tokens :]
            drafted.rates.observe(draft, tokens)
            if draft.source == NAME:
                drafted.rates.observe(draft._replace(buckets=[ANY_BUCKET] * len(draft.tokens)), tokens)
            drafted.draft = None

    def end(self, sequence: Sequence) -> None:
        """Stop drafting for a sequence. The sequence must still have its slot."""
        if sequence in self._drafted:
            self.end_verifying(sequence)
            pool = self._drafted.pop(sequence).pool
            if pool is not None and sequence.num_output:
                pool.add(sequence.tokens[sequence.num_prompt :])
            if self._model is not None:
                self._model.end(sequence)

    def forget_idle(self) -> None:
        """Release the states that the draft model has kept for finished requests.

        The pools of recent outputs are kept.
        """
        if self._model is not None:
            self._model.forget_idle()
