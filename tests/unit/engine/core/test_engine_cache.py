"""Prefixes, preemption and several completions on the fake backend, whose text depends on every cell."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from typing import Any

import pytest

from cellama.engine import Event, Finished, InvalidRequest, SamplingParams, Started, Text
from cellama.engine.core import forward
from cellama.engine.fake import FakeBackend

from ....conftest import wait_until
from ...conftest import PATIENCE_S, Gate, MakeEngine, cold, request

HEAD = "You are a helpful assistant. Answer in one sentence, and never lie about what you do not know for sure. "


def computed(backend: FakeBackend) -> int:
    return sum(len(chunk.tokens) for batch in backend.batches for chunk in batch)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("n_slots", [1, 3])
def test_second_request_computes_only_its_own_suffix(make_engine: MakeEngine, unified: bool, n_slots: int) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=n_slots, unified=unified))
    engine.submit(request(HEAD + "first", max_tokens=5)).result(PATIENCE_S)
    before = computed(backend)
    second = engine.submit(request(HEAD + "second", max_tokens=5)).result(PATIENCE_S)
    assert second.text == cold(make_engine, HEAD + "second", max_tokens=5).text
    assert second.usage.cached_tokens == len(HEAD)
    assert computed(backend) - before == len("second") + 4


@pytest.mark.parametrize("unified", [False, True])
def test_prefix_is_reused_from_a_slot_that_is_still_running(make_engine: MakeEngine, unified: bool) -> None:
    engine, _ = make_engine(FakeBackend(unified=unified, ctx_per_slot=10**6))
    streams, running = threading.Event(), request(HEAD + "first", max_tokens=10**6, stream=True)
    first = engine.submit(running, lambda event: streams.set() if isinstance(event, Text) else None)
    assert streams.wait(PATIENCE_S)
    second = engine.submit(request(HEAD + "second", max_tokens=5)).result(PATIENCE_S)
    assert not first.done
    first.cancel()
    assert second.usage.cached_tokens == len(HEAD)
    assert second.text == cold(make_engine, HEAD + "second", max_tokens=5).text


@pytest.mark.parametrize("memory", [{}, {"window": 20}, {"partial_reuse": False}], ids=str)
@pytest.mark.parametrize("n_slots", [1, 8])
def test_requests_that_wait_for_the_same_prefix_compute_it_once(
    make_engine: MakeEngine, n_slots: int, memory: dict[str, Any]
) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=n_slots, **memory), chunk_size=16)
    gate = Gate(backend)
    prompts = [HEAD + f"question {i}" for i in range(24)]
    handles = [engine.submit(request(prompt, max_tokens=3)) for prompt in prompts]
    gate.open.set()
    texts = [handle.result(PATIENCE_S).text for handle in handles]
    assert texts == [cold(make_engine, prompt, max_tokens=3).text for prompt in prompts]
    shared = len(HEAD + "question ")
    optimum = shared + sum(len(prompt) - shared for prompt in prompts) + 2 * len(prompts)
    assert computed(backend) <= 1.05 * optimum


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_prefix_is_kept_while_a_request_waits_for_it(make_engine: MakeEngine, unified: bool, order: str) -> None:
    """Use bulk requests, whose states are saved only for waiting requests."""
    heads = [f"Family {name}. {HEAD}" for name in "abcd"]
    engine, backend = make_engine(FakeBackend(n_slots=6, unified=unified, ctx_per_slot=160), chunk_size=16)
    gate = Gate(backend)
    prompts = [head + f"{i:02}" for head in heads for i in range(12)]
    if order == "shuffled":
        random.Random(1).shuffle(prompts)
    handles = [engine.submit(request(prompt, max_tokens=3, priority=9)) for prompt in prompts]
    gate.open.set()
    for handle in handles:
        handle.result(PATIENCE_S)
    suffixes = 2 * len(prompts)
    optimum = sum(len(head) for head in heads) + suffixes + 2 * len(prompts)
    assert computed(backend) <= 1.05 * optimum


def test_request_with_cache_prompt_false_neither_reuses_nor_keeps_a_prefix(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()

    def cached(prompt: str, **params: Any) -> int:
        return engine.submit(request(prompt, max_tokens=3, **params)).result(PATIENCE_S).usage.cached_tokens

    assert cached(HEAD + "a", cache_prompt=False) == 0
    assert cached(HEAD + "b") == 0
    assert cached(HEAD + "c", cache_prompt=False) == 0
    assert cached(HEAD + "d") == len(HEAD)
    assert engine.snapshot().kv_cached_tokens > 0


def test_cache_scope_separates_tenants(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    cached = [
        engine.submit(request(HEAD + text, cache_scope=scope, max_tokens=3)).result(PATIENCE_S).usage.cached_tokens
        for text, scope in (("a", "one"), ("b", "two"), ("c", "one"), ("d", ""))
    ]
    assert cached == [0, 0, len(HEAD), 0]


def test_state_evicted_from_its_slot_is_restored_from_ram(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=1))
    talks = [f"Talk number {i}. " + HEAD for i in range(3)]
    for talk in talks:
        engine.submit(request(talk, max_tokens=3)).result(PATIENCE_S)
    again = [engine.submit(request(talk + "And?", max_tokens=3)).result(PATIENCE_S) for talk in talks]
    assert [completion.usage.cached_tokens for completion in again] == [len(talk) for talk in talks]
    assert [c.text for c in again] == [cold(make_engine, talk + "And?", max_tokens=3).text for talk in talks]
    assert engine.snapshot().ram_states >= 2


def test_ram_tier_keeps_only_the_last_turn_of_a_conversation(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=1, ctx_per_slot=2000))
    talk = HEAD
    for turn in range(4):
        talk += engine.submit(request(talk, max_tokens=5)).result(PATIENCE_S).text + f" turn {turn} "
        engine.submit(request(f"{turn} somebody else " + HEAD, max_tokens=5)).result(PATIENCE_S)
    wait_until(lambda: engine.snapshot().ram_states == 1 + 4, "the conversation, and the requests in between")
    assert engine.snapshot().ram_saves == 4 + 4


def test_ram_tier_respects_its_quota_and_evicts_the_least_recently_used_state(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=1), cache_ram_bytes=250)  # the fake's states have one byte per token
    for name in "abcd":
        engine.submit(request(name * 100, max_tokens=3)).result(PATIENCE_S)
        assert engine.snapshot().ram_used_bytes <= 250
    cached = [
        engine.submit(request(name * 100 + "x", max_tokens=3)).result(PATIENCE_S).usage.cached_tokens for name in "ad"
    ]
    assert cached == [0, 100]


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
@pytest.mark.parametrize("partial_reuse", [False, True])
@pytest.mark.parametrize("unified", [False, True])
def test_urgent_request_takes_the_slot_of_a_bulk_request_that_resumes_later(
    make_engine: MakeEngine, unified: bool, partial_reuse: bool, ram_bytes: int
) -> None:
    backend = FakeBackend(n_slots=2, unified=unified, partial_reuse=partial_reuse)
    engine, _ = make_engine(backend, cache_ram_bytes=ram_bytes)
    start, gate = Gate(backend), list[Gate]()
    under_way = threading.Event()
    events: list[list[Event]] = [[], []]

    def watch(index: int, event: Event) -> None:
        events[index].append(event)
        if not gate and all(told and isinstance(told[-1], Text) for told in events):
            # This is the engine thread, so nothing more is decoded until the urgent request has arrived.
            gate.append(Gate(backend))
            under_way.set()

    bulk = [
        engine.submit(request(f"bulk {i} " * 10, priority=9, max_tokens=120), lambda e, i=i: watch(i, e))  # type: ignore[misc]
        for i in range(2)
    ]
    start.open.set()
    assert under_way.wait(PATIENCE_S)
    urgent = engine.submit(request("urgent", priority=0, max_tokens=5))
    gate[0].open.set()
    assert urgent.result(PATIENCE_S).text == cold(make_engine, "urgent", max_tokens=5).text
    texts = [handle.result(PATIENCE_S).text for handle in bulk]
    assert texts == [cold(make_engine, f"bulk {i} " * 10, max_tokens=120).text for i in range(2)]
    assert engine.snapshot().preemptions == 1
    for told, text in zip(events, texts, strict=True):  # one start, one end, and no token twice
        assert [type(event) for event in told if not isinstance(event, Text)] == [Started, Finished]
        assert "".join(event.text for event in told if isinstance(event, Text)) == text


def test_bulk_request_does_not_take_the_slot_of_another_bulk_request(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=1))
    handles = [engine.submit(request(f"bulk {i}", priority=9)) for i in range(5)]
    for handle in handles:
        handle.result(PATIENCE_S)
    assert engine.snapshot().preemptions == 0


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
def test_no_token_is_lost_when_kv_cells_run_out(make_engine: MakeEngine, ram_bytes: int) -> None:
    backend = FakeBackend(n_slots=6, unified=True, ctx_per_slot=256, n_cells=300)
    engine, _ = make_engine(backend, cache_ram_bytes=ram_bytes)
    gate = Gate(backend)
    prompts = [f"story {i} " * (i + 1) for i in range(12)]
    handles = [engine.submit(request(prompt, max_tokens=120)) for prompt in prompts]
    gate.open.set()
    texts = [handle.result(PATIENCE_S).text for handle in handles]
    assert texts == [cold(make_engine, prompt, max_tokens=120).text for prompt in prompts]
    assert engine.snapshot().preemptions > 0
    assert backend.num_used() <= 300


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("partial_reuse", [False, True])
def test_no_token_is_lost_after_many_failures(
    make_engine: MakeEngine, unified: bool, partial_reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "ATTEMPTS_ALONE", 100)  # no request fails by chance
    rng = random.Random(5)
    failures = deque(rng.choices([0, 1, 2, -1, -3], weights=[30, 1, 1, 1, 1], k=3000))
    backend = FakeBackend(n_slots=4, unified=unified, partial_reuse=partial_reuse, failures=failures)
    engine, _ = make_engine(backend, chunk_size=8)
    prompts = [HEAD[: rng.randrange(1, 90)] + f"{i}" for i in range(40)]
    handles = [engine.submit(request(p, max_tokens=15, priority=rng.randrange(10))) for p in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        assert handle.result(PATIENCE_S).text == cold(make_engine, prompt, max_tokens=15).text
    assert engine.snapshot().kv_used_tokens == 0


def test_memory_that_cannot_be_truncated_is_reused_as_a_whole_without_checkpoints(
    make_engine: MakeEngine,
) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=2, partial_reuse=False), cache_ram_bytes=0)
    first = engine.submit(request(HEAD, max_tokens=5)).result(PATIENCE_S)
    whole = HEAD + first.text[:4]  # the last token is never computed
    longer = engine.submit(request(whole + "more", max_tokens=5)).result(PATIENCE_S)
    other = engine.submit(request(HEAD + "other", max_tokens=5)).result(PATIENCE_S)
    assert (longer.usage.cached_tokens, other.usage.cached_tokens) == (len(whole), 0)
    assert longer.text == cold(make_engine, whole + "more", max_tokens=5).text
    assert other.text == cold(make_engine, HEAD + "other", max_tokens=5).text


def test_third_request_reuses_the_prefix_shared_by_the_first_two_from_a_checkpoint(
    make_engine: MakeEngine,
) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=2, partial_reuse=False))
    done = [engine.submit(request(HEAD + name, max_tokens=5)).result(PATIENCE_S) for name in ("one", "two", "six")]
    assert [each.usage.cached_tokens for each in done] == [0, 0, len(HEAD)]
    assert done[2].text == cold(make_engine, HEAD + "six", max_tokens=5).text
    assert 0 < engine.snapshot().ram_used_bytes < 1000


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_completions_of_one_prompt_share_its_prefill(make_engine: MakeEngine, partial_reuse: bool) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=8, partial_reuse=partial_reuse))
    sampling = SamplingParams(seed=11)
    events: list[Event] = []
    done = engine.submit(request(HEAD, n=5, sampling=sampling, max_tokens=6), events.append).result(PATIENCE_S)
    choices = (done, *done.alternatives)
    expected = [cold(make_engine, HEAD, sampling=SamplingParams(seed=11 + i), max_tokens=6).text for i in range(5)]
    assert [choice.text for choice in choices] == expected
    assert [choice.index for choice in choices] == list(range(5))
    assert done.usage.completion_tokens == 30
    assert computed(backend) == len(HEAD) + 4 + 5 * 5
    assert [type(e) for e in events if not isinstance(e, Text)] == [Started, Finished]
    for index, text in enumerate(expected):
        assert "".join(e.text for e in events if isinstance(e, Text) and e.index == index) == text


def test_completions_of_one_prompt_are_cancelled_or_fail_together(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=2, ctx_per_slot=10**6))
    cancelled = engine.submit(request(n=4, max_tokens=10**6))
    cancelled.cancel()
    done = cancelled.result(PATIENCE_S)
    assert [c.finish_reason for c in (done, *done.alternatives)] == ["cancelled"] * 4
    backend.poison = ord("!")
    with pytest.raises(Exception, match="for this request alone"):
        engine.submit(request("!", n=3)).result(PATIENCE_S)
    assert engine.snapshot().kv_used_tokens == engine.snapshot().requests_waiting == 0
    with pytest.raises(InvalidRequest, match="n: 3 is not supported by this method; use submit"):
        engine.generate("x", n=3)


def test_asyncio_callers_get_the_same_text_and_free_their_slots(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=2, ctx_per_slot=10**6))

    async def use() -> tuple[str, str]:
        texts = await asyncio.gather(*(engine.agenerate("hello", temperature=0, max_tokens=20) for _ in range(4)))
        chunks = [chunk async for chunk in engine.astream("hello", temperature=0, max_tokens=20)]
        endless = asyncio.create_task(engine.agenerate("hello", temperature=0, max_tokens=10**6))
        async for _ in engine.astream("hi", temperature=0, max_tokens=10**6):
            break
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        with pytest.raises(TimeoutError):
            await engine.agenerate("hello", max_tokens=10**6, timeout_s=0.1)
        assert len(set(texts)) == 1
        return texts[0], "".join(chunks)

    whole, streamed = asyncio.run(use())
    assert whole == streamed == cold(make_engine, "hello").text
    assert engine.submit(request()).result(PATIENCE_S).finish_reason == "length"
