"""Tests that texts do not depend on the tier of their prefix, with the real llama.cpp and the bundled model."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cellama.bench.models.memory_shapes import HybridShape, RecurrentShape, WindowShape
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import EngineOptions, Model, ModelManager
from cellama.engine.kvcache import disk_tier

from ..conftest import EXAMPLES
from .small_models import EXACT, SMALL

STORY = "Once upon a time, there was a little fox. The fox liked to play in the park. One day, the fox found a ball. "
PLACES: tuple[dict[str, Any], ...] = (
    {"n_parallel": 4, "kv_layout": "partitioned"},
    {"n_parallel": 1},
    {"n_parallel": 8, "kv_layout": "partitioned"},
    {"n_parallel": 3, "kv_layout": "unified"},
)
PIRATE = {"pirate": ("bundled://pirate", 0.0)}


@pytest.fixture(autouse=True)
def slow_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the prefill rate to one token per second, so that requests wait for files on any machine."""
    monkeypatch.setattr(disk_tier, "INITIAL_PREFILL_RATE", 1.0)
    monkeypatch.setattr(disk_tier, "INITIAL_PREFILL_TOKENS", 10**100)


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager()
    yield manager
    manager.close()


def load(manager: ModelManager, name: str, place: dict[str, Any], folder: Path | None) -> Model:
    options = EngineOptions(threads=1, ctx_per_slot=1024, cache_dir=None if folder is None else str(folder), **place)
    return manager.load(name, "bundled://tiny", options=options, capabilities=["generate"], adapters=PIRATE)


def test_text_continues_from_a_state_file_with_any_slot_count_and_layout(manager: ModelManager, tmp_path: Path) -> None:
    model = load(manager, "first", PLACES[0], tmp_path / "first")
    first = model.engine.complete(STORY * 3, max_tokens=20, temperature=0)
    model.evict()  # writes the remaining states to disk
    assert model.engine.snapshot().disk_saves >= 1
    whole = model.engine.complete(STORY * 3 + first.text + " Then", max_tokens=30, temperature=0, cache_prompt=False)
    manager.unload("first")
    for i, place in enumerate(PLACES):
        folder = shutil.copytree(tmp_path / "first", tmp_path / f"{i}")  # because a longer state replaces a shorter one
        model = load(manager, f"{i}", place, folder)
        again = model.engine.complete(" Then", parent_key=first.finish_key, max_tokens=30, temperature=0)
        assert again.text == whole.text
        assert again.usage.cache_tier == "disk"
        assert again.usage.cached_tokens >= first.usage.prompt_tokens + 19


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_texts_of_random_conversations_do_not_depend_on_cached_states(
    manager: ModelManager, tmp_path: Path, seed: int
) -> None:
    """Truncate conversations at random lengths, across restarts, evictions, layouts, adapters and scopes."""
    chance, tiers = random.Random(seed), set()
    computed = load(manager, "computed", {"n_parallel": 1, "cache_prompt": False}, None)
    talks = [computed.tokenize(STORY * 3), computed.tokenize("A bear and a cat. " + STORY * 2)]
    model = None
    for i in range(30):
        if model is None or chance.random() < 0.2:
            if model is not None:
                manager.unload(model.id)
            model = load(manager, f"{i}", chance.choice(PLACES), tmp_path)
        elif chance.random() < 0.2:
            model.evict()
        talk = chance.choice(talks)
        prompt = talk[: chance.randrange(80, len(talk) + 1)]
        params: dict[str, Any] = {"max_tokens": chance.randrange(1, 20), "temperature": 0, "ignore_eos": True}
        params["adapters"] = chance.choice(((), (), (("pirate", 1.0),)))
        done = model.engine.complete(prompt, cache_scope=chance.choice(("", "b")), **params)
        assert done.tokens == computed.engine.complete(prompt, **params).tokens
        tiers.add(done.usage.cache_tier)
        talks.append([*prompt, *done.tokens][:600])
    assert "disk" in tiers


@pytest.mark.parametrize("shape", [WindowShape, RecurrentShape, HybridShape], ids=lambda shape: shape.__name__)
def test_conversations_continue_from_files_when_states_cannot_be_truncated(
    manager: ModelManager, tmp_path: Path, shape: type[Shape]
) -> None:
    path, prompt = tmp_path / "m.gguf", [random.Random(0).randrange(5, 300) for _ in range(700)]
    write_model(path, shape(**SMALL), file_type="F32", seed=1)
    options = EngineOptions(threads=1, ctx_per_slot=1024, n_parallel=2, cache_dir=str(tmp_path / "kv"), **EXACT)
    params: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    first = manager.load("first", str(path), options=options, capabilities=["generate"])
    done = first.engine.complete(prompt, **params)
    first.evict()  # writes the remaining states to disk
    assert first.engine.snapshot().disk_saves >= 1
    manager.unload("first")
    second = manager.load("second", str(path), options=replace(options, n_parallel=3), capabilities=["generate"])
    turn = [*prompt, *done.tokens, *prompt[:40]]
    more = second.engine.complete(turn, **params)
    assert (more.usage.cache_tier, more.usage.cached_tokens) == ("disk", 700 + 11)
    for talk, found in (
        (turn, more),
        (other := [*prompt[:500], *prompt[:50]], second.engine.complete(other, **params)),
    ):
        assert found.tokens == second.engine.complete(talk, cache_prompt=False, **params).tokens
    counters = second.engine.store.counters if second.engine.store else None
    assert counters is not None
    assert not counters.misses
