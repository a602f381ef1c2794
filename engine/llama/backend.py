"""The llama.cpp implementation of the engine's Backend: contexts, KV cells, batches, logits and samplers."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from cellama.engine.backend import ABORTED, AdapterSet, Chunk, DecodeError, Sampler
from cellama.engine.errors import GrammarFailed, InvalidRequest, ModelLoadFailed
from cellama.engine.grammar.grammars import CompiledGrammar, GrammarSpec
from cellama.engine.memory.open_sizes import STREAM_PADDING
from cellama.engine.options import ROPE_OPTIONS, EngineOptions, RopeScaling
from cellama.engine.request import CONSTRAINTS, SamplingParams, TokenLogprob
from cellama.engine.sampling.dry import Breakers
from cellama.engine.sampling.joint import MIN_ROWS, JointDraw
from cellama.engine.sampling.processors import (
    BannedTokens,
    ProcessorFactory,
    SequenceStart,
    load_processor,
    make_processors,
)
from cellama.engine.sampling.rows import RowThreads
from cellama.engine.sampling.sampler import NothingAllowed, RowDraw, TokenSampler
from cellama.engine.system.processors import available_cores

from . import log as llama_log
from .ggml_backends import cpu_library
from .model import LlamaModel, adapter_pointer
from .state_format import from_portable, to_portable

STATE_FORMAT = 2  # version of portable states; states of other versions are ignored and computed again
MAX_AUTO_UNIFIED_SLOTS = 1  # with more slots, `auto` chooses one stream per slot, which decodes faster (ADR 003)
CACHE_TYPES = {  # types of KV cells and their numbers in ggml.h
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # llama_cpp has no constant for it
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
}
ROPE_SCALING: dict[RopeScaling, int] = {
    "none": lib.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": lib.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": lib.LLAMA_ROPE_SCALING_TYPE_YARN,
    "longrope": lib.LLAMA_ROPE_SCALING_TYPE_LONGROPE,
}
_OMP_PAUSE_SOFT = 1  # omp.h: frees the threads and keeps OpenMP's settings
_FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
# llama_get_logits from llama.h, declared so that it returns a plain address
_logits_address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", lib._lib))
# If at least this share of the rows of a decode call is needed, the maxima of all rows are computed together, which is
# faster (ADR 009).
JOINT_ARGMAX_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class KvShape:
    """The layout of a context's KV cells. Sizes are in tokens."""

    unified: bool  # one pool for all slots; otherwise one stream per slot
    n_ctx: int  # the value for llama.cpp, which includes padding
    ctx_per_slot: int
    n_cells: int

    @staticmethod
    def choose(model: LlamaModel, options: EngineOptions) -> KvShape:
        """Return the layout for these options. Raises InvalidRequest.

        If the options don't specify a context size, the model's training context is used.
        """
        slots = options.num_slots
        unified = options.kv_layout == "unified" or (options.kv_layout == "auto" and slots <= MAX_AUTO_UNIFIED_SLOTS)
        if unified:
            total = options.n_ctx or slots * (options.ctx_per_slot or model.info.n_ctx_train)
            per_slot = min(options.ctx_per_slot or total, total)
            return KvShape(unified=True, n_ctx=_padded(total), ctx_per_slot=per_slot, n_cells=total)
        if options.n_ctx is not None and options.ctx_per_slot is None and options.n_ctx < slots:
            raise InvalidRequest(
                f"n_ctx: {options.n_ctx} is less than one token for each of {slots} slots; "
                "raise n_ctx or lower n_parallel"
            )
        per_slot = options.ctx_per_slot or (options.n_ctx or 0) // slots or model.info.n_ctx_train
        if options.n_ctx is not None and per_slot * slots > options.n_ctx:
            raise InvalidRequest(
                f"n_ctx: {options.n_ctx} is too small: {slots} slots of {per_slot} tokens need "
                f"{per_slot * slots}; set only one of n_ctx and ctx_per_slot, or set kv_layout to unified"
            )
        return KvShape(unified=False, n_ctx=_padded(per_slot) * slots, ctx_per_slot=per_slot, n_cells=per_slot * slots)


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // STREAM_PADDING) * STREAM_PADDING


