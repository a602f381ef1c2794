"""A loaded model with its engines, and a tokenizer that has only the vocabulary and the chat template."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cellama.config import limits
from cellama.config.logging import event_logger
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
from cellama.engine.errors import AdapterLoadFailed, InvalidRequest, ModelLoadFailed, TemplateFailed, WrongCapability
from cellama.engine.events import CacheTier, Completion
from cellama.engine.grammar.schema import prepare_schema
from cellama.engine.memory.budget import Footprint
from cellama.engine.options import Capability, EngineOptions, Uses
from cellama.engine.request import CONSTRAINTS, SamplingParams, sampling_of
from cellama.engine.snapshots import ModelSnapshot
from cellama.engine.system.threads import at_low_priority
from cellama.engine.system.watchdog import Pulse
from cellama.engine.text.chat_options import ChatOptions, ChatPrompt, grammar_of_calls, reply_format_of
from cellama.engine.text.chat_template import ChatTemplate, Message, Rendered, after_reply
from cellama.engine.text.formats.call_grammar import TextConstraint

from .sources import HubOptions, resolve

if TYPE_CHECKING:
    from cellama.engine.llama import LlamaBackend, LlamaEmbeddingBackend, LlamaModel

log = event_logger(__name__)

DEFAULT_MODEL = ":default"
SAVE_AT_CLOSE_S = 10.0  # seconds; many supervisors wait 30 s between SIGTERM and SIGKILL
_FILE_SEPARATOR = "\n\n--- snippet ---\n\n"  # for models without a token for it, as in llama-server
MAX_CALLERS_TEMPLATES = 4  # chat templates of callers whose processes are kept, each with about 20 MB
_MAX_PREPARED = 256  # cached schemas of tools; an agent sends the same tools with each request

TextOrTokens = str | Sequence[int]
Vector = NDArray[np.float32]

_prepared = functools.lru_cache(maxsize=_MAX_PREPARED)(prepare_schema)


def wanted_text(given: Mapping[str, Any], defaults: Mapping[str, Any], options: ChatOptions) -> TextConstraint | None:
    """Return the constraint on the text of a chat reply, based on the sampling parameters and the model's defaults.

    If the options force a tool call, the defaults are ignored. Raises InvalidRequest.
    """
    sampling = sampling_of(given, {} if options.forces_call else defaults)
    kind = next((name for name in CONSTRAINTS if getattr(sampling, name) is not None), None)
    return None if kind is None else TextConstraint(kind, getattr(sampling, kind), sampling.strict_schema)


def _as_user(message: Message) -> Message:
    """Return the message, with the role "system" replaced by "user"."""
    return {**message, "role": "user"} if message.get("role") == "system" else message


class Texts:
    """Tokenizes texts and renders chat prompts for a model. Any thread may use it."""

    def __init__(self, name: str, weights: LlamaModel, *, control_tokens_in_text: bool = False) -> None:
        """Tokenize with the vocabulary of `weights`. `name` appears in error messages.

        With `control_tokens_in_text`, control tokens are recognised in the text of messages. By default, control tokens
        can only come from the chat template.
        """
        self._name = name
        self._weights = weights
        self._control_tokens_in_text = control_tokens_in_text
        self._callers_templates = functools.lru_cache(MAX_CALLERS_TEMPLATES)(self._compiled)

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises TemplateFailed if the template is missing or doesn't compile."""
        source = self._weights.chat_template
        if source is None:
            raise TemplateFailed(
                f"model {self._name!r} has no chat template; use `generate` with a prompt, or a chat model"
            )
        return self._compiled(source)

    def _template_for(self, options: ChatOptions) -> ChatTemplate:
        """Return the template given by the options, or else the model's own template. Raises TemplateFailed.

        A template given by the options runs in its own process, which ends once the template is neither cached nor in
        use.
        """
        return self.template if options.chat_template is None else self._callers_templates(options.chat_template)

    def _compiled(self, source: str) -> ChatTemplate:
        weights = self._weights
        bos, eos = weights.special_text("bos"), weights.special_text("eos")
        specials = weights.special_tokens
        return ChatTemplate(
            source,
            bos=bos,
            eos=eos,
            specials=specials,
            ends=[special.text for special in specials if weights.is_end(special.id)],
            mark=not self._control_tokens_in_text,
        )

    @functools.cached_property
    def follows_replies(self) -> bool:
        """Whether messages can be appended to a reply without changing the reply's tokens."""
        try:
            after_reply([{"role": "user", "content": "."}], self.template.render)
        except TemplateFailed:
            return False
        return True

    @functools.cached_property
    def chat_features(self) -> tuple[str, ...]:
        """The features supported by the chat template: "tools" and "thinking".

        The tuple is empty if the model has no chat template.
        """
        if self._weights.chat_template is None:
            return ()
        supported = {"tools": self.template.supports_tools, "thinking": self.template.supports_thinking}
        return tuple(name for name, is_supported in supported.items() if is_supported)

    def _close_template(self) -> None:
        template = self.__dict__.get("template")
        if template is not None:
            template.close()
        self._callers_templates.cache_clear()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a string. With `parse_special`, special tokens are recognised in the string."""
        return self._weights.tokenize(text, add_special=add_special, parse_special=parse_special)

    def tokens_of(self, texts: Iterable[str | Sequence[int]]) -> list[list[int]]:
        """Return the token ids of each string. Lists of token ids are returned unchanged. Raises InvalidRequest."""
        return [self.tokenize(text) if isinstance(text, str) else self._known(text) for text in texts]

    def _known(self, tokens: Iterable[int]) -> list[int]:
        ids, n_vocab = list(tokens), self._weights.info.n_vocab
        if not all(0 <= token < n_vocab for token in ids):
            raise InvalidRequest(
                f"the input has token ids outside the range 0 to {n_vocab - 1}; use token ids of this model"
            )
        return ids

    def detokenize(self, tokens: Iterable[int]) -> str:
        """Convert tokens to text. Control tokens produce no text. Raises InvalidRequest."""
        ids = self._known(tokens)
        with self._weights.lifetime:
            return b"".join(self._weights.token_bytes(token) for token in ids).decode(errors="replace")

    def pieces_of(self, tokens: Iterable[int]) -> list[bytes]:
        """Return the bytes of each token. For control tokens, return their text. Raises InvalidRequest."""
        return [self._weights.piece_of(token) for token in self._known(tokens)]

    def fill_in_the_middle(
        self, prefix: str | Sequence[int], suffix: str, others: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """Return a prompt for generating the text between a prefix and a suffix. Raises InvalidRequest.

        `others` contains the names and texts of other files in the same project. The prompt has the same format as in
        llama-server.
        """
        fim = self._weights.fim_tokens
        if min(fim.prefix, fim.suffix, fim.middle) < 0:
            raise InvalidRequest(
                f"suffix: model {self._name!r} has no fill-in-the-middle tokens; remove the suffix, or "
                "use a code model that has these tokens"
            )
        before = list(self._weights.added_tokens[0])
        if others and fim.repository >= 0:
            before += [fim.repository, *self._plain("myproject\n")]
        for name, text in others:
            head = [fim.file, *self._plain(f"{name}\n")] if fim.file >= 0 else self._plain(_FILE_SEPARATOR)
            before += [*head, *self._plain(text)]
        if others and fim.file >= 0:
            before += [fim.file, *self._plain("filename\n")]
        head = self._plain(prefix) if isinstance(prefix, str) else self._known(prefix)
        return [*before, fim.prefix, *head, fim.suffix, *self._plain(suffix), fim.middle]

    def _plain(self, text: str) -> list[int]:
        return self.tokenize(text, add_special=False)

    def render_chat(self, /, messages: Sequence[Message], **template_args: Any) -> str:
        """Return the prompt of a conversation as text. Raises TemplateFailed.

        The arguments are documented in `ChatTemplate.render`.
        """
        return self.template.render(messages, **template_args).text

    def tokenize_chat(self, /, messages: Sequence[Message], **template_args: Any) -> list[int]:
        """Return the token ids of a conversation's prompt. Special tokens come from the chat template."""
        return self._tokens_of_prompt(self.template, self.template.render(messages, **template_args))

    def tokenize_prefix(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """Return a conversation's token ids, without the tokens that start a reply.

        Raises the same errors as `render`.
        """
        template = self._template_for(options)
        prompt = template.render(options.all_of(messages), **{**options.variables, "add_generation_prompt": False})
        return self._tokens_of_prompt(template, prompt)

    def _tokens_of_prompt(self, template: ChatTemplate, prompt: Rendered) -> list[int]:
        weights, tokens = self._weights, self._tokens_after(template, prompt)
        bos = weights.special_text("bos")
        if bos and prompt.marked.startswith(bos):
            return tokens
        before, after = weights.added_tokens
        return [*before, *tokens, *after]

    def prepare_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        *,
        follows_reply: bool = False,
        last_reply: Message | None = None,
        wanted: TextConstraint | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation and the format of the reply. Raises TemplateFailed, InvalidRequest.

        `wanted` is the constraint on the reply's text (see `wanted_text`).

        With `follows_reply`, the messages follow a reply that is already in the context. The prompt then continues
        after the reply, and keeps the context's system message and tools. If the reply is known, pass it as
        `last_reply`, with the options that the context was created with.
        """
        template, started = self._template_for(options), options.started_reply(messages)
        variables = {**options.variables, "add_generation_prompt": options.add_generation_prompt and not started}
        if follows_reply:
            prompt = self._render_after_reply(template, messages, options, variables, last_reply)
        else:
            prompt = template.render(options.all_of(messages), **variables)
        if started:
            prompt = prompt.until(started)
        reply = reply_format_of(self._name, template, prompt, options, self._ids_of_markup)
        grammar = grammar_of_calls(self._name, reply, options, _prepared, wanted)
        tokens = self._tokens_after(template, prompt) if follows_reply else self._tokens_of_prompt(template, prompt)
        if grammar is None:
            return ChatPrompt(prompt.text, tokens, reply)
        lark = grammar.write()
        if len(lark) > limits.MAX_LARK_CHARS:
            raise InvalidRequest(
                f"tools: the grammar of the tool calls has {len(lark)} characters, but the limit is "
                f"{limits.MAX_LARK_CHARS}; send fewer tools, or shorter schemas"
            )
        bound = replace(reply, bound_at_start=True, has_bound_calls=True, is_call=options.forces_call)
        return ChatPrompt(prompt.text, tokens, bound, lark=lark, warnings=tuple(grammar.warnings))

    def _render_after_reply(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        options: ChatOptions,
        variables: dict[str, Any],
        last_reply: Message | None,
    ) -> Rendered:
        has_system = any(message.get("role") == "system" for message in messages)
        can_follow = template.message_order.more_systems
        if last_reply is not None:  # the context already has the system message and the tools
            variables = {**variables, "tools": ()} if template.repeats_tools else variables
            messages = messages if can_follow else [_as_user(message) for message in messages]
        elif options.system is not None or (has_system and not can_follow):
            raise InvalidRequest(
                "messages: with this chat template, a system message can't follow a reply; remove it, or send the "
                "whole conversation without parent_key"
            )

        def render(turns: list[Message], **changed: Any) -> Rendered:
            return template.render(turns, **{**variables, **changed})

        calls = () if last_reply is None else last_reply.get("tool_calls") or ()
        return after_reply(messages, render, calls, template.ends)

    def _tokens_after(self, template: ChatTemplate, prompt: Rendered) -> list[int]:
        return self._weights.tokenize_marked(prompt.text, prompt.marked, template.markup)

    def _ids_of_markup(self, text: str) -> list[int]:
        return self.tokenize(text, add_special=False, parse_special=True)


class Tokenizer(Texts):
    """A model's vocabulary and chat template.

    The vocabulary and the template load quickly, because the weights are not loaded. Use the object as a context
    manager, or call `close` when you are done.
    """

    def __init__(self, source: str, hub: HubOptions | None = None) -> None:
        """Load the vocabulary from the file. Raises ModelLoadFailed."""
        from cellama.engine.llama import LlamaModel

        super().__init__(source, LlamaModel(resolve(source, hub or HubOptions()), vocab_only=True))

    def close(self) -> None:
        """Free the memory. Repeated calls have no effect."""
        self._close_template()
        self._weights.close()

    def __enter__(self) -> Tokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Model(Texts):
    """A loaded model: the weights, and the engine, embedder and reranker that its capabilities require."""

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
        """Load the model from a file. `adapters` maps each name to a source and a scale.

        `tuned` contains the names of the options that were set by `cellama tune`. If loading fails, all memory is
        freed. Raises ModelLoadFailed, and the same errors as `load_adapter`.
        """
        from cellama.engine.llama import LlamaModel

        started = time.monotonic()
        self.id = model_id
        self.source = source
        self.options = options
        self.tuned = tuned
        self.capabilities = uses.capabilities
        self.memory: Footprint  # as logged by llama.cpp
        self.devices: dict[str, int]  # number of layers by device
        self.ctx_per_slot: int | None = None  # tokens; None without an engine
        self._hub = hub
        self._engine: Engine | None = None
        self._embedder: Embedder | None = None
        self._reranker: Reranker | None = None
        self._weights = at_low_priority(lambda: LlamaModel(path, options))
        try:
            super().__init__(model_id, self._weights, control_tokens_in_text=options.control_tokens_in_text)
            self._load(uses, adapters or {})
        except Exception:
            self.close()
            raise
        self.load_s = time.monotonic() - started
        self._loaded_at = time.time()

    def _load(self, uses: Uses, adapters: Mapping[str, tuple[str, float]]) -> None:
        """Create the contexts in a low-priority thread, start the threads that use them, and load the adapters."""
        from cellama.engine.llama import PairFormat, load_contexts

        if "chat" in self.capabilities and self._weights.chat_template is not None:
            markup = self.template.reply_markup  # raises if the template is broken, so that the load fails
            log.info("chat template recognized", model=self.id, detail=str(markup))
        backends, self.memory, self.devices = at_low_priority(lambda: load_contexts(self._weights, self.options, uses))
        generation, embedding, ranking = backends.generation, backends.embedding, backends.ranking
        unowned: list[LlamaBackend | LlamaEmbeddingBackend | None] = [generation, embedding, ranking]
        try:
            if generation is not None:
                draft = self._load_draft()
                unowned.append(draft)
                self.ctx_per_slot = generation.ctx_per_slot
                self._engine = Engine(generation, self.options, name=self.id, draft=draft)
                unowned = [embedding, ranking]
            if embedding is not None:
                self._embedder = Embedder(embedding, self.id, self._weights.added_tokens[1])
                unowned = [ranking]
            if ranking is not None:
                pairs = PairFormat(self._weights, control_tokens_in_text=self.options.control_tokens_in_text)
                self._reranker = Reranker(pairs, Embedder(ranking, name=f"{self.id}-rank"))
        except Exception:
            for backend in unowned:
                if backend is not None:
                    backend.close()
            raise
        for name, (source, scale) in adapters.items():
            self.load_adapter(name, source, scale)

    def _load_draft(self) -> LlamaBackend | None:
        """Return a context of the draft model with the same slots as the model, or None if no draft model is set."""
        from cellama.engine.llama import load_draft

        if self.options.draft is None:
            return None
        path = Path(self.options.draft)
        draft = at_low_priority(lambda: load_draft(path, self.options))
        self._draft_weights, self.memory = draft.weights, self.memory.plus(draft.footprint)
        log.info("draft model loaded", model=self.id, draft=path.name, description=draft.weights.info.description)
        return draft.backend

    @property
    def info(self) -> ModelInfo:
        """The model's description, read from the model file."""
        return self._weights.info

    @property
    def tuned_text(self) -> str:
        """The names and values of the tuned options, for display."""
        return ", ".join(f"{name} {getattr(self.options, name)}" for name in self.tuned)

    @property
    def threads(self) -> int:
        """The current number of threads that compute a step."""
        return self.parts[0].threads

    @property
    def threads_are_chosen(self) -> bool:
        """Whether the user has set the number of threads. Otherwise, engines share the cores (core_sharing.py)."""
        return self.options.threads is not None and "threads" not in self.tuned

    @property
    def num_saved_bytes(self) -> int:
        """The size in bytes of the KV states in RAM and of the memory prepared for reading states from disk."""
        if self._engine is None:
            return 0
        warm = 0 if self._engine.store is None else self._engine.store.warm_bytes
        return self._engine.snapshot().ram_used_bytes + warm

    @property
    def last_used(self) -> float:
        """The Unix time of the last request, or of the load if the model has not received any requests."""
        return max(self._loaded_at, *(part.last_submit for part in self.parts))

    @property
    def engine(self) -> Engine:
        """The generation engine. Raises WrongCapability if the model has no generation engine."""
        if self._engine is None:
            raise self._wrong_capability("generate")
        return self._engine

    @property
    def embedder(self) -> Embedder:
        """The embedder. Raises WrongCapability if the model has no embedder."""
        if self._embedder is None:
            raise self._wrong_capability("embed")
        return self._embedder

    @property
    def reranker(self) -> Reranker:
        """The reranker. Raises WrongCapability if the model has no reranker."""
        if self._reranker is None:
            raise self._wrong_capability("rerank")
        return self._reranker

    def require(self, capability: Capability) -> None:
        """Raise WrongCapability unless the model was loaded with this capability."""
        if capability not in self.capabilities:
            raise self._wrong_capability(capability)

    def _wrong_capability(self, capability: Capability) -> WrongCapability:
        from cellama.engine.llama import missing_reason

        loaded_for = ", ".join(sorted(self.capabilities))
        reason = missing_reason(self._weights, capability)
        return WrongCapability(f"model {self.id!r} is loaded for {loaded_for}, not for {capability}; {reason}")

    # Requests

    def generate(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> str:
        """Return the text that follows a prompt, like `Engine.generate`. Also raises WrongCapability."""
        self.require("generate")
        return self.engine.generate(prompt, timeout_s=timeout_s, **params)

    def prefill(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """Prefill a prompt into the cache, like `Engine.prefill`. Also raises WrongCapability."""
        self.require("generate")
        return self.engine.prefill(prompt, timeout_s=timeout_s, **params)

    def stream(self, prompt: Prompt, *, timeout_s: float = CHUNK_TIMEOUT_S, **params: Any) -> Iterator[str]:
        """Yield the text that follows a prompt in chunks, like `Engine.stream`. Also raises WrongCapability."""
        self.require("generate")
        return self.engine.stream(prompt, timeout_s=timeout_s, **params)

    def chat(self, messages: Sequence[Message], *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """Return the assistant's next turn as a Completion with text, reasoning and tool calls.

        `params` are the fields of ChatOptions, Request and SamplingParams. If `parent_key` is the `finish_key` of an
        earlier completion, the messages continue that completion's context. Raises TimeoutError, TemplateFailed,
        InvalidRequest, WrongCapability, UnknownKey, and the same errors as `Engine.submit`.
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
        """Return a vector for each text. A text can be a string or a list of token ids.

        A single text doesn't need to be in a list. `params` are the parameters of `Embedder.submit`. Raises
        TimeoutError, WrongCapability, and the same errors as `Embedder.submit`.
        """
        self.require("embed")
        is_single = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
        handle = self.embedder.submit(self.tokens_of([texts] if is_single else texts), **params)  # type: ignore[list-item,arg-type]
        try:
            return handle.result(timeout_s)
        except TimeoutError:
            handle.cancel()
            raise TimeoutError(
                f"timeout_s: the texts were not embedded within {timeout_s} s; raise timeout_s, or send fewer texts"
            ) from None

    def render_chat(self, /, messages: Sequence[Message], **template_args: Any) -> str:
        """Return the prompt of a conversation, like `Texts.render_chat`. Also raises WrongCapability."""
        self.require("chat")
        return super().render_chat(messages, **template_args)

    # Adapters and KV states

    def load_adapter(self, name: str, source: str, scale: float = 1.0, hub: HubOptions | None = None) -> AdapterInfo:
        """Load a LoRA adapter and return its description.

        Later requests that don't choose any adapters use this adapter, unless its scale is 0. Running requests are not
        affected. `source` is a path or a file on the Hub. `hub` defaults to the model's Hub options. Raises IdTaken,
        AdapterLoadFailed and InvalidRequest. Raises WrongCapability if the model has no generation engine, because
        embeddings don't support adapters.
        """
        loaded = self.engine.adapters
        try:
            path = resolve(source, hub or self._hub)
        except ModelLoadFailed as error:
            raise AdapterLoadFailed(f"adapter {name!r}: {error}") from None
        return loaded.load(name, source, path, scale)

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters, each with its scale and the number of requests that use it."""
        return [] if self._engine is None else self._engine.adapters.infos()

    def set_adapter_scale(self, name: str, scale: float) -> None:
        """Set an adapter's scale for later requests that don't choose any adapters.

        Raises the same errors as `Adapters.set_scale`.
        """
        self.engine.adapters.set_scale(name, scale)

    def unload_adapter(self, name: str, timeout_s: float = UNLOAD_TIMEOUT_S) -> None:
        """Reject new requests for an adapter, and free it once it is unused.

        Raises the same errors as `Adapters.unload`.
        """
        self.engine.adapters.unload(name, timeout_s)

    def cached_prefix(self, prompt: Prompt, scope: str = "", adapters: AdapterChoice = None) -> Mapping[CacheTier, int]:
        """Return how many leading prompt tokens are in each cache tier, like `Engine.cached_prefix`."""
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        return self.engine.cached_prefix(tokens, scope, adapters)

    def save_states(self, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Write KV states to `cache_dir`, if it is set.

        Return the number of written states, like `Engine.save_states`.
        """
        return 0 if self._engine is None else self._engine.save_states(timeout_s)

    def evict(self, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Save states, then empty the idle slots and the RAM tier, like `Engine.evict`. The model stays loaded."""
        return self.engine.evict(timeout_s)

    # Status and closing

    def snapshot(self) -> ModelSnapshot:
        """Return a snapshot of the engine, embedder and reranker, without waiting for their threads."""
        engine, embedder, reranker = self._engine, self._embedder, self._reranker
        return ModelSnapshot(
            engine=None if engine is None else engine.snapshot(),
            embedder=None if embedder is None else embedder.snapshot(),
            reranker=None if reranker is None else reranker.embedder.snapshot(),
        )

    @property
    def pulses(self) -> list[Pulse]:
        """The pulses of the model's threads, which a Watchdog can check."""
        return [part.pulse for part in self.parts]

    @property
    def is_busy(self) -> bool:
        """Whether any requests are unfinished."""
        return any(part.is_busy for part in self.parts)

    def wait_until_idle(self, deadline: float) -> bool:
        """Wait until all requests have finished, or until `deadline` (time.monotonic()).

        Return False if a request is still unfinished at the deadline.
        """
        return all(part.wait_until_idle(max(0.0, deadline - time.monotonic())) for part in self.parts)

    @property
    def parts(self) -> list[Engine | Embedder]:
        """The engine, the embedder and the reranker's embedder, if they exist. Each component has its own thread."""
        ranking = None if self._reranker is None else self._reranker.embedder
        return [part for part in (self._engine, self._embedder, ranking) if part is not None]

    def close(self, save_s: float = SAVE_AT_CLOSE_S) -> bool:
        """Stop the model's threads and free the model's memory. Running requests fail with EngineStopped.

        If `cache_dir` is set, KV states are saved first, which takes at most `save_s` seconds. Return False if a step
        or a tokenization doesn't finish in time. The weights then stay in memory, because freeing weights that are in
        use would crash the process. Repeated calls are allowed.
        """
        self._close_template()
        if save_s > 0:
            self.save_states(save_s)
        stopped = [part.close() for part in self.parts]
        closed = all(stopped) and self._weights.close()
        if closed and self._draft_weights is not None:
            closed = self._draft_weights.close()
        if not closed:
            log.error(
                "model unload failed", model=self.id, detail="an engine step or a tokenization did not finish in time"
            )
        return closed
