"""Tests of the parser for llama.cpp's log of a load."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from cellama.engine import (
    ModelLoadFailed,
)
from cellama.engine.llama import LlamaModel, buffers, log as llama_log
from cellama.engine.memory.budget import MemoryUse

MIB = 1 << 20
CONTEXT = [
    "llama_context:        CPU  output buffer size =     1.00 MiB",
    "sched_reserve:        CPU compute buffer size =    30.00 MiB",
    "llama_kv_cache: layer   0: dev = CPU",
    "llama_kv_cache: size =    8.00 MiB (  1024 cells,   1 layers, 16/16 seqs), K (f16):    4.00 MiB, V (f16)…",
]


@pytest.mark.parametrize("missing", range(len(CONTEXT)))
def test_missing_size_in_the_log_raises_an_error(missing: int) -> None:
    assert buffers.kv_and_compute(CONTEXT, {}) == {"CPU": MemoryUse(0, 8 * MIB, 31 * MIB)}
    assert buffers.kv_and_compute(CONTEXT[:2], {}, with_memory=False) == {"CPU": MemoryUse(0, 0, 31 * MIB)}
    with pytest.raises(ModelLoadFailed, match=r"no known line about .*; install a version of llama-cpp-python"):
        buffers.kv_and_compute(CONTEXT[:missing] + CONTEXT[missing + 1 :], {})


def test_missing_weights_and_layers_in_the_log_raise_an_error() -> None:
    with pytest.raises(ModelLoadFailed, match="the weights"):
        buffers.loaded_weights(CONTEXT, {}, MIB, {})
    with pytest.raises(ModelLoadFailed, match="the devices of layers"):
        buffers.planned_weights(CONTEXT, {})


def test_take_errors_returns_only_errors_of_the_calling_thread(tmp_path: Path) -> None:
    heads = [tmp_path / f"{name}.gguf" for name in ("first", "second")]
    for path in heads:
        path.write_bytes(b"GGUF" + bytes(20))
    llama_log.take_errors()
    with pytest.raises(ModelLoadFailed, match=r"first.gguf.*: .*invalid|first.gguf.*: .*failed"):
        LlamaModel(heads[0])
    other = threading.Thread(target=lambda: llama_log._on_log(4, b"a complaint of another thread", None))
    other.start()
    other.join()
    assert llama_log.take_errors() == ""


def test_repacked_weights_are_counted_once() -> None:
    load = [
        "load_tensors:   CPU_Mapped model buffer size =   100.00 MiB",
        "load_tensors:   CPU_REPACK model buffer size =    60.00 MiB",
    ]
    assert buffers.loaded_weights(load, {}, 100 * MIB, {}) == {"CPU": MemoryUse(100 * MIB, mapped_bytes=40 * MIB)}


def test_interrupt_during_a_load_is_raised_after_the_load() -> None:
    """Send a signal during llama.cpp's work.

    Its log callback receives the signal first, and would drop the exception.
    """
    before, lines = signal.signal(signal.SIGINT, signal.default_int_handler), list[str]()

    def load() -> None:
        with llama_log.capture() as captured:
            signal.raise_signal(signal.SIGINT)
            llama_log._on_log(4, b"still loading", None)
            lines.extend(captured)

    try:
        with pytest.raises(KeyboardInterrupt):
            load()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert lines == ["still loading"]
