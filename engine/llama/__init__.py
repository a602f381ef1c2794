"""llama.cpp behind the engine's protocols: the only importer of llama_cpp."""

from .context import LlamaBackend
from .devices import devices, machine
from .embedding import LlamaEmbeddingBackend
from .footprint import Plan, load_contexts, plan_load
from .gguf_file import fingerprint
from .model import LlamaModel
from .pairs import PairFormat

__all__ = [
    "LlamaBackend",
    "LlamaEmbeddingBackend",
    "LlamaModel",
    "PairFormat",
    "Plan",
    "devices",
    "fingerprint",
    "load_contexts",
    "machine",
    "plan_load",
]
