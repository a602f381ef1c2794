"""What a model is loaded for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .options import Pooling

Capability = Literal["generate", "chat", "embed", "rerank"]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)


@dataclass(frozen=True, slots=True)
class Uses:
    """The capabilities of a loaded model, each with what it needs; `pooling` is that of its embeddings."""

    capabilities: frozenset[Capability]
    pooling: Pooling = "mean"

    @property
    def generates(self) -> bool:
        """True if it needs a generation context."""
        return bool(self.capabilities & {"generate", "chat"})

    @property
    def embeds(self) -> bool:
        return "embed" in self.capabilities

    @property
    def ranks(self) -> bool:
        return "rerank" in self.capabilities
