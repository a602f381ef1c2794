"""Joint draws: every row gets the token that its own sampler would have chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from cellama.engine import SamplingParams
from cellama.engine.sampling.joint import JointDraw
from cellama.engine.sampling.processors import SequenceStart, make_processors
from cellama.engine.sampling.rows import RowThreads
from cellama.engine.sampling.sampler import TokenSampler

VOCABULARY = 6000 + 13  # not a multiple of the size of a block


def samplers(all_params: list[SamplingParams], seed: int, position: int) -> list[TokenSampler]:
    """Return a sampler for each row, whose sequence already has some tokens."""
    history = [(7 * seed + i) % VOCABULARY for i in range(30)]
    made = []
    for index, params in enumerate(all_params):
        start = SequenceStart(params, history, position, n_vocab=VOCABULARY, end_tokens=frozenset())
        made.append(TokenSampler(params, seed + index, make_processors(start), num_sampled=position))
    return made


def joint_draw(num_threads: int = 1) -> JointDraw:
    return JointDraw(VOCABULARY, RowThreads(num_threads, min_values=1))


def drawn(
    logits: NDArray[np.float32], all_params: list[SamplingParams], seed: int, position: int, num_threads: int = 1
) -> list[int | None]:
    """Draw from all rows together, and check that each sampler then returns its own token."""
    made, rows = samplers(all_params, seed, position), logits.copy()
    draws = [draw for row, sampler in enumerate(made) if (draw := sampler.draw_of(row)) is not None]
    tokens = joint_draw(num_threads).draw(rows, draws)
    if np.isfinite(logits).all():
        for sampler, token in zip(made, tokens, strict=True):
            sampler.use_drawn(token)
        each = zip(made, rows, strict=True)
        assert [sampler.sample(row)[0] for sampler, row in each] == sampled(logits, all_params, seed, position)
    return tokens


def sampled(logits: NDArray[np.float32], all_params: list[SamplingParams], seed: int, position: int) -> list[int]:
    each = zip(samplers(all_params, seed, position), logits.copy(), strict=True)
    return [sampler.sample(row)[0] for sampler, row in each]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-5, 0.2, 0.8, 1.0, 2.0]),
        "top_p": st.sampled_from([0.0, 0.3, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.6, 1.0]),
        "repeat_penalty": st.sampled_from([1.0, 1.3]),
    }
)


@given(
    st.lists(PARAMS, min_size=2, max_size=9),
    st.integers(2, 21),
    st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    st.sampled_from([0.0, 0.25]),
    st.integers(0, 2**32 - 20),
    st.integers(0, 3000),
    st.integers(1, 3),
)
def test_joint_draws_are_the_samplers_draws(
    given: list[dict[str, Any]],
    top_k: int,
    scale: float,
    rounding: float,
    seed: int,
    position: int,
    num_threads: int,
) -> None:
    all_params = [SamplingParams(top_k=top_k, **params) for params in given]
    logits = np.random.default_rng(seed).standard_normal((len(given), VOCABULARY)).astype(np.float32) * np.float32(
        scale
    )
    logits = np.round(logits / rounding) * np.float32(rounding) if rounding else logits  # with equal logits
    tokens = drawn(logits, all_params, seed, position, num_threads)
    for token, expected in zip(tokens, sampled(logits, all_params, seed, position), strict=True):
        assert token in (expected, None)
    if scale == 8.0 and not rounding:
        assert None not in tokens


@pytest.mark.parametrize(
    ("value", "tokens_with_it"),
    [(np.nan, slice(None)), (np.inf, slice(None)), (-np.inf, slice(None)), (np.nan, 0), (np.inf, -1), (np.nan, -1)],
)
def test_unusual_rows_are_left_to_their_samplers(value: float, tokens_with_it: int | slice) -> None:
    params = [SamplingParams(top_k=5, temperature=1.0)] * 3
    logits = np.random.default_rng(1).standard_normal((3, VOCABULARY)).astype(np.float32)
    logits[1, tokens_with_it] = value
    tokens = drawn(logits, params, 1, 0)
    assert tokens[1] is None
    logits[1] = 0
    expected = sampled(logits, params, 1, 0)
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]


def test_small_vocabularies_have_no_joint_draw() -> None:
    assert [joint_draw().is_possible(top_k) for top_k in (40, 187)] == [True, False]


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"top_k": 0}, {"typical_p": 0.5}, {"mirostat": 2}, {"xtc_probability": 0.5}, {"logprobs": 2}],
)
def test_other_samplers_have_no_joint_draw(params: dict[str, Any]) -> None:
    assert TokenSampler(SamplingParams(**{"top_k": 40, "temperature": 1.0, **params}), 1).draw_of(0) is None
