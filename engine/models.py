"""A loaded model: what it can do, through its weights, its engine, its embedder and its template."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from .backend import ModelInfo
from .budget import Footprint
from .chat import Message
from .embedder import Embedder
from .engine import Engine
from .errors import WrongCapability
from .params import EngineOptions
from .texts import Texts

if TYPE_CHECKING:
    from .llama.backends import Backends

log = logging.getLogger(__name__)

Capability = Literal["generate", "chat", "embed"]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)
DEFAULT_MODEL = ":default"


class Model(Texts):
    """A loaded model: its weights, once, and an engine and an embedder where its capabilities ask for them."""

    def __init__(
        self,
        model_id: str,
        source: str,
        path: Path,
        options: EngineOptions,
        capabilities: frozenset[Capability],
    ) -> None:
        """Loads everything from the file of its source; a failure leaves nothing behind. Raises ModelLoadFailed."""
        from .llama import LlamaModel, load_contexts

        started = time.monotonic()
        self.id = model_id
        self.source = source
        self.options = options
        self.capabilities = capabilities
        self.memory: Footprint  # what llama.cpp says it took
        self.devices: dict[str, int]  # on which devices its layers lie, and how many of them
        self._engine: Engine | None = None
        self._embedder: Embedder | None = None
        self.ctx_per_slot: int | None = None  # tokens; None without an engine
        self._weights = LlamaModel(path, n_gpu_layers=options.n_gpu_layers)
        try:
            super().__init__(model_id, self._weights)
            if "chat" in capabilities and self._weights.chat_template is not None:
                self.template  # noqa: B018  (a broken one is a reason not to load the model)
            backends, self.memory, self.devices = load_contexts(self._weights, options, capabilities)
            self._start(backends)
        except Exception:
            self.close()
            raise
        self.load_s = time.monotonic() - started
        self._loaded_at = time.time()

    def _start(self, backends: Backends) -> None:
        """Gives the backends to their threads; one that no thread took is freed."""
        try:
            if backends.generation is not None:
                self.ctx_per_slot = backends.generation.ctx_per_slot
                self._engine = Engine(backends.generation, self.options, name=self.id)
            if backends.embedding is not None:
                self._embedder = Embedder(backends.embedding, name=self.id)
        except Exception:
            for taken, backend in ((self._engine, backends.generation), (self._embedder, backends.embedding)):
                if taken is None and backend is not None:
                    backend.close()
            raise

    @property
    def info(self) -> ModelInfo:
        return self._weights.info

    @property
    def last_used(self) -> float:
        """Unix seconds of the last request, or of the end of the load."""
        parts = (self._engine, self._embedder)
        return max(self._loaded_at, *(part.last_submit for part in parts if part is not None))

    @property
    def engine(self) -> Engine:
        """The generation engine. Raises WrongCapability when the model has none."""
        if self._engine is None:
            raise self._lacks("generate")
        return self._engine

    @property
    def embedder(self) -> Embedder:
        """The embedder. Raises WrongCapability when the model has none."""
        if self._embedder is None:
            raise self._lacks("embed")
        return self._embedder

    def require(self, capability: Capability) -> None:
        """Raises WrongCapability unless the model was loaded for this use."""
        if capability not in self.capabilities:
            raise self._lacks(capability)

    def _lacks(self, capability: Capability) -> WrongCapability:
        able = ", ".join(sorted(self.capabilities))
        return WrongCapability(
            f"model {self.id!r} is loaded for {able}, not for {capability}; add {capability!r} to its capabilities"
        )

    def render_chat(self, messages: Sequence[Message], **template_args: Any) -> str:
        """As Texts.render_chat. Raises WrongCapability, too."""
        self.require("chat")
        return super().render_chat(messages, **template_args)

    @property
    def is_busy(self) -> bool:
        """True while requests of it have not ended."""
        return any(part.is_busy for part in (self._engine, self._embedder) if part is not None)

    def close(self) -> bool:
        """Ends its threads, then frees contexts and weights. What runs fails with EngineStopped.

        False, and nothing is freed, if a step does not end: freeing weights under it would end the process.
        """
        closed = [part.close() for part in (self._engine, self._embedder) if part is not None]
        if all(closed):
            self._weights.close()
        else:
            log.error("model %s is still in a step; its memory is not freed", self.id)
        return all(closed)
