"""A loaded model: what it can do, through its weights, its engine, its embedder and its template."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cellama.engine.backend import ModelInfo
from cellama.engine.core.adapters import UNLOAD_TIMEOUT_S, AdapterInfo
from cellama.engine.core.embedder import Embedder, Reranker
from cellama.engine.core.engine import (
    CHUNK_TIMEOUT_S,
    GENERATE_TIMEOUT_S,
    SAVE_TIMEOUT_S,
    AdapterChoice,
    Engine,
    Prompt,
)
from cellama.engine.errors import AdapterLoadFailed, ModelLoadFailed, WrongCapability
from cellama.engine.events import CacheTier, Completion
from cellama.engine.memory.budget import Footprint
from cellama.engine.options import Capability, EngineOptions, Uses
from cellama.engine.request import SamplingParams
from cellama.engine.snapshots import ModelSnapshot
from cellama.engine.system.threads import at_low_priority
from cellama.engine.system.watchdog import Pulse
from cellama.engine.text.chat_options import ChatOptions
from cellama.engine.text.chat_template import Message

from .sources import HubOptions, resolve
from .tokenizer import Texts, wanted_text

if TYPE_CHECKING:
    from cellama.engine.llama import LlamaBackend, LlamaEmbeddingBackend, LlamaModel

log = logging.getLogger(__name__)

DEFAULT_MODEL = ":default"
SAVE_AT_CLOSE_S = 10.0  # seconds; a supervisor that sent SIGTERM often waits 30 before it kills

TextOrTokens = str | Sequence[int]
Vector = NDArray[np.float32]


class Model(Texts):
    """A loaded model: its weights, and an engine, embedder and reranker according to its capabilities."""

    _draft_weights: LlamaModel | None = None

    def __init__(
        self,
        model_id: str,
        source: str,
        path: Path,
        options: EngineOptions,
        uses: Uses,
        hub: HubOptions,
        adapters: Mapping[str, tuple[str, float]] | None = None,
        tuned: tuple[str, ...] = (),
    ) -> None:
        """Loads everything from the file of its source, with `adapters` by name (source, scale).

        `tuned` names the options that are as `cellama tune` found them best.
        A failure leaves nothing behind. Raises ModelLoadFailed, and what `load_adapter` does.
        """
        from cellama.engine.llama import LlamaModel

        started = time.monotonic()
        self.id = model_id
        self.source = source
        self.options = options
        self.tuned = tuned
        self.capabilities = uses.capabilities
        self.memory: Footprint  # what llama.cpp says it took
        self.devices: dict[str, int]  # on which devices its layers lie, and how many of them
        self.ctx_per_slot: int | None = None  # tokens; None without an engine
        self._hub = hub
        self._engine: Engine | None = None
        self._embedder: Embedder | None = None
        self._reranker: Reranker | None = None
        self._weights = at_low_priority(lambda: LlamaModel(path, n_gpu_layers=options.n_gpu_layers))
        try:
            super().__init__(model_id, self._weights, control_tokens_in_text=options.control_tokens_in_text)
            self._load(uses, adapters or {})
        except Exception:
            self.close()
            raise
        self.load_s = time.monotonic() - started
        self._loaded_at = time.time()

    def _load(self, uses: Uses, adapters: Mapping[str, tuple[str, float]]) -> None:
        """Make the contexts, give each to a thread of normal priority, and load the adapters."""
        from cellama.engine.llama import PairFormat, load_contexts

        if "chat" in self.capabilities and self._weights.chat_template is not None:
            markup = self.template.reply_markup  # a broken template is a reason not to load the model
            log.info("model %s: %s", self.id, markup)
        backends, self.memory, self.devices = at_low_priority(lambda: load_contexts(self._weights, self.options, uses))
        generation, embedding, ranking = backends.generation, backends.embedding, backends.ranking
        untaken: list[LlamaBackend | LlamaEmbeddingBackend | None] = [generation, embedding, ranking]
        try:
            if generation is not None:
                draft = self._load_draft()
                untaken.append(draft)
                self.ctx_per_slot = generation.ctx_per_slot
                self._engine = Engine(generation, self.options, name=self.id, draft=draft)
                untaken = [embedding, ranking]
            if embedding is not None:
                self._embedder = Embedder(embedding, self.id, self._weights.around[1])
                untaken = [ranking]
            if ranking is not None:
                pairs = PairFormat(self._weights, control_tokens_in_text=self.options.control_tokens_in_text)
                self._reranker = Reranker(pairs, Embedder(ranking, name=f"{self.id}-rank"))
        except Exception:
            for backend in untaken:
                if backend is not None:
                    backend.close()
            raise
        for name, (source, scale) in adapters.items():
            self.load_adapter(name, source, scale)

    def _load_draft(self) -> LlamaBackend | None:
        """Return the context of the draft model, with as many slots as the model's own, and as long; None without."""
        from cellama.engine.llama import load_draft

        if self.options.draft is None:
            return None
        path = Path(self.options.draft)
        draft = at_low_priority(lambda: load_draft(path, self.options))
        self._draft_weights, self.memory = draft.weights, self.memory.plus(draft.footprint)
        log.info("model %s: %s drafts for it (%s)", self.id, path.name, draft.weights.info.description)
        return draft.backend

    @property
    def info(self) -> ModelInfo:
        """What the file says that the model is."""
        return self._weights.info

    @property
    def tuned_text(self) -> str:
        """The tuned options and their values, for people."""
        return ", ".join(f"{name} {getattr(self.options, name)}" for name in self.tuned)

    @property
    def threads(self) -> int:
        """With how many its steps are computed now."""
        return self.parts[0].threads

    @property
    def threads_are_chosen(self) -> bool:
        """True when the number stays as it was set; else it is this model's share of the cores (core_sharing.py)."""
        return self.options.threads is not None and "threads" not in self.tuned

    @property
    def num_saved_bytes(self) -> int:
        """What the KV states that it keeps in RAM take now, and memory that waits for those on disk."""
        if self._engine is None:
            return 0
        warm = 0 if self._engine.store is None else self._engine.store.warm_bytes
        return self._engine.snapshot().ram_used_bytes + warm

    @property
    def last_used(self) -> float:
        """Unix seconds of the last request, or of the end of the load."""
        return max(self._loaded_at, *(part.last_submit for part in self.parts))

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
        """Raise WrongCapability unless the model was loaded with this capability."""
        if capability not in self.capabilities:
            raise self._lacks(capability)

    def _lacks(self, capability: Capability) -> WrongCapability:
        from cellama.engine.llama import missing

        able = ", ".join(sorted(self.capabilities))
        why = missing(self._weights, capability)
        return WrongCapability(f"model {self.id!r} is loaded for {able}, not for {capability}; {why}")

    # What it is asked

    def generate(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> str:
        """Return the text that follows a prompt (see Engine.generate). Also raises WrongCapability."""
        self.require("generate")
        return self.engine.generate(prompt, timeout_s=timeout_s, **params)

    def prefill(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """Compute a prompt into the cache (see Engine.prefill). Also raises WrongCapability."""
        self.require("generate")
        return self.engine.prefill(prompt, timeout_s=timeout_s, **params)

    def stream(self, prompt: Prompt, *, timeout_s: float = CHUNK_TIMEOUT_S, **params: Any) -> Iterator[str]:
        """Yield the text that follows a prompt in chunks (see Engine.stream)."""
        self.require("generate")
        return self.engine.stream(prompt, timeout_s=timeout_s, **params)

    def chat(self, messages: Sequence[Message], *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """Return the assistant's next turn as a Completion, with text, reasoning and tool calls.

        `params` are fields of ChatOptions, Request and SamplingParams. With `parent_key`, the `finish_key` of a
        completion, the messages follow that context. Raises TimeoutError, TemplateFailed, InvalidRequest,
        WrongCapability, UnknownKey, and as Engine.submit.
        """
        self.require("chat")
        given = {name: params.pop(name) for name in ChatOptions.__dataclass_fields__ if name in params}
        options = ChatOptions(**given)
        sampling = {name: params[name] for name in SamplingParams.__dataclass_fields__ if name in params}
        prompt = self.prepare_chat(
            messages,
            options,
            follows_reply=params.get("parent_key") is not None,
            wanted=wanted_text(sampling, self.engine.sampling_defaults, options),
        )
        params |= prompt.sampling
        return self.engine.complete(
            prompt.tokens, timeout_s=timeout_s, reply=prompt.reply, warnings=prompt.warnings, **params
        )

    def embed(
        self, texts: TextOrTokens | Sequence[TextOrTokens], *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any
    ) -> list[Vector]:
        """Return a vector for each text. A text can also be a list of token ids, and a single text needs no list.

        `params` are those of Embedder.submit. Raises TimeoutError, WrongCapability, and as Embedder.submit.
        """
        self.require("embed")
        alone = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
        handle = self.embedder.submit(self.tokens_of([texts] if alone else texts), **params)  # type: ignore[list-item,arg-type]
        try:
            return handle.result(timeout_s)
        except TimeoutError:
            handle.cancel()
            raise TimeoutError(
                f"the texts were not read within {timeout_s} s; raise timeout_s, or send fewer"
            ) from None

    def render_chat(self, /, messages: Sequence[Message], **template_args: Any) -> str:
        """As Texts.render_chat. Raises WrongCapability, too."""
        self.require("chat")
        return super().render_chat(messages, **template_args)

    # Its adapters and KV states

    def load_adapter(self, name: str, source: str, scale: float = 1.0, hub: HubOptions | None = None) -> AdapterInfo:
        """Load a LoRA adapter. From now on, requests that do not choose adapters use it, unless its scale is 0.

        `source` is a path, or a file on the hub. `hub` defaults to the model's own options. Running requests do not
        change. Raises IdTaken, AdapterLoadFailed, InvalidRequest, WrongCapability (embeddings have no adapters).
        """
        loaded = self.engine.adapters
        try:
            path = resolve(source, hub or self._hub)
        except ModelLoadFailed as error:
            raise AdapterLoadFailed(f"adapter {name!r}: {error}") from None
        return loaded.load(name, source, path, scale)

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters, with their scales and the requests that use them."""
        return [] if self._engine is None else self._engine.adapters.infos()

    def set_adapter_scale(self, name: str, scale: float) -> None:
        """Set the scale for later requests that do not choose adapters. Raises as Adapters.set_scale."""
        self.engine.adapters.set_scale(name, scale)

    def unload_adapter(self, name: str, timeout_s: float = UNLOAD_TIMEOUT_S) -> None:
        """Refuse the adapter to new requests, and free it when no request uses it. Raises as Adapters.unload."""
        self.engine.adapters.unload(name, timeout_s)

    def cached_prefix(self, prompt: Prompt, scope: str = "", adapters: AdapterChoice = None) -> Mapping[CacheTier, int]:
        """Return how many of the first tokens of a prompt are in each tier (see Engine.cached_prefix)."""
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        return self.engine.cached_prefix(tokens, scope, adapters)

    def save_states(self, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Write KV states to `cache_dir`, if there is one, and return their number (see Engine.save_states)."""
        return 0 if self._engine is None else self._engine.save_states(timeout_s)

    def evict(self, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Save states as `save_states`, then empty idle slots and RAM. The model stays loaded (see Engine.evict)."""
        return self.engine.evict(timeout_s)

    # Its state and its end

    def snapshot(self) -> ModelSnapshot:
        """Return the current state of its engine, embedder and reranker. Never waits for their threads."""
        engine, embedder, reranker = self._engine, self._embedder, self._reranker
        return ModelSnapshot(
            engine=None if engine is None else engine.snapshot(),
            embedder=None if embedder is None else embedder.snapshot(),
            reranker=None if reranker is None else reranker.embedder.snapshot(),
        )

    @property
    def pulses(self) -> list[Pulse]:
        """Of its threads, for a Watchdog."""
        return [part.pulse for part in self.parts]

    @property
    def is_busy(self) -> bool:
        """True while requests of it have not ended."""
        return any(part.is_busy for part in self.parts)

    def wait_until_idle(self, deadline: float) -> bool:
        """Wait until every request has finished. Return False if one has not at `deadline` (time.monotonic())."""
        return all(part.wait_until_idle(max(0.0, deadline - time.monotonic())) for part in self.parts)

    @property
    def parts(self) -> list[Engine | Embedder]:
        """What computes, each in a thread of its own."""
        ranking = None if self._reranker is None else self._reranker.embedder
        return [part for part in (self._engine, self._embedder, ranking) if part is not None]

    def close(self, save_s: float = SAVE_AT_CLOSE_S) -> bool:
        """Stop its threads and free its memory. Running requests fail with EngineStopped. Idempotent.

        With `cache_dir`, KV states that are worth it are saved first, for at most `save_s` seconds. Return False if a
        step or a tokenization does not finish. The weights then stay, because freeing them would crash the process.
        """
        self._close_template()
        if save_s > 0:
            self.save_states(save_s)
        ended = [part.close() for part in self.parts]
        closed = all(ended) and self._weights.close()
        if closed and self._draft_weights is not None:
            closed = self._draft_weights.close()
        if not closed:
            log.error("model %s is still in use; its memory is not freed", self.id)
        return closed
