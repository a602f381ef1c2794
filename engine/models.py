"""A loaded model: what it can do, through its weights, its engine, its embedder and its template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from .backend import ModelInfo
from .chat import Message
from .embedder import Embedder
from .engine import Engine
from .errors import InvalidRequest, WrongCapability, nearest
from .hub import HubOptions
from .params import EngineOptions, Pooling
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
    ) -> None:
        """Loads everything; a failure leaves nothing behind. Without capabilities it gets those that suit its file.

        Raises ModelLoadFailed, WrongCapability.
        """
        from .llama import LlamaBackend, LlamaEmbeddingBackend, LlamaModel, PairFormat

        self.id = model_id
        self.source = source
        self.options = options
        self.capabilities = capabilities or frozenset()
        self._engine: Engine | None = None
        self._embedder: Embedder | None = None
        self._reranker: Reranker | None = None
        self._weights = LlamaModel(resolve(source, hub or HubOptions()), n_gpu_layers=options.n_gpu_layers)
        try:
            super().__init__(model_id, self._weights)
            self.capabilities, pooling = choose_uses(model_id, self._weights, capabilities, options)
            if "chat" in self.capabilities and self._weights.chat_template is not None:
                self.template  # noqa: B018  (a broken one is a reason not to load the model)
            if self.capabilities & {"generate", "chat"}:
                self._engine = Engine(LlamaBackend(self._weights, options), options, name=model_id)
            if "embed" in self.capabilities:
                self._embedder = Embedder(LlamaEmbeddingBackend(self._weights, options, pooling), name=model_id)
            if "rerank" in self.capabilities:
                scoring = Embedder(LlamaEmbeddingBackend(self._weights, options, "rank"), name=f"{model_id}-rank")
                self._reranker = Reranker(PairFormat(self._weights), scoring)
        except Exception:
            self.close()
            raise

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

    @property
    def is_busy(self) -> bool:
        """True while requests of it have not ended."""
        return any(part.is_busy for part in self._parts)

    @property
    def _parts(self) -> list[Engine | Embedder | Reranker]:
        return [part for part in (self._engine, self._embedder, self._reranker) if part is not None]

    def close(self) -> bool:
        """Ends its threads, then frees contexts and weights. What runs fails with EngineStopped.

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
