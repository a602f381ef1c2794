"""A small model that guesses the tokens of another one: it has the same words, and can take tokens back."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import llama_cpp.llama_cpp as lib

from cellama.engine.capabilities import Uses
from cellama.engine.errors import ModelLoadFailed
from cellama.engine.llama.backend import LlamaBackend
from cellama.engine.llama.model import LlamaModel
from cellama.engine.memory.budget import Footprint
from cellama.engine.options import EngineOptions

from .load_plan import load_contexts

GENERATES = Uses(frozenset({"generate"}))
_TYPES = 0x3F  # of a token's attributes; the others say how text becomes tokens (llama.h: llama_token_attr)


class DraftParts(NamedTuple):
    """What a draft model consists of."""

    weights: LlamaModel
    backend: LlamaBackend
    footprint: Footprint


class Words(NamedTuple):
    """A vocabulary: two models mean the same by a token's number if these are equal."""

    kind: str
    size: int  # without what fills it up at its end
    digest: str  # of the tokens' texts and types

    def __str__(self) -> str:
        return f"{self.kind} of {self.size} tokens, digest {self.digest}"


def words_of(model: LlamaModel) -> Words:
    """The vocabulary of a model, dry or not."""
    texts = []
    with model.lifetime:
        for token in range(model.info.n_vocab):
            kind = lib.llama_vocab_get_attr(model.vocab, token) & _TYPES
            texts.append(b"%d:%s" % (kind, lib.llama_vocab_get_text(model.vocab, token) or b""))
    unused = b"%d:" % lib.LLAMA_TOKEN_ATTR_UNUSED
    while texts and texts[-1].startswith(unused):
        del texts[-1]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(4, "little") + text)
    return Words(model.metadata("tokenizer.ggml.model") or "none", len(texts), digest.hexdigest()[:12])


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
        ours, others = words_of(draft), words_of(model)
        if ours != others:
            raise ModelLoadFailed(
                f"{str(path)!r} can't guess for {str(model_path)!r}: its vocabulary is {ours}, that of the other one "
                f"is {others}; choose a draft model of the same family"
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
