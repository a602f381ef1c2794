"""Tests that the candidates after all filters equal those of llama.cpp's samplers, with the same probabilities."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cellama.engine import EngineOptions, Model, ModelManager
from cellama.engine.llama import LlamaModel
from cellama.engine.request import SamplingParams
from cellama.engine.sampling.dry import Dry
from cellama.engine.sampling.processors import SequenceStart, make_processors
from cellama.engine.sampling.sampler import TokenSampler

from ..conftest import EXAMPLES

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama.h: llama_token_data
KEEP_ALL = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
BREAKERS = ("\n", ":", '"', "*", "said", "fox jumps")
BORDERLINE = 2e-5  # tolerance of a probability, which is float32 in llama.cpp and float64 here


@pytest.fixture(scope="module")
def weights() -> Iterator[LlamaModel]:
    manager = ModelManager()
    model: Model = manager.load("tiny", "bundled://tiny", options=EngineOptions(n_parallel=1, threads=1))
    yield model._weights
    manager.close()


class Chain:
    """llama.cpp's samplers in the order of its common/sampling.cpp, without the final draw."""

    def __init__(self, weights: LlamaModel, params: SamplingParams, history: list[int]) -> None:
        self._chain: Any = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        n_vocab = weights.info.n_vocab
        biases = (lib.llama_logit_bias * len(params.logit_bias))(*params.logit_bias)
        self._add(lib.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
        repeat = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        self._add(lib.llama_sampler_init_penalties(n_vocab, params.repeat_last_n, *repeat))
        breakers = [text.encode() for text in params.dry_sequence_breakers]
        texts = (ctypes.c_char_p * len(breakers))(*breakers)
        dry = params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_penalty_last_n
        self._add(lib.llama_sampler_init_dry(weights.vocab, *dry, texts, len(breakers)))
        if params.mirostat:
            self._add(lib.llama_sampler_init_temp(params.temperature))
            tau, eta = params.mirostat_tau, params.mirostat_eta
            if params.mirostat == 1:
                self._add(lib.llama_sampler_init_mirostat(n_vocab, 0, tau, eta, 100))
            else:
                self._add(lib.llama_sampler_init_mirostat_v2(0, tau, eta))
        else:
            self._add(lib.llama_sampler_init_top_n_sigma(params.top_n_sigma))
            self._add(lib.llama_sampler_init_top_k(params.top_k))
            self._add(lib.llama_sampler_init_typical(params.typical_p, 0))
            self._add(lib.llama_sampler_init_top_p(params.top_p, 0))
            self._add(lib.llama_sampler_init_min_p(params.min_p, 0))
            self._add(lib.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, 0))
            dynamic = params.temperature, params.dynatemp_range, params.dynatemp_exponent
            self._add(lib.llama_sampler_init_temp_ext(*dynamic))
        for token in history:
            lib.llama_sampler_accept(self._chain, token)

    def _add(self, sampler: Any) -> None:
        assert sampler
        lib.llama_sampler_chain_add(self._chain, sampler)

    def candidates(self, logits: np.ndarray[Any, Any]) -> dict[int, float]:
        """Return the logits of the remaining candidates by token."""
        candidates = np.zeros(len(logits), CANDIDATE)
        candidates["id"], candidates["logit"] = np.arange(len(logits)), logits
        pointer = candidates.ctypes.data_as(lib.llama_token_data_p)
        array = lib.llama_token_data_array(data=pointer, size=len(candidates), selected=-1, sorted=False)
        lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        remaining = [(array.data[at].id, array.data[at].logit) for at in range(array.size)]
        return {token: logit for token, logit in remaining if logit > -np.inf}

    def close(self) -> None:
        lib.llama_sampler_free(self._chain)


def probabilities(logits: dict[int, float]) -> dict[int, float]:
    values = np.array(list(logits.values()), np.float64)
    exponents = np.exp(values - values.max())
    return dict(zip(logits, (exponents / exponents.sum()).tolist(), strict=True))


def compare(weights: LlamaModel, params: SamplingParams, history: list[int], logits: np.ndarray[Any, Any]) -> None:
    chain = Chain(weights, params, history)
    theirs = probabilities(chain.candidates(logits.copy()))
    chain.close()
    window, breakers = params.dry_penalty_last_n, weights.breakers(params.dry_sequence_breakers)
    start = SequenceStart(params, history, 0, n_vocab=len(logits), end_tokens=frozenset())
    changed = logits.copy()
    for processor in make_processors(start, breakers=breakers if params.has_dry else None, dry_window=window):
        processor.apply(changed)
    sampler = TokenSampler(params, 0)
    ids, values = sampler.candidates(changed)
    ours = probabilities(dict(zip(ids.tolist(), values.tolist(), strict=True)))
    for token in ours.keys() ^ theirs.keys():  # rounding can add or remove a token at the border of a filter
        assert min(max(ours.get(token, 0), theirs.get(token, 0)), 1) < 0.02, (token, params)
    assert len(ours.keys() ^ theirs.keys()) <= 1, (ours.keys() - theirs.keys(), theirs.keys() - ours.keys(), params)
    if ours.keys() == theirs.keys():
        assert max(abs(ours[token] - theirs[token]) for token in ours) < BORDERLINE, params


