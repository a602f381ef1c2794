"""What a model file can be used for: llama.cpp ends the process, or gives noise, when it is used otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import llama_cpp.llama_cpp as lib

from .model import LlamaModel

# llama.cpp, llama-model.cpp: create_memory gives these no KV cache; some of them don't say so in their metadata.
ENCODERS = frozenset(
    "bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert modern-bert gemma-embedding "
    "wavtokenizer-dec".split()
)
_HEADS = (b"cls.weight", b"cls.output.weight")


class _GgufParams(ctypes.Structure):
    """gguf.h: gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


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
    return any(_holds(path, name) for path in _files(model) for name in _HEADS)


def _files(model: LlamaModel) -> Iterator[Path]:
    """The file, or all files of a split model, of which it is the first."""
    count = int(model.metadata("split.count") or 1)
    for number in range(1, count + 1):
        yield model.path.with_name(model.path.name.replace("-00001-of-", f"-{number:05}-of-"))


def _holds(path: Path, tensor: bytes) -> bool:
    init, find, free = (getattr(lib._lib, f"gguf_{name}") for name in ("init_from_file", "find_tensor", "free"))
    init.argtypes, init.restype = [ctypes.c_char_p, _GgufParams], ctypes.c_void_p
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_int64
    free.argtypes = [ctypes.c_void_p]
    head = init(str(path).encode(), _GgufParams(True, None))
    try:
        return bool(head) and find(head, tensor) >= 0
    finally:
        free(head)
