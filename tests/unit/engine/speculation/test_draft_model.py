"""A draft model for a large model. Fakes with the same cells predict the same tokens; one with less memory doesn't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from cellama.engine import (
    Completion,
    EngineOptions,
    Handle,
    InvalidRequest,
    ModelLoadFailed,
    Pulse,
    Request,
    SamplingParams,
)
from cellama.engine.core.engine_core import Command, EngineCore
from cellama.engine.fake import FakeBackend, FakePlan
from cellama.engine.scheduling.sequence import Sequence as Running
from cellama.engine.speculation.draft_model import MAX_FAILURES, NAME, DraftModel
from cellama.engine.speculation.sources import AcceptanceRates, DraftTokens

from ....eager_gate import Eager

SLOTS = 4
PROMPTS = ("one prompt", "another prompt", "a third one that is a good deal longer", "x", "y", "z")


def asked(greedy: bool = True) -> list[Request]:
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0, seed=5)
    return [
        Request(prompt, tuple(prompt.encode()), sampling, max_tokens=50 + 9 * number, priority=9 if number < 4 else 0)
        for number, prompt in enumerate(PROMPTS)
    ]


def run(
    requests: list[Request], draft: FakeBackend | None, *, unified: bool = False, failures: Sequence[int] = ()
) -> list[Completion]:
    fake = FakeBackend(n_slots=SLOTS, ctx_per_slot=128, end_every=150, unified=unified)
    options = EngineOptions(n_parallel=SLOTS, n_batch=64, speculation="off" if draft is None else "auto")
    core = EngineCore(fake, options, Pulse("test"), draft=draft)
    if draft is not None:
        draft.batches.clear()
        draft.failures.extend(failures)
        core.drafting.gate = Eager(1)  # type: ignore[assignment]
    handles = [Handle(replace(r, submitted_at=0.0), lambda *_: None, None, plan=FakePlan(r.sampling)) for r in requests]
    for number, handle in enumerate(handles):
        assert core.inbox.submit(Command("submit", handle))
        for _ in range(6 if number == SLOTS - 1 else 0):  # the others take the slots of some of these
            core.step()
    for _ in range(600):
        core.step()
    return [handle.result(0) for handle in handles]


def small(**values: int | bool) -> FakeBackend:
    return FakeBackend(n_slots=SLOTS, ctx_per_slot=128, n_batch=128, unified=True, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("memory", "least"), [(0, 0.9), (12, 0.0)])
def test_draft_model_does_not_change_generated_texts(memory: int, least: float, greedy: bool, unified: bool) -> None:
    plain = run(asked(greedy), None, unified=unified)
    draft = small(memory=memory, end_every=150)
    drafted = run(asked(greedy), draft, unified=unified)
    assert [done.text for done in drafted] == [done.text for done in plain]
    accepted = sum(done.usage.accepted_prediction_tokens for done in drafted)
    rejected = sum(done.usage.rejected_prediction_tokens for done in drafted)
    assert len(draft.batches) > 10
    assert accepted >= least * (accepted + rejected)
    assert accepted > 20 or memory
    assert rejected > 0 or memory == 0


def test_failing_draft_model_does_not_change_texts_and_is_eventually_disabled() -> None:
    plain = run(asked(), None)
    drafted = run(asked(), small(), failures=[0, 1, 0, 0, -1, -3, 0, 2] * 3)
    assert [done.text for done in drafted] == [done.text for done in plain]
    broken = small()
    assert [done.text for done in run(asked(), broken, failures=[-3] * 500)] == [done.text for done in plain]
    assert len(broken.batches) == MAX_FAILURES


def test_draft_model_that_cannot_decode_is_rejected() -> None:
    draft = small()
    draft.failures.append(-1)
    with pytest.raises(ModelLoadFailed, match="remove the draft option"):
        run(asked(), draft)


@pytest.mark.parametrize("short", [{"ctx_per_slot": 40}, {"n_cells": 90}])
def test_draft_model_with_few_cells_drafts_as_many_tokens_as_fit(short: dict[str, int]) -> None:
    plain = run(asked(), None)
    draft = FakeBackend(**{"n_slots": SLOTS, "ctx_per_slot": 128, "n_batch": 128, "unified": True, **short})
    drafted = run(asked(), draft)
    assert [done.text for done in drafted] == [done.text for done in plain]
    assert sum(done.usage.accepted_prediction_tokens for done in drafted) > 0


def test_draft_model_requires_speculation_and_is_closed_with_its_engine() -> None:
    draft = small()
    core = EngineCore(FakeBackend(n_slots=SLOTS), EngineOptions(speculation="auto"), Pulse("test"), draft=draft)
    core.close(InvalidRequest("closed"))
    assert draft.closed
    with pytest.raises(InvalidRequest, match="draft"):
        EngineOptions(draft="bundled://tiny", speculation="off")
    with pytest.raises(InvalidRequest, match="draft"):
        EngineOptions(draft="", speculation="auto")


class Followed:
    """A draft model alone, with sequences like those of an engine."""

    def __init__(self, **values: int) -> None:
        self.backend = small(**values)
        self.model = DraftModel(self.backend, 64)
        self.backend.batches.clear()

    def sequence(self, tokens: Sequence[int], slot: int | None = 0, scope: str = "", **request: bool) -> Running:
        asked = Request("it", tuple(tokens), SamplingParams(temperature=0), 50, cache_scope=scope, **request)  # type: ignore[arg-type]
        return Running(asked, 1, 0.0, list(tokens), slot=slot)

    def draft(self, *sequences: Running, most: int = 4) -> dict[Running, list[int]]:
        drafts, _ = self.model.draft({sequence: AcceptanceRates() for sequence in sequences}, most)
        return {sequence: draft.tokens for sequence, draft in drafts.items()}

    def held(self) -> list[list[object]]:
        return [[cell.token for cell in cells] for cells in self.backend.cells]

    def num_read(self) -> int:
        return sum(len(chunk.tokens) for batch in self.backend.batches for chunk in batch)


def test_slots_are_truncated_to_the_chosen_tokens() -> None:
    followed = Followed()
    sequence = followed.sequence([1, 2, 3])
    guessed = followed.draft(sequence)[sequence]
    sequence.tokens += [*guessed[:2], 9]
    before = followed.num_read()
    assert followed.draft(sequence, most=1)[sequence]
    assert followed.held()[0] == [1, 2, 3, *guessed[:2], 9]
    assert followed.num_read() - before == 1


def test_missing_tokens_are_prefilled_in_batches_before_drafting() -> None:
    followed, random = Followed(), Random(1)
    long = followed.sequence([random.randrange(97, 123) for _ in range(100)])
    short = followed.sequence([1, 2], slot=1)
    first = followed.draft(long, short)
    assert list(first) == [short]
    assert len(followed.backend.batches[0]) == 2
    short.tokens += first[short]
    assert set(followed.draft(long, short)) == {long, short}
    assert max(sum(len(chunk.tokens) for chunk in batch) for batch in followed.backend.batches) <= 64


def test_drafts_for_several_slots_take_one_pass_per_token() -> None:
    followed = Followed()
    sequences = [followed.sequence([number, 2, 3], slot=number) for number in range(SLOTS)]
    made = followed.draft(*sequences, most=4)
    assert all(len(tokens) == 4 for tokens in made.values())
    assert [len(batch) for batch in followed.backend.batches] == [SLOTS] * 4


def test_waiting_sequence_keeps_its_draft_slot_while_another_slot_is_free() -> None:
    followed = Followed()
    sequences = [followed.sequence([number, 2, 3], slot=number) for number in range(SLOTS)]
    followed.draft(*sequences)
    sequences[1].slot = None  # preempted
    followed.draft(sequences[0])
    assert followed.held()[1][:1] == [1]
    sequences[1].slot, sequences[2].slot = 2, None
    before = followed.num_read()
    followed.draft(sequences[1], most=1)
    assert followed.num_read() - before == 1
    other = followed.sequence([7, 8], slot=1)
    followed.draft(other)
    assert followed.held()[2][:2] == [7, 8]
    sequences[3].slot, sequences[2].slot = None, 3
    assert followed.draft(sequences[2])[sequences[2]]


def test_cells_from_one_scope_are_not_reused_in_another_scope() -> None:
    followed = Followed()
    for scope, cached, expected in [("a", True, 40), ("a", True, 1), ("b", True, 40), ("b", False, 40), ("b", True, 1)]:
        sequence = followed.sequence(range(40), scope=scope, cache_prompt=cached)
        before = followed.num_read()
        followed.draft(sequence, most=1)
        assert followed.num_read() - before == expected, (scope, cached)
        followed.model.end(sequence)
    followed.model.forget_idle()
    assert followed.held() == [[]] * SLOTS


def test_unknown_tokens_are_not_prefilled() -> None:
    followed = Followed()
    followed.backend.n_vocab = 200
    strange, known = followed.sequence([1, 256, 2]), followed.sequence([1, 2], slot=1)
    assert set(followed.draft(strange, known)) == {known}


def test_failed_decode_calls_leave_no_cells() -> None:
    followed = Followed()
    sequence = followed.sequence([1, 2, 3], slot=1)
    followed.backend.failures.extend([0, -3])
    assert followed.draft(sequence) == {}
    assert followed.held() == [[]] * SLOTS
    assert followed.draft(sequence)[sequence]


def test_draft_stops_early_when_acceptance_rates_are_low() -> None:
    followed, rates = Followed(), AcceptanceRates()
    for _ in range(50):
        rates.observe(DraftTokens(NAME, [1], [7]), [2])
    sequence = followed.sequence([1, 2, 3])
    drafts, _ = followed.model.draft({sequence: rates}, 15)
    assert len(drafts[sequence].tokens) == 1
