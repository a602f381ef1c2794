"""A llama.cpp context for generation, filled through numpy views on the batch arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from cellama.engine.backend import ABORTED, AdapterSet, Chunk, DecodeError, Sampler
from cellama.engine.errors import InvalidRequest, ModelLoadFailed
from cellama.engine.options import EngineOptions
from cellama.engine.sampling_params import SamplingParams
from cellama.engine.system.processors import available_cores

from . import log as llama_log
from .abort import AbortFlag
from .memory import CACHE_TYPES, KvShape, LlamaMemory, identity_of
from .model import LlamaModel, adapter_pointer
from .outputs import Outputs
from .samplers import GreedySampler, LlamaSampler, Plan, form_of

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


class LlamaBackend(LlamaMemory):
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
        super().__init__(model, self.context, shape, options.num_slots)
        self.threads: int = lib.llama_n_threads(self.context)
        self._batch = TokenBatch(options.n_batch)
        self._most_rows = options.logit_rows
        self._outputs = Outputs(self.context, options.logit_rows, self.n_vocab)
        self._abort = AbortFlag(self.context)
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

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> Plan:
        for token, _ in params.logit_bias:
            if token >= self.n_vocab:
                raise InvalidRequest(f"logit_bias names token {token}; the model has tokens 0..{self.n_vocab - 1}")
        form = form_of(params)
        return Plan(
            params,
            None if form is None else self.vocabulary.grammars.compile(form, visible),
            self.vocabulary.breakers(params.dry_sequence_breakers) if params.has_dry else None,
        )

    def new_sampler(
        self,
        plan: Plan,
        seed: int,
        history: Sequence[int],
        *,
        ban_end: bool,
        num_sampled: int = 0,
        num_unbound: int | None = 0,
        mirostat_mu: float | None = None,
    ) -> Sampler:
        banned = np.array(sorted(self.vocabulary.end_tokens), dtype=np.int64) if ban_end else None
        if plan.params.is_plainly_greedy:
            return GreedySampler(self, banned)
        return LlamaSampler(self, plan, seed, history, banned, num_sampled, num_unbound, mirostat_mu)

    def close(self) -> None:
        self._batch.close()
        lib.llama_free(self.context)
