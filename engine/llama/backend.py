"""The engine's Backend on llama.cpp: a context for generation, with the KV cells of its slots."""

from __future__ import annotations

import ctypes
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
from cellama.engine.errors import InvalidRequest
from cellama.engine.memory.open_sizes import STREAM_PADDING
from cellama.engine.options import EngineOptions
from cellama.engine.request import SamplingParams
from cellama.engine.sampling.processors import BannedTokens, SequenceStart, load_processor

from . import log as llama_log
from .context import AbortFlag, TokenBatch, end_threads, new_context, set_threads
from .files.state_format import from_portable, to_portable
from .model import LlamaModel, adapter_pointer
from .outputs import Outputs
from .samplers import LlamaSampler, LlamaSamplingPlan, form_of

STATE_FORMAT = 2  # version of portable states; states of another version are computed again
UNIFIED_UP_TO = 1  # slots up to which `auto` takes one pool of cells: with more, streams decode faster (ADR 003)


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
            return KvShape(unified=True, n_ctx=_padded(total), ctx_per_slot=per_slot, n_cells=total)
        if options.n_ctx is not None and options.ctx_per_slot is None and options.n_ctx < slots:
            raise InvalidRequest(f"n_ctx is {options.n_ctx}, less than a token for each of {slots} slots; raise it")
        per_slot = options.ctx_per_slot or (options.n_ctx or 0) // slots or model.info.n_ctx_train
        if options.n_ctx is not None and per_slot * slots > options.n_ctx:
            raise InvalidRequest(
                f"{slots} slots of {per_slot} tokens need {per_slot * slots}, n_ctx is {options.n_ctx}; "
                "give one of n_ctx and ctx_per_slot, or choose kv_layout unified"
            )
        return KvShape(unified=False, n_ctx=_padded(per_slot) * slots, ctx_per_slot=per_slot, n_cells=per_slot * slots)


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


class LlamaBackend:
    """The engine's Backend on llama.cpp."""

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        """Allocates context and KV cache. Raises ModelLoadFailed, InvalidRequest."""
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
                n_outputs_max=options.logit_rows,  # of n_batch they would be reserved
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
        windows = bool(lib.llama_model_n_swa(model.pointer))  # a block of cells more, for the layers that have one
        # Blocks of cells before that of a recurrent memory, in states and checkpoints; None: there is no such memory.
        self._cell_blocks: int | None = None
        self._checkpoint_blocks: int | None = None
        if recurrent:
            self._cell_blocks = 1 + windows if lib.llama_model_is_hybrid(model.pointer) else 0
            self._checkpoint_blocks = int(windows) if self._cell_blocks else 0
        self._memory = lib.llama_get_memory(self.context)
        self._in_copy: set[int] = set()  # slots whose streams llama.cpp copies at the beginning of its next decode call
        self.threads: int = lib.llama_n_threads(self.context)
        self._batch = TokenBatch(options.n_batch)
        self._most_rows = options.logit_rows
        self._outputs = Outputs(self.context, options.logit_rows, self.n_vocab)
        self._abort = AbortFlag(self.context)
        self._logits_processors = options.logits_processors
        self._banned_ends = BannedTokens(model.end_tokens)  # of requests that never end
        self._adapters: AdapterSet = ()  # those of the last decode call

    def set_threads(self, count: int) -> None:
        set_threads(self.context, count)
        self.threads = count

    def rest(self) -> None:
        end_threads()

    def load_adapter(self, path: Path) -> int:
        return self.vocabulary.load_adapter(path)

    def free_adapter(self, handle: int) -> None:
        self.vocabulary.free_adapter(handle)

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        batch = self._batch
        batch.clear()
        self._outputs.forget()
        num_rows = sum([1 + chunk.num_drafts for chunk in chunks if chunk.samples])
        if num_rows > self._most_rows:  # llama.cpp would end the process
            raise ValueError(f"a batch with {num_rows} rows of logits, there are {self._most_rows}")
        for chunk in chunks:
            last = batch.add(chunk.slot, chunk.position, chunk.tokens)
            if chunk.samples:
                batch.want_outputs(last + 1 - len(chunk.tokens) if chunk.decode else last, 1 + chunk.num_drafts)
        if adapters == self._adapters:
            code = self._call_decode()
        else:  # the first decode call with other adapters makes its graph anew
            with self.vocabulary.adapters_lock:
                self._set_adapters(adapters)
                code = self._call_decode()
        # A GPU computes on after llama_decode: what it takes is known, and worth learning from, when that is over.
        lib.llama_synchronize(self.context)
        self._abort.lower()
        if code != -1:  # else it did not even begin
            self._in_copy.clear()
        if code:
            raise DecodeError(code)
        self._outputs.expect([(chunk.slot, 1 + chunk.num_drafts) for chunk in chunks if chunk.samples])

    def _call_decode(self) -> int:
        return llama_log.call_abortable(
            self._abort.is_raised, lambda: lib.llama_decode(self.context, self._batch.batch), aborted=ABORTED
        )

    def _set_adapters(self, adapters: AdapterSet) -> None:
        # Through none at all: llama.cpp compares addresses, and a new adapter may lie where a freed one was.
        lib.llama_set_adapters_lora(self.context, None, 0, None)
        if adapters:
            pointers = (lib.llama_adapter_lora_p_ctypes * len(adapters))(
                *(adapter_pointer(use.adapter.handle) for use in adapters)
            )
            scales = (ctypes.c_float * len(adapters))(*(use.scale for use in adapters))
            lib.llama_set_adapters_lora(self.context, pointers, len(adapters), scales)
        self._adapters = adapters

    def abort(self) -> None:
        self._abort.raise_()

    def logits(self, slot: int, row: int = 0) -> NDArray[np.float32]:
        """A view on a row of this slot's logits, float32 of n_vocab, valid until the next decode. Raises KeyError."""
        return self._outputs.row(slot, row)

    def likeliest(self, slot: int, row: int = 0) -> int:
        """The token with the highest logit, before anything changed this row. Raises KeyError."""
        return self._outputs.likeliest(slot, row)

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> LlamaSamplingPlan:
        for token, _ in params.logit_bias:
            if token >= self.n_vocab:
                raise InvalidRequest(f"logit_bias names token {token}; the model has tokens 0..{self.n_vocab - 1}")
        form = form_of(params)
        return LlamaSamplingPlan(
            params,
            constraint=None if form is None else self.vocabulary.grammars.compile(form, visible),
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

    # The cells of its slots (docs/adr/010-cutting-states-back.md)

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
        code = lib.llama_decode(self.context, batch)
        lib.llama_batch_free(batch)
        lib.llama_memory_seq_rm(self._memory, slot, position, -1)
        if code < 0:
            raise RuntimeError(f"llama.cpp can't copy the stream of slot {slot}: llama_decode returned {code}")
        self._in_copy.clear()

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
            raise RuntimeError(f"llama.cpp can't copy the state of slot {slot}, which has {len(data)} bytes")
        return data

    def _read(self, slot: int, data: NDArray[np.uint8], flags: int) -> bool:
        """The slot has the state, or the part of it that is written in `data`; False: it is empty."""
        self._finish_copy(slot)
        if lib.llama_state_seq_set_data_ext(self.context, _pointer(data), len(data), slot, flags):
            return True
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        return False

    def close(self) -> None:
        self._batch.close()
        lib.llama_free(self.context)


def _pointer(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
