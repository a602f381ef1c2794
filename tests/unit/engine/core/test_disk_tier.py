"""States in files, on the fake backend: texts are those of computing, whatever tier a prefix comes from."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cellama.engine import Engine, EngineOptions, Handle, UnknownKey
from cellama.engine.core import engine as engine_module
from cellama.engine.fake import _ALPHABET, FakeBackend
from cellama.engine.kvcache import disk_tier
from cellama.engine.kvstore import keys
from cellama.engine.kvstore.counters import StoreCounters
from cellama.engine.kvstore.states import KeptState, Match

from ....conftest import wait_until
from ...conftest import PATIENCE_S, request

STORY = "Once upon a time there was a fox who told a story, and this is how it began on a day in spring. "
ENDLESS = 1_000_000  # tokens: more than any test waits for
MEMORIES: tuple[dict[str, Any], ...] = ({}, {"window": 20}, {"partial_reuse": False})


class Home:
    """Engines that come and go on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[Engine] = []

    def open(self, **how: Any) -> Engine:
        own = ("unified", "window", "partial_reuse", "n_slots", "ctx_per_slot")
        memory = {name: how.pop(name) for name in own if name in how}
        backend = FakeBackend(n_batch=512, **{"n_slots": 2, "ctx_per_slot": 4000, **memory})
        options = {"cache_dir": str(self.folder), "n_parallel": backend.n_slots, "n_batch": 512, **how}
        self.engines.append(Engine(backend, EngineOptions(**options)))
        return self.engines[-1]

    def close(self, *, save: bool = True) -> None:
        while self.engines:
            engine = self.engines.pop()
            if save:
                engine.save_states(PATIENCE_S)
            assert engine.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "states")
    yield home
    home.close(save=False)


