"""llama.cpp behind the engine's protocols: the only importer of llama_cpp."""

from .abilities import missing
from .context import LlamaBackend
from .embedding import LlamaEmbeddingBackend
from .files.gguf_file import fingerprint
from .model import LlamaModel
from .pairs import PairFormat
from .planning.devices import devices, machine
from .planning.load_plan import Plan, load_contexts, plan_load

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
    "missing",
    "plan_load",
]
