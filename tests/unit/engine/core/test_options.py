"""Tests that each option of an engine takes effect or is rejected."""

from __future__ import annotations

import pytest

from cellama.engine import EngineOptions, InvalidRequest
from cellama.engine.fake import FakeBackend

from ...conftest import PATIENCE_S, MakeEngine, request


@pytest.mark.parametrize("options", [{"n_ubatch": 7}, {"n_batch": 7}, {"n_ubatch": 300, "n_batch": 7}])
def test_options_with_fewer_tokens_per_pass_than_slots_are_rejected(options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"(n_batch|n_ubatch) is 7; it must be at least n_parallel \(8\)"):
        EngineOptions(n_parallel=8, **options)
    assert EngineOptions(n_parallel=7, **options).pass_tokens == 7


def test_chunk_size_takes_effect_or_is_rejected(make_engine: MakeEngine) -> None:
    assert (EngineOptions().chunk_tokens, EngineOptions().pass_tokens) == (512, 512)
    assert EngineOptions(n_ubatch=64).chunk_tokens == 64
    wide = EngineOptions(chunk_size=1024)  # n_ubatch is None
    assert (wide.chunk_tokens, wide.pass_tokens) == (1024, 1024)
    for options in ({"n_ubatch": 512}, {"n_batch": 512}):
        with pytest.raises(
            InvalidRequest, match=r"chunk_size is 1024; it must be at most n_ubatch and n_batch \(512\)"
        ):
            EngineOptions(chunk_size=1024, **options)
    engine, backend = make_engine(FakeBackend(n_slots=1, n_batch=4096, ctx_per_slot=4096), chunk_size=1024)
    assert engine.submit(request("x" * 1024, max_tokens=1)).result(PATIENCE_S)
    assert [len(chunk.tokens) for chunk in backend.batches[0]] == [1024]


def test_completion_reports_the_cache_hit_and_requested_context_tokens(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=2))
    first = engine.submit(request("a long prompt", return_tokens=True, n=2)).result(PATIENCE_S)
    assert first.context_tokens == (*b"a long prompt", *first.tokens)
    assert [other.context_tokens for other in first.alternatives] == [None]
    again = engine.submit(request("a long prompt")).result(PATIENCE_S)
    other = engine.submit(request("a long one")).result(PATIENCE_S)
    assert [done.usage.cache_hit_kind for done in (first, again, other)] == ["cold", "exact", "partial"]
    assert again.context_tokens is None