@pytest.fixture
def dear_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is taken to compute a second, so a file is waited for as long as it takes, on any machine."""
    monkeypatch.setattr(disk_tier, "FIRST_GUESS", 1.0)
    monkeypatch.setattr(disk_tier, "GUESS_TOKENS", 10**100)


def say(engine: Engine, prompt: str, count: int = 5, **params: Any) -> Any:
    return engine.complete(prompt, max_tokens=count, temperature=0, **params)


def run_on(engine: Engine, prompt: str) -> Handle:
    """A request that has begun, and goes on until it is cancelled."""
    streams, never = threading.Event(), threading.Event()

    def on_event(event: object) -> None:
        streams.set()
        never.wait(0.001)  # leaves the interpreter to other threads, as a decode call of llama.cpp does

    handle = engine.submit(request(prompt, max_tokens=ENDLESS, stream=True), on_event)
    assert streams.wait(PATIENCE_S)
    return handle


def expected(context: Sequence[int], count: int, adapters: tuple[tuple[str, float], ...] = ()) -> str:
    """What the fake says after these tokens, computed without an engine."""
    cells = [(token, adapters) if adapters else token for token in context]
    said = bytearray()
    for _ in range(count):
        token = _ALPHABET[zlib.crc32(repr((cells, 0)).encode()) % len(_ALPHABET)]
        said.append(token)
        cells.append((token, adapters) if adapters else token)
    return said.decode()


@pytest.mark.usefixtures("dear_prefill")
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_restarted_engine_goes_on_from_a_file(home: Home, memory: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_texts_from_any_tier_are_those_of_computing(
    home: Home, tmp_path: Path, memory: dict[str, Any], seed: int
) -> None:
    """Conversations that share beginnings, cut anywhere, over restarts, evictions, layouts, adapters and scopes."""
    chance, talks = random.Random(seed), [STORY[:60], STORY, "Another one. " + STORY]
    (tmp_path / "a.gguf").write_text("adapter a")
    engine, tiers = None, set()
    for _ in range(120):
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
def test_nothing_of_one_scope_is_found_by_another(home: Home) -> None:
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


def test_damaged_file_is_computed_again(home: Home) -> None:
    say(home.open(), STORY)
    home.close()
    (file,) = home.folder.rglob("*.kv")
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)
    engine = home.open()
    again = say(engine, STORY + "And then?")
    assert (again.text, again.usage.cached_tokens) == (expected((STORY + "And then?").encode(), 5), 0)
    wait_until(lambda: engine.snapshot().disk_misses == 1, "the file is found out")


@pytest.mark.usefixtures("dear_prefill")
def test_evict_leaves_what_runs_alone_and_takes_the_rest(home: Home) -> None:
    engine = home.open(n_slots=3, ctx_per_slot=ENDLESS)
    done = say(engine, STORY)
    handle = run_on(engine, "Who runs? " + STORY)
    assert engine.evict(PATIENCE_S) >= 1  # what runs may be copied to RAM again at any moment
    left = engine.cached_prefix(tuple(STORY.encode()))
    assert left["device"] == left["ram"] == engine.snapshot().kv_cached_tokens == 0
    handle.cancel()
    said = handle.result(PATIENCE_S).text[:200]
    assert said == expected(handle.request.prompt, len(said)) != ""
    again = say(engine, "And?", parent_key=done.finish_key)
    assert (again.text, again.usage.cache_tier) == (expected((STORY + done.text + "And?").encode(), 5), "disk")


def test_running_sequence_is_on_disk_before_it_ends(home: Home) -> None:
    """After a crash, another process goes on from there."""
    handle = run_on(home.open(ctx_per_slot=ENDLESS), STORY)
    other = home.open()
    wait_until(lambda: other.cached_prefix(tuple(STORY.encode()))["disk"] == len(STORY), "the prompt is kept")
    handle.cancel()


@pytest.mark.usefixtures("dear_prefill")
def test_engine_thread_never_hashes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_probe_from_many_threads_disturbs_nothing(home: Home) -> None:
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


# Folders that do not do what they should


class BadStore:
    """Has whatever is asked for, and never gives it as it should."""

    is_idle, read_rate, used_bytes, quota_bytes = True, 1e9, 0, 0
    counters = StoreCounters(0, {}, 0, 0, 0, {}, 0, 0, 0)

    def longest(self, seed: bytes, tokens: Sequence[int]) -> Match | None:
        return Match("0" * 64, len(tokens), len(tokens), 100, 0, ())

    def load(self, match: Match, on_loaded: Callable[[KeptState | None], None]) -> None: ...

    def offer(self, state: Any, worth_s: float, num_bytes: int = 0) -> bool:
        return False

    def note_busy(self, busy: bool) -> None: ...

    def context(self, key: str) -> None: ...

    def flush(self, deadline: float) -> int:
        return 0

    def close(self) -> None: ...


class Raises(BadStore):
    def longest(self, seed: bytes, tokens: Sequence[int]) -> Match | None:
        raise OSError("longest")

    def offer(self, state: Any, worth_s: float, num_bytes: int = 0) -> bool:
        raise OSError("offer")


class RaisesLater(Raises):
    longest = BadStore.longest

    def load(self, match: Match, on_loaded: Callable[[KeptState | None], None]) -> None:
        raise OSError("load")


class Loses(BadStore):
    def load(self, match: Match, on_loaded: Callable[[KeptState | None], None]) -> None:
        threading.Thread(target=on_loaded, args=(None,)).start()


class GivesRubbish(BadStore):
    def load(self, match: Match, on_loaded: Callable[[KeptState | None], None]) -> None:
        state = KeptState(b"", tuple(STORY.encode()), 0, b"(7, ((1, 2), 0, 0))")
        threading.Thread(target=on_loaded, args=(state,)).start()


@pytest.mark.parametrize("store", [BadStore, Raises, RaisesLater, Loses, GivesRubbish])
def test_store_that_fails_costs_time_only(
    home: Home, store: type[BadStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "open_store", lambda options, identity: store())
    engine = home.open()
    for text in (STORY, STORY + "And?", "x" + STORY):
        done = say(engine, text)
        assert done.text == expected(text.encode(), 5)
        assert done.usage.cache_tier != "disk"
    engine.evict(PATIENCE_S)
    assert say(engine, STORY).text == expected(STORY.encode(), 5)


def test_request_waits_no_longer_for_a_file_than_computing_takes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file never comes; before anything is measured, a prefill is taken to compute 1000 tokens/s."""
    monkeypatch.setattr(engine_module, "open_store", lambda options, identity: BadStore())
    done = say(home.open(), STORY)
    assert 0.9 * len(STORY) <= done.timings.prefix_wait_ms
    assert done.text == expected(STORY.encode(), 5)


def test_files_on_their_way_count_as_ram(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Match] = []

    class Slow(BadStore):
        def longest(self, seed: bytes, tokens: Sequence[int]) -> Match | None:
            return Match(f"{tokens[0]:064}", len(tokens), len(tokens), 600, 0, ())

        def load(self, match: Match, on_loaded: Callable[[KeptState | None], None]) -> None:
            asked.append(match)

    monkeypatch.setattr(engine_module, "open_store", lambda options, identity: Slow())
    engine = home.open(n_slots=4, cache_ram_bytes=1000)
    handles = [engine.submit(request(f"{i}" + STORY, max_tokens=3)) for i in range(3)]
    assert [len(handle.result(PATIENCE_S).tokens) for handle in handles] == [3, 3, 3]
    assert len(asked) == 1  # for a second one there is no room
    assert engine.snapshot().ram_used_bytes <= 400
