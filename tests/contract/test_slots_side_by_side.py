"""Tests that texts do not depend on padding rows or on moves between slots, with the real llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellama.bench.harness.engines import submit_together
from cellama.bench.models.memory_shapes import HybridShape, RecurrentShape, WindowShape
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import (
    Completion,
    EngineOptions,
    Model,
    ModelManager,
    Request,
    SamplingParams,
)
from cellama.engine.kvcache.manager import MIN_SAVED_TOKENS
from cellama.engine.scheduling.decode_costs import DecodeCosts, MoveCosts
from cellama.engine.scheduling.slot_layout import SlotLayout

from .holding import Hold
from .small_models import EXACT, SMALL

PATIENCE_S = 120
GREEDY = SamplingParams(temperature=0)
N_SLOTS = 6
KEPT = (1, 3, 5)
NEW = 60
STORY = "Once upon a time, there was a little fox. The fox liked to play in the park. "


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager()
    yield manager
    manager.close()


@pytest.fixture(autouse=True)
def costly_decode_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make decode calls expensive and rows nearly free, independently of this machine."""
    monkeypatch.setattr(DecodeCosts, "is_measured", True, raising=False)
    for estimate in ("expected", "optimistic"):
        monkeypatch.setattr(DecodeCosts, estimate, lambda _, rows: 1 + 0.01 * rows)
    monkeypatch.setattr(MoveCosts, "of", lambda _, num_tokens: 0.0)


def load(manager: ModelManager, source: str, **options: Any) -> Model:
    chosen = {"threads": 1, "ctx_per_slot": 512, "cache_ram_bytes": 0, **EXACT, **options}
    return manager.load(None, source, options=EngineOptions(**chosen), capabilities=["generate"])


def request(model: Model, text: str, **params: Any) -> Request:
    return Request(text, tuple(model.tokenize(text)), GREEDY, **{"max_tokens": NEW, "ignore_eos": True, **params})


def alone(manager: ModelManager, source: str, texts: list[str], **params: Any) -> list[tuple[int, ...]]:
    model = load(manager, source, n_parallel=1, cache_prompt=False)
    return [model.engine.submit(request(model, text, **params)).result(PATIENCE_S).tokens for text in texts]


def scattered(model: Model, texts: list[str]) -> tuple[list[Completion], SlotLayout]:
    """Return the completions of every second text, after cancelling the others to leave gaps between the slots."""
    hold = Hold(8)
    listeners = iter([*[None] * (len(texts) - 1), hold])
    handles = submit_together(model, [request(model, text) for text in texts], lambda: next(listeners))
    assert hold.reached.wait(PATIENCE_S)
    for index, handle in enumerate(handles):
        if index not in KEPT:
            handle.cancel()
    hold.opened.set()
    done = [handle.result(PATIENCE_S) for handle in handles]
    return [done[index] for index in KEPT], model.engine._core.scheduler.layout


def source_of(shape: type[Shape] | None, folder: Path) -> str:
    if shape is None:
        return "bundled://tiny"
    write_model(folder / "model.gguf", shape(**SMALL), file_type="F32", seed=2)
    return str(folder / "model.gguf")


TEXTS = [f"{index}: {STORY * (1 + index % 3)}" for index in range(N_SLOTS)]
SHAPES = (None, Shape, WindowShape, RecurrentShape, HybridShape)


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "padded"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "tiny" if shape is None else str(shape.architecture))
def test_texts_are_the_same_in_scattered_slots_and_cached_prefixes_are_kept(
    manager: ModelManager, tmp_path: Path, shape: type[Shape] | None, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not moves:
        monkeypatch.setattr(SlotLayout, "plan_moves", lambda _: [])
    padded: list[int] = []
    remove_padding = SlotLayout.remove_padding
    monkeypatch.setattr(
        SlotLayout, "remove_padding", lambda self, rows: (padded.append(len(rows)), remove_padding(self, rows))[1]
    )
    source = source_of(shape, tmp_path)
    expected = alone(manager, source, TEXTS)
    model = load(manager, source, n_parallel=N_SLOTS, kv_layout="partitioned")
    done, layout = scattered(model, TEXTS)
    assert [completion.tokens for completion in done] == [expected[index] for index in KEPT]
    assert (layout.num_moves > 0) == moves
    memory = model.engine._core.scheduler.cache.memory
    assert (sum(padded) > 0) == (not moves and memory.partial_reuse)
    if memory.partial_reuse and not (
        moves and shape is WindowShape
    ):  # the state of a window can only be restored completely after a move
        cache, requests = model.engine._core.scheduler.cache, [request(model, text) for text in TEXTS]
        reusable = [cache.longest_prefix(each.prompt, each.cache_scope) for each in requests]
        are_saved = [len(each.prompt) >= MIN_SAVED_TOKENS for each in requests]
        assert [n for n, is_saved in zip(reusable, are_saved, strict=True) if is_saved] == [
            len(each.prompt) - 1 for each, is_saved in zip(requests, are_saved, strict=True) if is_saved
        ]
    again = [model.engine.submit(request(model, text)).result(PATIENCE_S) for text in TEXTS]
    assert [completion.tokens for completion in again] == expected


def test_unified_layout_does_not_need_padding_or_moves(manager: ModelManager) -> None:
    model = load(manager, "bundled://tiny", n_parallel=N_SLOTS, kv_layout="unified", n_ctx=N_SLOTS * 512)
    done, layout = scattered(model, TEXTS)
    assert [completion.tokens for completion in done] == [
        tokens for index, tokens in enumerate(alone(manager, "bundled://tiny", TEXTS)) if index in KEPT
    ]
    assert layout.num_moves == 0


def test_completions_of_one_prompt_are_moved_together(manager: ModelManager) -> None:
    model = load(manager, "bundled://tiny", n_parallel=N_SLOTS, kv_layout="partitioned")
    sampling = SamplingParams(temperature=0.8, seed=5)
    single = load(manager, "bundled://tiny", n_parallel=1, cache_prompt=False)
    many = Request("n", tuple(model.tokenize(STORY)), sampling, max_tokens=NEW, ignore_eos=True, n=2)
    expected = single.engine.submit(many).result(PATIENCE_S)
    hold = Hold(8)
    listeners = iter([None, None, hold])
    requests = [*(request(model, text) for text in TEXTS[:2]), many]
    first, second, handle = submit_together(model, requests, lambda: next(listeners))
    assert hold.reached.wait(PATIENCE_S)
    first.cancel()
    late = model.engine.submit(request(model, TEXTS[5]))
    second.cancel()
    hold.opened.set()
    done = handle.result(PATIENCE_S)
    late.result(PATIENCE_S)
    assert [c.tokens for c in (done, *done.alternatives)] == [c.tokens for c in (expected, *expected.alternatives)]
