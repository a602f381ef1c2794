"""The KV cache of a context: its shape, and moving cells between slots and RAM. Implements KvMemory."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from cellama.engine.errors import InvalidRequest
from cellama.engine.memory.context_size import STREAM_PADDING
from cellama.engine.options import EngineOptions

from .files.state_format import from_portable, to_portable
from .model import LlamaModel

STATE_FORMAT = 2  # of portable states; another number makes those of before foreign
UNIFIED_UP_TO = 1  # slots; docs/adr/003-kv-layout.md


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


@dataclass(frozen=True, slots=True)
class KvShape:
    """How the cells are laid out, in tokens."""

    unified: bool  # one pool, or a stream per slot
    n_ctx: int  # what llama.cpp is told
    ctx_per_slot: int
    n_cells: int

    @staticmethod
    def choose(model: LlamaModel, options: EngineOptions) -> KvShape:
        """What the options say; a context that they leave open is the training context. Raises InvalidRequest."""
        slots = options.num_slots
        unified = options.kv_layout == "unified" or (options.kv_layout == "auto" and slots <= UNIFIED_UP_TO)
        if unified:
            total = options.n_ctx or slots * (options.ctx_per_slot or model.info.n_ctx_train)
            per_slot = min(options.ctx_per_slot or total, total)
            return KvShape(True, _padded(total), per_slot, total)
        if options.n_ctx is not None and options.ctx_per_slot is None and options.n_ctx < slots:
            raise InvalidRequest(f"n_ctx is {options.n_ctx}, less than a token for each of {slots} slots; raise it")
        per_slot = options.ctx_per_slot or (options.n_ctx or 0) // slots or model.info.n_ctx_train
        if options.n_ctx is not None and per_slot * slots > options.n_ctx:
            raise InvalidRequest(
                f"{slots} slots of {per_slot} tokens need {per_slot * slots}, n_ctx is {options.n_ctx}; "
                "give one of n_ctx and ctx_per_slot, or choose kv_layout unified"
            )
        return KvShape(False, _padded(per_slot) * slots, per_slot, per_slot * slots)


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // STREAM_PADDING) * STREAM_PADDING


def identity_of(model: LlamaModel, options: EngineOptions, load_log: Iterable[str]) -> bytes:
    """What states of a context depend on beside tokens and adapters; `load_log` is what llama.cpp said when making it.

    The file's own settings, for instance of rope, are in its fingerprint. llama.cpp numbers the format of its files of
    states and not that of states in memory, so its own version counts, too: an update computes them anew.
    """
    refused = any("Flash Attention not supported" in line or "flash_attn is not compat" in line for line in load_log)
    parts = (
        STATE_FORMAT,
        (llama_cpp.__version__, lib.LLAMA_STATE_SEQ_VERSION, lib.LLAMA_SESSION_VERSION),
        (model.info.architecture, model.info.fingerprint, model.info.n_vocab),
        (options.cache_type_k, options.cache_type_v),
        options.flash_attention != "off" and not refused,
    )
    return hashlib.sha256(repr(parts).encode()).digest()


class LlamaMemory:
    """The cells of a context's slots. Engine thread only. What they allow: docs/adr/010-cutting-states-back.md."""

    def __init__(self, model: LlamaModel, context: Any, shape: KvShape, n_slots: int) -> None:
        self.n_slots = n_slots
        self.ctx_per_slot = shape.ctx_per_slot
        self.n_cells = shape.n_cells
        self.unified = shape.unified
        recurrent = lib.llama_model_is_recurrent(model.pointer) or lib.llama_model_is_hybrid(model.pointer)
        self._window = 0 if recurrent else lib.llama_model_n_swa(model.pointer)
        self.partial_reuse = not recurrent
        self._num_streams = 1 if shape.unified else n_slots
        windows = bool(lib.llama_model_n_swa(model.pointer))  # a block of cells more, for the layers that have one
        # Blocks of cells before that of a recurrent memory, in states and checkpoints; None: there is no such memory.
        self._cell_blocks: int | None = None
        self._checkpoint_blocks: int | None = None
        if recurrent:
            self._cell_blocks = 1 + windows if lib.llama_model_is_hybrid(model.pointer) else 0
            self._checkpoint_blocks = int(windows) if self._cell_blocks else 0
        self._context = context
        self._memory = lib.llama_get_memory(context)
        self._in_copy: set[int] = set()  # slots whose streams llama.cpp copies at the beginning of its next decode call

    def first_cut(self, slot: int) -> int:
        if not self.partial_reuse:
            return int(lib.llama_memory_seq_pos_max(self._memory, slot)) + 1
        first = lib.llama_memory_seq_pos_min(self._memory, slot) if self._window else 0
        return first + self._window if first > 0 else 0

    def first_saved_cut(self, num_tokens: int) -> int:
        return 0 if self.partial_reuse and (not self._window or num_tokens <= self._window) else num_tokens

    def trim(self, slot: int, num_tokens: int, checkpoint: NDArray[np.uint8] | None = None) -> bool:
        if checkpoint is not None and not self._read(slot, checkpoint, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY):
            return False
        if lib.llama_memory_seq_rm(self._memory, slot, num_tokens, -1) and self._is_whole(slot, num_tokens):
            return True
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)  # removing all of a sequence never fails
        return False

    def _is_whole(self, slot: int, num_tokens: int) -> bool:
        """True if the next token can be computed from what is left: a window may have lost what it looks back on."""
        if num_tokens == 0:
            return True
        held = lib.llama_memory_seq_pos_max(self._memory, slot) + 1
        return bool(held == num_tokens >= self.first_cut(slot))

    def copy(self, source: int, target: int, num_tokens: int, checkpoint: NDArray[np.uint8] | None = None) -> bool:
        if self.unified and self.partial_reuse:
            lib.llama_memory_seq_cp(self._memory, source, target, 0, num_tokens)
        elif self._window:
            lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)  # a state has the last window only
            self._in_copy |= {source, target}
        else:  # llama.cpp copies whole streams; the state of the used cells alone takes less time
            return self.restore(target, self.save(source), num_tokens, checkpoint)
        return self.trim(target, num_tokens)

    def _finish_copy(self, slot: int) -> None:
        """The stream of the slot is copied now: only decode calls do that, so a token is computed and removed again."""
        if slot not in self._in_copy:
            return
        position = lib.llama_memory_seq_pos_max(self._memory, slot) + 1
        batch = lib.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.token[0], batch.pos[0], batch.logits[0] = 1, 0, position, 0
        batch.n_seq_id[0], batch.seq_id[0][0] = 1, slot
        code = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        lib.llama_memory_seq_rm(self._memory, slot, position, -1)
        if code < 0:
            raise RuntimeError(f"llama.cpp can't copy the stream of slot {slot}: llama_decode returned {code}")
        self._in_copy.clear()

    def state_bytes(self, slot: int) -> int:
        return int(lib.llama_state_seq_get_size(self._context, slot))

    def save(self, slot: int) -> NDArray[np.uint8]:
        return self._write(slot, self.state_bytes(slot), lib.LLAMA_STATE_SEQ_FLAGS_NONE)

    def restore(
        self, slot: int, data: NDArray[np.uint8], num_tokens: int, checkpoint: NDArray[np.uint8] | None = None
    ) -> bool:
        return self._read(slot, data, lib.LLAMA_STATE_SEQ_FLAGS_NONE) and self.trim(slot, num_tokens, checkpoint)

    def checkpoint_bytes(self, slot: int) -> int:
        return int(lib.llama_state_seq_get_size_ext(self._context, slot, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY))

    def checkpoint(self, slot: int) -> NDArray[np.uint8]:
        return self._write(slot, self.checkpoint_bytes(slot), lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def portable(self, data: NDArray[np.uint8], num_tokens: int, *, checkpoint: bool = False) -> memoryview:
        return to_portable(data, num_tokens, self._checkpoint_blocks if checkpoint else self._cell_blocks)

    def from_portable(self, data: Buffer, *, checkpoint: bool = False) -> tuple[NDArray[np.uint8], int]:
        return from_portable(data, self._num_streams, self._checkpoint_blocks if checkpoint else self._cell_blocks)

    def _write(self, slot: int, size: int, flags: int) -> NDArray[np.uint8]:
        self._finish_copy(slot)
        data = np.empty(size, np.uint8)
        if not lib.llama_state_seq_get_data_ext(self._context, _pointer(data), len(data), slot, flags):
            raise RuntimeError(f"llama.cpp can't copy the state of slot {slot}, which has {len(data)} bytes")
        return data

    def _read(self, slot: int, data: NDArray[np.uint8], flags: int) -> bool:
        """The slot has the state, or the part of it that is written in `data`; False: it is empty."""
        self._finish_copy(slot)
        if lib.llama_state_seq_set_data_ext(self._context, _pointer(data), len(data), slot, flags):
            return True
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        return False


def _pointer(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
