"""Adapters on the fake backend, whose texts depend on the adapters of every cell."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cellama.engine import AdapterBusy, AdapterLoadFailed, Engine, IdTaken, InvalidRequest, Request, UnknownAdapter
from cellama.engine.backend import Adapter, AdapterSet, AdapterUse
from cellama.engine.fake import FakeBackend
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.scheduling.strategies import STRATEGIES, make_strategy

from ....conftest import wait_until
from ...conftest import PATIENCE_S, Gate, MakeEngine, request

Choice = tuple[tuple[str, float], ...]
CHOICES: tuple[Choice, ...] = ((), (("p", 0.5),), (("p", 1.0),), (("q", 1.0),), (("q", 1.0), ("p", 0.5)))
PREFIX = "the same beginning for everybody " * 3


def add(engine: Engine, folder: Path, name: str, scale: float = 0.0, content: str = "") -> None:
    path = folder / name
    path.write_text(f"adapter {content or name}")
    engine.adapters.load(name, str(path), path, scale)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_unloading_an_adapter_fails_only_if_it_was_never_loaded(make_engine: MakeEngine, folder: Path) -> None:
    engine, _ = make_engine()
    add(engine, folder, "p")
    for _ in range(2):
        engine.adapters.check_unload("p")
        engine.adapters.unload("p")
    for unload in (engine.adapters.check_unload, engine.adapters.unload):
        with pytest.raises(UnknownAdapter, match="adapter 'q' is not loaded"):
            unload("q")
    add(engine, folder, "p")
    engine.adapters.unload("p")
    assert engine.adapters.infos() == []


def text_of(engine: Engine, prompt: str = PREFIX, adapters: Choice | None = None, max_tokens: int = 20) -> str:
    return engine.submit(request(prompt, adapters=adapters, max_tokens=max_tokens)).result(PATIENCE_S).text


@pytest.mark.parametrize("unified", [False, True])
def test_requests_with_different_adapters_get_the_same_text_as_when_run_alone(
    make_engine: MakeEngine, folder: Path, unified: bool
) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=6, unified=unified))
    alone, _ = make_engine(FakeBackend(n_slots=1))
    for name, one in itertools.product("pq", (engine, alone)):
        add(one, folder, name)
    asked = [(f"{PREFIX}{i}", CHOICES[i % len(CHOICES)]) for i in range(30)]
    handles = [engine.submit(request(prompt, adapters=choice, max_tokens=30)) for prompt, choice in asked]
    texts = [handle.result(PATIENCE_S).text for handle in handles]
    assert texts == [text_of(alone, prompt, choice, 30) for prompt, choice in asked]
    assert len(set(backend.adapter_sets)) == len(CHOICES)


@pytest.mark.parametrize("unified", [False, True])
def test_preempted_requests_resume_with_their_adapters(make_engine: MakeEngine, folder: Path, unified: bool) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=2, unified=unified))
    alone, _ = make_engine(FakeBackend(n_slots=1))
    for name, one in itertools.product("pq", (engine, alone)):
        add(one, folder, name)
    asked = [(f"{PREFIX}{i}", CHOICES[i % len(CHOICES)]) for i in range(12)]
    gate = Gate(backend)
    handles = [
        engine.submit(request(prompt, adapters=choice, max_tokens=30, priority=9 if i < 4 else 0))
        for i, (prompt, choice) in enumerate(asked)
        if i < 2 or gate.reached.wait(PATIENCE_S)
    ]
    gate.open.set()
    texts = [handle.result(PATIENCE_S).text for handle in handles]
    assert texts == [text_of(alone, prompt, choice, 30) for prompt, choice in asked]
    assert engine.snapshot().preemptions > 0


def test_prefixes_are_shared_within_an_adapter_set_but_not_across_sets(make_engine: MakeEngine, folder: Path) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=3))
    for name in "pq":
        add(engine, folder, name)

    def cached(choice: Choice) -> int:
        return engine.submit(request(PREFIX, adapters=choice)).result(PATIENCE_S).usage.cached_tokens

    assert [cached(choice) for choice in CHOICES] == [0] * len(CHOICES)
    assert all(cached(choice) == len(PREFIX) - 1 for choice in reversed(CHOICES))  # from slots, or from RAM
    assert cached((("p", 0.25),)) == 0
    assert cached((("p", 0.0),)) > 0  # the same as no adapter


def test_prefix_of_a_reloaded_adapter_is_reused_only_if_its_file_is_unchanged(
    make_engine: MakeEngine, folder: Path
) -> None:
    engine, _ = make_engine()
    cached = []
    for content in ("one", "two", "one"):
        add(engine, folder, "p", 1.0, content)
        cached.append(engine.submit(request(PREFIX)).result(PATIENCE_S).usage.cached_tokens)
        engine.adapters.unload("p")
    assert cached == [0, 0, len(PREFIX) - 1]


def test_requests_that_choose_no_adapters_get_and_keep_the_default_adapters(
    make_engine: MakeEngine, folder: Path
) -> None:
    engine, backend = make_engine(cache_prompt=False)
    plain = text_of(engine)
    add(engine, folder, "p", scale=1.0)
    own = text_of(engine)
    assert own == text_of(engine, adapters=(("p", 1.0),)) != plain
    assert text_of(engine, adapters=()) == plain
    gate = Gate(backend)
    running = engine.submit(request(PREFIX))
    assert gate.reached.wait(PATIENCE_S)
    engine.adapters.set_scale("p", 0.0)
    later = engine.submit(request(PREFIX))
    gate.open.set()
    assert (running.result(PATIENCE_S).text, later.result(PATIENCE_S).text) == (own, plain)


def test_unload_waits_for_the_last_request_and_frees_the_adapter(make_engine: MakeEngine, folder: Path) -> None:
    engine, backend = make_engine()
    add(engine, folder, "p", scale=1.0)
    gate = Gate(backend)
    running = engine.submit(request(PREFIX))
    unloading = threading.Thread(target=engine.adapters.unload, args=("p", PATIENCE_S))
    unloading.start()
    wait_until(lambda: engine.adapters.infos()[0].status == "unloading", "the adapter goes")
    other = engine.submit(request("other"))
    with pytest.raises(UnknownAdapter, match="adapter 'p' is unloading"):
        engine.submit(request(adapters=(("p", 1.0),)))
    assert engine.adapters.infos()[0].in_use == 1
    gate.open.set()
    assert running.result(PATIENCE_S).text != other.result(PATIENCE_S).text
    unloading.join(PATIENCE_S)
    assert engine.adapters.infos() == []
    assert backend.adapters == set()


def test_unload_that_times_out_leaves_the_adapter_loaded(make_engine: MakeEngine, folder: Path) -> None:
    engine, backend = make_engine()
    add(engine, folder, "p", scale=1.0)
    own, gate = text_of(engine), Gate(backend)
    running = engine.submit(request("x"))
    with pytest.raises(AdapterBusy, match=r"'p' is still in use by 1 request\(s\) after 0\.01 s"):
        engine.adapters.unload("p", 0.01)
    gate.open.set()
    assert running.result(PATIENCE_S).text
    assert text_of(engine) == own
    engine.adapters.unload("p", PATIENCE_S)
    with pytest.raises(UnknownAdapter, match="adapter 'p' is not loaded for this model; known: none"):
        text_of(engine, adapters=(("p", 1.0),))


def test_failed_requests_and_closed_engines_release_their_adapters(make_engine: MakeEngine, folder: Path) -> None:
    engine, backend = make_engine(FakeBackend(poison=ord("!")))
    add(engine, folder, "p", scale=1.0)
    handle = engine.submit(request("bad!"))
    assert handle.future.exception(PATIENCE_S) is not None
    with pytest.raises(InvalidRequest):
        engine.submit(request("x" * 300))
    engine.adapters.unload("p", PATIENCE_S)
    assert backend.adapters == set()


def test_invalid_use_of_adapters_raises_errors_with_a_remedy(make_engine: MakeEngine, folder: Path) -> None:
    engine, _ = make_engine()
    add(engine, folder, "pirate")
    with pytest.raises(IdTaken, match="adapter 'pirate' already exists"):
        add(engine, folder, "pirate")
    (folder / "text").write_text("no")
    with pytest.raises(AdapterLoadFailed):
        engine.adapters.load("text", "text", folder / "text")
    with pytest.raises(UnknownAdapter, match="did you mean 'pirate'"):
        engine.submit(request(adapters=(("pirat", 1.0),)))
    for scale in (float("nan"), float("inf"), True):
        with pytest.raises(InvalidRequest, match="the scale of adapter 'pirate' is"):
            engine.adapters.set_scale("pirate", scale)
    with pytest.raises(InvalidRequest, match="one scale for each name"):
        request(adapters=(("pirate", 1.0), ("pirate", 2.0)))
    assert [info.name for info in engine.adapters.infos()] == ["pirate"]


SETS: list[AdapterSet] = [(), *((AdapterUse(Adapter(f, f, f), 1.0),) for f in "pq")]


@given(
    sequences=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(0, 9), st.integers(0, 20))),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    unified=st.booleans(),
)
def test_scheduler_uses_one_adapter_set_per_step_and_finishes_all_sequences(
    sequences: list[tuple[int, int, int, int]], strategy: str, unified: bool
) -> None:
    backend = FakeBackend(n_slots=4, ctx_per_slot=40, unified=unified, n_cells=90 if unified else 0, adapters={*"pq"})
    scheduler = Scheduler(Limits(16, 8), make_strategy(strategy), backend, 200)
    waiting = list(enumerate(sequences))
    for step in range(3000):
        now = step * 0.05
        for index, (length, kind, priority, _) in [entry for entry in waiting if entry[1][3] <= step]:
            made = Request(str(index), tuple(range(length)), priority=priority)
            scheduler.enqueue(Sequence(made, 0, now, list(made.prompt), adapters=SETS[kind]), now)
        waiting = [entry for entry in waiting if entry[1][3] > step]
        scheduler.admit(now)
        works = scheduler.schedule(now)
        assert bool(works) == scheduler.has_work
        sets = {work.sequence.adapters for work in works}
        assert len(sets) <= 1
        if works:
            backend.decode([work.chunk for work in works], *sets)
        for work in works:
            scheduler.commit(work)
            work.sequence.tokens += [7] * work.chunk.samples
            if scheduler.is_full(work.sequence):
                scheduler.release(work.sequence)
    assert not scheduler.has_work
