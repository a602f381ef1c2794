"""A small model that guesses the tokens of another one: it has the same words, and can take tokens back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import llama_cpp.llama_cpp as lib

from cellama.engine.errors import ModelLoadFailed
from cellama.engine.llama.backend import LlamaBackend
from cellama.engine.llama.model import LlamaModel
from cellama.engine.memory.budget import Footprint
from cellama.engine.options import EngineOptions, Uses

from .load_plan import load_contexts

GENERATES = Uses(frozenset({"generate"}))
_TYPES = 0x3F  # of a token's attributes; the others say how text becomes tokens (llama.h: llama_token_attr)


class DraftParts(NamedTuple):
    """What a draft model consists of."""

    weights: LlamaModel
    backend: LlamaBackend
    footprint: Footprint


def vocabulary_of(model: LlamaModel) -> tuple[str, list[bytes]]:
    """Return the kind of a model's vocabulary, and the type and text of each token without unused ones at the end.

    A token's number means the same in two models if both are equal.
    """
    texts = []
    with model.lifetime:
        for token in range(model.info.n_vocab):
            kind = lib.llama_vocab_get_attr(model.vocab, token) & _TYPES
            texts.append(b"%d:%s" % (kind, lib.llama_vocab_get_text(model.vocab, token) or b""))
    unused = b"%d:" % lib.LLAMA_TOKEN_ATTR_UNUSED
    while texts and texts[-1].startswith(unused):
        del texts[-1]
    return model.metadata("tokenizer.ggml.model") or "none", texts


def check_draft(path: Path, model_path: Path) -> None:
    """Raises ModelLoadFailed unless the model at `path` can guess for the other one. Reads no weights."""
    with (
        closing(LlamaModel(path, n_gpu_layers=0, dry=True)) as draft,
        closing(LlamaModel(model_path, n_gpu_layers=0, dry=True)) as model,
    ):
        for one, role in ((model, "have a draft model"), (draft, "be a draft model")):
            if lib.llama_model_is_recurrent(one.pointer) or lib.llama_model_is_hybrid(one.pointer):
                raise ModelLoadFailed(
                    f"{str(one.path)!r} ({one.info.architecture}) can't {role}: its states can't be cut back where a "
                    "guess is wrong; leave out draft, or choose another model"
                )
        (kind, tokens), (other_kind, other_tokens) = vocabulary_of(draft), vocabulary_of(model)
        if (kind, tokens) != (other_kind, other_tokens):
            raise ModelLoadFailed(
                f"{str(path)!r} can't draft for {str(model_path)!r}: their vocabularies differ ({kind} of "
                f"{len(tokens)} tokens, {other_kind} of {len(other_tokens)}); choose a draft model of the same family"
            )


def load_draft(path: Path, options: EngineOptions) -> DraftParts:
    """Loads a draft model for one that is loaded with these options. Raises ModelLoadFailed."""
    weights = LlamaModel(path, n_gpu_layers=options.n_gpu_layers)
    try:
        backends, footprint, _ = load_contexts(weights, options.of_draft, GENERATES)
    except Exception:
        weights.close()
        raise
    assert backends.generation is not None
    return DraftParts(weights, backends.generation, footprint)
