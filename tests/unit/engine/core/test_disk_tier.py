"""States in files, on the fake backend: texts don't depend on the tier from which a prefix comes."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from cellama.engine import Engine, Handle, UnknownKey
from cellama.engine.kvcache import disk_tier
from cellama.engine.kvstore import keys

from ....conftest import EXAMPLES, wait_until
from ...conftest import PATIENCE_S, request
from .homes import STORY, Home, expected, say

ENDLESS = 1_000_000  # more tokens than any test waits for
MEMORIES: tuple[dict[str, Any], ...] = ({}, {"window": 20}, {"partial_reuse": False})


@pytest.fixture
def dear_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make prefill appear to take a second per token, so that requests wait for a file on any machine."""
    monkeypatch.setattr(disk_tier, "INITIAL_PREFILL_RATE", 1.0)
    monkeypatch.setattr(disk_tier, "INITIAL_PREFILL_TOKENS", 10**100)


def run_on(engine: Engine, prompt: str) -> Handle:
    """Return a request that has started, and continues until it is cancelled."""
    streams, never = threading.Event(), threading.Event()

    def on_event(event: object) -> None:
        streams.set()
        never.wait(0.001)  # yields the interpreter to other threads, as llama.cpp's decode calls do

    handle = engine.submit(request(prompt, max_tokens=ENDLESS, stream=True), on_event)
    assert streams.wait(PATIENCE_S)
    return handle


@pytest.mark.usefixtures("dear_prefill")
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_restarted_engine_continues_from_a_state_on_disk(home: Home, memory: dict[str, Any]) -> None:
    first = say(home.open(n_slots=4, **memory), STORY)
    home.close()
    engine = home.open(n_slots=1, unified=True, **memory)
    probed = engine.cached_prefix(tuple((STORY + first.text).encode()))
    assert probed == {"device": 0, "ram": 0, "disk": len(STORY) + 5}
    again = say(engine, "And then?", parent_key=first.finish_key)
    assert again.text == expected((STORY + first.text + "And then?").encode(), 5)
    assert (again.usage.cached_tokens, again.usage.cache_tier) == (len(STORY) + 4, "disk")
    assert engine.last_cache_hit == again.usage.cache_hit
    told = engine.snapshot()
    assert (told.cache_hits, told.cache_hits_disk, told.disk_loads, told.disk_late) == (1, 1, 1, 0)
    third = say(engine, "And then?", parent_key=again.finish_key)
    assert third.usage.cache_tier == "device"


@pytest.mark.parametrize("seed", range(2 * EXAMPLES))
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_texts_do_not_depend_on_the_tier_of_their_prefixes(
    home: Home, tmp_path: Path, memory: dict[str, Any], seed: int
) -> None:
    """Test conversations with shared prefixes over restarts, evictions, layouts, adapters and scopes."""
    chance, talks = random.Random(seed), [STORY[:60], STORY, "Another one. " + STORY]
    (tmp_path / "a.gguf").write_text("adapter a")
    engine, tiers = None, set()
    for _ in range(60):
        if engine is None or chance.random() < 0.1:
            home.close(save=chance.random() < 0.8)
            engine = home.open(
                n_slots=chance.choice((1, 2, 5)),
                unified=chance.random() < 0.5,
                cache_ram_bytes=chance.choice((20_000, 1 << 20)),
                **memory,
            )
            engine.adapters.load("a", "a", tmp_path / "a.gguf", scale=0)
        elif chance.random() < 0.1:
            engine.evict(PATIENCE_S)
        talk, scope, scale = chance.choice(talks), chance.choice(("", "b")), chance.choice((0.0, 0.0, 0.5))
        prompt = talk[: chance.randrange(10, len(talk))] + chance.choice(("", "x" * chance.randrange(90)))
        count = chance.randrange(0, 12)
        done = say(engine, prompt, count, cache_scope=scope, adapters=(("a", scale),))
        key = ((engine.adapters.infos()[0].fingerprint, scale),) if scale else ()
        assert done.text == expected(prompt.encode(), count, key)
        tiers.add(done.usage.cache_tier)
        if len(prompt) < 1000:
            talks.append(prompt + done.text)
    assert "disk" in tiers


