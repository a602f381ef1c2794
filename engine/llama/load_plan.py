"""Plan how to load a model file: choose the model's capabilities, and calculate the memory that the model will need.

To plan a load, llama.cpp performs a dry load of the file, without weights or cells, and logs its buffer sizes. Like a
real load, a dry load reads the file's header and plans the compute graphs, which takes a few hundredths of a second and
a few MB. The dry load also allocates a batch's outputs, the states of recurrent layers, and about 50 bytes of
bookkeeping per cell. To keep the states and the bookkeeping small, planning first measures the states of one slot. Then
planning measures increasingly large contexts until a context does not fit.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import llama_cpp.llama_cpp as lib

from cellama.engine.errors import InvalidRequest, ModelLoadFailed, WrongCapability, nearest
from cellama.engine.memory.budget import CPU, AvailableMemory, Footprint, MemoryUse
from cellama.engine.memory.open_sizes import MIN_TOKENS, choose_ctx, choose_quota, with_quota
from cellama.engine.options import CAPABILITIES, Capability, EngineOptions, Uses

from . import buffers, log as llama_log
from .backend import LlamaBackend
from .devices import gpu_buffers
from .embedding import MAX_TEXTS, LlamaEmbeddingBackend, own_pooling
from .gguf_files import parts, tensors
from .model import LlamaModel
from .placement import device_of_tensor

_FLOAT_BYTES = 4
_PROBE = "Planning 1 load."
CHEAP_CELLS = 1 << 20  # cells above which dry contexts grow in steps; the bookkeeping for this many cells takes 50 MB
# Architectures without a KV cache (create_memory in llama.cpp's llama-model.cpp). Some have no metadata for it.
ENCODERS = frozenset(
    "bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert modern-bert gemma-embedding "
    "wavtokenizer-dec".split()
)
_NO_HEAD = "its file has no classification head; use a model that was trained and converted as a reranker"
_HEADS = ("cls.weight", "cls.output.weight")
GENERATES = Uses(frozenset({"generate"}))
_ON_CPU = EngineOptions(n_gpu_layers=0, devices=())
_TYPE_BITS = 0x3F  # the attributes of a token that are its type; the others affect tokenization (llama_token_attr)


# Capabilities


def can_generate(model: LlamaModel) -> bool:
    """Return whether the model predicts the next token. Encoders and diffusion models don't predict the next token."""
    causal = model.metadata(f"{model.info.architecture}.attention.causal") != "false"
    other = lib.llama_model_has_encoder(model.pointer) or lib.llama_model_is_diffusion(model.pointer)
    return causal and not bool(other) and model.info.architecture not in ENCODERS


def is_reranker(model: LlamaModel) -> bool:
    """Return whether the model's metadata declares the model to be a reranker."""
    return bool(model.number("pooling_type") == lib.LLAMA_POOLING_TYPE_RANK)


def has_head(model: LlamaModel) -> bool:
    """Return whether the model has a classification head.

    For a model without a classification head, pooling "rank" returns meaningless scores.
    """
    return any(tensor.name in _HEADS for part in parts(model.path) for tensor in tensors(part))


def missing_reason(model: LlamaModel, capability: Capability) -> str:
    """Return the reason why a model was not loaded with a capability, followed by a remedy."""
    if capability in ("generate", "chat") and not can_generate(model):
        return "it is an encoder, which can't generate text; use another model"
    if capability == "chat" and model.chat_template is None:
        return "its file has no chat template; use `generate` with a prompt, or a chat model"
    if capability == "rerank" and not has_head(model):
        return _NO_HEAD
    return f"add {capability!r} to its capabilities"


