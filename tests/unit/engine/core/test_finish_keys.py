"""Keys of contexts, and requests that continue a context, on the fake backend."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cellama.engine import CacheHit, Completion, InvalidRequest, Request, UnknownKey
from cellama.engine.fake import FakeBackend
from cellama.engine.kvcache import ram_tier
from cellama.engine.kvstore.keys import key_of, seed_of

from ...conftest import GREEDY, PATIENCE_S, Gate, MakeEngine, cold, request

HEAD = "You are a helpful assistant. Answer in one sentence, and never lie about what you do not know for sure. "


def test_finish_key_identifies_prompt_and_output(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    done = engine.complete(HEAD, max_tokens=5, cache_scope="a")
    assert done.finish_key == key_of(seed_of(backend.identity, (), "a"), [*HEAD.encode(), *done.tokens])
    assert engine.complete(HEAD, max_tokens=5, cache_prompt=False).finish_key is None


def test_alternative_completions_have_their_own_finish_keys(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    done = engine.submit(Request("r", tuple(HEAD.encode()), max_tokens=8, n=3)).result(PATIENCE_S)
    keys = {one.finish_key: one for one in (done, *done.alternatives)}
    assert len(keys) == 3
    for key, one in keys.items():
        assert key is not None
        assert engine.context_of(key) == (*HEAD.encode(), *one.tokens)


@pytest.mark.parametrize("memory", [{}, {"unified": True}, {"window": 20}, {"partial_reuse": False}], ids=str)
def test_conversation_with_parent_keys_produces_the_same_text_as_a_whole_prompt(
    make_engine: MakeEngine, memory: dict[str, Any]
) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=2, ctx_per_slot=4000, end_every=9, **memory))
    talk, key, chance = HEAD, None, random.Random(5)
    for turn in range(12):
        said = f" turn {turn}: " + "x" * chance.randrange(40)
        new, num_tokens = said if key else talk + said, chance.randrange(1, 30)
        done = engine.complete(new, parent_key=key, max_tokens=num_tokens, temperature=0)
        talk += said
        assert done.text == whole(make_engine, talk, memory, max_tokens=num_tokens).text
        assert done.usage.prompt_tokens == len(talk)
        talk, key = talk + done.text, done.finish_key


def whole(make_engine: MakeEngine, prompt: str, memory: dict[str, Any], **params: Any) -> Completion:
    backend = FakeBackend(n_slots=1, ctx_per_slot=4000, end_every=9, **memory)
    return make_engine(backend, cache_prompt=False)[0].complete(prompt, temperature=0, **params)


def test_parent_key_from_another_scope_or_adapter_is_unknown(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, _ = make_engine()
    (tmp_path / "a.gguf").write_text("adapter a")
    engine.adapters.load("a", "a", tmp_path / "a.gguf", scale=0)
    key = engine.complete(HEAD, max_tokens=5, cache_scope="mine", adapters=(("a", 0.5),)).finish_key
    assert key is not None
    assert engine.complete("", parent_key=key, cache_scope="mine", adapters=(("a", 0.5),), max_tokens=2).tokens
    others: list[dict[str, Any]] = [{}, {"cache_scope": "mine"}, {"cache_scope": "mine", "adapters": (("a", 0.6),)}]
    for other in others:
        with pytest.raises(UnknownKey, match="whole prompt"):
            engine.complete("", parent_key=key, **other)


@pytest.mark.parametrize("key", ["", "f" * 64, "F" * 64, "../" * 20, 7, "\ud800" * 64], ids=repr)
def test_unknown_parent_key_is_an_error(make_engine: MakeEngine, key: Any) -> None:
    engine, _ = make_engine()
    with pytest.raises(UnknownKey):
        engine.complete("go on", parent_key=key)
    with pytest.raises(InvalidRequest, match="cache_scope"):
        engine.complete("go on", cache_scope=7)


def test_number_of_recent_contexts_is_limited(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_tier, "MAX_CONTEXTS", 3)
    monkeypatch.setattr(ram_tier, "MAX_CONTEXT_TOKENS", 250)
    engine, _ = make_engine()
    keys = [str(engine.complete(f"{i}" + "x" * 99, max_tokens=1).finish_key) for i in range(4)]
    assert [len(engine.context_of(key)) for key in keys[2:]] == [101, 101]
    for key in keys[:2]:
        with pytest.raises(UnknownKey):
            engine.context_of(key)


# Prefill without sampling


@pytest.mark.parametrize("memory", [{}, {"unified": True}, {"window": 20}, {"partial_reuse": False}], ids=str)
def test_prefill_computes_the_prompt_and_samples_nothing(make_engine: MakeEngine, memory: dict[str, Any]) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=2, **memory))
    read = engine.prefill(HEAD)
    assert (read.text, read.tokens, read.finish_reason) == ("", (), "length")
    assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (len(HEAD), 0)
    assert read.timings.ttft_ms is None
    assert read.timings.prompt_eval_rate is not None
    before = sum(len(chunk.tokens) for batch in backend.batches for chunk in batch)
    done = engine.complete("Why?", parent_key=read.finish_key, max_tokens=5, temperature=0)
    assert done.text == cold(make_engine, HEAD + "Why?", max_tokens=5).text
    assert (done.usage.cached_tokens, done.usage.cache_tier) == (len(HEAD), "device")
    assert sum(len(chunk.tokens) for batch in backend.batches for chunk in batch) - before == len("Why?") + 4


def test_bulk_prefill_is_saved_in_ram(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=1))
    engine.prefill(HEAD, priority=9)
    engine.complete("somebody else " + HEAD, max_tokens=3, priority=9)
    done = engine.complete(HEAD + "Why?", max_tokens=3)
    assert (done.usage.cached_tokens, done.usage.cache_tier) == (len(HEAD), "ram")
    assert engine.last_cache_hit == CacheHit("partial", len(HEAD), "ram")


def test_prefill_with_a_timeout_or_several_completions_finishes(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    both = engine.submit(request(HEAD, max_tokens=0, n=2)).result(PATIENCE_S)
    assert [one.tokens for one in (both, *both.alternatives)] == [(), ()]
    backend.failures.extend([2, 1])  # aborted, and no free cells: both are retried
    assert engine.prefill("another " + HEAD).finish_reason == "length"
    late = engine.submit(request(HEAD * 2, max_tokens=0, timeout_s=1e-9)).result(PATIENCE_S)
    assert late.finish_reason == "timeout"


def test_prefill_that_loses_its_slot_resumes_later(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=1, ctx_per_slot=2000), chunk_size=16)
    gate = Gate(backend)
    bulk = engine.submit(request(HEAD * 8, max_tokens=0, priority=9))
    assert gate.reached.wait(PATIENCE_S)
    urgent = engine.submit(request("urgent", max_tokens=3, priority=0))
    gate.open.set()
    assert len(urgent.result(PATIENCE_S).tokens) == 3
    read = bulk.result(PATIENCE_S)
    assert (read.tokens, read.usage.prompt_tokens, engine.snapshot().preemptions) == ((), len(HEAD * 8), 1)
    assert engine.complete(HEAD * 8 + "Why?", max_tokens=2).usage.cached_tokens == len(HEAD * 8)


def test_usage_contains_the_cache_tier_of_a_reused_prefix(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=1))
    assert engine.last_cache_hit is None
    first = engine.submit(request(HEAD, sampling=GREEDY, max_tokens=3)).result(PATIENCE_S)
    assert (first.usage.cache_hit, engine.last_cache_hit) == (CacheHit("cold", 0, None),) * 2
    again = engine.submit(request(HEAD, max_tokens=3)).result(PATIENCE_S)
    assert again.usage.cache_hit == CacheHit("exact", len(HEAD) - 1, "device")
