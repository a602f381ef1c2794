"""The llama.cpp implementation of the engine's protocols. No other package imports llama_cpp."""

from .backend import LlamaBackend
from .devices import devices, machine
from .embedding import LlamaEmbeddingBackend, PairFormat
from .gguf_files import fingerprint
from .load_plan import DraftParts, LoadPlan, check_draft, load_contexts, load_draft, missing_reason, plan_load
from .model import LlamaModel

__all__ = [
    "DraftParts",
    "LlamaBackend",
    "LlamaEmbeddingBackend",
    "LlamaModel",
    "LoadPlan",
    "PairFormat",
    "check_draft",
    "devices",
    "fingerprint",
    "load_contexts",
    "load_draft",
    "machine",
    "missing_reason",
    "plan_load",
]
