"""Serve this machine's CPU with llama.cpp's RPC: `python serve.py HOST:PORT MEMORY_BYTES`.

To clients, the CPU appears as a GPU with the given memory. Imports neither llama_cpp nor cellama, to start fast.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

_CPU = 0  # ggml_backend_dev_type
_NUM_THREADS = 1  # other servers and the tests also need the cores
_size_p = ctypes.POINTER(ctypes.c_size_t)
_GetMemory = ctypes.CFUNCTYPE(None, ctypes.c_void_p, _size_p, _size_p)


class _Device(ctypes.Structure):  # the first fields of ggml_backend_device in ggml-backend-impl.h
    _fields_ = (("get_name", ctypes.c_void_p), ("get_description", ctypes.c_void_p), ("get_memory", _GetMemory))


def library(name: str) -> Path:
    """Return the path of one of the installed llama_cpp's libraries, such as "ggml-rpc". It may not exist."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(spec.origin).parent / "lib" / f"lib{name}.{suffix}"


def serve(address: str, memory_bytes: int) -> None:
    """Serve clients until the process is stopped. Returns only if the address can't be used."""
    ggml = ctypes.CDLL(str(library("ggml")))  # with its dependencies, which include ggml-rpc
    device_of_type = ggml.ggml_backend_dev_by_type
    device_of_type.restype, device_of_type.argtypes = ctypes.c_void_p, (ctypes.c_int,)
    # void ggml_backend_rpc_start_server(endpoint, cache_dir, n_threads, n_devices, devices) in ggml-rpc.h
    start = ggml.ggml_backend_rpc_start_server
    start.restype, start.argtypes = None, (*(ctypes.c_char_p,) * 2, *(ctypes.c_size_t,) * 2, ctypes.c_void_p)

    @_GetMemory
    def get_memory(_: int, free: ctypes._Pointer[ctypes.c_size_t], total: ctypes._Pointer[ctypes.c_size_t]) -> None:
        free[0] = total[0] = memory_bytes  # llama.cpp would report all of this machine's RAM for each server

    device = device_of_type(_CPU)
    _Device.from_address(device).get_memory = get_memory
    start(address.encode(), None, _NUM_THREADS, 1, (ctypes.c_void_p * 1)(device))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
    sys.exit(f"{sys.argv[1]} can't be used")
