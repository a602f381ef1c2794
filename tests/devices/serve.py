"""Serve this machine's CPU with llama.cpp's RPC: `python serve.py HOST:PORT NUM_DEVICES NUM_THREADS`.

To clients, the CPU appears as the given number of GPUs. Imports neither llama_cpp nor cellama, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

_CPU = 0  # ggml_backend_dev_type


def library(name: str) -> Path:
    """Return the path of one of the installed llama_cpp's libraries, such as "ggml-rpc". It may not exist."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(spec.origin).parent / "lib" / f"lib{name}.{suffix}"


def serve(address: str, num_devices: int, num_threads: int) -> None:
    """Serve clients until the process is stopped. Returns only if the address can't be used."""
    ggml, rpc = ctypes.CDLL(str(library("ggml"))), ctypes.CDLL(str(library("ggml-rpc")))
    device_of_type = ggml.ggml_backend_dev_by_type
    device_of_type.restype, device_of_type.argtypes = ctypes.c_void_p, (ctypes.c_int,)
    # void ggml_backend_rpc_start_server(endpoint, cache_dir, n_threads, n_devices, devices) in ggml-rpc.h
    start = rpc.ggml_backend_rpc_start_server
    start.restype, start.argtypes = None, (*(ctypes.c_char_p,) * 2, *(ctypes.c_size_t,) * 2, ctypes.c_void_p)
    devices = (ctypes.c_void_p * num_devices)(*[device_of_type(_CPU)] * num_devices)
    start(address.encode(), None, num_threads, num_devices, devices)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.exit(f"{sys.argv[1]} can't be used")