@pytest.mark.usefixtures("dear_prefill")
def test_states_in_one_scope_are_not_found_in_another_scope(home: Home) -> None:
    mine = say(home.open(), STORY, cache_scope="mine")
    home.close()
    engine = home.open()
    assert mine.finish_key is not None
    for scope in ("", "your", "MINE", "mine "):
        assert set(engine.cached_prefix(tuple(STORY.encode()), scope).values()) == {0}
        with pytest.raises(UnknownKey):
            say(engine, "", parent_key=mine.finish_key, cache_scope=scope)
        assert say(engine, STORY, cache_scope=scope).usage.cached_tokens == 0
    assert say(engine, STORY, cache_scope="mine").usage.cache_tier == "disk"


def test_damaged_state_is_recomputed(home: Home) -> None:
    say(home.open(), STORY)
    home.close()
    (file,) = home.folder.rglob("*.kv")
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)
    engine = home.open()
    again = say(engine, STORY + "And then?")
    assert (again.text, again.usage.cached_tokens) == (expected((STORY + "And then?").encode(), 5), 0)
    wait_until(lambda: engine.snapshot().disk_misses == 1, "the damage is detected")


@pytest.mark.usefixtures("dear_prefill")
def test_evict_removes_idle_states_without_affecting_running_requests(home: Home) -> None:
    engine = home.open(n_slots=3, ctx_per_slot=ENDLESS)
    done = say(engine, STORY)
    handle = run_on(engine, "Who runs? " + STORY)
    assert engine.evict(PATIENCE_S) >= 1  # running requests may be copied to RAM again at any time
    left = engine.cached_prefix(tuple(STORY.encode()))
    assert left["device"] == left["ram"] == engine.snapshot().kv_cached_tokens == 0
    handle.cancel()
    said = handle.result(PATIENCE_S).text[:200]
    assert said == expected(handle.request.prompt, len(said)) != ""
    again = say(engine, "And?", parent_key=done.finish_key)
    assert (again.text, again.usage.cache_tier) == (expected((STORY + done.text + "And?").encode(), 5), "disk")


def test_running_sequence_is_saved_to_disk_before_it_finishes(home: Home) -> None:
    """After a crash, another process continues from this state."""
    handle = run_on(home.open(ctx_per_slot=ENDLESS), STORY)
    other = home.open()
    wait_until(lambda: other.cached_prefix(tuple(STORY.encode()))["disk"] == len(STORY), "the prompt is kept")
    handle.cancel()


@pytest.mark.usefixtures("dear_prefill")
def test_engine_thread_never_computes_hashes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: set[str] = set()
    sha256 = keys.sha256

    def noted(data: bytes) -> Any:
        hashed.add(threading.current_thread().name)
        return sha256(data)

    monkeypatch.setattr(keys, "sha256", noted)
    engine = home.open()
    say(engine, STORY)
    engine.evict(PATIENCE_S)
    assert say(engine, STORY + "And?").usage.cache_tier == "disk"
    assert len(hashed) >= 2
    assert engine.pulse.name not in hashed


def test_probes_from_many_threads_do_not_affect_requests(home: Home) -> None:
    engine, stop, failed = home.open(n_slots=4), threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            try:
                for text in (STORY, "x" + STORY):
                    found = engine.cached_prefix(tuple(text.encode()))
                    assert max(found.values()) <= len(text)
            except Exception as error:
                failed.append(error)

    for thread in (threads := [threading.Thread(target=look) for _ in range(2)]):
        thread.start()
    for i in range(60):
        say(engine, ("x" * (i % 3) + STORY)[: 20 + i] + f"{i}")
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed
