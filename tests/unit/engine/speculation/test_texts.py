"""Texts are the same with and without drafts, for right and wrong predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from cellama.engine import Completion, EngineOptions, Handle, Pulse, Request, Resumed, SamplingParams
from cellama.engine.core.engine_core import Command, EngineCore
from cellama.engine.fake import FakeBackend, FakePlan

from ....conftest import EXAMPLES
from ....eager_gate import Eager

SLOTS = 4


def run(requests: Sequence[Request], *, eager: int | None, unified: bool = False, **backend: int) -> list[Completion]:
    """Run all requests together. With `eager`, a seed, drafts are decoded."""
    fake = FakeBackend(n_slots=SLOTS, unified=unified, ctx_per_slot=96, **backend)
    options = EngineOptions(n_parallel=SLOTS, n_batch=64, speculation="off" if eager is None else "auto")
    core = EngineCore(fake, options, Pulse("test"))
    if eager is not None:
        core.drafting.gate = Eager(eager)  # type: ignore[assignment]
    handles = [Handle(replace(r, submitted_at=0.0), lambda *_: None, None, plan=FakePlan(r.sampling)) for r in requests]
    for handle in handles:
        assert core.inbox.submit(Command("submit", handle))
    for _ in range(2000):
        core.step()
    check_conserved(core, fake)
    return [handle.result(0) for handle in handles]


def check_conserved(core: EngineCore, fake: FakeBackend) -> None:
    for slot in range(SLOTS):
        assert core.scheduler.cache.cells.of(slot) == len(fake.cells[slot])
    assert not core.drafting._drafted


def wrongly(tokens: Sequence[int], random: Random) -> tuple[int, ...]:
    """Return the tokens as a caller may predict them: some are wrong, missing or superfluous."""
    guess = [token if random.random() < 0.8 else random.randrange(97, 123) for token in tokens]
    if guess and random.random() < 0.5:
        del guess[random.randrange(len(guess))]
    return tuple(guess)


requests_st = st.lists(
    st.builds(
        lambda prompt, most, stop, greedy, priority, n, mirostat, eos: Request(
            f"{prompt}{most}",
            tuple(prompt.encode()),
            SamplingParams(temperature=0.0 if greedy else 1.0, seed=7, mirostat=0 if greedy else mirostat),
            max_tokens=most,
            stop=stop,
            priority=priority,
            n=n,
            ignore_eos=eos,
        ),
        st.text("ab", min_size=1, max_size=30),
        st.integers(1, 80),
        st.sampled_from([(), ("a",), ("e ",)]),
        st.booleans(),
        st.sampled_from([0, 3, 9]),
        st.sampled_from([1, 1, 2]),
        st.sampled_from([0, 2]),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=15 * EXAMPLES, deadline=None)
@given(requests_st, st.booleans(), st.sampled_from([0, 2]), st.sampled_from([0, 40]), st.integers(0, 1 << 30))
def test_texts_are_the_same_with_and_without_drafts(
    requests: list[Request], unified: bool, memory: int, end_every: int, seed: int
) -> None:
    settings_of_model = {"memory": memory, "end_every": end_every, "n_cells": 120 if unified else 0}
    plain = run(requests, eager=None, unified=unified, **settings_of_model)
    random = Random(seed)
    guessing = [
        replace(request, prediction=wrongly(completion.tokens, random))
        for request, completion in zip(requests, plain, strict=True)
    ]
    drafted = run(guessing, eager=seed, unified=unified, **settings_of_model)
    for before, after in zip(plain, drafted, strict=True):
        for left, right in zip((before, *before.alternatives), (after, *after.alternatives), strict=True):
            assert (left.tokens, left.text, left.finish_reason) == (right.tokens, right.text, right.finish_reason)


def test_correct_predictions_are_accepted_and_counted() -> None:
    request = Request("it", tuple(b"a prompt"), SamplingParams(temperature=0), max_tokens=50, ignore_eos=True)
    (plain,) = run([request], eager=None)
    (drafted,) = run([replace(request, prediction=plain.tokens)], eager=1)
    assert drafted.tokens == plain.tokens
    assert drafted.usage.accepted_prediction_tokens > 20
    assert drafted.usage.rejected_prediction_tokens == 0


def test_no_token_is_lost_when_a_prediction_is_wrong() -> None:
    request = Request("it", tuple(b"a prompt"), SamplingParams(temperature=0), max_tokens=50, ignore_eos=True)
    (plain,) = run([request], eager=None)
    (drafted,) = run([replace(request, prediction=tuple(b"Z" * 50))], eager=1)
    assert drafted.tokens == plain.tokens
    assert drafted.usage.accepted_prediction_tokens == 0 < drafted.usage.rejected_prediction_tokens


@pytest.mark.parametrize("half", [1, 13])
def test_resumed_request_continues_with_its_prediction(half: int) -> None:
    request = Request("it", tuple(b"a prompt"), SamplingParams(temperature=1, seed=3), max_tokens=40, ignore_eos=True)
    (plain,) = run([request], eager=None)
    resumed = replace(request, prediction=plain.tokens, resume=(Resumed(plain.tokens[:half]),))
    (drafted,) = run([resumed], eager=2)
    assert drafted.tokens == plain.tokens
    assert drafted.usage.accepted_prediction_tokens > 10


def test_models_with_recurrent_memory_get_no_drafts() -> None:
    request = Request("it", tuple(b"abab" * 8), SamplingParams(temperature=0), max_tokens=40, prediction=(1, 2, 3))
    (drafted,) = run([request], eager=1, partial_reuse=False)
    assert drafted.usage.accepted_prediction_tokens == drafted.usage.rejected_prediction_tokens == 0
