"""Parse the sizes of llama.cpp's buffers, in bytes per device, from the log of a real or dry load.

Other llama.cpp versions may use different log messages. If a required size is not found, an error is raised, so a
missing size is never treated as 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import llama_cpp

from cellama.engine.errors import ModelLoadFailed
from cellama.engine.memory.budget import CPU, MemoryUse

_MIB = 1024 * 1024
_WEIGHTS = re.compile(r"load_tensors:\s+(\S+) model buffer size =\s*([\d.]+) MiB")
_LAYER = re.compile(r"load_tensors: layer\s+(\d+) assigned to device (\S+),")
_KV_LAYER = re.compile(r"llama_kv_cache: layer\s+\d+: dev = (\S+)")
_KV = re.compile(
    r"llama_kv_cache: size =\s*([\d.]+) MiB"
)  # in a dry load, the lines of the individual buffers have size 0
_STATES = re.compile(r"(\S+) (?:RS|DSV4 .*state) buffer size =\s*([\d.]+) MiB")
_COMPUTE = re.compile(r"sched_reserve:\s+(\S+) compute buffer size =\s*([\d.]+) MiB")
_SHARED = "Meta("  # start of the name of the device that stands for all devices in split mode tensor
_OUTPUT = re.compile(r"llama_context:\s+(\S+)\s+output buffer size =\s*([\d.]+) MiB")


def kv_and_compute(lines: Iterable[str], gpus: Mapping[str, str], *, with_memory: bool = True) -> dict[str, MemoryUse]:
    """Return the memory that contexts use on each device, based on what llama.cpp logged when creating the contexts.

    `with_memory` must be true if any of the contexts has cells or states. Raises ModelLoadFailed if a size is missing.
    """
    lines = list(lines)
    _require(lines, "compute buffers", _COMPUTE)
    _require(lines, "outputs", _OUTPUT)
    if with_memory:
        _require(lines, "the KV cache", _KV, _STATES)
    kv, compute, layers = Counter(states(lines, gpus)), Counter[str](), Counter[str]()
    for line in lines:
        if match := _KV_LAYER.search(line):
            layers[match[1]] += 1
        elif match := _KV.search(line):
            if not layers and float(match[1]):
                raise _unknown("the layers of the KV cache")
            for device, count in layers.items():  # layers with cells have about the same size
                kv[device] += int(float(match[1]) * _MIB * count / layers.total())
            layers.clear()
        elif match := _COMPUTE.search(line) or _OUTPUT.search(line):
            compute[device_of(match[1], gpus)] += int(float(match[2]) * _MIB)
    return {device: MemoryUse(0, kv[device], compute[device]) for device in {**kv, **compute}}


def states(lines: Iterable[str], gpus: Mapping[str, str]) -> dict[str, int]:
    """Return the number of bytes that the states of recurrent layers occupy on each device."""
    found = Counter[str]()
    for match in filter(None, map(_STATES.search, lines)):
        found[device_of(match[1], gpus)] += int(float(match[2]) * _MIB)
    return dict(found)


def loaded_weights(
    lines: Iterable[str], gpus: Mapping[str, str], size_bytes: int, shares: Mapping[str, float]
) -> dict[str, MemoryUse]:
    """Return the memory that loaded weights occupy on each device, based on what llama.cpp logged during the load.

    `size_bytes` is the total size of all tensors. Weights on the CPU can exist twice: in the mapped file, and repacked
    for the processor. Such weights are counted only once, because llama.cpp doesn't read them from the file again.
    If devices share each layer, llama.cpp logs only the part of the device with the largest of the `shares`. Raises
    ModelLoadFailed if a size is missing.
    """
    lines = list(lines)
    _require(lines, "the weights", _WEIGHTS)
    buffers, mapped = Counter[str](), 0
    for match in filter(None, map(_WEIGHTS.search, lines)):
        num_bytes, device = int(float(match[2]) * _MIB), device_of(match[1], gpus)
        if device.startswith(_SHARED):
            buffers[device] += int(num_bytes * sum(shares.values()) / max(shares.values()))
        elif device == CPU and match[1].endswith("_Mapped"):
            mapped += num_bytes
        else:
            buffers[device] += num_bytes
    mapped = max(0, min(mapped, size_bytes - buffers[CPU]))
    buffers[CPU] += mapped
    return {
        device: MemoryUse(num, mapped_bytes=mapped if device == CPU else 0) for device, num in buffers.items() if num
    }


def layers_per_device(lines: Iterable[str]) -> dict[str, int]:
    """Return the number of layers on each device, including the output layer. Raises ModelLoadFailed."""
    lines = list(lines)
    _require(lines, "the devices of layers", _LAYER)
    return dict(Counter(match[2] for match in filter(None, map(_LAYER.search, lines))))


def planned_weights(
    lines: Iterable[str],
    tensors: Mapping[str, int],
    override: Callable[[str], str | None] = lambda name: None,
    *,
    mapped: bool = True,
) -> dict[str, MemoryUse]:
    """Return the memory that the weights will occupy on each device, based on the log of a dry load.

    `tensors` maps tensor names to sizes in bytes. `override` returns the device that the options choose for a tensor,
    or None. Otherwise, each layer is on the device named in the log, the output is on the last layer's device, and all
    other tensors are on the CPU. If `mapped` is false, the file is read instead of mapped. Raises ModelLoadFailed.
    """
    lines = list(lines)
    _require(lines, "the devices of layers", _LAYER)
    device_of_layer = {int(match[1]): match[2] for match in filter(None, map(_LAYER.search, lines))}
    output = device_of_layer.get(max(device_of_layer, default=0), CPU)
    sizes = Counter[str]()
    for name, num_bytes in tensors.items():
        if (chosen := override(name)) is not None:
            sizes[chosen] += num_bytes
        elif name.startswith("blk."):
            sizes[device_of_layer.get(int(name.split(".")[1]), CPU)] += num_bytes
        else:
            sizes[output if name.startswith("output") else CPU] += num_bytes
    if (
        output != CPU and "output.weight" not in tensors
    ):  # the output shares the weights of the embedding, which are copied to its device
        sizes[output] += tensors.get("token_embd.weight", 0)
    return {
        device: MemoryUse(size, mapped_bytes=size if mapped and device == CPU else 0) for device, size in sizes.items()
    }


def _require(lines: Iterable[str], subject: str, *patterns: re.Pattern[str]) -> None:
    if not any(pattern.search(line) for line in lines for pattern in patterns):
        raise _unknown(subject)


def _unknown(subject: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"the log of llama.cpp has no known line about {subject}; install a version of llama-cpp-python that "
        f"this version of cellama supports (installed: {llama_cpp.__version__})"
    )


def device_of(buffer: str, gpus: Mapping[str, str]) -> str:
    """Return the device that contains a buffer. `gpus` maps the names of buffers to devices (`devices.gpu_buffers`).

    For example, "CUDA0_Split" is on CUDA0, and pinned memory ("CUDA_Host") is in RAM. A buffer that all devices share
    is its own device, until `divided` divides it.
    """
    if buffer.startswith(_SHARED):
        return buffer
    return next((gpu for name, gpu in gpus.items() if buffer == name or buffer.startswith(f"{name}_")), CPU)


def divided(usage: Mapping[str, MemoryUse], shares: Mapping[str, float]) -> dict[str, MemoryUse]:
    """Divide the memory that devices share (split mode tensor) between them, in proportion to their `shares`.

    Each device has the whole compute buffer.
    """
    found = {name: use for name, use in usage.items() if not name.startswith(_SHARED)}
    for use in (use for name, use in usage.items() if name.startswith(_SHARED)):
        for device, share in shares.items():
            part = share / sum(shares.values())
            found[device] = MemoryUse(int(use.weights_bytes * part), int(use.kv_bytes * part), use.compute_bytes)
    return found
