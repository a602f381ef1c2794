"""Tests of the options that place a model on devices or override settings in its file. tests/devices has the others."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cellama.api.cli.commands import app
from cellama.engine import EngineOptions, InvalidRequest, Model, ModelLoadFailed, ModelManager
from cellama.engine.llama import LoadPlan, buffers, fingerprint_of, load_plan, placement, plan_load
from cellama.engine.memory.budget import CPU, AvailableMemory, Budget, Device, Footprint, MemoryUse
from cellama.engine.models.sources import resolve
from cellama.engine.options import Uses

TINY = "bundled://tiny"
BASE: dict[str, Any] = {"n_parallel": 2, "ctx_per_slot": 256, "threads": 1, "cache_ram_bytes": 0}
PROMPT = "Once upon a time there was a little frog"
Load = Callable[..., Model]


@pytest.fixture
def load() -> Iterator[Load]:
    """Return a function that loads the bundled model with these options."""
    manager = ModelManager("unlimited")

    def load(**options: Any) -> Model:
        name = f"m{len(manager.models())}"
        return manager.load(name, TINY, options=EngineOptions(**BASE, **options), capabilities=["generate"])

    yield load
    manager.close()


def text_of(model: Model) -> str:
    return model.engine.generate(PROMPT, max_tokens=40, temperature=0)


def plan(available: dict[str, int] | None = None, **options: Any) -> LoadPlan:
    requested = frozenset({"generate"})
    return plan_load("m", resolve(TINY), EngineOptions(**BASE, **options), requested, AvailableMemory(available or {}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_gpu_layers", -2),
        ("devices", [""]),
        ("devices", ["CUDA0", "CUDA0"]),
        ("split_mode", "rows"),
        ("tensor_split", [0, 0]),
        ("tensor_split", [1, -1]),
        ("main_gpu", -1),
        ("n_cpu_moe", -2),
        ("override_tensors", ["ffn"]),
        ("override_tensors", ["(=CPU"]),
        ("rpc", ["localhost"]),
        ("rpc", ["localhost:0"]),
        ("kv_overrides", {"llama.context_length": [1]}),
        ("kv_overrides", {"k" * 128: 1}),
        ("rope_scaling", "other"),
        ("rope_freq_scale", 0),
        ("rope_freq_base", float("nan")),
        ("yarn_orig_ctx", 0),
        ("yarn_beta_fast", -1),
    ],
)
def test_options_reject_an_invalid_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        EngineOptions(**{name: value})


def test_options_reject_moving_tensors_between_gpus_that_share_each_layer() -> None:
    with pytest.raises(InvalidRequest, match="tensors can only be moved to the CPU"):
        EngineOptions(split_mode="tensor", override_tensors=("ffn=CUDA1",))


def test_options_reject_shares_for_another_number_of_devices() -> None:
    with pytest.raises(InvalidRequest, match="it must be one share for each of the 1 devices"):
        EngineOptions(devices=("CUDA0",), tensor_split=(1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ["CUDA7"]}, "'CUDA7' is not a device of this machine"),
        ({"override_tensors": ["ffn=CUDA7"]}, "override_tensors: ffn=CUDA7: the model does not use this device"),
        ({"devices": [], "main_gpu": 3}, "main_gpu: 3 is not an index of a device"),
        ({"tensor_split": [1, 2, 3]}, "has 3 shares, but there are 0 devices"),
    ],
)
def test_load_is_refused_if_a_device_is_missing(load: Load, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadFailed, match=message):
        load(**options)


def test_rpc_server_with_a_public_address_is_refused_unless_allowed(load: Load) -> None:
    with pytest.raises(InvalidRequest, match=r"8\.8\.8\.8:50052 is a public address"):
        load(rpc=["8.8.8.8:50052"])
    assert placement._is_private("10.0.0.2")
    assert placement._is_private("127.0.0.1")


def test_load_is_refused_if_no_rpc_server_answers(load: Load) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ModelLoadFailed, match=f"can't connect to 127.0.0.1:{port}: .*; start its RPC server"):
        load(rpc=[f"127.0.0.1:{port}"])


def test_rpc_server_is_refused_by_a_build_without_rpc(load: Load) -> None:
    if placement.registry_function("RPC", "ggml_backend_rpc_add_server", None) is not None:
        pytest.skip("llama.cpp was built with RPC")
    message = "built without RPC; build llama-cpp-python with CMAKE_ARGS"
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ModelLoadFailed, match=message):
        load(rpc=[f"127.0.0.1:{server.getsockname()[1]}"])


def test_overrides_of_the_file_change_texts_and_the_fingerprint(load: Load) -> None:
    plain = load()
    assert text_of(load(rope_freq_scale=1.0)) == text_of(plain)
    scaled, other_base = load(rope_freq_scale=0.25), load(rope_freq_base=50.0)
    overridden = load(kv_overrides={"llama.rope.freq_base": 50.0})
    assert len({text_of(model) for model in (plain, scaled, other_base)}) == 3
    assert text_of(overridden) == text_of(other_base)
    models = (plain, scaled, other_base, overridden)
    assert len({model.info.fingerprint for model in models}) == 4
    assert len({model.engine.identity for model in models}) == 4
    assert scaled.info.fingerprint == fingerprint_of(resolve(TINY), EngineOptions(rope_freq_scale=0.25))


def test_texts_do_not_depend_on_where_tensors_and_cells_are(load: Load) -> None:
    expected = text_of(load())
    for options in (
        {"override_tensors": [r"blk\.[01]\.ffn=CPU"]},
        {"n_cpu_moe": -1},
        {"devices": []},
        {"kv_offload": False},
        {"use_mmap": False},
        {"use_mlock": True},
    ):
        assert text_of(load(**options)) == expected, options


@pytest.mark.parametrize("use_mmap", [True, False])
def test_weights_are_mapped_only_with_use_mmap(load: Load, use_mmap: bool) -> None:
    planned = plan(use_mmap=use_mmap).footprint.on(CPU)
    assert (planned.mapped_bytes > 0) == use_mmap
    assert (load(use_mmap=use_mmap).memory.on(CPU).mapped_bytes > 0) == use_mmap


def test_integrated_gpus_are_used_only_without_another_gpu() -> None:
    assert placement.without_spare({"Vulkan0": "integrated gpu", "Vulkan1": "gpu"}) == ["Vulkan1"]
    assert placement.without_spare({"Vulkan0": "integrated gpu"}) == ["Vulkan0"]


def test_planned_weights_follow_tensor_overrides() -> None:
    log = [f"load_tensors: layer {i:3} assigned to device CUDA0, is_swa = 0" for i in range(3)]
    sizes = {f"blk.{i}.{name}.weight": 10 for i in range(2) for name in ("ffn_up_exps", "attn_q")}
    overrides = placement.tensor_overrides(EngineOptions(n_cpu_moe=1, override_tensors=(r"1\.attn=CUDA1",)), ["CUDA1"])
    found = buffers.planned_weights(log, sizes, lambda name: placement.device_of_tensor(name, overrides), mapped=False)
    assert {device: use.total_bytes for device, use in found.items()} == {"CPU": 10, "CUDA0": 20, "CUDA1": 10}


def test_memory_that_devices_share_is_divided_by_their_shares() -> None:
    usage = {"Meta()": MemoryUse(400, 40, 8), CPU: MemoryUse(1)}
    assert buffers.divided(usage, {"CUDA0": 3, "CUDA1": 1}) == {
        CPU: MemoryUse(1),
        "CUDA0": MemoryUse(300, 30, 8),
        "CUDA1": MemoryUse(100, 10, 8),
    }


@pytest.mark.parametrize(("free", "expected"), [(1000, -1), (560, 5), (99, 0), (0, 0)])
def test_as_many_layers_as_fit_are_placed_on_gpus(monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    tried = []

    def plan_layers(model_id: str, path: Path, options: EngineOptions, *others: Any) -> LoadPlan:
        tried.append(options.n_gpu_layers)
        num_layers = 9 if options.n_gpu_layers == -1 else options.n_gpu_layers or 0
        devices = {"CUDA0": MemoryUse(60 + 100 * num_layers)} if num_layers else {}
        footprint = Footprint({CPU: MemoryUse(100 * (9 - num_layers)), **devices})
        return LoadPlan(options, footprint, Uses(frozenset()), {"CUDA0": num_layers, CPU: 9 - num_layers})

    monkeypatch.setattr(load_plan, "_plan_layers", plan_layers)
    found = plan({CPU: 10_000, "CUDA0": free})
    assert found.options.n_gpu_layers == expected
    assert len(tried) <= 6


def test_device_that_reports_all_memory_as_free_is_not_filled_twice() -> None:
    device = Device("RPC0", "gpu", "10.0.0.2:50052", total_bytes=1000, free_bytes=1000)
    budget = Budget("auto", lambda: [device])
    before = budget.available().free["RPC0"]
    for use in (MemoryUse(300), MemoryUse(200)):
        budget.reserve(str(use), Footprint({"RPC0": use}))
        budget.settle(str(use), Footprint({"RPC0": use}))
    assert budget.available().free["RPC0"] == before - 500


def test_plan_command_shows_devices_and_fails_if_the_model_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner().invoke
    found = run(app, ["models", "plan", TINY, "--set", "n_parallel=3", "--json"])
    assert found.exit_code == 0
    shown = json.loads(found.stdout)
    assert (shown["n_parallel"], shown["fits"], shown["devices"][0]["name"]) == (3, True, CPU)
    assert shown["devices"][0]["layers"] == shown["num_layers"]
    assert "The model fits" in run(app, ["models", "plan", TINY]).stdout
    refused = run(app, ["models", "plan", TINY, "--set", "n_parallel=256", "--set", "ctx_per_slot=2000000"])
    assert refused.exit_code == 1
    assert "The model does not fit: it needs" in " ".join(refused.stdout.split())
    unknown = run(app, ["models", "plan", TINY, "--set", 'devices=["CUDA7"]'])
    assert unknown.exit_code == 1
    assert "'CUDA7' is not a device" in unknown.output
