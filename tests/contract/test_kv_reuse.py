"""Tests that texts do not depend on the origin of their cells, with all layouts and memory types of llama.cpp."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cellama.bench.harness.engines import submit_together
from cellama.bench.models.memory_shapes import HybridShape, RecurrentShape, WindowShape
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import (
    Completion,
    EngineOptions,
    Event,
    Handle,
    InvalidRequest,
    Model,
    ModelManager,
    Request,
    SamplingParams,
    Text,
)
from cellama.engine.backend import Chunk, DecodeError
from cellama.engine.bundled import TINY_PATH
from cellama.engine.llama import LlamaBackend, LlamaModel
from cellama.engine.text.reply_reader import ReplyFormat

from .small_models import EXACT, SMALL

PATIENCE_S = 60
GREEDY = SamplingParams(temperature=0)
STORY = "Once upon a time, there was a little fox. The fox liked to play in the park. One day, the fox found a ball. "
LAYOUTS = ("partitioned", "unified")


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager()
    yield manager
    manager.close()


def load(manager: ModelManager, source: str = "bundled://tiny", **options: Any) -> Model:
    name = str(len(manager.models()))
    return manager.load(name, source, options=EngineOptions(**{"threads": 1, **options}), capabilities=["generate"])


def run(model: Model, prompt: str | list[int], **params: Any) -> Completion:
    tokens = model.tokenize(prompt) if isinstance(prompt, str) else prompt
    request = Request("r", tuple(tokens), GREEDY, **{"max_tokens": 30, "ignore_eos": True, **params})
    return model.engine.submit(request).result(PATIENCE_S)


class Meanwhile:
    """A listener that submits another request after every 20 text events."""

    def __init__(self, model: Model, make: Callable[[int], Request], times: int) -> None:
        self._engine, self._make = model.engine, make
        self._num_texts, self._times = 0, times
        self._handles: queue.SimpleQueue[Handle] = queue.SimpleQueue()

    def __call__(self, event: Event) -> None:
        self._num_texts += isinstance(event, Text)
        number, rest = divmod(self._num_texts, 20)
        if isinstance(event, Text) and not rest and number <= self._times:
            self._handles.put(self._engine.submit(self._make(number - 1)))

    def results(self) -> list[Completion]:
        return [self._handles.get(timeout=PATIENCE_S).result(PATIENCE_S) for _ in range(self._times)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_request_computes_only_its_suffix_of_a_1500_token_prefix(manager: ModelManager, layout: str) -> None:
    cold = load(manager, n_parallel=1, cache_prompt=False)
    model = load(manager, n_parallel=3, kv_layout=layout, cache_ram_bytes=0)
    prefix = (model.tokenize(STORY) * 100)[:1500]
    ends = [model.tokenize(text) for text in ("The fox logged", "But a bear came", "What did the cat")]
    computed: list[int] = []
    model.engine.add_step_listener(lambda step: computed.append(step.prefill_tokens))
    for index, end in enumerate(ends):
        done = run(model, prefix + end)
        assert done.tokens == run(cold, prefix + end).tokens
        assert done.usage.cached_tokens == (1500 if index else 0)
    assert sum(computed) == 1500 + sum(map(len, ends))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefix_is_shared_with_a_request_that_is_still_running(manager: ModelManager, layout: str) -> None:
    cold = load(manager, n_parallel=1, cache_prompt=False)
    model = load(manager, n_parallel=2, kv_layout=layout)
    prefix = (model.tokenize(STORY) * 100)[:1500]
    middle = prefix[:1234] + model.tokenize("Then a bear came")  # diverges within the tokens of the first request
    urgent = Meanwhile(model, lambda _: Request("m", tuple(middle), GREEDY, max_tokens=30, ignore_eos=True), times=1)
    first = model.engine.submit(
        Request("first", (*prefix, *model.tokenize("The fox")), GREEDY, max_tokens=100, ignore_eos=True), urgent
    )
    whole = first.result(PATIENCE_S).tokens
    (done,) = urgent.results()
    assert done.usage.cached_tokens == 1234
    assert done.tokens == run(cold, middle).tokens
    assert whole == run(cold, [*prefix, *model.tokenize("The fox")], max_tokens=100).tokens


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ram_bytes", [0, 1 << 28])
def test_preempted_request_produces_the_same_text(manager: ModelManager, layout: str, ram_bytes: int) -> None:
    cold = load(manager, n_parallel=1, cache_prompt=False)
    model = load(manager, n_parallel=2, kv_layout=layout, cache_ram_bytes=ram_bytes)
    prompts = [STORY * 3 + "The fox", STORY * 2 + "A bear"]
    texts = [tuple(model.tokenize(f"Once upon a time, a {index}")) for index in range(6)]
    urgent = Meanwhile(model, lambda number: Request("u", texts[number], GREEDY, max_tokens=5, priority=0), times=6)
    requests = [
        Request(p, tuple(model.tokenize(p)), GREEDY, max_tokens=200, ignore_eos=True, priority=9) for p in prompts
    ]
    bulk = submit_together(model, requests, lambda: urgent)
    expected = [run(cold, prompt, max_tokens=200).tokens for prompt in prompts]
    assert [handle.result(PATIENCE_S).tokens for handle in bulk] == expected
    assert model.engine.snapshot().preemptions >= 3


def test_text_is_the_same_when_kv_cells_run_out(manager: ModelManager) -> None:
    cold = load(manager, n_parallel=1, cache_prompt=False)
    model = load(manager, n_parallel=8, kv_layout="unified", n_ctx=1024, cache_ram_bytes=1 << 24)
    prompts = [f"{i} " + STORY * (1 + i % 4) for i in range(16)]
    requests = [
        Request(p, tuple(model.tokenize(p)), GREEDY, max_tokens=150, ignore_eos=True, priority=3 + 3 * (i % 3))
        for i, p in enumerate(prompts)
    ]
    handles = submit_together(model, requests)
    assert [h.result(PATIENCE_S).tokens for h in handles] == [run(cold, p, max_tokens=150).tokens for p in prompts]
    snapshot = model.engine.snapshot()
    assert snapshot.preemptions > 0
    assert snapshot.kv_used_tokens == 0
    assert snapshot.kv_cached_tokens <= snapshot.kv_total_tokens == 1024


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_conversations_than_slots_continue_from_ram(manager: ModelManager, layout: str) -> None:
    cold = load(manager, n_parallel=1, cache_prompt=False)
    model = load(manager, n_parallel=2, kv_layout=layout, cache_ram_bytes=1 << 28)
    talks = [model.tokenize(f"Talk number {i}. " + STORY * 2) for i in range(5)]
    known = [0] * len(talks)
    for _ in range(3):
        for index, talk in enumerate(talks):
            done = run(model, talk)
            assert done.tokens == run(cold, talk).tokens
            assert done.usage.cached_tokens >= known[index]
            known[index] = len(talk) + len(done.tokens) - 1  # the last token is never computed
            talks[index] = [*talk, *done.tokens, *model.tokenize(" And then, the next day, ")]
    assert model.engine.snapshot().ram_states >= 5


SHAPES = [Shape, WindowShape, RecurrentShape, HybridShape]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.architecture))
def test_every_memory_type_produces_the_same_text_as_an_empty_cache(
    manager: ModelManager, tmp_path: Path, shape: type[Shape], layout: str
) -> None:
    """Run turns of a conversation, forks and other prompts on fewer slots, with F32 so that rounding has no effect."""
    path = tmp_path / "model.gguf"
    write_model(path, shape(**SMALL), file_type="F32", seed=1)
    cold = load(manager, str(path), n_parallel=1, cache_prompt=False, **EXACT)
    model = load(manager, str(path), n_parallel=2, kv_layout=layout, n_batch=64, **EXACT)
    talks = [model.tokenize(f"{i} talk " + STORY[: 60 + 20 * i]) for i in range(3)]
    cached = 0
    for turn in range(3):
        for index, talk in enumerate(talks):
            done = run(model, talk)
            assert done.tokens == run(cold, talk).tokens, f"{shape.architecture}, turn {turn}, talk {index}"
            cached += done.usage.cached_tokens
            talks[index] = [*talk, *done.tokens, *model.tokenize(" and then")]
            fork = talk[: len(talk) // 2] + model.tokenize(" something else")
            assert run(model, fork).tokens == run(cold, fork).tokens
    assert cached > 0, "nothing was reused, so the test proves nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "slots"), [(WindowShape, 4), (RecurrentShape, 4), (HybridShape, 4), (HybridShape, 1)]
)
def test_shared_prefixes_in_a_prompt_family_are_computed_once(
    manager: ModelManager, tmp_path: Path, shape: type[Shape], layout: str, slots: int
) -> None:
    """Run a tree of prompts, all of which share 100 tokens, and some of which share 90 more."""
    path = tmp_path / "model.gguf"
    write_model(path, shape(**SMALL), file_type="F32", seed=3)
    cold = load(manager, str(path), n_parallel=1, cache_prompt=False, **EXACT)
    model = load(manager, str(path), n_parallel=slots, kv_layout=layout, **EXACT)
    prefix = model.tokenize(STORY * 2)[:190]
    prompts = [[*prefix[: 100 if i % 2 else 190], 10 + i, *model.tokenize(f"and {i} others")] for i in range(7)]
    computed: list[int] = []
    model.engine.add_step_listener(lambda step: computed.append(step.prefill_tokens))
    requests = [Request(str(p), tuple(p), GREEDY, max_tokens=9, ignore_eos=True) for p in prompts]
    handles = submit_together(model, requests)  # a late request would find no checkpoint at its branch
    assert [h.result(PATIENCE_S).tokens for h in handles] == [run(cold, p, max_tokens=9).tokens for p in prompts]
    assert sum(computed) <= 1.02 * (190 + sum(len(p) - (100 if i % 2 else 190) for i, p in enumerate(prompts)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda shape: str(shape.architecture))
def test_chat_turn_reuses_the_previous_prompt_even_if_the_answer_changed(
    manager: ModelManager, tmp_path: Path, shape: type[Shape], layout: str
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, shape(**SMALL), file_type="F32", seed=4)
    cold = load(manager, str(path), n_parallel=1, cache_prompt=False, **EXACT)
    model = load(manager, str(path), n_parallel=2, kv_layout=layout, **EXACT)
    talk, num_shared = model.tokenize(STORY), 0
    for turn in range(3):
        done = run(model, talk, reply=ReplyFormat())
        assert done.tokens == run(cold, talk, reply=ReplyFormat()).tokens
        assert done.usage.cached_tokens >= num_shared
        num_shared = len(talk) - 4
        talk = [*talk[:-2], *model.tokenize(f"Answer {turn} as it was. ") * 5]  # the end of the prompt is replaced


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.architecture))
def test_sequences_with_every_memory_type_survive_preemption(
    manager: ModelManager, tmp_path: Path, shape: type[Shape]
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, shape(**SMALL), file_type="F32", seed=2)
    cold = load(manager, str(path), n_parallel=1, cache_prompt=False, **EXACT)
    model = load(manager, str(path), n_parallel=1, **EXACT)
    prompt, short = model.tokenize(STORY), model.tokenize("urgent " + STORY[:50])
    urgent = Meanwhile(model, lambda _: Request("u", tuple(short), GREEDY, max_tokens=4, priority=0), times=3)
    bulk = model.engine.submit(
        Request("bulk", tuple(prompt), GREEDY, max_tokens=150, ignore_eos=True, priority=9), urgent
    )
    expected = run(cold, short, max_tokens=4).tokens
    assert [done.tokens for done in urgent.results()] == [expected] * 3
    assert bulk.result(PATIENCE_S).tokens == run(cold, prompt, max_tokens=150).tokens
    assert model.engine.snapshot().preemptions >= 2


def test_context_size_is_derived_from_the_options(manager: ModelManager) -> None:
    def room(**options: Any) -> tuple[int, int]:
        snapshot = load(manager, **options).engine.snapshot()
        return snapshot.slots_total, snapshot.kv_total_tokens

    assert room(n_parallel=4) == (4, 4 * 2048)  # the model's training context
    assert room(n_parallel=4, n_ctx=1000) == (4, 1000)
    assert room(n_parallel=4, n_ctx=1000, kv_layout="unified") == (4, 1000)
    assert room(n_parallel=4, ctx_per_slot=300) == (4, 1200)
    assert room(n_parallel=4, ctx_per_slot=300, n_ctx=600, kv_layout="unified") == (4, 600)
    with pytest.raises(InvalidRequest, match="n_ctx: 600 is too small: 4 slots of 300 tokens need 1200"):
        load(manager, n_parallel=4, ctx_per_slot=300, n_ctx=600, kv_layout="partitioned")


def test_cancel_aborts_a_long_decode_call_without_a_warning(
    manager: ModelManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that no cells are kept.

    Without the abort flag, the only prefill call would finish and keep its cells.
    """
    write_model(tmp_path / "m.gguf", Shape(n_layer=2, n_vocab=1024), seed=1)
    model = load(manager, str(tmp_path / "m.gguf"), n_parallel=1, n_batch=2048, n_ubatch=2048, chunk_size=2048)
    reached, cancelled = threading.Event(), threading.Event()
    decode = model.engine._backend.decode

    def decode_and_tell(*call: Any) -> None:
        reached.set()
        assert cancelled.wait(PATIENCE_S)  # the flag is set during the call on any machine
        decode(*call)

    model.engine._backend.decode = decode_and_tell  # type: ignore[method-assign]
    caplog.set_level(logging.DEBUG, "cellama.engine.llama")
    handle = model.engine.submit(Request("long", tuple(range(10, 1010)) * 2, GREEDY))
    assert reached.wait(PATIENCE_S)
    handle.cancel()
    cancelled.set()
    assert handle.result(PATIENCE_S).finish_reason == "cancelled"
    logged = [record for record in caplog.records if "ret = 2" in record.getMessage()]
    assert logged  # llama.cpp has logged the abort
    assert max(record.levelno for record in logged) == logging.DEBUG
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert model.engine.snapshot().kv_cached_tokens == 0
    assert run(model, list(range(10, 40)), max_tokens=3).usage.cached_tokens == 0


@pytest.mark.parametrize("is_aborting", [False, True])
def test_failed_decode_call_logs_a_warning_unless_it_was_aborted(
    is_aborting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = LlamaModel(TINY_PATH)
    backend = LlamaBackend(model, EngineOptions(n_parallel=1, ctx_per_slot=64, threads=1))
    try:
        backend.decode([Chunk(0, 0, model.tokenize("Once upon a time")[:4], samples=True)])
        if is_aborting:
            backend.abort()
        with pytest.raises(DecodeError) as failure:
            # The batch is rejected because positions are missing.
            backend.decode([Chunk(0, 40, [5], samples=True)])
        assert failure.value.code == -1
        assert any(record.levelno == logging.WARNING for record in caplog.records)
    finally:
        backend.close()
        model.close()
