"""Candidates of the caller's own: drafts for another model, and what this one says to such."""

from __future__ import annotations

import pytest

from cellama.engine import Engine, EngineOptions, InvalidRequest, PromptTooLong
from cellama.engine.core.generation import Verdict
from cellama.engine.fake import FakeBackend

from ...conftest import MakeEngine

PREFIX = list(b"a prefix")


@pytest.fixture(params=["auto", "off"])
def engine(make_engine: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    return make_engine(FakeBackend(n_slots=2, ctx_per_slot=64, end_every=30), speculation=request.param)[0]


def test_all_that_a_model_drafts_it_accepts(engine: Engine) -> None:
    *drafted, following = engine.draft_tokens(PREFIX, 9)
    assert engine.verify(PREFIX, drafted) == Verdict(len(drafted), following)


@pytest.mark.parametrize("wrong", range(6))
def test_candidates_are_accepted_up_to_the_first_that_is_wrong(engine: Engine, wrong: int) -> None:
    drafted = list(engine.draft_tokens(PREFIX, 6))
    candidates = [*drafted[:wrong], ord("~"), *drafted[wrong + 1 :]]
    assert engine.verify(PREFIX, candidates) == Verdict(wrong, drafted[wrong])
    assert engine.verify(PREFIX, candidates, most=3) == Verdict(min(wrong, 3), drafted[min(wrong, 3)])


def test_no_candidates_get_the_next_token(engine: Engine) -> None:
    assert engine.verify(PREFIX, []) == Verdict(0, engine.draft_tokens(PREFIX, 1)[0])


def test_the_end_of_a_text_is_no_token(engine: Engine) -> None:
    ending = next(p for p in ([*PREFIX, i] for i in range(97, 123)) if len(engine.draft_tokens(p, 40)) < 40)
    drafted = list(engine.draft_tokens(ending, 40))
    assert engine.verify(ending, drafted) == Verdict(len(drafted), None)
    assert engine.verify(ending, [*drafted, 97, 98]) == Verdict(len(drafted), None)


def test_bad_candidates_are_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLong):
        engine.verify(PREFIX, [97] * 64)
    with pytest.raises(InvalidRequest, match="the prediction has token ids outside"):
        engine.verify(PREFIX, [300])
    with pytest.raises(InvalidRequest, match="most"):
        engine.verify(PREFIX, [97], most=-1)


def test_defaults_of_the_model_change_no_verdict() -> None:
    options = EngineOptions(n_parallel=1, n_batch=64, sampling={"temperature": 1.5, "seed": 3})
    drawn, greedy = (
        Engine(FakeBackend(n_slots=1), chosen) for chosen in (options, EngineOptions(n_parallel=1, n_batch=64))
    )
    try:
        assert drawn.draft_tokens(PREFIX, 8) == greedy.draft_tokens(PREFIX, 8)
    finally:
        assert drawn.close()
        assert greedy.close()
