"""What a model will take, before it is loaded: llama.cpp loads it dry, without weights and cells, and says so.

A dry load reads the file's head and plans the compute graphs, as a real one does; that takes some hundredths of a
second and, for a moment, a few MB. Three things it does allocate: the outputs of a batch, the states of recurrent
layers, and some 50 bytes of bookkeeping per cell. The last two are approached from below: one slot's states, and
contexts of more and more cells, until one does not fit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import llama_cpp.llama_cpp as lib

from cellama.engine.llama import log as llama_log
from cellama.engine.llama.abilities import choose_uses
from cellama.engine.llama.backend import LlamaBackend
from cellama.engine.llama.embedding import MAX_TEXTS, LlamaEmbeddingBackend
from cellama.engine.llama.files.gguf_file import parts, tensors
from cellama.engine.llama.model import LlamaModel
from cellama.engine.memory.budget import CPU, AvailableMemory, Footprint, MemoryUse
from cellama.engine.memory.open_sizes import MIN_TOKENS, choose_ctx, choose_quota, with_quota
from cellama.engine.options import Capability, EngineOptions, Uses

from . import buffers
from .devices import gpu_names

_FLOAT = 4  # bytes
_PROBE = "Planning 1 load."
CHEAP_CELLS = 1 << 20  # cells of a dry context that are planned at once: their bookkeeping takes 50 MB


@dataclass(frozen=True, slots=True)
class Backends:
    """What runs a model; None where no capability asks for it."""

    generation: LlamaBackend | None
    embedding: LlamaEmbeddingBackend | None
    ranking: LlamaEmbeddingBackend | None

    @staticmethod
    def make(model: LlamaModel, options: EngineOptions, uses: Uses) -> Backends:
        """Allocates the contexts; a failure leaves none. Raises ModelLoadFailed, InvalidRequest."""
        with contextlib.ExitStack() as made:
            generation = made.enter_context(closing(LlamaBackend(model, options))) if uses.generates else None
            embedding = ranking = None
            if uses.embeds:
                embedding = made.enter_context(closing(LlamaEmbeddingBackend(model, options, uses.pooling)))
            if uses.ranks:
                ranking = made.enter_context(closing(LlamaEmbeddingBackend(model, options, "rank")))
            made.pop_all()
        return Backends(generation, embedding, ranking)

    @property
    def have_memory(self) -> bool:
        """True if a context has cells or states; an encoder's has none."""
        reading = [backend for backend in (self.embedding, self.ranking) if backend is not None]
        return self.generation is not None or any(backend.has_memory for backend in reading)

    def close(self) -> None:
        """Frees the contexts. No thread may use them."""
        for backend in (self.generation, self.embedding, self.ranking):
            if backend is not None:
                backend.close()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model will be loaded: its options with the context that was chosen, and what it will take."""

    options: EngineOptions
    footprint: Footprint
    uses: Uses
    tuned: tuple[str, ...] = ()  # the options that are as `cellama tune` found them best


def plan_load(
    model_id: str, path: Path, options: EngineOptions, wanted: frozenset[Capability] | None, room: AvailableMemory
) -> LoadPlan:
    """A load that fits into the room if one does with these options; None wants the uses that suit the file.

    Raises ModelLoadFailed, WrongCapability, InvalidRequest.
    """
    dry = LlamaModel(path, n_gpu_layers=options.n_gpu_layers, dry=True)
    try:
        dry.tokenize(_PROBE, parse_special=True)  # some damaged vocabularies end the process only now
        return _DryLoad(dry, options, choose_uses(model_id, dry, wanted, options), room).plan()
    finally:
        dry.close()


def load_contexts(model: LlamaModel, options: EngineOptions, uses: Uses) -> tuple[Backends, Footprint, dict[str, int]]:
    """The contexts of a model that is loaded, what it takes now by llama.cpp's own word, and its layers per device.

    Raises ModelLoadFailed, InvalidRequest.
    """
    with llama_log.capture() as lines:
        backends = Backends.make(model, options, uses)
    weights = buffers.loaded_weights(model.load_log, gpu_names(), model.info.size_bytes)
    taken = _measure(model, lines, backends, weights)
    if saves_states(options, uses):
        taken = with_quota(taken, options.held_bytes)
    return backends, taken, buffers.layers_per_device(model.load_log)


def saves_states(options: EngineOptions, uses: Uses) -> bool:
    """Whether a model has use for a quota of saved states."""
    return uses.generates and options.cache_prompt


def _measure(
    model: LlamaModel, load_log: Iterable[str], backends: Backends, weights: dict[str, MemoryUse]
) -> Footprint:
    """What a model takes with these contexts, which logged `load_log`; the largest output they can have counted."""
    usage = Counter[str](), Counter[str]()
    sizes = buffers.kv_and_compute(load_log, gpu_names(), with_memory=backends.have_memory)
    for device, one in sizes.items():
        usage[0][device] += one.kv_bytes
        usage[1][device] += one.compute_bytes
    for backend in filter(None, (backends.embedding, backends.ranking)):
        # llama.cpp begins with one output per text, and has one per token, logits included, as soon as there are more
        rows = max(0, backend.max_tokens - backend.max_texts)
        usage[1][CPU] += rows * (model.info.n_vocab + model.info.n_embd) * _FLOAT
    return Footprint(
        {
            device: replace(weights.get(device, MemoryUse()), kv_bytes=usage[0][device], compute_bytes=usage[1][device])
            for device in dict.fromkeys([CPU, *weights, *usage[0], *usage[1]])
        }
    )


def _divided(num_tokens: int | None, divisor: int) -> int | None:
    return None if num_tokens is None else max(1, num_tokens // divisor)


class _DryLoad:
    """One dry model, and contexts of it with other options until one fits."""

    def __init__(self, model: LlamaModel, options: EngineOptions, uses: Uses, room: AvailableMemory) -> None:
        self._model = model
        self._options = options
        self._uses = uses
        asked_for = options.held_bytes if options.cache_ram_bytes is not None and saves_states(options, uses) else 0
        self._room = room.minus(with_quota(Footprint(), asked_for))
        self._whole_room = room
        self._weights = self._plan_weights()

    def _plan_weights(self) -> dict[str, MemoryUse]:
        size = self._model.info.size_bytes
        if set(buffers.layers_per_device(self._model.load_log)) <= {CPU}:
            return {CPU: MemoryUse(size, mapped_bytes=size)}
        sizes = {tensor.name: tensor.num_bytes for part in parts(self._model.path) for tensor in tensors(part)}
        return buffers.planned_weights(self._model.load_log, sizes)

    def plan(self) -> LoadPlan:
        plan = self._plan_context()
        if not saves_states(self._options, self._uses):
            return plan
        quota = choose_quota(self._options.cache_ram_bytes, plan.footprint, self._whole_room)
        options = replace(plan.options, cache_ram_bytes=quota)
        return replace(plan, options=options, footprint=with_quota(plan.footprint, options.held_bytes))

    def _plan_context(self) -> LoadPlan:
        states = self._too_large_states()
        if states is not None:
            return LoadPlan(self._options, states, self._uses)
        options = self._options
        if options.n_ctx is None and options.ctx_per_slot is None and self._uses.generates:
            trained = self._model.info.n_ctx_train
            first = max(2 * MIN_TOKENS, CHEAP_CELLS // options.num_slots)
            ctx, footprint = choose_ctx(
                lambda ctx: self._approach(replace(options, ctx_per_slot=ctx)), self._room, trained, first=first
            )
            return LoadPlan(replace(options, ctx_per_slot=ctx), footprint, self._uses)
        return LoadPlan(options, self._approach(options), self._uses)

    def _approach(self, options: EngineOptions) -> Footprint:
        """What a context takes; for one that can't fit, about what it would, judged by a smaller one."""
        num_cells = options.n_ctx or options.num_slots * (options.ctx_per_slot or 0)
        divisor = 1 << max(0, (num_cells // CHEAP_CELLS).bit_length())
        while divisor > 1:
            n_ctx, per_slot = _divided(options.n_ctx, divisor), _divided(options.ctx_per_slot, divisor)
            footprint = self._measure(replace(options, n_ctx=n_ctx, ctx_per_slot=per_slot))
            if self._room.shortage(footprint) is not None:
                grown = {
                    name: replace(usage, kv_bytes=usage.kv_bytes * divisor) for name, usage in footprint.devices.items()
                }
                return Footprint(grown)
            divisor //= 2
        return self._measure(options)

    def _measure(self, options: EngineOptions) -> Footprint:
        with llama_log.capture() as lines:
            backends = Backends.make(self._model, options, self._uses)
            backends.close()
        return _measure(self._model, lines, backends, self._weights)

    def _too_large_states(self) -> Footprint | None:
        """What the states of a recurrent model take at least, if that is too much already; else None."""
        pointer = self._model.pointer
        if not (lib.llama_model_is_recurrent(pointer) or lib.llama_model_is_hybrid(pointer)):
            return None
        options = replace(self._options, n_parallel=1, n_ctx=None, ctx_per_slot=1)
        with llama_log.capture() as lines:
            Backends.make(self._model, options, Uses(frozenset({"generate"}))).close()
        one = buffers.states(lines, gpu_names())
        slots = self._options.num_slots * self._uses.generates + MAX_TEXTS * (self._uses.embeds + self._uses.ranks)
        devices = dict.fromkeys([*self._weights, *one])
        usage = {
            name: replace(self._weights.get(name, MemoryUse()), kv_bytes=slots * one.get(name, 0)) for name in devices
        }
        least = Footprint(usage)
        return least if self._room.shortage(least) else None
