"""What all contexts of llama.cpp need: their making, threads and batches, and a flag that aborts a decode call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from cellama.engine.errors import ModelLoadFailed
from cellama.engine.options import EngineOptions
from cellama.engine.system.processors import available_cores

from . import log as llama_log
from .model import LlamaModel

CACHE_TYPES = {  # types of KV cells → their numbers in ggml.h
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # llama_cpp does not name it
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
}
_PAUSE_SOFT = 1  # of OpenMP: it remembers its settings
_FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


def new_context(model: LlamaModel, options: EngineOptions, **overrides: Any) -> Any:
    """A llama_context with what `options` say and `overrides` set. Raises ModelLoadFailed."""
    params = lib.llama_context_default_params()
    params.n_threads = params.n_threads_batch = options.threads or available_cores()
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
    params.type_k = CACHE_TYPES[options.cache_type_k]
    params.type_v = CACHE_TYPES[options.cache_type_v]
    params.swa_full = True  # a prefix can be cut back to any length (docs/adr/010-cutting-states-back.md)
    for name, value in overrides.items():
        setattr(params, name, value)
    llama_log.take_errors()
    context = lib.llama_init_from_model(model.pointer, params)
    if not context:
        raise ModelLoadFailed(
            f"llama.cpp can't make a context for {str(model.path)!r}: {llama_log.take_errors()}; "
            "lower n_parallel or ctx_per_slot, or choose another cache type"
        )
    return context


def set_threads(context: Any, count: int) -> None:
    """The next decode call computes with so many threads; that costs nothing."""
    lib.llama_set_n_threads(context, count, count)


def end_threads() -> None:
    """Ends the threads that compute with the calling one; its next decode call starts new ones, in some 0.1 ms.

    While they exist, also idle, OpenMP takes the machine for oversubscribed as soon as another engine of this process
    computes: that one's threads then sleep at each barrier where they would spin, and its steps take up to twice as
    long (docs/adr/007-threads.md).
    """
    if _pause is not None:
        _pause(_PAUSE_SOFT)


def _find_pause() -> Any:
    """omp_pause_resource_all of OpenMP 5; None if llama.cpp was built without it."""
    try:
        function = lib._lib.omp_pause_resource_all
    except AttributeError:
        return None
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return function


_pause = _find_pause()


class TokenBatch:
    """A llama_batch of at most `capacity` tokens, written by slices."""

    def __init__(self, capacity: int) -> None:
        self.batch = lib.llama_batch_init(capacity, 0, 1)
        self._capacity = capacity
        self._tokens = np.ctypeslib.as_array(self.batch.token, (capacity,))
        self._positions = np.ctypeslib.as_array(self.batch.pos, (capacity,))
        self._outputs = np.ctypeslib.as_array(self.batch.logits, (capacity,))
        np.ctypeslib.as_array(self.batch.n_seq_id, (capacity,))[:] = 1
        # seq_id is an array of pointers into one block each; the blocks are made contiguous here, once.
        self._slots: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        base, size = self._slots.ctypes.data, self._slots.itemsize
        self._own_pointers = [ctypes.cast(self.batch.seq_id[i], ctypes.c_void_p).value for i in range(capacity)]
        pointers = ctypes.cast(self.batch.seq_id, ctypes.POINTER(ctypes.c_void_p))
        for i in range(capacity):
            pointers[i] = base + i * size
        self._pointers = pointers

    def clear(self) -> None:
        self.batch.n_tokens = 0

    def add(self, slot: int, position: int, tokens: Sequence[int], *, all_outputs: bool = False) -> int:
        """Appends consecutive tokens of a slot; returns the row of the last one, which is the next free minus 1."""
        start: int = self.batch.n_tokens
        end = start + len(tokens)
        if end > self._capacity:  # llama.cpp would end the process
            raise ValueError(f"a batch of {end} tokens, the capacity is {self._capacity}")
        self._tokens[start:end] = tokens
        self._positions[start:end] = np.arange(position, position + len(tokens))
        self._slots[start:end] = slot
        self._outputs[start:end] = all_outputs
        self.batch.n_tokens = end
        return end - 1

    def want_outputs(self, row: int, count: int) -> None:
        """So many rows from this one on get logits."""
        self._outputs[row : row + count] = 1

    def close(self) -> None:
        """Gives the memory back, with the pointers that llama.cpp allocated."""
        for i, pointer in enumerate(self._own_pointers):
            self._pointers[i] = pointer
        lib.llama_batch_free(self.batch)


class AbortFlag:
    """A byte that llama.cpp looks at between the nodes of its graph (CPU backends only).

    A callback in Python would take the GIL at every node. The C library's `strlen` reads the byte instead: of the
    empty string "" it makes 0, go on, of "\\1" it makes 1, abort.
    """

    def __init__(self, context: Any) -> None:
        self._text = ctypes.create_string_buffer(2)
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
        callback = ctypes.cast(strlen, lib.ggml_abort_callback)
        self._keep = callback
        lib.llama_set_abort_callback(context, callback, ctypes.cast(self._text, ctypes.c_void_p))

    def raise_(self) -> None:
        """The decode call that runs now, or else the next one, is aborted. Any thread."""
        self._text[0] = b"\1"

    def is_raised(self) -> bool:
        return self._text[0] != b"\0"

    def lower(self) -> None:
        self._text[0] = b"\0"
