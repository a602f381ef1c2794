"""Which drafts a step decodes, and what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cellama.engine.backend import Chunk
from cellama.engine.kvcache.manager import KvCache
from cellama.engine.options import EngineOptions
from cellama.engine.scheduling.bulk_policy import BESIDE_STEP_S, BULK_STEP_S
from cellama.engine.scheduling.neighbours import runs_of
from cellama.engine.scheduling.sequence import Sequence, Work
from cellama.engine.snapshots import DraftCount

from .asking import Asking
from .draft_model import DraftModel
from .forced import ForcedText
from .gate import MOST_DRAFTS, Candidate, Gate
from .lookup import Follower, Index, Pool, Pools
from .odds import Odds
from .sources import Draft, Source

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Guesses:
    """What is guessed of one sequence."""

    sources: list[Source]
    odds: Odds
    pool: Pool | None
    at: int = -1  # the sequence had so many tokens when its draft was made
    draft: Draft | None = None  # the last one, decoded or not
    most: int = 0  # tokens that it may have
    num_unverified: int = 0  # positions that the slot holds beyond those that are accounted


class Drafting:
    """Owns the drafts of all sequences. Engine thread only.

    calls_of ─► decode ─► begin_verifying ─► (sample, accept)* ─► end_verifying
    """

    def __init__(self, cache: KvCache, options: EngineOptions, model: DraftModel | None = None) -> None:
        """The options say whether to guess, and of how many rows a decode call has logits. `model` guesses, too."""
        self.gate = Gate(options.logit_rows, unified=cache.memory.unified)
        self.counts: dict[str, DraftCount] = {}  # since the start, by source
        self._cache = cache
        self._most_rows = options.logit_rows
        self._can_take_back = cache.memory.partial_reuse
        self.is_active = self._can_take_back and options.speculation != "off"  # else no draft is ever asked for
        self._is_accounted = False  # what is decoded now is single tokens and drafts of this step, as the gate chose
        self._odds = Odds()
        self._pools = Pools()
        self._guesses: dict[Sequence, Guesses] = {}
        self._num_tokens = 0  # that the last step with drafts brought, 0 if the last one had none …
        self._spent_s = 0.0  # … and what its decode calls took
        self._asking = None if model is None else Asking(model, self._odds)

    # Before a decode call

    def take_checks(self, works: list[Work]) -> tuple[list[Work], list[Work]]:
        """Those that only check candidates, with as many of these as there are logits for, and those that do not.

        Each of the first is a decode call, whatever it costs: it is what its caller asks for.
        """
        checks = {
            work.sequence: check
            for work in works
            if work.sequence.request.only_checks and (check := self._with_candidates(work, len(works)))
        }
        self._is_accounted = False
        if checks:
            works = [work for work in works if work.sequence not in checks]
        return list(checks.values()), works

    def _with_candidates(self, work: Work, num_works: int) -> Work | None:
        sequence, chunk = work
        request, memory = sequence.request, self._cache.memory
        if not (chunk.decode and self._can_take_back):
            return None
        most = min(self._most_rows - 1, self._most_drafts(sequence))
        if memory.unified:
            most = min(most, self._cache.cells.free - num_works)
        tokens = list(request.prediction[sequence.num_output : sequence.num_output + max(0, most)])
        if not tokens:
            return None
        guesses = self._guesses.setdefault(sequence, Guesses([], Odds(self._odds), None))
        guesses.at, guesses.draft = len(sequence.tokens), Draft("prediction", tokens, [])
        return Work(sequence, chunk._replace(tokens=[*chunk.tokens, *tokens], num_drafts=len(tokens)))

    def _most_drafts(self, sequence: Sequence) -> int:
        """That its slot has room for, can take back, and that are not beyond its end."""
        memory, slot = self._cache.memory, sequence.slot
        assert slot is not None
        if memory.first_cut(slot) > sequence.num_computed:
            return 0
        return min(memory.ctx_per_slot - len(sequence.tokens), sequence.request.max_tokens - sequence.num_output - 1)

    def calls_of(self, works: list[Work]) -> list[list[Work]]:
        """The decode calls for these single tokens, with drafts as far as they pay."""
        if len(works) > self._most_rows:
            return [works]
        try:
            return self._calls_with_drafts(works)
        except Exception:  # the boundary between guesses and the work of requests, which goes on without them
            log.exception("guessing tokens failed; from now on none are guessed")
            self.is_active = False
            return [works]

    def _calls_with_drafts(self, works: list[Work]) -> list[list[Work]]:
        if self._num_tokens and self._spent_s:
            self.gate.account(self._num_tokens, self._spent_s)
        self._num_tokens, self._spent_s, self._is_accounted = 0, 0.0, True
        if self.gate.is_resting(len(works)):
            return [works]
        drafts = {work.chunk.slot: draft for work in works if (draft := self._draft(work.sequence)) is not None}
        candidates = [self._candidate(work, drafts.get(work.chunk.slot)) for work in works]
        is_read = any(work.sequence.request.is_interactive for work in works)
        most_s = BESIDE_STEP_S if is_read else BULK_STEP_S
        lengths = self._choose(works, candidates, drafts, most_s)
        if not lengths or not self._fit(works, lengths):
            return [works]
        self._num_tokens = len(works)
        drafted = [self._with_draft(work, drafts, lengths) for work in works]
        if self._cache.memory.unified:
            return [drafted]
        parts = [[w for w in drafted if len(w.chunk.tokens) > 1], [w for w in drafted if len(w.chunk.tokens) == 1]]
        return [part for part in parts if part]

    def _draft(self, sequence: Sequence) -> Draft | None:
        """The best guess of all sources, by the odds of its first token."""
        guesses = self._guesses.get(sequence) or self._begin(sequence)
        most = min(MOST_DRAFTS, self._most_drafts(sequence))
        guesses.at, guesses.draft = len(sequence.tokens), None
        guesses.most = most
        if most < 1:
            return None
        drafts = [draft for source in guesses.sources if (draft := source.draft(most)) is not None]
        if drafts:
            guesses.draft = max(drafts, key=lambda draft: guesses.odds.of(draft.source, draft.marks[0]))
        return guesses.draft

    def _begin(self, sequence: Sequence) -> Guesses:
        sources: list[Source] = []
        if sequence.request.sampling.is_constrained:
            sources.append(ForcedText(sequence))
        if prediction := sequence.request.prediction[: self._cache.memory.ctx_per_slot]:  # it is indexed in memory
            expected = Follower("prediction", Index(list(prediction)), sequence.tokens)
            if sequence.tokens[sequence.num_prompt :] == list(prediction[: sequence.num_output]):
                expected.expect(sequence.num_output)
            sources.append(expected)
        sources.append(Follower("prompt", Index(sequence.tokens), sequence.tokens))
        pool = None
        if sequence.request.cache_prompt:
            pool = self._pools.of(sequence.scope)
            sources.append(Follower("pool", pool.index, sequence.tokens))
        guesses = self._guesses[sequence] = Guesses(sources, Odds(self._odds), pool)
        return guesses

    def _candidate(self, work: Work, draft: Draft | None) -> Candidate:
        guesses, slot = self._guesses[work.sequence], work.chunk.slot
        odds = [] if draft is None else guesses.odds.of_draft(draft)
        if self._asking is None:
            memory = self._cache.memory
            can_pad = not memory.unified and memory.first_cut(slot) <= work.sequence.num_computed
            return Candidate(slot, odds, can_pad=can_pad)
        return self._asking.candidate(work.sequence, slot, odds, guesses.odds, guesses.most)

    def _choose(
        self, works: Seq[Work], candidates: Seq[Candidate], drafts: dict[int, Draft], most_s: float
    ) -> Mapping[int, int]:
        """How many drafts of each slot to decode, by slot. Those of the draft model are made, if they are to be."""
        if self._asking is None:
            return self.gate.choose(candidates, most_s)
        self._asking.begin_step()
        lengths = self.gate.choose(candidates, most_s, self._asking.seconds)
        offered = {c.slot for c in candidates if c.is_made}
        asked = {w.sequence: self._guesses[w.sequence].odds for w in works if w.chunk.slot in offered & lengths.keys()}
        if not asked:
            if offered and not self.gate.compares:
                self._asking.refuse([self._guesses[w.sequence].odds for w in works if w.chunk.slot in offered])
            return lengths
        made, seconds = self._asking.make(asked, max(lengths.values()))
        for sequence, draft in made.items():
            guesses = self._guesses[sequence]
            tokens, marks = draft.tokens[: guesses.most], draft.marks[: guesses.most]
            guesses.draft = draft._replace(tokens=tokens, marks=marks)
        self._num_tokens, self._spent_s = len(works), seconds  # that counts, whatever is decoded now
        return self._fitting(works, drafts, most_s - seconds)

    def _fitting(self, works: Seq[Work], drafts: dict[int, Draft], most_s: float) -> Mapping[int, int]:
        """How many of the drafts that there are now, by slot."""
        candidates = []
        for sequence, chunk in works:
            guesses, odds = self._guesses[sequence], []
            if guesses.draft is not None:
                drafts[chunk.slot] = guesses.draft
                odds = guesses.odds.of_draft(guesses.draft)
            candidates.append(Candidate(chunk.slot, odds))
        return self.gate.fit(candidates, most_s)

    def forget_idle(self) -> None:
        """Nothing is held of requests that have ended, but what pools have of their outputs."""
        if self._asking is not None:
            self._asking.forget_idle()

    def _fit(self, works: Seq[Work], lengths: Mapping[int, int]) -> bool:
        """True if there are cells for all of them. Drafts take none from a sequence."""
        memory = self._cache.memory
        if memory.unified:
            return self._cache.cells.free >= len(works) + sum(lengths.values())
        return all(self._cache.cells.of(slot) + 1 + length <= memory.ctx_per_slot for slot, length in lengths.items())

    def _with_draft(self, work: Work, drafts: Mapping[int, Draft], lengths: Mapping[int, int]) -> Work:
        """The work with its draft, padded to its length: rows of one pass are as many for each slot."""
        sequence, chunk = work
        length = lengths.get(chunk.slot, 0)
        if not length:
            return work
        tokens = drafts[chunk.slot].tokens[:length] if chunk.slot in drafts else []
        padding = [(tokens or chunk.tokens)[-1]] * (length - len(tokens))
        return Work(sequence, chunk._replace(tokens=[*chunk.tokens, *tokens, *padding], num_drafts=len(tokens)))

    # After it

    def observe(self, chunks: Seq[Chunk], seconds: float) -> None:
        """Is told what a decode call of single tokens and drafts took."""
        if not self.is_active or not all(chunk.decode for chunk in chunks):
            return
        if self._is_accounted:
            self._spent_s += seconds
        if self._cache.memory.unified:
            self.gate.observe([sum([len(chunk.tokens) for chunk in chunks])], seconds)
            return
        rows = {chunk.slot: len(chunk.tokens) for chunk in chunks}
        passes = [run.size * rows[run.first] for run in runs_of([chunk.slot for chunk in chunks])]
        self.gate.observe(passes, seconds)

    def begin_verifying(self, work: Work) -> None:
        """The chunk is decoded, its first token accounted; its drafts lie in the slot behind it."""
        sequence, chunk = work
        if (guesses := self._guesses.get(sequence)) is None:
            return
        guesses.num_unverified = len(chunk.tokens) - 1
        if chunk.num_drafts and guesses.draft is not None:
            sequence.num_drafted += chunk.num_drafts
            self._count(guesses.draft.source, drafted=chunk.num_drafts, drafts=1)

    def _count(self, source: str, *, drafted: int = 0, accepted: int = 0, drafts: int = 0) -> None:
        """A new dictionary: others read it meanwhile."""
        before = self.counts.get(source, DraftCount(0, 0, 0))
        now = DraftCount(before.drafted + drafted, before.accepted + accepted, before.drafts + drafts)
        self.counts = {**self.counts, source: now}

    def accept(self, sequence: Sequence) -> None:
        """The next draft is what the model chose: it is accounted."""
        guesses = self._guesses[sequence]
        assert sequence.slot is not None
        assert guesses.draft is not None
        self._num_tokens += self._is_accounted
        guesses.num_unverified -= 1
        sequence.num_computed += 1
        sequence.num_accepted += 1
        self._count(guesses.draft.source, accepted=1)
        self._cache.extend(sequence.slot, 1)

    def end_verifying(self, sequence: Sequence) -> None:
        """The slot holds what is accounted and no more; and what was guessed is compared with what came."""
        if (guesses := self._guesses.get(sequence)) is None:
            return
        if guesses.num_unverified and sequence.slot is not None:
            guesses.num_unverified = 0
            sequence.cut_back(self._cache.truncate(sequence.slot, sequence.num_computed))
        if (draft := guesses.draft) is not None:
            tokens = sequence.tokens[guesses.at :]
            guesses.odds.compare(draft, tokens)
            if self._asking is not None:
                self.gate.account(0, self._asking.learn(sequence, guesses.odds, draft, tokens))
            guesses.draft = None

    def end(self, sequence: Sequence) -> None:
        """The sequence ends, and has its slot still, if it had one."""
        if sequence in self._guesses:
            self.end_verifying(sequence)
            pool = self._guesses.pop(sequence).pool
            if pool is not None and sequence.num_output:
                pool.add(sequence.tokens[sequence.num_prompt :])
            if self._asking is not None:
                self.gate.account(0, self._asking.end(sequence))
