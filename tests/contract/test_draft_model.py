"""Tests of a small draft model for a larger model, with the real llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from cellama.bench.models.padded import write_padded
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import (
    EngineOptions,
    InsufficientMemory,
    Model,
    ModelLoadFailed,
    ModelManager,
    Request,
    SamplingParams,
)

from ..eager_gate import Eager
from .small_models import SMALL

TINY = "bundled://tiny"
OPENINGS = ("Once upon a time", "The cat", "It was a sunny day, and a small dog", "Max had", "A", "In a big forest")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a copy of the bundled model with wider layers that don't change its results."""
    path = tmp_path_factory.mktemp("padded") / "twin.gguf"
    write_padded(path, 1.0)
    return str(path)


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager()
    yield manager
    manager.close()


def options(draft: str | None, **values: int) -> EngineOptions:
    given = {"n_parallel": 3, "ctx_per_slot": 256, "threads": 1, "cache_ram_bytes": 0, **values}
    return EngineOptions(**given, draft=draft, speculation="auto" if draft else "off")  # type: ignore[arg-type]


def texts(model: Model, sampling: SamplingParams) -> list[tuple[str, int]]:
    """Run more requests than slots, some of which preempt others.

    Return their texts and the number of accepted draft tokens.
    """
    handles = []
    for number, opening in enumerate(OPENINGS):
        prompt = tuple(model.tokenize(opening))
        request = Request(opening, prompt, sampling, max_tokens=40 + 9 * number, priority=9 if number < 4 else 0)
        handles.append(model.engine.submit(request))
    done = [handle.result(60) for handle in handles]
    return [(completion.text, completion.usage.accepted_prediction_tokens) for completion in done]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=3)])
def test_draft_model_does_not_change_the_generated_texts(
    manager: ModelManager, twin: str, sampling: SamplingParams
) -> None:
    plain = manager.load("plain", twin, options=options(None))
    drafted = manager.load("drafted", twin, options=options(TINY))
    drafted.engine._core.drafting.gate = Eager(1)  # type: ignore[assignment]
    expected, found = texts(plain, sampling), texts(drafted, sampling)
    assert [text for text, _ in found] == [text for text, _ in expected]
    counts = drafted.engine._core.drafting.counts["model"]
    assert counts.accepted > 50
    assert counts.accepted > 0.8 * counts.drafted
    assert drafted.memory.total_bytes > plain.memory.total_bytes
    manager.unload("drafted")
    assert not manager.is_loaded("drafted")


def test_draft_model_with_a_different_vocabulary_is_rejected(manager: ModelManager, twin: str, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write_model(other, Shape(**SMALL))
    with pytest.raises(ModelLoadFailed, match=r"vocabularies differ \(\w+ with 320 tokens, \w+ with \d+\)"):
        manager.load("a", twin, options=options(str(other)))
    with pytest.raises(ModelLoadFailed, match=r"draft model: .* does not exist; check the path"):
        manager.load("a", twin, options=options(str(tmp_path / "missing.gguf")))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(other.read_bytes()[:3000])
    with pytest.raises(ModelLoadFailed, match="damaged"):
        manager.load("a", twin, options=options(str(damaged)))
    with pytest.raises(ModelLoadFailed, match="remove the draft option"):
        manager.load("a", twin, options=options(TINY), capabilities=["embed"])
    assert manager.entries() == []
    assert manager.load("a", twin, options=options(None)).info.n_vocab != 320


def test_draft_model_counts_toward_the_memory_budget(twin: str) -> None:
    with closing(ModelManager()) as manager:
        plain = manager.load("plain", twin, options=options(None)).memory.total_bytes
        both = manager.load("both", twin, options=options(TINY)).memory.total_bytes
    with closing(ModelManager(memory_budget=(plain + both) // 2)) as manager:
        with pytest.raises(InsufficientMemory, match="remove the draft option"):
            manager.load("a", twin, options=options(TINY))
        assert manager.load("a", twin, options=options(None)).memory.total_bytes == plain


def test_automatic_context_size_leaves_memory_for_the_draft_model(twin: str) -> None:
    with closing(ModelManager()) as manager:
        long = options(TINY, ctx_per_slot=2048)
        limit = int(0.93 * manager.load("a", twin, options=long, capabilities=["generate"]).memory.total_bytes)
    with closing(ModelManager(memory_budget=limit)) as manager:
        free = replace(long, ctx_per_slot=None)
        model = manager.load("a", twin, options=free, capabilities=["generate"])
        assert model.memory.total_bytes <= limit
        assert model.ctx_per_slot is not None
        assert 512 <= model.ctx_per_slot < 2048