def choose_uses(
    model_id: str, weights: LlamaModel, requested: frozenset[Capability] | None, options: EngineOptions
) -> Uses:
    """Return the capabilities with which a model should be loaded, and the pooling of its embeddings.

    If no capabilities are requested, they are chosen based on the model's file. Models with pooling "rank" get only
    `rerank`. All other models get `embed`. Of these, models that generate text also get `generate`, and `chat` if they
    have a chat template. Encoders with a classification head also get `rerank`. Raises WrongCapability if the model
    does not support a requested capability, and InvalidRequest if a capability is unknown.
    """
    for name in (requested or frozenset()) - set(CAPABILITIES):
        raise InvalidRequest(f"capabilities: {name!r} is unknown; {nearest(name, CAPABILITIES)}")
    generates, head = can_generate(weights), has_head(weights)
    pooling = own_pooling(weights) if options.pooling == "auto" else options.pooling
    if requested is None:
        texts: set[Capability] = {"generate"} if generates else set()
        texts |= {"chat"} if generates and weights.chat_template is not None else set()
        ranks: set[Capability] = {"rerank"} if head and (is_reranker(weights) or not generates) else set()
        vectors: set[Capability] = {"embed"}
        requested = frozenset({"rerank"} if pooling == "rank" else vectors | texts | ranks)
    kind = f"model {model_id!r} ({weights.info.description})"
    if requested & {"generate", "chat"} and not generates:
        raise WrongCapability(f"{kind} is an encoder and can't generate; load it with capabilities = ['embed']")
    if "rerank" in requested and not head:
        raise WrongCapability(f"{kind} can't rerank: {_NO_HEAD}, or omit 'rerank'")
    if "embed" in requested and pooling == "rank":
        raise WrongCapability(
            f"{kind} has pooling 'rank', which returns scores instead of vectors; set pooling to mean, cls, last or "
            "none, or load it with capabilities = ['rerank']"
        )
    return Uses(requested, pooling)


# Memory


