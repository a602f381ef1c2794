"""The llama.cpp implementation of the engine's protocols. No other package imports llama_cpp."""

from .backend import LlamaBackend
from .devices import devices, machine
from .embedding import LlamaEmbeddingBackend, PairFormat
from .load_plan import DraftParts, LoadPlan, check_draft, load_contexts, load_draft, missing_reason, plan_load
from .model import LlamaModel, fingerprint_of
from .placement import connect_all

__all__ = [
    "DraftParts",
    "LlamaBackend",
    "LlamaEmbeddingBackend",
    "LlamaModel",
    "LoadPlan",
    "PairFormat",
    "check_draft",
    "connect_all",
    "devices",
    "fingerprint_of",
    "load_contexts",
    "load_draft",
    "machine",
    "missing_reason",
    "plan_load",
]
