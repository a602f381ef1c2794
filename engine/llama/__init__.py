"""llama.cpp behind the engine's protocols: the only importer of llama_cpp."""

from .context import LlamaBackend
from .embedding import LlamaEmbeddingBackend
from .model import LlamaModel

__all__ = ["LlamaBackend", "LlamaEmbeddingBackend", "LlamaModel"]
