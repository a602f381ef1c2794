"""What a model does in one call, and the same by the id of a model that a manager holds meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellama.engine.capabilities import Capability
from cellama.engine.core.embedder import Embedder
from cellama.engine.core.engine import Engine
from cellama.engine.core.generation import CHUNK_TIMEOUT_S, GENERATE_TIMEOUT_S, Prompt
from cellama.engine.events import Completion
from cellama.engine.sampling_params import SamplingParams
from cellama.engine.text.chat_template import ChatOptions, Message

from .tokenizer import Texts, wanted_text

TextOrTokens = str | Sequence[int]
Vector = NDArray[np.float32]


class ModelCalls(Texts, ABC):
    """One call for each use of a model."""

    id: str

    @property
    @abstractmethod
    def engine(self) -> Engine: ...

    @property
    @abstractmethod
    def embedder(self) -> Embedder: ...

    @abstractmethod
    def require(self, capability: Capability) -> None: ...

    def generate(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> str:
        """The text that follows a prompt; see Engine.generate. Raises WrongCapability, too."""
        self.require("generate")
        return self.engine.generate(prompt, timeout_s=timeout_s, **params)

    def prefill(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """Reads a prompt into the cache; see Engine.prefill. Raises WrongCapability, too."""
        self.require("generate")
        return self.engine.prefill(prompt, timeout_s=timeout_s, **params)

    def stream(self, prompt: Prompt, *, timeout_s: float = CHUNK_TIMEOUT_S, **params: Any) -> Iterator[str]:
        """The same in chunks; see Engine.stream."""
        self.require("generate")
        return self.engine.stream(prompt, timeout_s=timeout_s, **params)

    def chat(self, messages: Sequence[Message], *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """The assistant's next turn: a Completion, since there is more to it than its text.

        `params` as in ChatOptions, Request and SamplingParams. With `parent_key`, a completion's `finish_key`, the
        messages are those that follow it. Raises TimeoutError, TemplateFailed, InvalidRequest, WrongCapability,
        UnknownKey, and what Engine.submit does.
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
        """A vector per text, one of which may be given alone; token ids are taken as they are.

        `params` as in Embedder.submit. Raises TimeoutError, WrongCapability, and what Embedder.submit does.
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


class CallsById(ABC):
    """The same calls by the id of a model, or ":default": it stays until the call has ended, whoever unloads it."""

    @abstractmethod
    def get(self, model_id: str) -> ModelCalls: ...

    @abstractmethod
    def hold(self, model_id: str) -> AbstractContextManager[ModelCalls]: ...

    def generate(self, model_id: str, prompt: Prompt, **params: Any) -> str:
        """As Model.generate. Raises UnknownModel, too."""
        with self.hold(model_id) as model:
            return model.generate(prompt, **params)

    def prefill(self, model_id: str, prompt: Prompt, **params: Any) -> Completion:
        """As Model.prefill. Raises UnknownModel, too."""
        with self.hold(model_id) as model:
            return model.prefill(prompt, **params)

    def stream(self, model_id: str, prompt: Prompt, **params: Any) -> Iterator[str]:
        """As Model.stream. Raises UnknownModel, at once and not with the first chunk."""
        chosen = self.get(model_id).id
        return self._stream(chosen, prompt, params)

    def _stream(self, model_id: str, prompt: Prompt, params: dict[str, Any]) -> Iterator[str]:
        with self.hold(model_id) as model:
            yield from model.stream(prompt, **params)

    def chat(self, model_id: str, messages: Sequence[Message], **params: Any) -> Completion:
        """As Model.chat. Raises UnknownModel, too."""
        with self.hold(model_id) as model:
            return model.chat(messages, **params)

    def embed(self, model_id: str, texts: TextOrTokens | Sequence[TextOrTokens], **params: Any) -> list[Vector]:
        """As Model.embed. Raises UnknownModel, too."""
        with self.hold(model_id) as model:
            return model.embed(texts, **params)
