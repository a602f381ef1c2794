"""Malfunctioning directories of states cost time, but change no text."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cellama.engine.core import engine as engine_module
from cellama.engine.kvstore.states import StateHead, StateMatch, StoreCounters, StoredState

from ...conftest import PATIENCE_S, request
from .homes import STORY, Home, expected, say


def match_of(key: str, tokens: Sequence[int], num_bytes: int) -> StateMatch:
    """Return a match for a file with all of these tokens."""
    head = StateHead(
        key=key,
        seed=b"",
        tokens=array("I", tokens),
        first_cut=0,
        scope="",
        parts=(),
        blocks=[],
        num_bytes=num_bytes,
        head_bytes=0,
    )
    return StateMatch(head, len(tokens))


class BadStore:
    """Reports a file for every request, and fails to deliver it in various ways."""

    is_idle, read_rate, used_bytes, quota_bytes = True, 1e9, 0, 0
    counters = StoreCounters()

    def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        return match_of("0" * 64, tokens, 100)

    def load(self, match: StateMatch, on_loaded: Callable[[StoredState | None], None]) -> None: ...

    def offer(self, make: Any, expected_saved_s: float, num_bytes: int) -> bool:
        return False

    def note_busy(self, busy: bool) -> None: ...

    def note_saved(self, seconds: float) -> None: ...

    def context(self, key: str) -> None: ...

    def flush(self, deadline: float) -> int:
        return 0

    def close(self) -> None: ...


class Raises(BadStore):
    def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        raise OSError("longest")


class Loses(BadStore):
    def load(self, match: StateMatch, on_loaded: Callable[[StoredState | None], None]) -> None:
        threading.Thread(target=on_loaded, args=(None,)).start()


class GivesRubbish(BadStore):
    def load(self, match: StateMatch, on_loaded: Callable[[StoredState | None], None]) -> None:
        state = StoredState(b"", tuple(STORY.encode()), 0, b"(7, ((1, 2), 0, 0))")
        threading.Thread(target=on_loaded, args=(state,)).start()


@pytest.mark.parametrize("store", [BadStore, Raises, Loses, GivesRubbish])
def test_failing_store_costs_time_but_changes_no_text(
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


def test_request_waits_for_a_file_no_longer_than_recomputing_the_state_takes(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file never arrives. Before the first measurement, prefill is assumed to compute 1000 tokens per second."""
    monkeypatch.setattr(engine_module, "open_store", lambda options, identity: BadStore())
    done = say(home.open(), STORY)
    assert 0.9 * len(STORY) <= done.timings.prefix_wait_ms
    assert done.text == expected(STORY.encode(), 5)


def test_files_being_read_count_toward_the_ram_quota(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[StateMatch] = []

    class Slow(BadStore):
        def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
            return match_of(f"{tokens[0]:064}", tokens, 600)

        def load(self, match: StateMatch, on_loaded: Callable[[StoredState | None], None]) -> None:
            asked.append(match)

    monkeypatch.setattr(engine_module, "open_store", lambda options, identity: Slow())
    engine = home.open(n_slots=4, cache_ram_bytes=1000)
    handles = [engine.submit(request(f"{i}" + STORY, max_tokens=3)) for i in range(3)]
    assert [len(handle.result(PATIENCE_S).tokens) for handle in handles] == [3, 3, 3]
    assert len(asked) == 1  # there is no room for a second one
    assert engine.snapshot().ram_used_bytes <= 400
