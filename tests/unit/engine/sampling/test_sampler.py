"""The token sampler: distributions, filters, penalties, and resuming after any number of draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from cellama.engine import InvalidRequest, SamplingParams
from cellama.engine.sampling.processors import BannedTokens, Penalties, SequenceStart, make_processors
from cellama.engine.sampling.sampler import (
    NothingAllowed,
    TokenSampler,
    softmax,
    sorted_candidates,
    top_ids,
    top_p,
    top_p_candidates,
    uniforms,
)

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], dtype=np.float32))


def sampler_of(params: SamplingParams, seed: int, tokens: Sequence[int] = (), **learned: Any) -> TokenSampler:
    """Return a sampler with the built-in processors."""
    start = SequenceStart(params, tokens, 0, n_vocab=len(LOGITS), end_tokens=frozenset())
    return TokenSampler(params, seed, make_processors(start), **learned)


def draws(logits: NDArray[np.float32], count: int = 4000, **params: Any) -> NDArray[np.float64]:
    """Return the share of each token in draws with different seeds."""
    sampling = SamplingParams(**{**OFF, **params})
    chosen = [sampler_of(sampling, seed).sample(logits.copy())[0] for seed in range(count)]
    return np.bincount(chosen, minlength=len(logits)) / count


def test_draws_follow_the_probabilities() -> None:
    assert np.abs(draws(LOGITS) - softmax(LOGITS.astype(np.float64))).max() < 0.03


def test_temperature_sharpens_and_flattens_the_distribution() -> None:
    cold, hot = draws(LOGITS, temperature=0.5), draws(LOGITS, temperature=4.0)
    assert np.abs(cold - softmax(LOGITS.astype(np.float64) / 0.5)).max() < 0.03
    assert np.abs(hot - softmax(LOGITS.astype(np.float64) / 4)).max() < 0.03


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"typical_p": 0.2}, [1]),  # its surprise is the closest to the mean
        ({"typical_p": 0.5}, [0, 1]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.12}, [2, 3, 4]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.5}, [0, 1, 2, 3, 4]),
        ({"logit_bias": ((0, -np.inf), (2, -50.0))}, [1, 3, 4]),
        ({"mirostat": 2, "mirostat_tau": 1.0}, [0, 1]),  # at first up to 2 bits of surprise
        ({"top_k": 1}, [0]),
        ({"top_p": 0.0}, [0]),
        ({"top_n_sigma": 1.0}, [0, 1]),  # the standard deviation is 0.75
        ({"top_n_sigma": 0.1}, [0]),
        ({"top_n_sigma": -1.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.0, "dynatemp_range": 1.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 100.0}, [0]),
        ({"temperature": 0.0, "logit_bias": ((4, 100.0),)}, [4]),
    ],
)
def test_filter_keeps_exactly_the_expected_tokens(params: dict[str, Any], kept: list[int]) -> None:
    assert np.flatnonzero(draws(LOGITS, 600, **params)).tolist() == kept


def test_xtc_is_applied_with_the_configured_probability() -> None:
    share = draws(LOGITS, xtc_probability=0.5, xtc_threshold=0.12)[:2].sum()
    assert share == pytest.approx(0.35, abs=0.04)  # half of the time only the two top choices remain, which have 0.7


def test_penalties_match_the_penalties_in_llama_cpp() -> None:
    params = SamplingParams(repeat_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, repeat_last_n=4)
    penalties = Penalties(params, [9, 1, 1, 2, 0])  # 9 is outside the window
    logits = np.array([2.0, 4.0, -1.0, 3.0] + [0.0] * 6, dtype=np.float32)
    penalties.apply(logits)
    assert logits[:4].tolist() == [2 / 2 - 0.75, 4 / 2 - 1.25, -1 * 2 - 0.75, 3.0]
    assert not logits[4:].any()


def test_temperature_depends_on_the_entropy_of_the_candidates() -> None:
    probabilities = softmax(LOGITS.astype(np.float64))
    entropy = -(probabilities * np.log(probabilities)).sum() / np.log(len(LOGITS))
    expected = softmax(LOGITS.astype(np.float64) / (0.5 + 2 * entropy**3))
    found = draws(LOGITS, temperature=1.5, dynatemp_range=1.0, dynatemp_exponent=3.0)
    assert np.abs(found - expected).max() < 0.03


def test_text_can_end_only_after_the_minimum_number_of_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(1,))
    start = SequenceStart(params, [], 0, n_vocab=len(LOGITS), end_tokens=frozenset({0}))
    whole = TokenSampler(params, 0, make_processors(start))
    assert [whole.sample(LOGITS.copy())[0] for _ in range(4)] == [2, 2, 2, 0]
    resumed = replace(start, tokens=[2, 2], num_sampled=2)
    rest = TokenSampler(params, 0, make_processors(resumed), num_sampled=2)
    assert [rest.sample(LOGITS.copy())[0] for _ in range(2)] == [2, 0]
    assert make_processors(replace(start, num_sampled=3)) == []


def test_bans_apply_after_all_other_processors() -> None:
    class Wish:
        def apply(self, logits: NDArray[np.float32]) -> None:
            logits[:] += 100

        def accept(self, token: int) -> None: ...

    params = SamplingParams(logit_bias=((1, 50.0),))
    start = SequenceStart(params, [0], 0, n_vocab=len(LOGITS), end_tokens=frozenset({1}))
    processors = make_processors(start, added=[lambda _: None, lambda _: Wish()], banned=BannedTokens(start.end_tokens))
    assert [type(processor).__name__ for processor in processors] == ["LogitBias", "Wish", "BannedTokens"]
    assert 1 not in {TokenSampler(params, seed, processors).sample(LOGITS.copy())[0] for seed in range(50)}


@given(st.integers(0, 2**32 - 2), st.integers(0, 40), st.sampled_from([{}, {"mirostat": 1}, {"mirostat": 2}]))
def test_sampler_resumes_exactly_after_any_number_of_draws(seed: int, count: int, extra: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.5, repeat_penalty=1.3, xtc_probability=0.3, **extra)
    steps = np.random.default_rng(3).normal(size=(60, 50)).astype(np.float32)
    whole = sampler_of(params, seed, [1, 2, 3])
    tokens = [whole.sample(step.copy())[0] for step in steps]
    first = sampler_of(params, seed, [1, 2, 3])
    head = [first.sample(step.copy())[0] for step in steps[:count]]
    second = sampler_of(params, seed, [1, 2, 3, *head], num_sampled=count, mirostat_mu=first.mirostat_mu)
    assert head + [second.sample(step.copy())[0] for step in steps[count:]] == tokens


def test_small_changes_to_logits_do_not_change_the_draw() -> None:
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0)
    logits = rng.normal(size=2000).astype(np.float32)
    shaken = logits + rng.normal(size=2000).astype(np.float32) * 1e-5
    same = [
        TokenSampler(params, s).sample(logits.copy()) == TokenSampler(params, s).sample(shaken.copy())
        for s in range(200)
    ]
    assert all(same)


def test_mirostat_keeps_the_surprise_near_tau() -> None:
    rng = np.random.default_rng(2)
    for version in (1, 2):
        params = SamplingParams(temperature=1.0, mirostat=version, mirostat_tau=3.0)
        sampler, surprises = TokenSampler(params, 5), []
        for _ in range(400):
            logits = rng.normal(size=500).astype(np.float32) * 2
            sampler.sample(logits)
            surprises.append(sampler._surprise)
        assert np.mean(surprises[100:]) == pytest.approx(3.0, abs=0.4)


class Only:
    """A constraint that allows some tokens."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.accepted: list[int] = []

    def allows(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.isin(tokens, self.allowed)

    def mask(self) -> NDArray[np.bool_] | None:
        return None

    def forced_tokens(self) -> list[int]:
        return []

    def accept(self, token: int) -> None:
        assert token in self.allowed
        self.accepted.append(token)


class Masked(Only):
    """The same constraint with a mask of all tokens."""

    def mask(self) -> NDArray[np.bool_] | None:
        return self.allows(np.arange(3000))


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_k": 40}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 0}, {}])
@pytest.mark.parametrize("num_allowed", [2, 300, 2900])
def test_constraint_with_a_mask_selects_the_same_tokens(params: dict[str, Any], num_allowed: int) -> None:
    rng = np.random.default_rng(4)
    allowed = rng.choice(3000, num_allowed, replace=False).tolist()
    one, other = (
        TokenSampler(SamplingParams(**{**OFF, **params}), 1, constraint=of(*allowed)) for of in (Only, Masked)
    )
    for _ in range(20):
        logits = rng.normal(size=3000).astype(np.float32) * 4
        assert one.sample(logits.copy()) == other.sample(logits.copy())


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 3}, {"mirostat": 2}, {}])
def test_constraint_is_enforced_for_any_probabilities(params: dict[str, Any]) -> None:
    logits = np.random.default_rng(4).normal(size=3000).astype(np.float32) * 4
    unlikely = np.argsort(logits)[:3].tolist()
    constraint = Only(*unlikely)
    sampler = TokenSampler(SamplingParams(**{**OFF, **params}), 1, constraint=constraint)
    tokens = [sampler.sample(logits.copy())[0] for _ in range(5)]
    assert constraint.accepted == tokens
    if params.get("temperature") == 0:
        assert set(tokens) == {unlikely[-1]}


