"""Tests that models are loaded and unloaded while others serve, and that their memory is freed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import (
    ChatOptions,
    Engine,
    EngineError,
    EngineOptions,
    EngineStopped,
    IdTaken,
    ManagerExists,
    Message,
    Model,
    ModelBusy,
    ModelLoadFailed,
    ModelManager,
    Peer,
    Request,
    SamplingParams,
    UnknownModel,
)
from cellama.engine.llama.backend import LlamaBackend
from cellama.engine.models import memory_admission
from cellama.tasks.contract.shapes.workers import WorkerMemory, WorkerModel
from cellama.tasks.state.registry import describe

from ..conftest import PATIENCE_S, wait_until
from .holding import Hold
from .small_models import SMALL

TINY = "bundled://tiny"
OPTIONS = EngineOptions(n_parallel=2, threads=1)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager()
    yield manager
    manager.close()


def story(model: Model) -> Request:
    return Request("r", tuple(model.tokenize("Once upon a time")), GREEDY, max_tokens=8, ignore_eos=True)


def test_id_can_be_any_string_and_defaults_to_the_name_of_the_source(manager: ModelManager) -> None:
    ids = [manager.load(model_id, TINY, options=OPTIONS).id for model_id in (None, None, "a b/ü:1")]
    assert ids == ["tiny", "tiny-2", "a b/ü:1"]
    assert [entry.id for entry in manager.entries()] == ids
    assert manager.default == "tiny"
    assert all(map(manager.is_loaded, ids))
    with pytest.raises(IdTaken, match="a model with the id 'tiny' already exists"):
        manager.load("tiny", TINY)


def test_first_model_is_the_default_until_it_is_unloaded_or_another_model_is_chosen(manager: ModelManager) -> None:
    for model_id in ("a", "b", "c"):
        manager.load(model_id, TINY, options=OPTIONS)
    manager.set_default("b")
    assert manager.get(":default").id == "b"
    manager.unload("b")
    assert manager.get(":default").id == "a"
    with pytest.raises(UnknownModel, match="model 'b' is not loaded"):
        manager.set_default("b")
    manager.unload("a")
    manager.unload("c")
    with pytest.raises(UnknownModel, match="no default model is set"):
        manager.get(":default")


def test_unload_waits_for_running_requests_and_rejects_new_requests(manager: ModelManager) -> None:
    model, hold = manager.load("m", TINY, options=OPTIONS), Hold()
    handle = model.engine.submit(story(model), hold)
    assert hold.reached.wait(PATIENCE_S)
    unloading = threading.Thread(target=manager.unload, args=("m",))
    unloading.start()
    wait_until(lambda: not manager.is_loaded("m"), "the model goes")
    with pytest.raises(UnknownModel, match="model 'm' is unloading"):
        manager.get("m")
    hold.opened.set()
    assert handle.result(60).usage.completion_tokens == 8
    unloading.join(60)
    assert manager.entries() == []
    with pytest.raises(EngineStopped):
        model.engine.submit(handle.request)


def test_unload_raises_model_busy_and_the_model_serves_again(manager: ModelManager) -> None:
    model, hold = manager.load("m", TINY, options=OPTIONS), Hold()
    handle = model.engine.submit(story(model), hold)
    assert hold.reached.wait(PATIENCE_S)
    with pytest.raises(ModelBusy, match=r"'m' is still in use after 0\.05 s"):
        manager.unload("m", timeout_s=0.05)
    hold.opened.set()
    assert manager.get("m").engine.generate("Once", max_tokens=2)
    assert handle.result(60).finish_reason == "length"


def test_unload_waits_while_a_model_without_requests_is_held(manager: ModelManager) -> None:
    manager.load("m", TINY, options=OPTIONS)
    with manager.hold(":default") as model:
        unloading = threading.Thread(target=manager.unload, args=("m",))
        unloading.start()
        wait_until(lambda: not manager.is_loaded("m"), "the model goes")
        assert manager.is_leaving(":default")
        assert model.engine.generate(model.tokenize("Once upon a time"), max_tokens=2)
        assert unloading.is_alive()
    unloading.join(60)
    assert manager.entries() == []
    assert not manager.is_leaving(":default")


def test_manager_routes_calls_by_model_id_and_holds_the_model(manager: ModelManager) -> None:
    manager.load("m", TINY, options=OPTIONS)
    greedy = {"temperature": 0}
    assert manager.generate(":default", "Once upon a time", max_tokens=4, **greedy) == ", there was a"
    assert "".join(manager.stream("m", "Once upon a time", max_tokens=4, **greedy)) == ", there was a"
    question: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
    reply = manager.chat("m", question, enable_thinking=True, **greedy)
    assert (reply.text, bool(reply.reasoning)) == ("The capital of France is Paris.", True)
    assert manager.get("m").chat(question, **greedy).text == reply.text
    ids = manager.get("m").tokenize("a fox")
    one, two, three = [*manager.embed("m", "a fox"), *manager.embed("m", ids), manager.embed("m", ["a bee", ids])[1]]
    assert one.tolist() == two.tolist() == pytest.approx(three.tolist(), abs=1e-3)
    chunks = manager.stream("m", "Once upon a time", max_tokens=500, ignore_eos=True)
    assert next(chunks)
    with pytest.raises(ModelBusy):
        manager.unload("m", timeout_s=0.05)
    del chunks  # leaving the loop cancels the request and releases the model
    manager.unload("m")
    for use in (lambda: manager.stream("m", "Once"), lambda: manager.generate("m", "Once")):
        with pytest.raises(UnknownModel, match="model 'm' is not loaded"):
            use()


def test_invalid_calls_to_a_model_raise_clear_errors(manager: ModelManager) -> None:
    model = manager.load("m", TINY, options=OPTIONS, capabilities=["chat"])
    hello: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for use, message in (
        (lambda: model.embed("a fox"), "is loaded for chat, not for embed"),
        (lambda: model.chat(hello, max_tokns=3), "unknown parameter 'max_tokns'"),
        (lambda: model.chat(hello, system="Be kind."), "the messages already start with a system message"),
        (lambda: model.chat(hello, tool_choice="required"), "no tools are given"),
    ):
        with pytest.raises(EngineError, match=message):
            use()
    prompt_tokens = model.tokenize_chat(hello)
    assert model.prepare_chat(hello[1:], ChatOptions(system="Be brief.")).tokens == prompt_tokens


def test_default_model_changes_during_its_unload_and_is_restored_when_the_unload_fails(manager: ModelManager) -> None:
    for model_id in ("a", "b"):
        manager.load(model_id, TINY, options=OPTIONS)
    with manager.hold("a"):
        with pytest.raises(ModelBusy):
            manager.unload("a", timeout_s=0.05)
        assert manager.default == "a"
        unloading = threading.Thread(target=manager.unload, args=("a",))
        unloading.start()
        wait_until(lambda: manager.default == "b", "the default is b")
        assert manager.get(":default").id == "b"
    unloading.join(60)


def test_unloaded_model_rejects_every_call(manager: ModelManager) -> None:
    model = manager.load("m", TINY, options=OPTIONS)
    tokens = model.tokenize("Once upon a time")
    refused = threading.Event()

    def use() -> None:
        try:
            while True:
                model.tokenize("a long text " * 2000)
        except EngineStopped:
            refused.set()

    threading.Thread(target=use, daemon=True).start()
    manager.unload("m")
    assert refused.wait(60)
    messages: list[Message] = [{"role": "user", "content": "Hello"}]
    actions: list[Callable[[], object]] = [
        lambda: model.tokenize("Once"),
        lambda: model.detokenize(tokens),
        lambda: model.tokenize_chat(messages),
        lambda: model.engine.generate("Once upon a time"),
        lambda: model.generate("Once upon a time"),
        lambda: model.chat(messages),
        lambda: model.embed("Once"),
        lambda: model.engine.vocabulary.tokenize("Once"),
    ]
    for action in actions:
        with pytest.raises(EngineStopped, match=r"unloaded; load (it|the model) again"):
            action()


def test_model_with_a_hanging_step_is_unloaded_after_the_step(
    manager: ModelManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = manager.load("m", TINY, options=OPTIONS)
    monkeypatch.setattr(Engine.close, "__defaults__", (0.05,))
    entered, end = threading.Event(), threading.Event()
    model.engine.add_step_listener(lambda _: (entered.set(), end.wait(60)))
    handle = model.engine.submit(Request("r", (1, 2, 3), GREEDY, max_tokens=1))
    assert handle.result(60)
    assert entered.wait(60)
    with pytest.raises(ModelBusy, match="is draining, but its current step has not finished"):
        manager.unload("m")
    assert [entry.status for entry in manager.entries()] == ["unloading"]
    end.set()
    wait_until(lambda: manager.entries() == [], "the model is gone")
    assert manager.load("m", TINY, options=OPTIONS).tokenize("Once")


def test_loads_run_concurrently_and_a_failed_load_leaves_nothing_behind(manager: ModelManager, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    loads = [manager.load_in_background(f"m{i}", TINY, options=OPTIONS) for i in range(3)]
    failing = manager.load_in_background("bad", str(damaged))
    assert [load.result(60).id for load in loads] == ["m0", "m1", "m2"]
    with pytest.raises(ModelLoadFailed, match=r"damaged\.gguf"):
        failing.result(60)
    assert sorted(entry.id for entry in manager.entries()) == ["m0", "m1", "m2"]
    assert manager.load("bad", TINY, options=OPTIONS).id == "bad"  # the id is available again


def test_second_manager_is_rejected_until_the_first_is_closed(manager: ModelManager) -> None:
    with pytest.raises(ManagerExists, match="already has a ModelManager"):
        ModelManager()
    manager.close()
    ModelManager().close()


def test_unload_frees_the_memory(manager: ModelManager, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, Shape(n_embd=512, n_layer=8, n_head=8, n_head_kv=8, n_ff=1536, n_vocab=2000))
    process = psutil.Process()
    sizes = {"n_parallel": 8, "ctx_per_slot": 2048, "threads": 1, "cache_ram_bytes": 0}

    def load_and_use() -> tuple[int, int]:
        """Return the memory of the process afterwards, and the memory that the model took."""
        model = manager.load("m", str(path), options=EngineOptions(**sizes))
        model.engine.submit(Request("r", tuple(range(300, 400)), GREEDY, max_tokens=4, ignore_eos=True)).result(60)
        taken = model.memory.total_bytes
        manager.unload("m")
        return int(process.memory_info().rss), taken

    for _ in range(2):
        level, taken = load_and_use()  # includes memory that llama.cpp and the allocator never return
    for _ in range(2):
        last, _ = load_and_use()
    assert taken > 40e6
    assert last < level + taken  # a leak would have added more


def test_models_share_the_cores_unless_threads_is_set(manager: ModelManager) -> None:
    shared = manager.load("shared", TINY, options=EngineOptions(n_parallel=2))
    chosen = manager.load("chosen", TINY, options=EngineOptions(n_parallel=2, threads=3))
    assert (shared.threads_are_chosen, chosen.threads_are_chosen) == (False, True)
    manager.cores.meet([Peer(wants=512, uses=512.0)] * 512)
    wait_until(lambda: shared.threads == 1, "one thread")
    assert chosen.threads == 3


def test_registry_entries_of_models_and_memory_match_their_types(manager: ModelManager) -> None:
    manager.load("m", TINY, options=OPTIONS, adapters={"pirate": ("bundled://pirate", 1.0)})
    (entry,) = manager.entries()
    for kind, value in ((WorkerModel, describe(entry, default=True)), (WorkerMemory, manager.memory())):
        TypeAdapter(kind).validate_python(json.loads(json.dumps(value)), strict=True, extra="forbid")
    assert describe(entry, default=True)["follows_replies"]
    assert describe(entry, default=True)["chat_features"] == ["tools", "thinking"]


def test_registry_reports_a_model_as_stopped_when_its_engine_thread_died(
    manager: ModelManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise SystemExit("an error that no request caused")

    model = manager.load("m", TINY, options=OPTIONS)
    (entry,) = manager.entries()
    assert describe(entry, default=True)["status"] == "ready"
    monkeypatch.setattr(LlamaBackend, "decode", die)
    with pytest.raises(EngineStopped):
        model.engine.submit(story(model)).result(PATIENCE_S)
    wait_until(
        lambda: describe(entry, default=True)["status"] == "stopped", "the registry reports the model as stopped"
    )
    assert describe(entry, default=True)["engine"]["phase"] == "stopped"


def test_load_reuses_the_plan_of_an_unchanged_file(
    manager: ModelManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, Shape(**SMALL), file_type="F16")
    plan = manager.plan("m", str(path), options=OPTIONS)
    monkeypatch.setattr(memory_admission, "plan_in_child", lambda *_: pytest.fail("the load was planned again"))
    model = manager.load("m", str(path), options=OPTIONS)
    assert model.memory.total_bytes == pytest.approx(plan.footprint.total_bytes, rel=0.05)
    manager.unload("m")
    monkeypatch.undo()
    write_model(path, Shape(**{**SMALL, "n_layer": 8}), file_type="F16")
    assert manager.plan("m", str(path), options=OPTIONS).footprint.total_bytes > plan.footprint.total_bytes


def test_on_demand_model_is_the_default_only_if_it_is_loaded_as_the_default(manager: ModelManager) -> None:
    manager.load("a", TINY, options=OPTIONS, default=False)
    assert manager.default is None
    manager.load("b", TINY, options=OPTIONS, default=True)
    manager.unload("b")
    assert manager.default is None