def identity_of(model: LlamaModel, options: EngineOptions, load_log: Iterable[str]) -> bytes:
    """Return a digest of everything that affects a context's states, except tokens and adapters.

    `load_log` contains the lines that llama.cpp logged when it created the context. The model's fingerprint covers the
    file's own settings, such as the RoPE parameters, and the options that override them. llama.cpp's states have no
    version number. The digest therefore includes the llama.cpp version, so an update invalidates all states.
    """
    flash_refused = any(
        "Flash Attention not supported" in line or "flash_attn is not compat" in line for line in load_log
    )
    parts = (
        STATE_FORMAT,
        (llama_cpp.__version__, lib.LLAMA_STATE_SEQ_VERSION, lib.LLAMA_SESSION_VERSION),
        (model.info.architecture, model.info.fingerprint, model.info.n_vocab),
        (options.cache_type_k, options.cache_type_v),
        options.flash_attention != "off" and not flash_refused,
    )
    return hashlib.sha256(repr(parts).encode()).digest()


class LlamaBackend:
    """The engine's Backend, implemented with llama.cpp.

    Methods without a docstring are documented in `cellama.engine.backend`.
    """

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        """Allocate the context and the KV cache. Raises ModelLoadFailed and InvalidRequest."""
        shape = KvShape.choose(model, options)
        self.vocabulary = model
        self.n_vocab = model.info.n_vocab
        with llama_log.capture() as lines:
            self.context = new_context(
                model,
                options,
                n_ctx=shape.n_ctx,
                n_seq_max=options.num_slots,
                n_batch=options.n_batch,
                n_ubatch=options.pass_tokens,
                n_outputs_max=options.logit_rows,  # by default llama.cpp reserves rows for n_batch tokens
                kv_unified=shape.unified,
            )
        self.identity = identity_of(model, options, lines)
        self.n_slots = options.num_slots
        self.ctx_per_slot = shape.ctx_per_slot
        self.n_cells = shape.n_cells
        self.unified = shape.unified
        recurrent = lib.llama_model_is_recurrent(model.pointer) or lib.llama_model_is_hybrid(model.pointer)
        self._window = 0 if recurrent else lib.llama_model_n_swa(model.pointer)
        self.partial_reuse = not recurrent
        self._num_streams = 1 if shape.unified else options.num_slots
        windows = bool(lib.llama_model_n_swa(model.pointer))  # sliding-window layers have their own block of cells
        # Blocks of cells that precede the recurrent block in states and in checkpoints. None without a recurrent
        # memory.
        self._cell_blocks: int | None = None
        self._checkpoint_blocks: int | None = None
        if recurrent:
            self._cell_blocks = 1 + windows if lib.llama_model_is_hybrid(model.pointer) else 0
            self._checkpoint_blocks = int(windows) if self._cell_blocks else 0
        self._memory = lib.llama_get_memory(self.context)
        self._copied_slots: set[int] = (
            set()
        )  # slots whose streams llama.cpp copies at the start of its next decode call
        self.threads: int = lib.llama_n_threads(self.context)
        self._batch = TokenBatch(options.n_batch)
        self._max_rows = options.logit_rows
        self._row_threads = RowThreads(self.threads)
        self._outputs = Outputs(self.context, options.logit_rows, self.n_vocab, self._row_threads)
        self._joint_draw = JointDraw(self.n_vocab, self._row_threads)
        self._abort = AbortFlag(self.context)
        self._logits_processors = options.logits_processors
        self._banned_ends = BannedTokens(model.end_tokens)  # for requests with ignore_eos
        self._adapters: AdapterSet = ()  # adapters of the last decode call

    def set_threads(self, count: int) -> None:
        set_threads(self.context, count)
        self.threads = self._row_threads.max_threads = count

    def rest(self) -> None:
        end_threads()

    def load_adapter(self, path: Path) -> int:
        return self.vocabulary.load_adapter(path)

    def free_adapter(self, handle: int) -> None:
        self.vocabulary.free_adapter(handle)

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        batch = self._batch
        batch.clear()
        self._outputs.clear()
        num_rows, slots = 0, list[tuple[int, int]]()
        for slot, position, tokens, samples, is_decode, num_drafts in chunks:
            last = batch.add(slot, position, tokens)
            if samples:
                batch.request_outputs(last + 1 - len(tokens) if is_decode else last, 1 + num_drafts)
                num_rows += 1 + num_drafts
                slots.append((slot, 1 + num_drafts))
        if num_rows > self._max_rows:  # llama.cpp would abort the process
            raise ValueError(f"the batch has {num_rows} rows of logits, but the context has only {self._max_rows}")
        if adapters == self._adapters:
            code = self._call_decode()
        else:  # the first decode call with other adapters builds a new graph, which reads the list of adapters
            with self.vocabulary.adapters_lock:
                self._set_adapters(adapters)
                code = self._call_decode()
        # A GPU can still be computing when llama_decode returns. The scheduler needs the time of the whole computation.
        if slots and not code:
            self._outputs.set_slots(slots)  # also waits
        else:
            lib.llama_synchronize(self.context)
        self._abort.clear()
        if code != -1:  # with -1, llama.cpp has not started to decode
            self._copied_slots.clear()
        if code:
            raise DecodeError(code)

    def _call_decode(self) -> int:
        return llama_log.call_abortable(
            self._abort.is_set, lambda: lib.llama_decode(self.context, self._batch.batch), aborted=ABORTED
        )

    def _set_adapters(self, adapters: AdapterSet) -> None:
        # Clear the list first: llama.cpp compares addresses, and a new adapter can have the address of a freed one.
        lib.llama_set_adapters_lora(self.context, None, 0, None)
        if adapters:
            pointers = (lib.llama_adapter_lora_p_ctypes * len(adapters))(
                *(adapter_pointer(use.adapter.handle) for use in adapters)
            )
            scales = (ctypes.c_float * len(adapters))(*(use.scale for use in adapters))
            lib.llama_set_adapters_lora(self.context, pointers, len(adapters), scales)
        self._adapters = adapters

    def abort(self) -> None:
        self._abort.set()

    def logits(self, slot: int, row: int = 0) -> NDArray[np.float32]:
        """Return a row of the slot's logits as a writable float32 array with shape (n_vocab,). Raises KeyError.

        The array is valid until the next decode call.
        """
        return self._outputs.row(slot, row)

    def likeliest(self, slot: int, row: int = 0) -> int:
        """Return the token with the highest logit, assuming that the row has not been modified. Raises KeyError."""
        return self._outputs.likeliest(slot, row)

    def presample(self, samplers: Sequence[tuple[LlamaSampler, int]]) -> None:
        num_greedy = sum([sampler.is_plainly_greedy for sampler, _ in samplers])
        if num_greedy > 1 and num_greedy >= JOINT_ARGMAX_SHARE * self._outputs.num_rows:
            self._outputs.find_likeliest()
        if len(samplers) - num_greedy < MIN_ROWS:
            return
        groups: dict[int, list[tuple[LlamaSampler, RowDraw]]] = {}
        for sampler, slot in samplers:
            if (draw := sampler.draw_of(self._outputs.first_row(slot))) is not None:
                groups.setdefault(draw.params.top_k, []).append((sampler, draw))
        for top_k, group in groups.items():
            if len(group) >= MIN_ROWS and self._joint_draw.is_possible(top_k):
                tokens = self._joint_draw.draw(self._outputs.matrix, [draw for _, draw in group])
                for (sampler, _), token in zip(group, tokens, strict=True):
                    sampler.use_drawn(token)

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> LlamaSamplingPlan:
        for token, _ in params.logit_bias:
            if token >= self.n_vocab:
                raise InvalidRequest(
                    f"logit_bias: token {token} does not exist; the model has tokens 0 to {self.n_vocab - 1}"
                )
        for token in params.stop_token_ids:
            if token >= self.n_vocab:
                raise InvalidRequest(
                    f"stop_token_ids: token {token} does not exist; the model has tokens 0 to {self.n_vocab - 1}"
                )
        constraint = constraint_of(params)
        return LlamaSamplingPlan(
            params,
            constraint=None if constraint is None else self.vocabulary.grammars.compile(constraint, visible),
            breakers=self.vocabulary.breakers(params.dry_sequence_breakers) if params.has_dry else None,
            added_processors=tuple(load_processor(path) for path in self._logits_processors),
        )

    def new_sampler(
        self,
        plan: LlamaSamplingPlan,
        seed: int,
        history: Sequence[int],
        *,
        ban_end: bool,
        num_sampled: int = 0,
        num_unbound: int | None = 0,
        mirostat_mu: float | None = None,
    ) -> Sampler:
        start = SequenceStart(
            plan.params, history, num_sampled, n_vocab=self.n_vocab, end_tokens=self.vocabulary.end_tokens
        )
        banned = self._banned_ends if ban_end else None
        return LlamaSampler(self, plan, seed, start, banned=banned, num_unbound=num_unbound, mirostat_mu=mirostat_mu)

    # The cells of the slots (docs/adr/010-cutting-states-back.md)

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
        if lib.llama_memory_seq_rm(self._memory, slot, num_tokens, -1) and self._can_continue(slot, num_tokens):
            return True
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)  # removing all of a sequence never fails
        return False

    def _can_continue(self, slot: int, num_tokens: int) -> bool:
        """Return whether the next token can be computed after a truncation.

        The next token can't be computed if cells that the token depends on have left the sliding window.
        """
        if num_tokens == 0:
            return True
        held = lib.llama_memory_seq_pos_max(self._memory, slot) + 1
        return bool(held == num_tokens >= self.first_cut(slot))

    def copy(self, source: int, target: int, num_tokens: int, checkpoint: NDArray[np.uint8] | None = None) -> bool:
        if self.unified and self.partial_reuse:
            lib.llama_memory_seq_cp(self._memory, source, target, 0, num_tokens)
        elif self._window:
            lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)  # a saved state has only the last window
            self._copied_slots |= {source, target}
        else:  # copying a state with the used cells is faster than llama.cpp's copy of a whole stream
            return self.restore(target, self.save(source), num_tokens, checkpoint)
        return self.trim(target, num_tokens)

    def _finish_copy(self, slot: int) -> None:
        """Force llama.cpp to complete a pending copy of the slot's stream.

        llama.cpp copies streams only in decode calls, so this method computes a token and then removes it.
        """
        if slot not in self._copied_slots:
            return
        position = lib.llama_memory_seq_pos_max(self._memory, slot) + 1
        batch = lib.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.token[0], batch.pos[0], batch.logits[0] = 1, 0, position, 0
        batch.n_seq_id[0], batch.seq_id[0][0] = 1, slot
        code = lib.llama_decode(self.context, batch)
        lib.llama_batch_free(batch)
        lib.llama_memory_seq_rm(self._memory, slot, position, -1)
        if code < 0:
            raise RuntimeError(f"llama.cpp failed to copy the stream of slot {slot}: llama_decode returned {code}")
        self._copied_slots.clear()

    def state_bytes(self, slot: int) -> int:
        return int(lib.llama_state_seq_get_size(self.context, slot))

    def save(self, slot: int) -> NDArray[np.uint8]:
        return self._write(slot, self.state_bytes(slot), lib.LLAMA_STATE_SEQ_FLAGS_NONE)

    def restore(
        self, slot: int, data: NDArray[np.uint8], num_tokens: int, checkpoint: NDArray[np.uint8] | None = None
    ) -> bool:
        return self._read(slot, data, lib.LLAMA_STATE_SEQ_FLAGS_NONE) and self.trim(slot, num_tokens, checkpoint)

    def checkpoint_bytes(self, slot: int) -> int:
        return int(lib.llama_state_seq_get_size_ext(self.context, slot, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY))

    def checkpoint(self, slot: int) -> NDArray[np.uint8]:
        return self._write(slot, self.checkpoint_bytes(slot), lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def portable(self, data: NDArray[np.uint8], num_tokens: int, *, checkpoint: bool = False) -> memoryview:
        return to_portable(data, num_tokens, self._checkpoint_blocks if checkpoint else self._cell_blocks)

    def from_portable(self, data: Buffer, *, checkpoint: bool = False) -> tuple[NDArray[np.uint8], int]:
        return from_portable(data, self._num_streams, self._checkpoint_blocks if checkpoint else self._cell_blocks)

    def _write(self, slot: int, size: int, flags: int) -> NDArray[np.uint8]:
        self._finish_copy(slot)
        data = np.empty(size, np.uint8)
        if not lib.llama_state_seq_get_data_ext(self.context, _pointer(data), len(data), slot, flags):
            raise RuntimeError(f"llama.cpp failed to copy the state of slot {slot}, which has {len(data)} bytes")
        return data

    def _read(self, slot: int, data: NDArray[np.uint8], flags: int) -> bool:
        """Restore a state, or part of a state, into the slot. If restoring fails, empty the slot and return False."""
        self._finish_copy(slot)
        if lib.llama_state_seq_set_data_ext(self.context, _pointer(data), len(data), slot, flags):
            return True
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        return False

    def close(self) -> None:
        self._row_threads.close()
        self._batch.close()
        lib.llama_free(self.context)


def _pointer(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


# Contexts and batches, which the embedding backend also uses


def new_context(model: LlamaModel, options: EngineOptions, **overrides: Any) -> Any:
    """Return a new llama_context with parameters from `options` and `overrides`. Raises ModelLoadFailed."""
    params = lib.llama_context_default_params()
    params.n_threads = params.n_threads_batch = options.threads or available_cores()
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
    params.type_k = CACHE_TYPES[options.cache_type_k]
    params.type_v = CACHE_TYPES[options.cache_type_v]
    params.offload_kqv = options.kv_offload
    for name, value in rope_params(options).items():
        setattr(params, name, value)
    params.swa_full = True  # so that states can be cut back to any length (docs/adr/010-cutting-states-back.md)
    for name, value in overrides.items():
        setattr(params, name, value)
    llama_log.take_errors()
    context = lib.llama_init_from_model(model.pointer, params)
    if not context:
        raise ModelLoadFailed(
            f"llama.cpp can't create a context for {str(model.path)!r}: {llama_log.take_errors()}; "
            "lower n_parallel or ctx_per_slot, or choose another cache type"
        )
    return context


def rope_params(options: EngineOptions) -> dict[str, Any]:
    """Return the RoPE parameters of a context that the options set. llama.cpp reads the others from the file."""
    given = {name: value for name in ROPE_OPTIONS if (value := getattr(options, name)) is not None}
    scaling = given.pop("rope_scaling", None)
    return given if scaling is None else {**given, "rope_scaling_type": ROPE_SCALING[scaling]}


def set_threads(context: Any, count: int) -> None:
    """Set the number of threads for all later decode calls. This function is fast."""
    lib.llama_set_n_threads(context, count, count)


def end_threads() -> None:
    """Stop the OpenMP threads of the calling thread.

    The next decode call of the calling thread starts new OpenMP threads in about 0.1 ms. While these threads exist,
    even if they are idle, OpenMP considers the machine oversubscribed when another engine in this process is computing.
    That engine's threads then sleep at each barrier instead of spinning, so its steps take up to twice as long
    (docs/adr/007-threads.md).
    """
    pause = _find_pause()
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)


@functools.cache
def _find_pause() -> Any:
    """Return OpenMP 5's omp_pause_resource_all, or None if llama.cpp was built without it."""
    try:
        function = ctypes.CDLL(str(cpu_library())).omp_pause_resource_all
    except AttributeError:
        return None
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return function


class TokenBatch:
    """A llama_batch with at most `capacity` tokens, filled through numpy slices."""

    def __init__(self, capacity: int) -> None:
        self.batch = lib.llama_batch_init(capacity, 0, 1)
        self._capacity = capacity
        self._tokens = np.ctypeslib.as_array(self.batch.token, (capacity,))
        self._positions = np.ctypeslib.as_array(self.batch.pos, (capacity,))
        self._outputs = np.ctypeslib.as_array(self.batch.logits, (capacity,))
        np.ctypeslib.as_array(self.batch.n_seq_id, (capacity,))[:] = 1
        # seq_id is an array of pointers, each to a block of its own. Let them point into one contiguous array instead.
        self._slots: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        base, size = self._slots.ctypes.data, self._slots.itemsize
        # The same arrays. Assigning an item of a memoryview is much faster than assigning a slice.
        integers: list[Any] = [self._tokens, self._positions, self._slots]
        self._items = [*(memoryview(array).cast("B").cast("i") for array in integers), self._outputs.data]
        self._allocated_pointers = [ctypes.cast(self.batch.seq_id[i], ctypes.c_void_p).value for i in range(capacity)]
        pointers = ctypes.cast(self.batch.seq_id, ctypes.POINTER(ctypes.c_void_p))
        for i in range(capacity):
            pointers[i] = base + i * size
        self._pointers = pointers

    def clear(self) -> None:
        self.batch.n_tokens = 0

    def add(self, slot: int, position: int, tokens: Sequence[int], *, all_outputs: bool = False) -> int:
        """Append consecutive tokens of a slot to the batch. Return the batch index of the last token."""
        start: int = self.batch.n_tokens
        end = start + len(tokens)
        if end > self._capacity:  # llama.cpp would abort the process
            raise ValueError(f"the batch has {end} tokens, but the capacity is only {self._capacity}")
        self.batch.n_tokens = end
        if end - start == 1:  # most chunks
            token_item, position_item, slot_item, output_item = self._items
            token_item[start], position_item[start] = tokens[0], position
            slot_item[start], output_item[start] = slot, all_outputs
            return start
        self._tokens[start:end] = tokens
        self._positions[start:end] = np.arange(position, position + len(tokens))
        self._slots[start:end] = slot
        self._outputs[start:end] = all_outputs
        return end - 1

    def request_outputs(self, index: int, count: int) -> None:
        """Request logits for `count` tokens in the batch, starting at `index`."""
        if count == 1:
            self._items[3][index] = 1
        else:
            self._outputs[index : index + count] = 1

    def close(self) -> None:
        """Restore the pointers that llama.cpp allocated, and free the batch."""
        for i, pointer in enumerate(self._allocated_pointers):
            self._pointers[i] = pointer
        lib.llama_batch_free(self.batch)


class AbortFlag:
    """A flag that aborts decode calls: a byte that llama.cpp checks between the nodes of its graph (CPU backends only).

    A Python callback would take the GIL at every node, so the callback is the C library's `strlen`. `strlen` returns 0
    for the empty string, which continues the call, and 1 for a string of one byte, which aborts the call.
    """

    def __init__(self, context: Any) -> None:
        self._text = ctypes.create_string_buffer(2)
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
        callback = ctypes.cast(strlen, lib.ggml_abort_callback)
        self._callback = callback  # keeps the callback alive
        lib.llama_set_abort_callback(context, callback, ctypes.cast(self._text, ctypes.c_void_p))

    def set(self) -> None:
        """Abort the current decode call, or the next decode call if none is running.

        Any thread may call this method.
        """
        self._text[0] = b"\1"

    def is_set(self) -> bool:
        return self._text[0] != b"\0"

    def clear(self) -> None:
        self._text[0] = b"\0"


# Logits and samplers


class Outputs:
    """The rows of logits from the last decode call, in the order of the tokens for which they were requested.

    Only the engine thread may use this object.
    """

    def __init__(self, context: Any, num_rows: int, n_vocab: int, threads: RowThreads) -> None:
        """Create an object for decode calls with at most `num_rows` rows each."""
        self._threads = threads
        self._context = context
        self._shape = num_rows, n_vocab
        self._addresses: dict[int, tuple[NDArray[np.float32], list[NDArray[np.float32]]]] = {}
        self._first_rows: dict[int, int] = {}  # by slot
        self._rows: list[NDArray[np.float32]] = []
        self._likeliest: list[int] | None = None  # the likeliest token of each row, if found together
        self.matrix: NDArray[np.float32] = np.empty((0, n_vocab), np.float32)
        self.num_rows = 0  # rows of the last decode call; the matrix may have more rows

    def clear(self) -> None:
        """Remove all rows. `row` raises KeyError until `set_slots` is called after the next decode call."""
        self._first_rows, self._likeliest = {}, None

    def set_slots(self, slots: Sequence[tuple[int, int]]) -> None:
        """Wait until the decode call has computed its rows, and assign the rows to slots.

        `slots` contains pairs of a slot and its number of rows, in the order of the rows.
        """
        address = _logits_address(self._context)
        if (
            address not in self._addresses
        ):  # creating a view takes as long as finding a maximum, and llama.cpp rarely reallocates
            buffer = (ctypes.c_float * (self._shape[0] * self._shape[1])).from_address(address)
            matrix = np.ctypeslib.as_array(buffer).reshape(self._shape)
            self._addresses[address] = matrix, list(matrix)
        self.matrix, self._rows = self._addresses[address]
        self.num_rows = 0
        for slot, count in slots:
            self._first_rows[slot] = self.num_rows
            self.num_rows += count

    def first_row(self, slot: int) -> int:
        """Return the index of the slot's first row in the matrix. Raises KeyError like `row`."""
        return self._first_rows[slot]

    def row(self, slot: int, row: int = 0) -> NDArray[np.float32]:
        """Return a row of the slot's logits. Raises KeyError if the decode call has no rows for the slot."""
        return self._rows[self._first_rows[slot] + row]

    def find_likeliest(self) -> None:
        """Find the likeliest tokens of all rows together. No row may have been modified."""
        found = np.empty(self.num_rows, np.int64)

        def find(first: int, end: int) -> None:
            self.matrix[first:end].argmax(axis=1, out=found[first:end])

        self._threads.run(find, (self.num_rows, self._shape[1]))
        self._likeliest = found.tolist()

    def likeliest(self, slot: int, row: int = 0) -> int:
        """Return the token with the highest logit, assuming that the row has not been modified. Raises KeyError."""
        row += self._first_rows[slot]
        return int(self._rows[row].argmax()) if self._likeliest is None else self._likeliest[row]


@dataclass(frozen=True, slots=True)
class LlamaSamplingPlan:
    """A request's sampling parameters.

    The parameters are prepared once for all of the request's sequences, on the caller's thread.
    """

    params: SamplingParams
    constraint: CompiledGrammar | None = None
    breakers: Breakers | None = None  # only with DRY
    added_processors: tuple[ProcessorFactory, ...] = ()  # from the model option `logits_processors`

    @property
    def warnings(self) -> tuple[str, ...]:
        """Descriptions of the parts of the constraint that are not enforced."""
        return () if self.constraint is None else self.constraint.warnings


def constraint_of(params: SamplingParams) -> GrammarSpec | None:
    """Return the constraint on a request's text, or None if the text is not constrained."""
    given = next((name for name in CONSTRAINTS if getattr(params, name) is not None), None)
    if given is None:
        return None
    return GrammarSpec(given, getattr(params, given), params.grammar_root, params.strict_schema)


class LlamaSampler:
    """Samples a sequence's tokens from the logits of its slot."""

    def __init__(
        self,
        backend: LlamaBackend,
        plan: LlamaSamplingPlan,
        seed: int,
        start: SequenceStart,
        banned: BannedTokens | None,
        num_unbound: int | None,
        mirostat_mu: float | None,
    ) -> None:
        """Create a sampler that continues after the tokens of `start`.

        Raises GrammarFailed if these tokens violate the constraint.
        """
        self._backend = backend
        self._has_mirostat = bool(plan.params.mirostat)
        last_n = plan.params.dry_penalty_last_n
        processors = make_processors(
            start,
            breakers=plan.breakers,
            dry_window=backend.ctx_per_slot if last_n < 0 else last_n,
            added=plan.added_processors,
            banned=banned,
        )
        self._sampler = TokenSampler(
            plan.params, seed, processors, num_sampled=start.num_sampled, mirostat_mu=mirostat_mu
        )
        # Fast path for greedy requests: the likeliest token is sampled, unless it is one of these.
        self._banned: frozenset[int] | None = None
        if plan.params.is_plainly_greedy and all(processor is banned for processor in processors):
            self._banned = frozenset() if banned is None else banned.tokens
        self._can_draw_jointly = not plan.added_processors  # other code may fail, which must end only its own request
        self._grammar = None if plan.constraint is None else plan.constraint.start()
        self._is_bound = False
        if self._grammar is not None and num_unbound is not None:
            for token in start.tokens[len(start.tokens) - start.num_sampled + num_unbound :]:
                self._grammar.accept(token)
            self.bind()

    @property
    def mirostat_mu(self) -> float | None:
        """The current mirostat state, or None if mirostat is disabled."""
        return self._sampler.mirostat_mu if self._has_mirostat else None

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether each token is the likeliest one of an unmodified row, unless that token is banned."""
        return self._banned is not None

    def draw_of(self, row: int) -> RowDraw | None:
        """Return the draw of the next token from this row of logits, or None if it can't be drawn jointly."""
        return self._sampler.draw_of(row) if self._can_draw_jointly else None

    def use_drawn(self, token: int | None) -> None:
        """Let the next call of `sample` use the result of a joint draw (`TokenSampler.use_drawn`)."""
        self._sampler.use_drawn(token)

    def bind(self) -> None:
        if self._grammar is not None:
            self._sampler.constrain(self._grammar)
            self._is_bound = True

    def forced_tokens(self) -> list[int]:
        return self._grammar.forced_tokens() if self._is_bound and self._grammar is not None else []

    def sample(self, slot: int, forced: int | None = None, row: int = 0) -> tuple[int, TokenLogprob | None]:
        if self._banned is not None:
            if forced is not None:
                return forced, None
            token = self._backend.likeliest(slot, row)
            if token not in self._banned:
                return token, None
        try:
            return self._sampler.sample(self._backend.logits(slot, row), forced)
        except NothingAllowed:
            raise GrammarFailed(
                "the schema or grammar, together with logit_bias, min_tokens and ignore_eos, allows no token at this "
                "position; relax one of them"
            ) from None
