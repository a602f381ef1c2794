"""The models that one process holds, by id."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from .backend import ModelInfo
from .chat import ChatTemplate, Message
from .embedder import Embedder
from .engine import Engine
from .errors import ModelLoadFailed, TemplateFailed, UnknownModel, WrongCapability, nearest
from .params import EngineOptions
from .sources import resolve

if TYPE_CHECKING:
    from .llama import LlamaModel

log = logging.getLogger(__name__)

Capability = Literal["generate", "chat", "embed"]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)
DEFAULT_MODEL = ":default"


class Model:
    """A loaded model: its weights, once, and an engine and an embedder where its capabilities ask for them."""

    def __init__(self, model_id: str, source: str, options: EngineOptions, capabilities: frozenset[Capability]) -> None:
        """Loads everything; a failure leaves nothing behind. Raises ModelLoadFailed."""
        from .llama import LlamaBackend, LlamaEmbeddingBackend, LlamaModel

        self.id = model_id
        self.source = source
        self.options = options
        self.capabilities = capabilities
        self._weights: LlamaModel = LlamaModel(resolve(source), n_gpu_layers=options.n_gpu_layers)
        self._engine: Engine | None = None
        self._embedder: Embedder | None = None
        try:
            if capabilities & {"generate", "chat"}:
                self._engine = Engine(LlamaBackend(self._weights, options), options, name=model_id)
            if "embed" in capabilities:
                self._embedder = Embedder(LlamaEmbeddingBackend(self._weights, options), name=model_id)
            self._template = self._load_template()
        except Exception:
            self.close()
            raise

    def _load_template(self) -> ChatTemplate | None:
        source = self._weights.chat_template
        if source is None or "chat" not in self.capabilities:
            return None
        weights = self._weights
        return ChatTemplate(source, bos=weights.special_text("bos"), eos=weights.special_text("eos"))

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

    def require(self, capability: Capability) -> None:
        """Raises WrongCapability unless the model was loaded for this use."""
        if capability not in self.capabilities:
            raise self._lacks(capability)

    def _lacks(self, capability: Capability) -> WrongCapability:
        able = ", ".join(sorted(self.capabilities))
        return WrongCapability(
            f"model {self.id!r} is loaded for {able}, not for {capability}; add {capability!r} to its capabilities"
        )

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; `parse_special` turns the text of special tokens into them."""
        return self._weights.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of tokens; control tokens have none."""
        return b"".join(self._weights.token_bytes(token) for token in tokens).decode(errors="replace")

    def render_chat(self, messages: Sequence[Message], **template_args: Any) -> str:
        """The prompt of a conversation (see ChatTemplate.render). Raises TemplateFailed, WrongCapability."""
        self.require("chat")
        if self._template is None:
            raise TemplateFailed(
                f"model {self.id!r} has no chat template; use `generate` with a prompt, or a model made for chat"
            )
        return self._template.render(messages, **template_args)

    def tokenize_chat(self, messages: Sequence[Message], **template_args: Any) -> list[int]:
        """Token ids of a conversation's prompt; the template writes the special tokens, none is added twice."""
        text = self.render_chat(messages, **template_args)
        bos = self._weights.special_text("bos")
        return self.tokenize(text, add_special=not (bos and text.startswith(bos)), parse_special=True)

    def close(self) -> None:
        """Ends its threads, then frees contexts and weights. What runs fails with EngineStopped."""
        closed = [part.close() for part in (self._engine, self._embedder) if part is not None]
        if all(closed):
            self._weights.close()
        else:  # freeing weights under a running step would end the process
            log.error("model %s is still in a step; its memory is not freed", self.id)


class ModelManager:
    """Holds models by id and routes to them. Safe from any thread."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        self._default: str | None = None
        self._lock = threading.Lock()

    def load(
        self,
        model_id: str,
        source: str,
        *,
        options: EngineOptions | None = None,
        capabilities: Iterable[Capability] = CAPABILITIES,
        default: bool = False,
    ) -> Model:
        """Loads a model under an id; the first one is the default until another says so. Raises ModelLoadFailed."""
        started = time.monotonic()
        if model_id in self._models:
            raise ModelLoadFailed(f"a model {model_id!r} is loaded already; choose another id")
        model = Model(model_id, source, options or EngineOptions(), frozenset(capabilities))
        with self._lock:
            self._models[model_id] = model
            if default or self._default is None:
                self._default = model_id
        info, seconds = model.info, time.monotonic() - started
        log.info("model %s: %s, %.1f MB, loaded in %.2f s", model_id, info.description, info.size_bytes / 1e6, seconds)
        return model

    def get(self, model_id: str) -> Model:
        """The model of that id, or the default one for ":default". Raises UnknownModel."""
        with self._lock:
            model = self._models.get(self._default or "" if model_id == DEFAULT_MODEL else model_id)
        if model is None:
            raise UnknownModel(f"no model {model_id!r} is loaded here; {nearest(model_id, self._models)}")
        return model

    @property
    def default(self) -> str | None:
        """The id of the default model."""
        return self._default

    def models(self) -> Mapping[str, Model]:
        """All models by id, as they are now."""
        with self._lock:
            return dict(self._models)

    def close(self) -> None:
        """Closes every model."""
        with self._lock:
            models, self._models, self._default = list(self._models.values()), {}, None
        for model in models:
            model.close()
