"""The arithmetic of memory: available bytes, models to unload, and contexts that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cellama.engine.memory.budget import (
    ALL_DEVICES,
    AvailableMemory,
    Budget,
    Device,
    Footprint,
    MemoryBudget,
    MemoryUse,
    Shortage,
    Vram,
    choose_victims,
    margin,
    readable,
    vram_of,
)
from cellama.engine.memory.free_memory import group_limit
from cellama.engine.memory.open_sizes import KV_SHARE, choose_ctx, choose_quota, with_quota
from cellama.engine.options import EngineOptions

GIB = 1 << 30
SMALL = 100  # devices so small that their margin is a round number: 5%


def on_cpu(weights: int = 0, kv: int = 0, compute: int = 0, mapped: int = 0) -> Footprint:
    return Footprint({"CPU": MemoryUse(weights, kv, compute, mapped)})


class Machine:
    """A CPU and a GPU that report their free memory."""

    def __init__(self, cpu: int = SMALL, gpu: int = SMALL) -> None:
        self.free = {"CPU": cpu, "CUDA0": gpu}

    def devices(self) -> list[Device]:
        return [Device(name, "gpu" if name != "CPU" else "cpu", "", SMALL, free) for name, free in self.free.items()]

    def budget(self, limit: MemoryBudget = "auto") -> Budget:
        return Budget(limit, self.devices)


def test_auto_budget_is_the_free_memory_minus_a_margin() -> None:
    assert Machine(80, 60).budget().available() == AvailableMemory({"CPU": 75, "CUDA0": 55})
    assert margin(Device("CPU", "cpu", "", 1000 * GIB, 0)) == GIB


def test_vram_is_the_sum_of_all_gpus_or_none_without_gpus() -> None:
    cpu, gpus = Device("CPU", "cpu", "", 100, 50), [Device(f"CUDA{i}", "gpu", "", 24, 4 * i) for i in range(3)]
    assert vram_of([cpu, *gpus]) == Vram(72, 12, 60)
    assert vram_of([cpu]) is None


def test_quota_for_saved_states_is_counted_once_regardless_of_how_much_is_used() -> None:
    machine, used = Machine(90), {"a": 0}
    budget = Budget("auto", machine.devices, used.__getitem__)
    model = with_quota(on_cpu(10), 30)
    assert model.total_bytes == 40
    budget.reserve("a", model)
    assert budget.available().free["CPU"] == 85 - 40
    machine.free["CPU"] = 80  # the weights have been loaded
    budget.settle("a", model)
    assert budget.available().free["CPU"] == 75 - 30
    machine.free["CPU"], used["a"] = 55, 25  # states have been saved
    assert budget.available().free["CPU"] == 50 - 5
    assert budget.available().plus([model]).free["CPU"] == 50 - 5 + 40


def test_unset_quota_for_saved_states_is_a_share_of_the_available_memory() -> None:
    assert choose_quota(None, on_cpu(20), AvailableMemory({"CPU": 100, "CUDA0": 1})) == 20
    assert choose_quota(None, on_cpu(20), AvailableMemory({ALL_DEVICES: 60})) == 10
    assert choose_quota(None, on_cpu(20), AvailableMemory({"CPU": 10})) == 0
    assert choose_quota(None, on_cpu(20), AvailableMemory({"CPU": 100 * GIB})) == GIB == EngineOptions().saved_bytes
    assert choose_quota(7, on_cpu(20), AvailableMemory({"CPU": 10})) == 7
    quota = with_quota(Footprint(), 30)
    assert AvailableMemory({"CPU": 100, "CUDA0": 50}).minus(quota) == AvailableMemory({"CPU": 70, "CUDA0": 50})
    assert AvailableMemory({ALL_DEVICES: 100}).minus(quota) == AvailableMemory({ALL_DEVICES: 70})


def test_budget_in_bytes_limits_all_devices_and_models_together() -> None:
    budget = Machine().budget(50)
    budget.reserve("a", Footprint({"CPU": MemoryUse(10, 5), "CUDA0": MemoryUse(20)}))
    assert budget.available() == AvailableMemory({ALL_DEVICES: 15})
    assert budget.available().shortage(on_cpu(16)) == Shortage(ALL_DEVICES, 16, 15)
    assert budget.available().shortage(on_cpu(15)) is None
    budget.release("a")
    assert budget.available() == AvailableMemory({ALL_DEVICES: 50})


def test_load_in_progress_is_counted_once_while_device_memory_fills_up() -> None:
    machine = Machine()
    budget = machine.budget()
    budget.reserve("a", on_cpu(40))
    for free in (100, 80, 60):  # while its pages are loaded
        machine.free["CPU"] = free
        assert budget.available().free["CPU"] == 55
    budget.settle("a", on_cpu(40))
    assert budget.available().free["CPU"] == 55
    machine.free["CPU"] = 20  # another program has also taken memory
    budget.reserve("b", on_cpu(5))
    assert budget.available().free["CPU"] == 10


def test_memory_is_available_again_after_a_failed_load_or_an_unload() -> None:
    machine = Machine()
    budget = machine.budget()
    budget.reserve("gone", on_cpu(30))
    machine.free["CPU"] = 70
    budget.settle("gone", on_cpu(30))
    budget.reserve("a", on_cpu(20))
    budget.reserve("failing", on_cpu(25))
    assert budget.available().free["CPU"] == 20
    budget.release("failing")
    assert budget.available().free["CPU"] == 45
    machine.free["CPU"] = 100
    budget.release("gone")
    assert budget.available().free["CPU"] == 75


def test_mapped_weights_are_counted_even_if_the_system_reports_their_pages_as_free() -> None:
    machine = Machine()
    budget = machine.budget()
    budget.reserve("a", on_cpu(weights=40, kv=10, mapped=40))
    machine.free["CPU"] = 90  # only the cells take memory
    budget.settle("a", on_cpu(weights=40, kv=10, mapped=40))
    assert budget.available().free["CPU"] == 45


def test_shortage_error_names_the_device_with_the_largest_shortage() -> None:
    room = AvailableMemory({"CPU": 10, "CUDA0": 10})
    footprint = Footprint({"CPU": MemoryUse(12), "CUDA0": MemoryUse(5, 30), "unknown": MemoryUse(99)})
    assert room.shortage(footprint) == Shortage("CUDA0", 35, 10)
    assert room.shortage(Footprint({"CUDA0": MemoryUse(10)})) is None


def test_least_recently_used_models_are_unloaded_and_no_more_than_needed() -> None:
    room = AvailableMemory({"CPU": 10})
    idle = [("oldest", on_cpu(5)), ("old", on_cpu(30)), ("new", on_cpu(30))]
    assert choose_victims(room, on_cpu(15), idle) == ["oldest"]
    assert choose_victims(room, on_cpu(45), idle) == ["oldest", "old"]
    assert choose_victims(room, on_cpu(76), idle) == []


@given(st.integers(0, 50), st.integers(1, 200), st.lists(st.integers(0, 40), max_size=6))
def test_evicted_models_free_enough_memory_and_the_last_eviction_is_necessary(
    free: int, wanted: int, sizes: list[int]
) -> None:
    room, idle = AvailableMemory({"CPU": free}), [(str(i), on_cpu(size)) for i, size in enumerate(sizes)]
    if room.shortage(on_cpu(wanted)) is None:
        return
    victims = choose_victims(room, on_cpu(wanted), idle)
    gained = sum(sizes[int(victim)] for victim in victims)
    assert bool(victims) == (free + sum(sizes) >= wanted)
    if victims:
        assert free + gained >= wanted
        assert free + gained - sizes[int(victims[-1])] < wanted


@pytest.mark.parametrize("per_token", [1, 7, 1000])
@pytest.mark.parametrize("bend", [0, 3000], ids=["line", "window"])  # the cells of a sliding window stop growing
def test_unset_context_size_becomes_the_largest_size_that_fits(per_token: int, bend: int) -> None:
    room = AvailableMemory({"CPU": 20_000_000})

    def measure(ctx: int) -> Footprint:
        return on_cpu(weights=1_000_000, kv=per_token * ctx + 500 * min(ctx, bend), compute=10 * ctx)

    ctx, footprint = choose_ctx(measure, room, 131_072)
    assert room.shortage(footprint) is None
    assert footprint.on("CPU").kv_bytes <= KV_SHARE * room.free["CPU"]
    larger = measure(ctx + max(512, ctx // 4))
    assert ctx == 131_072 or larger.on("CPU").kv_bytes > KV_SHARE * room.free["CPU"]


def test_context_has_the_minimum_size_when_nothing_fits() -> None:
    ctx, footprint = choose_ctx(lambda ctx: on_cpu(kv=ctx), AvailableMemory({"CPU": 100}), 4096)
    assert (ctx, footprint) == (512, on_cpu(kv=512))
    assert choose_ctx(lambda ctx: on_cpu(kv=ctx), AvailableMemory({"CPU": 100}), 64)[0] == 64


def test_container_limit_is_the_lowest_limit_of_its_control_groups(tmp_path: Path) -> None:
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    assert group_limit(tmp_path, own) is None
    for folder, limit, usage in ((group, "max", "5"), (group.parent, "1000", "700"), (tmp_path, "5000", "4900")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(usage)
    (group.parent / "memory.stat").write_text("anon 1\ninactive_file 150\nactive_file 50\n")
    assert group_limit(tmp_path, own) == (1000, 100)


def test_memory_limit_of_control_groups_v1_applies(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/of/the/host\n0::/\n")
    (folder / "memory.limit_in_bytes").write_text("1000")
    (folder / "memory.usage_in_bytes").write_text("400")
    (folder / "memory.stat").write_text("cache 70\ntotal_inactive_file 40\ntotal_active_file 10\n")
    assert group_limit(tmp_path, own) == (1000, 650)
    (folder / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert group_limit(tmp_path, own) is None


def test_sizes_are_formatted_with_readable_units() -> None:
    assert [readable(n) for n in (0, 1023, 1536, 3.5 * GIB, 200 * GIB)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.5 GiB",
        "200 GiB",
    ]
