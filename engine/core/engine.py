"""The engine: a thread around an `EngineCore`, and what callers on other threads use of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from cellama.engine.backend import Backend, Vocabulary, key_of as adapters_key
from cellama.engine.checks import check_int
from cellama.engine.errors import EngineStopped, InvalidRequest, UnknownKey, nearest
from cellama.engine.events import CacheTier, Completion, Event, Finished, PrefixHit, RequestStats, StepStats, Text
from cellama.engine.kvcache.disk_tier import open_store
from cellama.engine.kvstore.keys import is_key, key_of, seed_of
from cellama.engine.memory.free_memory import give_memory_back
from cellama.engine.options import EngineOptions
from cellama.engine.request import Request
from cellama.engine.sampling_params import SamplingParams, sampling_of
from cellama.engine.snapshots import EngineSnapshot
from cellama.engine.system.threads import start_deep
from cellama.engine.system.watchdog import Pulse

from .adapters import Adapters
from .engine_core import Command, EngineCore
from .handle import CancelReason, EngineCall, Handle
from .output import Listener
from .telemetry import StepCounts

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0  # seconds; close, evict and calls wait for one step, which takes at most a few seconds on a CPU
CALL_TIMEOUT_S = 30.0  # seconds; as CLOSE_TIMEOUT_S
SAVE_TIMEOUT_S = 30.0  # seconds; a disk writes some gigabytes of states in this time
GENERATE_TIMEOUT_S = 60.0  # seconds; 256 tokens, the default, on a slow CPU
CHUNK_TIMEOUT_S = 30.0  # seconds; a long prompt is prefilled before the first chunk

Prompt = str | Sequence[int]
AdapterChoice = Iterable[tuple[str, float]] | None  # as in Request
T = TypeVar("T")

_PROMPT_PARAMETERS = ("parent_key",)  # what `generate` takes in addition to Request and SamplingParams
_LIKELIEST = asdict(SamplingParams(temperature=0))  # replaces all sampling defaults of the model


class Verdict(NamedTuple):
    """The result of `Engine.verify`."""

    num_accepted: int  # the first candidates that the model would have chosen
    next_token: int | None  # the model's choice after these; None: the text ends there


class Engine:
    """Serves many requests at once on one backend. Every method may be called from any thread."""

    def __init__(
        self, backend: Backend, options: EngineOptions, name: str = "engine", draft: Backend | None = None
    ) -> None:
        """Starts the engine thread, which owns the backend from now on. Telemetry names the model by `name`.

        `draft`, with the same vocabulary and as many slots, guesses tokens for it; the engine owns it, too.

        Raises InvalidRequest, GrammarFailed, and ModelLoadFailed for a `draft` that can't decode.
        """
        self.sampling_defaults = options.sampling_defaults
        backend.prepare(sampling_of({}, self.sampling_defaults), None)  # a broken grammar would fail every request
        self._backend = backend
        self._cache_prompt = options.cache_prompt
        self.adapters = Adapters(backend)
        self.pulse = Pulse(f"cellama-{name}")
        self.store = open_store(options, backend.identity)
        try:
            self._core = EngineCore(backend, options, self.pulse, name, self.store, draft)
        except BaseException:
            if self.store is not None:
                self.store.close()
            raise
        self._inbox = self._core.inbox
        self._thread = start_deep(self._run, self.pulse.name)

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary. Any thread may use it."""
        return self._backend.vocabulary

    # Requests

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Handle:
        """Hands a request to the engine. `on_event` is called on the engine thread: it must only hand over.

        Raises InvalidRequest, PromptTooLong, UnknownAdapter, EngineStopped at once; QueueFull comes through the handle.
        """
        self._core.scheduler.check(len(request.prompt) + (request.max_tokens - 1 if request.only_checks else 0))
        given = [("the prompt", request.prompt), ("the prediction", request.prediction)]
        given += [("what it resumes", resumed.tokens) for resumed in request.resume]
        for what, tokens in given:
            if not all(0 <= token < self._backend.n_vocab for token in tokens):
                raise InvalidRequest(f"{what} has token ids outside 0..{self._backend.n_vocab - 1}")
        plan = self._backend.prepare(request.sampling, dict(request.reply.visible) if request.reply else None)
        request = replace(
            request,
            submitted_at=time.monotonic() if request.submitted_at is None else request.submitted_at,
            cache_prompt=request.cache_prompt and self._cache_prompt,
            warnings=(*request.warnings, *plan.warnings),
        )
        handle = Handle(
            request,
            cancel=self._ask_to_cancel,
            on_event=on_event,
            adapters=self.adapters.take(request.adapters),
            plan=plan,
        )
        if self._core.disk is not None and request.cache_prompt:
            seed = seed_of(self._backend.identity, adapters_key(handle.adapters), request.cache_scope)
            resumed = request.resume[0].tokens if request.resume else ()
            handle.match = self._core.disk.find(seed, (*request.prompt, *resumed))
        if not self._inbox.submit(Command("submit", handle)):
            self.adapters.give_back(handle.adapters)
            raise EngineStopped("the engine is closed; the request was not taken")
        if request.is_interactive:
            self._core.forward.make_way()
        handle.add_done_callback(self._note_end)
        return handle

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
        return self.complete(prefix, timeout_s=timeout_s, max_tokens=most, **_LIKELIEST).tokens

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
            **_LIKELIEST,
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
            raise InvalidRequest(f"unknown parameter {name!r}; {nearest(name, [*known, *_PROMPT_PARAMETERS])}")
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

    def context_of(self, key: str, scope: str = "", adapters: AdapterChoice = None) -> tuple[int, ...]:
        """The tokens of the context that a `finish_key` names, for a request of this scope with these adapters.

        Never waits for the engine thread. Raises UnknownKey where it is gone, or was another scope's or other
        adapters', and UnknownAdapter.
        """
        tokens: tuple[int, ...] | None = None
        if isinstance(key, str) and is_key(key):
            seed = self._seed(scope, adapters)
            tokens = self._core.requests.recent.find(key, seed)
            if tokens is None and self.store is not None and (kept := self.store.context(key)) is not None:
                tokens = tuple(kept[1]) if kept[0] == seed and key_of(seed, kept[1]) == key else None
        if tokens is None:
            raise UnknownKey(
                f"parent_key {str(key)[:80]!r} names no context that is known here for cache_scope {scope!r} and these "
                "adapters: send the whole prompt without parent_key"
            )
        return tokens

    @property
    def identity(self) -> bytes:
        """What the cells of its contexts depend on beside tokens, adapters and scope, as a digest (ADR 014)."""
        return self._backend.identity

    def key_of(self, tokens: Sequence[int], scope: str = "", adapters: AdapterChoice = None) -> str:
        """The key of a context for a request of this scope with these adapters. Raises UnknownAdapter."""
        return key_of(self._seed(scope, adapters), tokens)

    def _seed(self, scope: str, adapters: AdapterChoice) -> bytes:
        taken = self.adapters.take(adapters)
        self.adapters.give_back(taken)
        return seed_of(self._backend.identity, adapters_key(taken), scope)

    def _note_end(self, handle: Handle) -> None:
        self.adapters.give_back(handle.adapters)
        self._inbox.end()

    @property
    def is_busy(self) -> bool:
        """True while requests have not ended."""
        return self._inbox.is_busy

    def wait_until_idle(self, timeout_s: float) -> bool:
        """True as soon as every request has ended; False if one has not after `timeout_s`."""
        return self._inbox.wait_until_idle(timeout_s)

    @property
    def last_submit(self) -> float:
        """Unix seconds of the last request; 0 before the first."""
        return self._inbox.last_submit

    def add_listener(self, listener: Listener) -> None:
        """Calls `listener` once per step with all events, on the engine thread: it must only hand over."""
        self._core.output.listeners.append(listener)

    def add_step_listener(self, listener: Callable[[StepStats], None]) -> None:
        """Calls `listener` after every step, on the engine thread."""
        self._core.telemetry.on_step.append(listener)

    def add_request_listener(self, listener: Callable[[RequestStats], None]) -> None:
        """Calls `listener` at the end of every request, on the engine thread."""
        self._core.telemetry.on_request.append(listener)

    def count_steps(self, counts: StepCounts) -> None:
        """Adds every step and every gap between tokens to these, on the engine thread."""
        self._core.telemetry.step_counts.append(counts)

    def snapshot(self) -> EngineSnapshot:
        """The state just now. Never waits for the engine thread."""
        return self._core.telemetry.snapshot

    @property
    def last_cache_hit(self) -> PrefixHit | None:
        """What the request that got a slot last took over; None before the first. Never waits."""
        return self._core.telemetry.last_cache_hit

    @property
    def threads(self) -> int:
        """With how many a step is computed."""
        return self._core.num_threads

    def use_threads(self, count: int) -> None:
        """Steps are computed with so many threads, from the next one on."""
        self._core.num_threads = count

    # The states that it keeps

    def cached_prefix(
        self, tokens: Sequence[int], scope: str = "", adapters: AdapterChoice = None
    ) -> dict[CacheTier, int]:
        """How many of the first tokens of a prompt are on the device, in RAM, on disk, for a request of this scope.

        Never waits for the engine thread: it may be a moment behind. Raises UnknownAdapter.
        """
        taken = self.adapters.take(adapters)
        self.adapters.give_back(taken)
        key, asked = adapters_key(taken), tuple(tokens)
        found: dict[CacheTier, int] = {**self._core.probe(asked, (scope, key) if key else scope), "disk": 0}
        if self._core.disk is not None:
            match = self._core.disk.find(seed_of(self._backend.identity, key, scope), asked)
            found["disk"] = 0 if match is None else match.usable(len(asked))
        return found

    def save_states(self, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Writes what is worth reading again to the folder, also of what runs; how many states were written.

        What is not written after `timeout_s` is not. Without a folder it does nothing.
        """
        if self.store is None:
            return 0
        deadline, before = time.monotonic() + timeout_s, self.store.counters.saves
        with contextlib.suppress(EngineStopped, TimeoutError):
            for slot in self._do(self._core.slots_to_save, deadline):
                self._do(partial(self._core.save_slot, slot), deadline)  # steps come between: what runs goes on
            saved = self._do(self._core.saved_states, deadline)
            while saved:  # one by one: what waits to be written is bounded, and all together may be more
                self._do(partial(self._core.offer, saved.pop()), deadline)
                self.store.flush(deadline)
        return self.store.counters.saves - before

    def evict(self, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """As `save_states`; then idle slots and RAM are empty, and the model stays; how many states were written.

        What runs goes on. Raises EngineStopped, and TimeoutError if a step takes longer.
        """
        num_saved = self.save_states(timeout_s)
        self._do(self._core.forget_idle, time.monotonic() + CALL_TIMEOUT_S)
        give_memory_back()
        return num_saved

    def _do(self, action: Callable[[], T], deadline: float) -> T:
        """What the engine thread returns of an action between two steps. Raises EngineStopped, TimeoutError."""
        call = EngineCall(action)
        if not self._inbox.put(call):
            raise EngineStopped("the engine is closed")
        try:
            return call.future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            call.future.cancel()
            raise TimeoutError("the engine's step takes longer than the time that was allowed") from None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fails what is unfinished with EngineStopped and frees the backend; False if a step takes longer.

        What is in RAM is not written: `save_states` does that, before.
        """
        if self._inbox.close():
            self._backend.abort()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self.store is not None:
            self.store.close()
        return True

    def _ask_to_cancel(self, handle: Handle, reason: CancelReason) -> None:
        # An abort that comes late hits the next decode call, which is tried again.
        if not handle.done and self._inbox.put(Command(reason, handle)) and self._core.forward.worth_aborting is handle:
            self._backend.abort()

    # The engine thread

    def _run(self) -> None:
        reason = "the engine was closed before the request ended"
        try:
            while self._wait():
                self._core.step()
        except BaseException as error:  # the boundary of the thread
            log.exception("the engine thread died")
            self.pulse.die(repr(error))
            reason = f"the engine thread died of {error!r}; restart the worker"
            self._core.telemetry.stopped()
        self._core.close(EngineStopped(reason))
        self.pulse.close()

    def _wait(self) -> bool:
        """Returns as soon as there is something to do; False when the engine is to end."""
        inbox, core = self._inbox, self._core
        if (pause_s := core.pause_s) and not inbox:
            self.pulse.rest()
            inbox.wait(pause_s)
        while not (core.has_work or inbox or inbox.is_closed):
            if core.save_one_idle():
                continue  # states go to RAM while no request waits for a step
            core.rest()
            self.pulse.rest()
            inbox.wait()
        return not inbox.is_closed


def _in_time(completion: Completion, timeout_s: float) -> Completion:
    if completion.finish_reason == "timeout":
        raise TimeoutError(f"the generation took longer than {timeout_s} s; raise timeout_s or lower max_tokens")
    return completion


def _too_slow(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"no text for {timeout_s} s; raise timeout_s or see the engine's load")
