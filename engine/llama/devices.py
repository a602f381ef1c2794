"""Find ggml's devices and their memory, using functions of ggml-backend.h that llama_cpp does not wrap."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as lib

from cellama.engine.llama.ggml_backends import ggml_function, initialise
from cellama.engine.memory.budget import CPU, Device, DeviceKind
from cellama.engine.memory.free_memory import ram
from cellama.engine.system.processors import available_cores

_KINDS: dict[int, DeviceKind] = {
    0: "cpu",
    1: "gpu",
    2: "integrated gpu",
}  # ggml_backend_dev_type; other types have no memory of their own


_size_p = ctypes.POINTER(ctypes.c_size_t)
_count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t)
_get = ggml_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
_name = ggml_function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
_describe = ggml_function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
_kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
_buffer_type = ggml_function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
_buffer_name = ggml_function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
_memory = ctypes.CFUNCTYPE(None, ctypes.c_void_p, _size_p, _size_p)(("ggml_backend_dev_memory", lib._lib))


def devices() -> list[Device]:
    """Return the supported GPUs that llama.cpp finds, and the CPU.

    The CPU's memory is the RAM available to this process.
    """
    initialise()
    found = [_device(_get(index)) for index in range(_count())]
    return sorted((device for device in found if device is not None), key=lambda device: device.kind != "cpu")


def _device(pointer: int) -> Device | None:
    kind = _KINDS.get(_kind(pointer))
    if kind is None:
        return None
    name, description = _name(pointer).decode(), (_describe(pointer) or b"").decode(errors="replace").strip()
    if name == CPU:
        total, free = ram()
    else:
        free_c, total_c = ctypes.c_size_t(), ctypes.c_size_t()
        _memory(pointer, ctypes.byref(free_c), ctypes.byref(total_c))
        total, free = total_c.value, free_c.value
    return Device(name, kind, description, total_bytes=total, free_bytes=free)


def gpu_kinds() -> dict[str, DeviceKind]:
    """Return the kinds of all devices except the CPU, by name, including the devices of connected RPC servers."""
    initialise()
    kinds = {_name(pointer).decode(): _KINDS.get(_kind(pointer), "cpu") for pointer in map(_get, range(_count()))}
    return {name: kind for name, kind in kinds.items() if kind != "cpu"}


def gpu_names() -> list[str]:
    """Return the names of all devices except the CPU, including the devices of connected RPC servers."""
    return list(gpu_kinds())


def gpu_buffers() -> dict[str, str]:
    """Return the names of the GPUs, keyed by the names of their buffers in llama.cpp's log.

    Both names are equal for local GPUs. The buffers of RPC devices have names such as "RPC0[10.0.0.2:50052]".
    """
    return {_buffer_name(_buffer_type(pointer_of(name))).decode(): name for name in gpu_names()}


def pointer_of(name: str) -> int:
    """Return ggml's pointer to the device with this name. Raises KeyError."""
    initialise()
    pointers = {_name(pointer).decode(): pointer for pointer in map(_get, range(_count()))}
    return int(pointers[name])


def machine() -> dict[str, Any]:
    """Return the properties that determine this machine's speed: CPU, usable cores, GPUs and llama.cpp version."""
    found = devices()
    return {
        "cpu": next((device.description for device in found if device.kind == "cpu"), "unknown"),
        "cores": available_cores(),
        "gpus": [device.description for device in found if device.kind != "cpu"],
        "llama_cpp": llama_cpp.__version__,
    }