def test_constraint_does_not_change_allowed_draws() -> None:
    free = TokenSampler(SamplingParams(), 7)
    bound = TokenSampler(SamplingParams(), 7, constraint=Only(*range(5)))
    assert [free.sample(LOGITS.copy()) for _ in range(20)] == [bound.sample(LOGITS.copy()) for _ in range(20)]


def test_sampler_raises_an_error_when_the_constraint_allows_no_token() -> None:
    with pytest.raises(NothingAllowed):
        TokenSampler(SamplingParams(), 1, constraint=Only()).sample(LOGITS.copy())


def test_logprobs_come_from_the_unmodified_distribution() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias=((4, 100.0),))
    token, report = sampler_of(params, 0).sample(LOGITS.copy())
    assert report is not None
    assert (token, report.token) == (4, 4)
    assert report.logprob == pytest.approx(np.log(0.05), abs=1e-5)
    assert [t for t, _ in report.top] == [0, 1]
    assert report.top[0][1] == pytest.approx(np.log(0.4), abs=1e-5)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=400), st.integers(0, 300))
def test_top_ids_are_the_first_ids_of_a_stable_sort(values: Sequence[int], count: int) -> None:
    logits = np.array(values, dtype=np.float32)
    expected = np.argsort(-logits, kind="stable")[:count]
    assert top_ids(logits, count)[: min(count, len(values))].tolist() == expected.tolist()


