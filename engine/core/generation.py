"""How threads and asyncio callers use an engine: text in, text out, all at once or in chunks."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple
from uuid import uuid4

from cellama.engine.backend import Vocabulary
from cellama.engine.checks import check_int
from cellama.engine.errors import InvalidRequest, nearest
from cellama.engine.events import Completion, Event, Finished, Text
from cellama.engine.request import Request
from cellama.engine.sampling_params import SamplingParams, sampling_of

from .handle import Handle

GENERATE_TIMEOUT_S = 60.0
CHUNK_TIMEOUT_S = 30.0

Prompt = str | Sequence[int]
_OURS = ("parent_key",)  # parameters that become a part of the prompt
AdapterChoice = Iterable[tuple[str, float]] | None  # as in Request
LIKELIEST = asdict(SamplingParams(temperature=0))  # whatever a model's defaults are


class Verdict(NamedTuple):
    """What a model says to candidates."""

    num_accepted: int  # of the first ones, that it would have chosen
    next_token: int | None  # that it chooses behind these; None: the text ends there


class Generating(ABC):
    """`generate` and `stream`, for threads and for asyncio, over the one method `submit`."""

    vocabulary: Vocabulary
    sampling_defaults: Mapping[str, Any]  # of generate and stream; a Request says all itself

    @abstractmethod
    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Handle: ...

    @abstractmethod
    def context_of(self, key: str, scope: str = "", adapters: AdapterChoice = None) -> tuple[int, ...]: ...

    def generate(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> str:
        """The text that follows a prompt (text or token ids). `params` as in Request and SamplingParams.

        With `parent_key`, a completion's `finish_key`, the prompt follows that one's context, token by token.
        Raises UnknownKey, and TimeoutError when it takes longer than `timeout_s`; the slot is free then.
        """
        return self.complete(prompt, timeout_s=timeout_s, **params).text

    def complete(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """As `generate`, with all that is known of the text."""
        return _in_time(self._submit(prompt, timeout_s, stream=False, **params).result(), timeout_s)

    def prefill(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """Reads a prompt into the cache and samples nothing; what begins with it later, or follows its `finish_key`,
        need not be read again. `params` and errors as those of `generate`."""
        return self.complete(prompt, timeout_s=timeout_s, **{**params, "max_tokens": 0})

    async def agenerate(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> str:
        """`generate` for asyncio. Cancelling the task frees the slot."""
        handle = self._submit(prompt, timeout_s, stream=False, **params)
        try:
            return _in_time(await asyncio.wrap_future(handle.future), timeout_s).text
        finally:
            handle.cancel()

    def stream(self, prompt: Prompt, *, timeout_s: float = CHUNK_TIMEOUT_S, **params: Any) -> Iterator[str]:
        """Chunks of text as they become final; leaving the loop cancels the request.

        Raises TimeoutError when a chunk takes longer than `timeout_s`, and the request's EngineError.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        handle = self._submit(prompt, None, stream=True, on_event=events.put, **params)
        try:
            while True:
                try:
                    event = events.get(timeout=timeout_s)
                except queue.Empty:
                    raise _too_slow(timeout_s) from None
                if isinstance(event, Finished):
                    handle.result()
                    return
                if isinstance(event, Text):
                    yield event.text
        finally:
            handle.cancel()

    async def astream(self, prompt: Prompt, *, timeout_s: float = CHUNK_TIMEOUT_S, **params: Any) -> AsyncIterator[str]:
        """`stream` for asyncio."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def append(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has no reader any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        handle = self._submit(prompt, None, stream=True, on_event=append, **params)
        try:
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), timeout_s)
                except TimeoutError:
                    raise _too_slow(timeout_s) from None
                if isinstance(event, Finished):
                    handle.result()
                    return
                if isinstance(event, Text):
                    yield event.text
        finally:
            handle.cancel()

    def draft_tokens(self, prefix: Prompt, most: int, *, timeout_s: float = GENERATE_TIMEOUT_S) -> tuple[int, ...]:
        """Up to `most` of the likeliest tokens after a prefix, for another model to verify; fewer where the text ends.

        Raises TimeoutError, and as Engine.submit.
        """
        return self.complete(prefix, timeout_s=timeout_s, max_tokens=most, **LIKELIEST).tokens

    def verify(
        self,
        prefix: Prompt,
        candidates: Sequence[int],
        *,
        most: int | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> Verdict:
        """How many of the candidates (the first `most`) are the likeliest tokens after the prefix, and what comes then.

        Raises TimeoutError, InvalidRequest, PromptTooLong if prefix and candidates leave no room for one more, and as
        Engine.submit.
        """
        check_int("most", len(candidates) if most is None else most, 0)
        guesses = tuple(candidates[:most])
        tokens = self.complete(
            prefix,
            timeout_s=timeout_s,
            max_tokens=len(guesses) + 1,
            prediction=guesses,
            only_checks=True,
            **LIKELIEST,
        ).tokens
        pairs = list(zip(tokens, guesses, strict=False))
        accepted = next((at for at, (token, guess) in enumerate(pairs) if token != guess), len(pairs))
        return Verdict(accepted, tokens[accepted] if accepted < len(tokens) else None)

    def _submit(
        self,
        prompt: Prompt,
        timeout_s: float | None,
        *,
        stream: bool,
        on_event: Callable[[Event], None] | None = None,
        **params: Any,
    ) -> Handle:
        submitted_at = time.monotonic()
        tokens = self._tokens_of(prompt, params.pop("parent_key", None), params)
        sampling = {name: params.pop(name) for name in SamplingParams.__dataclass_fields__ if name in params}
        known = Request.__dataclass_fields__.keys() | SamplingParams.__dataclass_fields__.keys()
        for name in params.keys() - known:
            raise InvalidRequest(f"unknown parameter {name!r}; {nearest(name, [*known, *_OURS])}")
        if params.get("n", 1) != 1:
            raise InvalidRequest(f"n is {params['n']}; generate and stream give one text, use submit for several")
        request = Request(
            id=params.pop("id", None) or uuid4().hex,
            prompt=tokens,
            sampling=sampling_of(sampling, self.sampling_defaults),
            timeout_s=timeout_s,
            stream=stream,
            **{"submitted_at": submitted_at, **params},
        )
        return self.submit(request, on_event)

    def _tokens_of(self, prompt: Prompt, parent_key: str | None, params: Mapping[str, Any]) -> tuple[int, ...]:
        """Those of a prompt; behind a parent's context nothing is put before them."""
        if parent_key is None:
            return tuple(self.vocabulary.tokenize(prompt) if isinstance(prompt, str) else prompt)
        context = self.context_of(parent_key, params.get("cache_scope", ""), params.get("adapters"))
        follows = self.vocabulary.tokenize(prompt, add_special=False) if isinstance(prompt, str) else prompt
        return (*context, *follows)


def _in_time(completion: Completion, timeout_s: float) -> Completion:
    if completion.finish_reason == "timeout":
        raise TimeoutError(f"the generation took longer than {timeout_s} s; raise timeout_s or lower max_tokens")
    return completion


def _too_slow(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"no text for {timeout_s} s; raise timeout_s or see the engine's load")
