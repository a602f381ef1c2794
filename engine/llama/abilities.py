"""What a model file can be used for: llama.cpp ends the process, or gives noise, when it is used otherwise."""

from __future__ import annotations

import llama_cpp.llama_cpp as lib

from cellama.engine.errors import InvalidRequest, WrongCapability, nearest
from cellama.engine.llama.files.gguf_file import parts, tensors
from cellama.engine.options import CAPABILITIES, Capability, EngineOptions, Uses

from .embedding import own_pooling
from .model import LlamaModel

# llama.cpp, llama-model.cpp: create_memory gives these no KV cache; some of them don't say so in their metadata.
ENCODERS = frozenset(
    "bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert modern-bert gemma-embedding "
    "wavtokenizer-dec".split()
)
_NO_HEAD = "its file has no classification head; take a model that was made for it and converted as a reranker"
_HEADS = ("cls.weight", "cls.output.weight")


def can_generate(model: LlamaModel) -> bool:
    """True when it predicts the next token: an encoder does not, nor does a diffusion model."""
    causal = model.metadata(f"{model.info.architecture}.attention.causal") != "false"
    other = lib.llama_model_has_encoder(model.pointer) or lib.llama_model_is_diffusion(model.pointer)
    return causal and not bool(other) and model.info.architecture not in ENCODERS


def is_reranker(model: LlamaModel) -> bool:
    """True when the file says that its result is a score."""
    return bool(model.number("pooling_type") == lib.LLAMA_POOLING_TYPE_RANK)


def has_head(model: LlamaModel) -> bool:
    """True when a file of it holds a classification head. Without one, pooling by rank gives noise as a score."""
    return any(tensor.name in _HEADS for part in parts(model.path) for tensor in tensors(part))


def missing(model: LlamaModel, capability: Capability) -> str:
    """What a model lacks for a use that it was not loaded for, and what helps."""
    if capability in ("generate", "chat") and not can_generate(model):
        return "it only reads texts, so it never can; take another model"
    if capability == "chat" and model.chat_template is None:
        return "its file has no chat template; use `generate` with a prompt, or a model made for chat"
    if capability == "rerank" and not has_head(model):
        return _NO_HEAD
    return f"add {capability!r} to its capabilities"


def choose_uses(
    model_id: str, weights: LlamaModel, wanted: frozenset[Capability] | None, options: EngineOptions
) -> Uses:
    """What a model is loaded for, and how its embeddings are pooled. Raises WrongCapability for what it can't do.

    None wants what its file is made for: a reranker ranks, other encoders embed, all others generate, embed, and, with
    a template for it, chat.
    """
    for name in (wanted or frozenset()) - set(CAPABILITIES):
        raise InvalidRequest(f"capability {name!r} is unknown; {nearest(name, CAPABILITIES)}")
    generates, head = can_generate(weights), has_head(weights)
    pooling = own_pooling(weights) if options.pooling == "auto" else options.pooling
    if wanted is None:
        texts: set[Capability] = {"generate"} if generates else set()
        texts |= {"chat"} if generates and weights.chat_template is not None else set()
        ranks: set[Capability] = {"rerank"} if head and (is_reranker(weights) or not generates) else set()
        vectors: set[Capability] = {"embed"}
        wanted = frozenset({"rerank"} if pooling == "rank" else vectors | texts | ranks)
    kind = f"model {model_id!r} ({weights.info.description})"
    if wanted & {"generate", "chat"} and not generates:
        raise WrongCapability(f"{kind} can't generate: it only reads texts; load it with capabilities = ['embed']")
    if "rerank" in wanted and not head:
        raise WrongCapability(f"{kind} can't rerank: {_NO_HEAD}, or leave out 'rerank'")
    if "embed" in wanted and pooling == "rank":
        raise WrongCapability(
            f"{kind} is pooled by rank, which gives scores and no vectors; set pooling to mean, cls, last or none, or "
            "load it with capabilities = ['rerank']"
        )
    return Uses(wanted, pooling)