@given(st.lists(st.integers(-900, 5), min_size=1, max_size=400), st.sampled_from([1, 130]), st.floats(0.01, 0.999))
def test_top_p_keeps_the_same_tokens_with_and_without_sorting(values: list[int], times: int, limit: float) -> None:
    logits, params = np.array(values * times, np.float32) / 7, SamplingParams(**{**OFF, "top_p": limit})
    expected = top_p(*sorted_candidates(logits, 0), params)
    found = top_p_candidates(logits, params)
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


def test_noise_is_uniform_and_depends_on_every_argument() -> None:
    ids = np.arange(50_000)
    noise = uniforms(1, 2, "draw", ids)
    assert abs(noise.mean() - 0.5) < 0.01
    assert np.histogram(noise, 10, (0, 1))[0].min() > 4700
    for other in (uniforms(2, 2, "draw", ids), uniforms(1, 3, "draw", ids), uniforms(1, 2, "xtc", ids)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"typical_p": 0}, "typical_p is 0; it must be above 0"),
        ({"mirostat": 3}, "mirostat is 3; it must be a whole number from 0 to 2"),
        ({"xtc_probability": 1.5}, "xtc_probability is 1.5"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias of 1 is nan"),
        ({"grammar": "root ::= x", "json_schema": "{}"}, "can't be combined; choose one"),
        ({"top_n_sigma": -2}, "top_n_sigma is -2; it must be from -1 to 1000"),
        ({"dynatemp_range": -0.1}, "dynatemp_range is -0.1"),
        ({"stop_token_ids": (-1,)}, "a token of stop_token_ids is -1"),
        ({"dry_base": 0}, "dry_base is 0; it must be above 0"),
    ],
)
def test_invalid_parameters_are_rejected(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30, 1e-3])
def test_temperature_close_to_zero_is_greedy(temperature: float) -> None:
    logits = np.array([1.0, 3.0, -2.0, 2.99, -np.inf], dtype=np.float32)
    for filters in ({}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"mirostat": 1}, {"mirostat": 2}):
        sampler = TokenSampler(SamplingParams(temperature=temperature, **filters), 7)
        assert sampler.sample(logits.copy())[0] == 1


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mu", [-1e6, 0.0, 1023.0, 1e6, 1e300])
def test_mirostat_continues_from_any_state(version: int, mu: float) -> None:
    params = SamplingParams(mirostat=version, mirostat_tau=100, mirostat_eta=10)
    sampler = TokenSampler(params, 0, mirostat_mu=mu)
    rows = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32) * 5
    for row in rows:
        assert 0 <= sampler.sample(row)[0] < 64
    assert np.isfinite(sampler.mirostat_mu)


def test_mirostat_ignores_top_k() -> None:
    logits = np.linspace(0, 0.1, 50).astype(np.float32)
    params = SamplingParams(mirostat=2, top_k=1, temperature=2.0)
    assert len({TokenSampler(params, seed).sample(logits.copy())[0] for seed in range(30)}) > 5