TOKENS = st.integers(2, 1000)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.01, 0.7, 1.0, 3.0]),
        "dynatemp_range": st.sampled_from([0.3, 1.0, 2.5]),
        "dynatemp_exponent": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 2, 40, 5000]),
        "top_p": st.sampled_from([0.01, 0.5, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "typical_p": st.sampled_from([0.1, 0.6, 0.99]),
        "repeat_penalty": st.sampled_from([0.5, 1.1, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.3]),
        "presence_penalty": st.sampled_from([-0.5, 0.7]),
        "repeat_last_n": st.sampled_from([0, 1, 7, 64]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-9.0, 5.0]), max_size=3).map(lambda b: tuple(b.items())),
        "xtc_probability": st.just(1.0),
        "xtc_threshold": st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.6]),
        "dry_multiplier": st.sampled_from([0.8, 5.0]),
        "dry_base": st.sampled_from([0.5, 1.0, 1.75, 50.0]),
        "dry_allowed_length": st.sampled_from([0, 1, 2, 5]),
        "dry_sequence_breakers": st.lists(st.sampled_from(BREAKERS), max_size=4).map(tuple),
    },
)


def logits_of(seed: int, size: int) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).normal(size=size) * 3).astype(np.float32)


HISTORIES = st.lists(st.sampled_from([5, 6, 7, 8, 300]), max_size=80)


@settings(max_examples=50 * EXAMPLES)
@given(PARAMS, HISTORIES, st.integers(0, 99), st.sampled_from([3, 20, 200]))
def test_filters_keep_the_same_tokens_as_llama_cpp(
    weights: LlamaModel, given_params: dict[str, Any], history: list[int], seed: int, window: int
) -> None:
    params = replace(KEEP_ALL, dry_penalty_last_n=window, **given_params)
    compare(weights, params, history, logits_of(seed, weights.info.n_vocab))


@settings(max_examples=20 * EXAMPLES)
@given(st.sampled_from([-1.0, 0.3, 1.0, 2.0, 3.5]), PARAMS, HISTORIES, st.integers(0, 99))
def test_top_n_sigma_keeps_the_same_tokens_as_llama_cpp(
    weights: LlamaModel, n: float, given_params: dict[str, Any], history: list[int], seed: int
) -> None:
    """Compare with a filter that removes forbidden tokens, because llama.cpp's typical_p and dynamic temperature don't.

    Both count the tokens that top_n_sigma has forbidden as candidates.
    """
    given_params = {name: value for name, value in given_params.items() if name != "typical_p"}
    params = replace(KEEP_ALL, dry_penalty_last_n=20, top_n_sigma=n, **{"min_p": 0.001, **given_params})
    compare(weights, replace(params, min_p=params.min_p or 0.001), history, logits_of(seed, weights.info.n_vocab))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [0.5, 2.0, 5.0])  # above, llama.cpp's version 1 overflows and keeps one token
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_mirostat_keeps_the_same_tokens_as_llama_cpp(
    weights: LlamaModel, version: int, tau: float, temperature: float
) -> None:
    params = replace(KEEP_ALL, mirostat=version, mirostat_tau=tau, temperature=temperature, top_k=1, top_p=0.1)
    for seed in range(5):
        compare(weights, params, [], logits_of(seed, weights.info.n_vocab))


def test_forbidden_tokens_are_never_candidates(weights: LlamaModel) -> None:
    """Compare without llama.cpp's typical_p, which counts forbidden tokens as NaN."""
    logits = logits_of(0, weights.info.n_vocab)
    forbidden = tuple((int(token), -np.inf) for token in np.argsort(-logits)[:3])
    for params in (KEEP_ALL, replace(KEEP_ALL, top_k=5, min_p=0.05, xtc_probability=1.0, xtc_threshold=0.05)):
        compare(weights, replace(params, logit_bias=forbidden), [], logits)


TEXTS = ('"The fox said: the fox said: the fox said', "a: b\n a: b\n a: b", "fox jumps. The fox jumps. The fox")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("breakers", [(), BREAKERS, ("fox jumps over", "x said")])
def test_dry_sampler_matches_llama_cpp_token_by_token(
    weights: LlamaModel, text: str, breakers: tuple[str, ...]
) -> None:
    window = 24
    params = replace(KEEP_ALL, dry_multiplier=2.0, dry_allowed_length=1, dry_sequence_breakers=breakers)
    params = replace(params, dry_penalty_last_n=window)
    history = weights.tokenize(text * 2)
    dry = Dry(params, window, weights.breakers(breakers), history[:3])
    for count in range(3, len(history)):
        logits = np.zeros(weights.info.n_vocab, np.float32)
        dry.apply(logits)
        chain = Chain(weights, params, history[:count])
        theirs = chain.candidates(np.zeros(weights.info.n_vocab, np.float32))
        chain.close()
        assert theirs == {token: pytest.approx(float(logits[token]), rel=1e-4) for token in theirs}
        dry.accept(history[count])
