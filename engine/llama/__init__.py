"""llama.cpp behind the engine's protocols: the only importer of llama_cpp."""

from .abilities import missing
from .backend import LlamaBackend
from .embedding import LlamaEmbeddingBackend
from .files.gguf_file import fingerprint
from .model import LlamaModel
from .pairs import PairFormat
from .planning.devices import devices, machine
from .planning.draft import DraftParts, check_draft, load_draft
from .planning.load_plan import LoadPlan, load_contexts, plan_load

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
    "missing",
    "plan_load",
]