@dataclass(frozen=True, slots=True)
class Backends:
    """The llama.cpp contexts of a loaded model. Contexts that no capability needs are None."""

    generation: LlamaBackend | None
    embedding: LlamaEmbeddingBackend | None
    ranking: LlamaEmbeddingBackend | None

    @staticmethod
    def make(model: LlamaModel, options: EngineOptions, uses: Uses) -> Backends:
        """Allocate the contexts. Raises ModelLoadFailed and InvalidRequest.

        If one allocation fails, the other contexts are freed.
        """
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
        """Whether any context has cells or states. An encoder's context has neither cells nor states."""
        encoders = [backend for backend in (self.embedding, self.ranking) if backend is not None]
        return self.generation is not None or any(backend.has_memory for backend in encoders)

    def close(self) -> None:
        """Free the contexts. No thread may be using the contexts."""
        for backend in (self.generation, self.embedding, self.ranking):
            if backend is not None:
                backend.close()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load plan: the options with the chosen context size, and the memory that the model will occupy."""

    options: EngineOptions
    footprint: Footprint
    uses: Uses
    layers: Mapping[str, int]  # number of layers by device, including the output layer
    tuned: tuple[str, ...] = ()  # names of the options with values from `cellama tune`

    @property
    def num_layers(self) -> int:
        """The number of layers on all devices."""
        return sum(self.layers.values())


def plan_load(
    model_id: str,
    path: Path,
    options: EngineOptions,
    requested: frozenset[Capability] | None,
    available: AvailableMemory,
) -> LoadPlan:
    """Plan a load that fits into the available memory, if possible with these options.

    If no capabilities are requested, they are chosen based on the model's file. If the number of layers on GPUs is not
    set, as many layers as fit are placed there. Raises ModelLoadFailed, WrongCapability and InvalidRequest.
    """

    def planned(num_layers: int) -> LoadPlan:
        return _plan_layers(model_id, path, replace(options, n_gpu_layers=num_layers), requested, available)

    if options.n_gpu_layers is not None:
        return planned(options.n_gpu_layers)
    plan = planned(-1)
    if available.shortage(plan.footprint) is None or not set(plan.footprint.devices) - {CPU}:
        return plan
    # With fewer layers on GPUs, a plan needs less of their memory, so a binary search finds the largest number.
    fits, too_many = 0, plan.num_layers
    plan = planned(0)
    while too_many - fits > 1:
        num_layers = (fits + too_many) // 2
        tried = planned(num_layers)
        if available.shortage(tried.footprint) is None:
            fits, plan = num_layers, tried
        else:
            too_many = num_layers
    return plan


def _plan_layers(
    model_id: str,
    path: Path,
    options: EngineOptions,
    requested: frozenset[Capability] | None,
    available: AvailableMemory,
) -> LoadPlan:
    """Plan a load with this number of layers on GPUs."""
    dry = LlamaModel(path, options, dry=True)
    try:
        dry.tokenize(_PROBE, parse_special=True)  # some damaged vocabularies abort the process only here
        return _DryLoad(dry, options, choose_uses(model_id, dry, requested, options), available).plan()
    finally:
        dry.close()


def load_contexts(model: LlamaModel, options: EngineOptions, uses: Uses) -> tuple[Backends, Footprint, dict[str, int]]:
    """Return the contexts of a loaded model, its memory as logged by llama.cpp, and the number of layers per device.

    Raises ModelLoadFailed and InvalidRequest.
    """
    with llama_log.capture() as lines:
        backends = Backends.make(model, options, uses)
    weights = buffers.loaded_weights(model.load_log, gpu_buffers(), model.info.size_bytes, _shares(model, options))
    taken = _measure(model, lines, backends, weights, options)
    if saves_states(options, uses):
        taken = with_quota(taken, options.held_bytes)
    return backends, taken, buffers.layers_per_device(model.load_log)


def saves_states(options: EngineOptions, uses: Uses) -> bool:
    """Return whether a model with these options and capabilities saves states to RAM."""
    return uses.generates and options.cache_prompt


def _shares(model: LlamaModel, options: EngineOptions) -> dict[str, float]:
    """Return the share of each device in split mode tensor, in which llama.cpp ignores how much memory is free."""
    return dict(zip(model.devices, options.tensor_split or (1.0,) * len(model.devices), strict=True))


def _measure(
    model: LlamaModel,
    load_log: Iterable[str],
    backends: Backends,
    weights: dict[str, MemoryUse],
    options: EngineOptions,
) -> Footprint:
    """Return the memory that a model needs with these contexts, including memory for the largest possible outputs.

    `load_log` contains the lines that llama.cpp logged when it created the contexts.
    """
    usage = Counter[str](), Counter[str]()
    sizes = buffers.kv_and_compute(load_log, gpu_buffers(), with_memory=backends.have_memory)
    for device, one in sizes.items():
        usage[0][device] += one.kv_bytes
        usage[1][device] += one.compute_bytes
    for backend in filter(None, (backends.embedding, backends.ranking)):
        # llama.cpp starts with one output per text. When a batch needs more, it allocates one per token, with logits.
        rows = max(0, backend.max_tokens - backend.max_texts)
        usage[1][CPU] += rows * (model.info.n_vocab + model.info.n_embd) * _FLOAT_BYTES
    found = {
        device: replace(weights.get(device, MemoryUse()), kv_bytes=usage[0][device], compute_bytes=usage[1][device])
        for device in dict.fromkeys([CPU, *weights, *usage[0], *usage[1]])
    }
    return Footprint(buffers.divided(found, _shares(model, options)))


def _divided(num_tokens: int | None, divisor: int) -> int | None:
    return None if num_tokens is None else max(1, num_tokens // divisor)


class _DryLoad:
    """A model that is loaded without weights, so that contexts with different options can be tried until one fits."""

    def __init__(self, model: LlamaModel, options: EngineOptions, uses: Uses, available: AvailableMemory) -> None:
        self._model = model
        self._options = options
        self._uses = uses
        requested_bytes = (
            options.held_bytes if options.cache_ram_bytes is not None and saves_states(options, uses) else 0
        )
        self._available = available.minus(with_quota(Footprint(), requested_bytes))
        self._total_available = available
        self._weights = self._plan_weights()

    def _plan_weights(self) -> dict[str, MemoryUse]:
        size, overrides, mapped = self._model.info.size_bytes, self._model.tensor_overrides, self._options.use_mmap
        if set(buffers.layers_per_device(self._model.load_log)) <= {CPU} and not overrides:
            return {CPU: MemoryUse(size, mapped_bytes=size if mapped else 0)}
        sizes = {tensor.name: tensor.num_bytes for part in parts(self._model.path) for tensor in tensors(part)}
        override = functools.partial(device_of_tensor, overrides=overrides)
        return buffers.planned_weights(self._model.load_log, sizes, override, mapped=mapped)

    def plan(self) -> LoadPlan:
        plan = self._plan_context()
        if not saves_states(self._options, self._uses):
            return plan
        quota = choose_quota(self._options.cache_ram_bytes, plan.footprint, self._total_available)
        options = replace(plan.options, cache_ram_bytes=quota)
        return replace(plan, options=options, footprint=with_quota(plan.footprint, options.held_bytes))

    def _plan_context(self) -> LoadPlan:
        layers = buffers.layers_per_device(self._model.load_log)
        states = self._too_large_states()
        if states is not None:
            return LoadPlan(self._options, states, self._uses, layers)
        options = self._options
        if options.n_ctx is None and options.ctx_per_slot is None and self._uses.generates:
            trained = self._model.info.n_ctx_train
            first = max(2 * MIN_TOKENS, CHEAP_CELLS // options.num_slots)
            ctx, footprint = choose_ctx(
                lambda ctx: self._approach(replace(options, ctx_per_slot=ctx)), self._available, trained, first=first
            )
            return LoadPlan(replace(options, ctx_per_slot=ctx), footprint, self._uses, layers)
        return LoadPlan(options, self._approach(options), self._uses, layers)

    def _approach(self, options: EngineOptions) -> Footprint:
        """Return the memory that a model needs with these options.

        If the context can't fit, the result is estimated from a smaller context.
        """
        num_cells = options.n_ctx or options.num_slots * (options.ctx_per_slot or 0)
        divisor = 1 << max(0, (num_cells // CHEAP_CELLS).bit_length())
        while divisor > 1:
            n_ctx, per_slot = _divided(options.n_ctx, divisor), _divided(options.ctx_per_slot, divisor)
            footprint = self._measure(replace(options, n_ctx=n_ctx, ctx_per_slot=per_slot))
            if self._available.shortage(footprint) is not None:
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
        return _measure(self._model, lines, backends, self._weights, options)

    def _too_large_states(self) -> Footprint | None:
        """Return the minimum memory for a recurrent model's states if the states don't fit, and None otherwise."""
        pointer = self._model.pointer
        if not (lib.llama_model_is_recurrent(pointer) or lib.llama_model_is_hybrid(pointer)):
            return None
        options = replace(self._options, n_parallel=1, n_ctx=None, ctx_per_slot=1)
        with llama_log.capture() as lines:
            Backends.make(self._model, options, Uses(frozenset({"generate"}))).close()
        one = buffers.states(lines, gpu_buffers())
        slots = self._options.num_slots * self._uses.generates + MAX_TEXTS * (self._uses.embeds + self._uses.ranks)
        devices = dict.fromkeys([*self._weights, *one])
        usage = {
            name: replace(self._weights.get(name, MemoryUse()), kv_bytes=slots * one.get(name, 0)) for name in devices
        }
        min_footprint = Footprint(usage)
        return min_footprint if self._available.shortage(min_footprint) else None


# Draft models


class DraftParts(NamedTuple):
    """A loaded draft model and the memory that it occupies."""

    weights: LlamaModel
    backend: LlamaBackend
    footprint: Footprint


def vocabulary_of(model: LlamaModel) -> tuple[str, list[bytes]]:
    """Return a vocabulary's type, and the type and text of each token. Unused tokens at the end are omitted.

    Two models have the same token ids if this function returns equal results for both models.
    """
    texts = []
    with model.lifetime:
        for token in range(model.info.n_vocab):
            kind = lib.llama_vocab_get_attr(model.vocab, token) & _TYPE_BITS
            texts.append(b"%d:%s" % (kind, lib.llama_vocab_get_text(model.vocab, token) or b""))
    unused = b"%d:" % lib.LLAMA_TOKEN_ATTR_UNUSED
    while texts and texts[-1].startswith(unused):
        del texts[-1]
    return model.metadata("tokenizer.ggml.model") or "none", texts


def check_draft(path: Path, model_path: Path) -> None:
    """Raise ModelLoadFailed unless the model at `path` can draft for the other model. No weights are read."""
    with (
        closing(LlamaModel(path, _ON_CPU, dry=True)) as draft,
        closing(LlamaModel(model_path, _ON_CPU, dry=True)) as model,
    ):
        for one, role in ((model, "have a draft model"), (draft, "be a draft model")):
            if lib.llama_model_is_recurrent(one.pointer) or lib.llama_model_is_hybrid(one.pointer):
                raise ModelLoadFailed(
                    f"{str(one.path)!r} ({one.info.architecture}) can't {role}: its state can't be rolled back "
                    "after rejected draft tokens; remove the draft option, or choose another model"
                )
        (kind, tokens), (other_kind, other_tokens) = vocabulary_of(draft), vocabulary_of(model)
        if (kind, tokens) != (other_kind, other_tokens):
            raise ModelLoadFailed(
                f"{str(path)!r} can't draft for {str(model_path)!r}: their vocabularies differ ({kind} with "
                f"{len(tokens)} tokens, {other_kind} with {len(other_tokens)}); choose a draft model of the same family"
            )


def load_draft(path: Path, options: EngineOptions) -> DraftParts:
    """Load a draft model for a model with these options. Raises ModelLoadFailed."""
    weights = LlamaModel(path, options.of_draft)
    try:
        backends, footprint, _ = load_contexts(weights, options.of_draft, GENERATES)
    except Exception:
        weights.close()
        raise
    assert backends.generation is not None
    return DraftParts(weights, backends.generation, footprint)
