"""Load ggml's backends, which compute on the CPU and on GPUs, and report which CPU variant llama.cpp chose.

Most builds of llama.cpp include their backends. A build with `GGML_BACKEND_DL` stores its backends in separate library
files, which llama_cpp does not load. A build with `GGML_CPU_ALL_VARIANTS` has one file per CPU generation, and
llama.cpp loads the best file for this CPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import tempfile
import threading
from pathlib import Path

import llama_cpp.llama_cpp as lib

from cellama.engine.errors import ModelLoadFailed

from . import log as llama_log

LIBRARIES = Path(lib._lib._name).absolute().parent
# LlamaModel disables AMX and with it repacked weights. On a CPU with AMX, the second best variant can use these.
AMX_VARIANT = "libggml-cpu-sapphirerapids.so"
_CPU_VARIANT = re.compile(r"libggml-cpu-([\w.]+)\.so")


class _SymbolInfo(ctypes.Structure):  # Dl_info in dlfcn.h
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def ggml_function(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    """Return a function of ggml-backend.h that llama_cpp does not wrap."""
    function: ctypes._NamedFuncPointer = getattr(lib._lib, name)
    function.restype, function.argtypes = result, arguments
    return function


def registry_function(backend: str, name: str, result: type | None, *arguments: type) -> ctypes._FuncPointer | None:
    """Return a function that a ggml backend exports under a name, or None without this backend or function."""
    load_backends()
    registry = _backend(backend.encode())
    address = _function_address(registry, name.encode()) if registry else None
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


_function_address = ggml_function(
    "ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
)
_num_backends = ggml_function("ggml_backend_reg_count", ctypes.c_size_t)
_load_all = ggml_function("ggml_backend_load_all_from_path", None, ctypes.c_char_p)
_backend = ggml_function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)
_loading = threading.Lock()


@functools.cache
def load_backends() -> None:
    """Load the backends that llama_cpp ships as separate files. If llama.cpp includes its backends, do nothing.

    Any thread may call this function. Raises ModelLoadFailed if llama.cpp has no backend for this CPU.
    """
    with _loading:
        if _num_backends():
            return
        with tempfile.TemporaryDirectory(prefix="cellama-backends-") as folder:
            for file in LIBRARIES.glob("libggml-*.so"):
                if file.name != AMX_VARIANT:
                    (Path(folder) / file.name).symlink_to(file)
            _load_all(os.fsencode(folder))
    if not _backend(b"CPU"):
        raise ModelLoadFailed(
            f"llama.cpp: {LIBRARIES} contains no backend for this CPU; reinstall llama-cpp-python "
            "(docs/how-to/install.md, Build for another CPU)"
        )


@functools.cache
def initialise() -> None:
    """Initialize llama.cpp. Repeated calls have no effect.

    Raises ModelLoadFailed if llama.cpp has no backend for this CPU.
    """
    llama_log.install()
    load_backends()
    lib.llama_backend_init()


@functools.cache
def cpu_library() -> Path:
    """Return the path of the library that contains the CPU backend."""
    load_backends()
    info = _SymbolInfo()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(_backend(b"CPU")), ctypes.byref(info))
    file = Path(os.fsdecode(info.file))
    return file if file.exists() else LIBRARIES / file.name  # the links of load_backends exist no longer


def cpu_variant() -> str:
    """Return the name of the CPU variant that llama.cpp chose, such as "zen4".

    If llama.cpp was built for a single CPU, return "".
    """
    found = _CPU_VARIANT.fullmatch(cpu_library().name)
    return found[1] if found else ""
