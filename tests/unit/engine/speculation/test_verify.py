"""Candidates from callers: drafting for another model, and verifying another model's drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cellama.engine import Engine, EngineOptions, InvalidRequest, PromptTooLong, Request, SamplingParams
from cellama.engine.core.engine import Verdict
from cellama.engine.fake import FakeBackend

from ...conftest import MakeEngine
from .test_mixed_work import drafting_core, predicted, submit
from .test_texts import run

PREFIX = list(b"a prefix")


@pytest.fixture(params=["auto", "off"])
def engine(make_engine: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    return make_engine(FakeBackend(n_slots=2, ctx_per_slot=64, end_every=30), speculation=request.param)[0]


def test_model_accepts_its_own_drafts(engine: Engine) -> None:
    *drafted, following = engine.draft_tokens(PREFIX, 9)
    assert engine.verify(PREFIX, drafted) == Verdict(len(drafted), following)


@pytest.mark.parametrize("wrong", range(6))
def test_candidates_are_accepted_up_to_the_first_wrong_candidate(engine: Engine, wrong: int) -> None:
    drafted = list(engine.draft_tokens(PREFIX, 6))
    candidates = [*drafted[:wrong], ord("~"), *drafted[wrong + 1 :]]
    assert engine.verify(PREFIX, candidates) == Verdict(wrong, drafted[wrong])
    assert engine.verify(PREFIX, candidates, most=3) == Verdict(min(wrong, 3), drafted[min(wrong, 3)])


def test_verify_without_candidates_returns_the_next_token(engine: Engine) -> None:
    assert engine.verify(PREFIX, []) == Verdict(0, engine.draft_tokens(PREFIX, 1)[0])


def test_verify_does_not_return_the_end_token(engine: Engine) -> None:
    ending = next(p for p in ([*PREFIX, i] for i in range(97, 123)) if len(engine.draft_tokens(p, 40)) < 40)
    drafted = list(engine.draft_tokens(ending, 40))
    assert engine.verify(ending, drafted) == Verdict(len(drafted), None)
    assert engine.verify(ending, [*drafted, 97, 98]) == Verdict(len(drafted), None)


def test_invalid_candidates_are_rejected(engine: Engine) -> None:
    with pytest.raises(PromptTooLong):
        engine.verify(PREFIX, [97] * 64)
    with pytest.raises(InvalidRequest, match="prediction has token ids outside"):
        engine.verify(PREFIX, [300])
    with pytest.raises(InvalidRequest, match="most"):
        engine.verify(PREFIX, [97], most=-1)


def test_sampling_defaults_of_the_model_do_not_affect_verify() -> None:
    options = EngineOptions(n_parallel=1, n_batch=64, sampling={"temperature": 1.5, "seed": 3})
    drawn, greedy = (
        Engine(FakeBackend(n_slots=1), chosen) for chosen in (options, EngineOptions(n_parallel=1, n_batch=64))
    )
    try:
        assert drawn.draft_tokens(PREFIX, 8) == greedy.draft_tokens(PREFIX, 8)
    finally:
        assert drawn.close()
        assert greedy.close()


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_candidates_are_decoded_in_one_pass(mode: str, unified: bool) -> None:
    fake = FakeBackend(n_slots=2, ctx_per_slot=64, unified=unified)
    with_thread = Engine(fake, EngineOptions(n_parallel=2, n_batch=64, speculation=mode))  # type: ignore[arg-type]
    try:
        drafted = with_thread.draft_tokens(PREFIX, 12)
        before = len(fake.batches)
        assert with_thread.verify(PREFIX, drafted[:11]) == Verdict(11, drafted[11])
        assert len(fake.batches) == before + 2
        assert [chunk.num_drafts for chunk in fake.batches[-1]] == [10]  # the first token follows the prefix
    finally:
        assert with_thread.close()


def test_candidates_are_decoded_in_one_pass_without_delaying_other_requests() -> None:
    core, fake = drafting_core(num_slots=2)
    plain = Request("plain", tuple(PREFIX), SamplingParams(temperature=0), max_tokens=10, ignore_eos=True)
    (told,) = run([plain], eager=None)
    stream = submit(core, predicted("stream", 9))
    core.step()
    check = submit(core, replace(plain, id="check", prediction=told.tokens[:9], only_checks=True, priority=0))
    for _ in range(4):
        core.step()
    assert check.result(0).tokens == told.tokens
    assert next(chunk.num_drafts for chunks in fake.batches for chunk in chunks if chunk.num_drafts) == 8
    assert core.telemetry.snapshot.generated_tokens >= 10 + 5
    assert not stream.done


def test_candidates_are_verified_step_by_step_when_memory_cannot_be_truncated() -> None:
    fake = FakeBackend(n_slots=1, ctx_per_slot=64, partial_reuse=False)
    engine = Engine(fake, EngineOptions(n_parallel=1, n_batch=64))
    try:
        drafted = engine.draft_tokens(PREFIX, 6)
        assert engine.verify(PREFIX, drafted[:5]) == Verdict(5, drafted[5])
        assert not any(chunk.num_drafts for chunks in fake.batches for chunk in chunks)
    finally:
        assert engine.close()
