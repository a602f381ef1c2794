"""llama.cpp behind the engine's protocols: the only importer of llama_cpp."""

from .abilities import can_generate, has_head, is_reranker
from .context import LlamaBackend
from .embedding import LlamaEmbeddingBackend, own_pooling
from .model import LlamaModel
from .pairs import PairFormat

__all__ = [
    "LlamaBackend",
    "LlamaEmbeddingBackend",
    "LlamaModel",
    "PairFormat",
    "can_generate",
    "has_head",
    "is_reranker",
    "own_pooling",
]
