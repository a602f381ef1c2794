"""A loaded model: what it can do, through its weights, its engine, its embedder and its template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from .adapters import UNLOAD_TIMEOUT_S, AdapterInfo
from .backend import ModelInfo
from .chat import Message
from .embedder import Embedder
from .engine import Engine
from .errors import AdapterLoadFailed, InvalidRequest, ModelLoadFailed, WrongCapability, nearest
from .hub import HubOptions
from .params import EngineOptions, Pooling
from .priority import at_low_priority
from .reranker import Reranker
from .sources import resolve
from .texts import Texts

if TYPE_CHECKING:
    from .llama import LlamaModel

log = logging.getLogger(__name__)

Capability = Literal["generate", "chat", "embed", "rerank"]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)
DEFAULT_MODEL = ":default"


class Model(Texts):
    """A loaded model: its weights, once, and an engine, an embedder, a reranker where its capabilities ask for them."""

    def __init__(
        self,
        model_id: str,
        source: str,
        options: EngineOptions,
        capabilities: frozenset[Capability] | None = None,
        hub: HubOptions | None = None,
        adapters: Mapping[str, tuple[str, float]] | None = None,
    ) -> None:
        """Loads everything, with `adapters` by name (source, scale); a failure leaves nothing behind.

        Without capabilities it gets those that suit its file. Raises ModelLoadFailed, WrongCapability, and what
        `load_adapter` does.
        """
        from .llama import LlamaModel

        self.id = model_id
        self.source = source
        self.options = options
        self.capabilities = capabilities or frozenset()
        self._hub = hub or HubOptions()
        self._engine: Engine | None = None
        self._embedder: Embedder | None = None
        self._reranker: Reranker | None = None
        self._weights = at_low_priority(
            lambda: LlamaModel(resolve(source, self._hub), n_gpu_layers=options.n_gpu_layers)
        )
        try:
            super().__init__(model_id, self._weights)
            self.capabilities, pooling = choose_uses(model_id, self._weights, capabilities, options)
            if "chat" in self.capabilities and self._weights.chat_template is not None:
                self.template  # noqa: B018  (a broken one is a reason not to load the model)
            self._open_contexts(pooling)
            for name, (adapter_source, scale) in (adapters or {}).items():
                self.load_adapter(name, adapter_source, scale)
        except Exception:
            self.close()
            raise

    def _open_contexts(self, pooling: Pooling) -> None:
        """A context of its own for each use, and the thread that it belongs to, which runs at normal priority."""
        from .llama import LlamaBackend, LlamaEmbeddingBackend, PairFormat

        weights, options = self._weights, self.options
        if self.capabilities & {"generate", "chat"}:
            backend = at_low_priority(lambda: LlamaBackend(weights, options))
            self._engine = Engine(backend, options, name=self.id)
        if "embed" in self.capabilities:
            embedding = at_low_priority(lambda: LlamaEmbeddingBackend(weights, options, pooling))
            self._embedder = Embedder(embedding, name=self.id)
        if "rerank" in self.capabilities:
            scoring = at_low_priority(lambda: LlamaEmbeddingBackend(weights, options, "rank"))
            self._reranker = Reranker(PairFormat(weights), Embedder(scoring, name=f"{self.id}-rank"))

    @property
    def info(self) -> ModelInfo:
        return self._weights.info

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

    @property
    def reranker(self) -> Reranker:
        """The reranker. Raises WrongCapability when the model has none."""
        if self._reranker is None:
            raise self._lacks("rerank")
        return self._reranker

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

    def load_adapter(self, name: str, source: str, scale: float = 1.0, hub: HubOptions | None = None) -> AdapterInfo:
        """Loads a LoRA adapter, which requests that do not choose have from now on; with scale 0 only those that do.

        `source` is a path, or a file on the hub; `hub` defaults to the model's own. Requests that run go on as they
        are. Raises IdTaken, AdapterLoadFailed, InvalidRequest, WrongCapability (embeddings have no adapters).
        """
        loaded = self.engine.adapters
        try:
            path = resolve(source, hub or self._hub)
        except ModelLoadFailed as error:
            raise AdapterLoadFailed(f"adapter {name!r}: {error}") from None
        return loaded.load(name, source, path, scale)

    def adapters(self) -> list[AdapterInfo]:
        """The adapters, with their scales and the requests that use them."""
        return [] if self._engine is None else self._engine.adapters.infos()

    def set_adapter_scale(self, name: str, scale: float) -> None:
        """Requests that do not choose have the adapter with this scale from now on. Raises as Adapters.set_scale."""
        self.engine.adapters.set_scale(name, scale)

    def unload_adapter(self, name: str, timeout_s: float = UNLOAD_TIMEOUT_S) -> None:
        """Frees an adapter once no unfinished request has it; new ones don't get it. Raises as Adapters.unload."""
        self.engine.adapters.unload(name, timeout_s)

    @property
    def is_busy(self) -> bool:
        """True while requests of it have not ended."""
        return any(part.is_busy for part in self._parts)

    @property
    def _parts(self) -> list[Engine | Embedder | Reranker]:
        return [part for part in (self._engine, self._embedder, self._reranker) if part is not None]

    def close(self) -> bool:
        """Ends its threads, then frees contexts, adapters and weights. What runs fails with EngineStopped.

        False, and nothing is freed, if a step does not end: freeing weights under it would end the process.
        """
        closed = [part.close() for part in self._parts]
        if all(closed):
            self._weights.close()
        else:
            log.error("model %s is still in a step; its memory is not freed", self.id)
        return all(closed)


def choose_uses(
    model_id: str, weights: LlamaModel, wanted: frozenset[Capability] | None, options: EngineOptions
) -> tuple[frozenset[Capability], Pooling]:
    """What a model is loaded for, and how its embeddings are pooled. Raises WrongCapability for what it can't do.

    None wants what its file is made for: a reranker ranks, other encoders embed, all others generate, chat and embed.
    """
    from .llama import can_generate, has_head, is_reranker, own_pooling

    for name in (wanted or frozenset()) - set(CAPABILITIES):
        raise InvalidRequest(f"capability {name!r} is unknown; {nearest(name, CAPABILITIES)}")
    generates, head = can_generate(weights), has_head(weights)
    pooling = own_pooling(weights) if options.pooling == "auto" else options.pooling
    if wanted is None:
        texts: set[Capability] = {"generate", "chat"} if generates else set()
        ranks: set[Capability] = {"rerank"} if head and (is_reranker(weights) or not generates) else set()
        vectors: set[Capability] = {"embed"}
        wanted = frozenset({"rerank"} if pooling == "rank" else vectors | texts | ranks)
    kind = f"model {model_id!r} ({weights.info.description})"
    if wanted & {"generate", "chat"} and not generates:
        raise WrongCapability(f"{kind} can't generate: it only reads texts; load it with capabilities = ['embed']")
    if "rerank" in wanted and not head:
        raise WrongCapability(
            f"{kind} can't rerank: its file has no classification head; take a model that was made for it and "
            "converted as a reranker, or leave out 'rerank'"
        )
    if "embed" in wanted and pooling == "rank":
        raise WrongCapability(
            f"{kind} is pooled by rank, which gives scores and no vectors; set pooling to mean, cls, last or none, or "
            "load it with capabilities = ['rerank']"
        )
    return wanted, pooling
