"""The engine: a thread that runs an `EngineCore`, and the methods that other threads call."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from cellama.config.logging import event_logger
from cellama.engine.backend import AdapterSet, Backend, Vocabulary, key_of as adapters_key
from cellama.engine.errors import EngineStopped, InvalidRequest, UnknownKey, check_int, nearest
from cellama.engine.events import CacheTier, Completion, Event, Finished, PrefixHit, RequestStats, StepStats, Text
from cellama.engine.kvcache.disk_tier import open_store
from cellama.engine.kvstore.keys import is_key, key_of, seed_of
from cellama.engine.memory.free_memory import give_memory_back
from cellama.engine.options import EngineOptions
from cellama.engine.request import Request, SamplingParams, sampling_of
from cellama.engine.snapshots import EngineSnapshot
from cellama.engine.system.threads import start_deep
from cellama.engine.system.watchdog import Pulse

from .adapters import Adapters
from .engine_core import Command, EngineCore
from .requests import CancelReason, EngineCall, Handle, Listener
from .telemetry import StepCounts

log = event_logger(__name__)

CLOSE_TIMEOUT_S = 30.0  # seconds; close, evict and calls wait for one step, which takes a few seconds at most on a CPU
CALL_TIMEOUT_S = 30.0  # seconds; for the same reason
SAVE_TIMEOUT_S = 30.0  # seconds; a disk writes several gigabytes of states in this time
GENERATE_TIMEOUT_S = 60.0  # seconds; enough for 256 tokens, the default, on a slow CPU
CHUNK_TIMEOUT_S = 30.0  # seconds; a long prompt is prefilled before the first chunk

Prompt = str | Sequence[int]
AdapterChoice = Iterable[tuple[str, float]] | None  # as in Request
T = TypeVar("T")

_PROMPT_PARAMETERS = ("parent_key",)  # parameters of `generate` beyond those of Request and SamplingParams
_GREEDY = asdict(SamplingParams(temperature=0))  # replaces all sampling defaults of the model


class Verdict(NamedTuple):
    """The result of `Engine.verify`."""

    num_accepted: int  # number of leading candidates that the model would have sampled
    next_token: int | None  # the token that the model samples after these; None if the text ends there


class Engine:
    """Serves many requests concurrently on one backend. All methods are thread-safe."""

    def __init__(
        self, backend: Backend, options: EngineOptions, name: str = "engine", draft: Backend | None = None
    ) -> None:
        """Start the engine thread, which takes ownership of the backends.

        `name` is the model's name in telemetry. `draft` is the backend of a draft model, which must have the same
        vocabulary and number of slots.

        Raises InvalidRequest, GrammarFailed, and ModelLoadFailed if the draft model can't decode.
        """
        self.sampling_defaults = options.sampling_defaults
        backend.prepare(sampling_of({}, self.sampling_defaults), None)  # an invalid grammar would fail all requests
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
        """The model's vocabulary, which is thread-safe."""
        return self._backend.vocabulary

    # Requests

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Handle:
        """Submit a request and return its handle.

        `on_event` is called on the engine thread, so it must return quickly. This method raises InvalidRequest,
        PromptTooLong, UnknownAdapter and EngineStopped. If the waiting queue is full, the handle's `result` raises
        QueueFull.
        """
        self._core.scheduler.check(len(request.prompt) + (request.max_tokens - 1 if request.only_checks else 0))
        given = [("prompt", request.prompt), ("prediction", request.prediction)]
        given += [("resume", resumed.tokens) for resumed in request.resume]
        for name, tokens in given:
            if not all(0 <= token < self._backend.n_vocab for token in tokens):
                raise InvalidRequest(
                    f"{name} has token ids outside the range 0 to {self._backend.n_vocab - 1}; "
                    "use token ids of this model"
                )
        plan = self._backend.prepare(request.sampling, dict(request.reply.visible) if request.reply else None)
        changes: dict[str, Any] = {}
        if request.submitted_at is None:
            changes["submitted_at"] = time.monotonic()
        if request.cache_prompt and not self._cache_prompt:
            changes["cache_prompt"] = False
        if plan.warnings:
            changes["warnings"] = (*request.warnings, *plan.warnings)
        if changes:  # a copy validates all fields again
            request = replace(request, **changes)
        handle = Handle(
            request,
            cancel=self._request_cancel,
            on_event=on_event,
            adapters=self.adapters.acquire(request.adapters),
            plan=plan,
        )
        if self._core.disk is not None and request.cache_prompt:
            seed = seed_of(self._backend.identity, adapters_key(handle.adapters), request.cache_scope)
            resumed = request.resume[0].tokens if request.resume else ()
            handle.match = self._core.disk.find(seed, (*request.prompt, *resumed))
        if not self._inbox.submit(Command("submit", handle)):
            self.adapters.release(handle.adapters)
            raise EngineStopped("the engine is closed; load the model again")
        self._core.forward.note_arrival(request)
        handle.add_done_callback(self._note_end)
        return handle

    def generate(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> str:
        """Return the generated text that follows a prompt. The prompt is a string or a list of token ids.

        `params` may set any fields of Request and SamplingParams. If `parent_key` is the `finish_key` of an earlier
        completion, the prompt continues that completion's context, token by token. Raises UnknownKey if the engine
        doesn't have that context. Raises TimeoutError after `timeout_s`, which also frees the slot.
        """
        return self.complete(prompt, timeout_s=timeout_s, **params).text

    def complete(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """Return the completion of a prompt: text, tokens, usage and timings.

        The parameters and errors are the same as for `generate`.
        """
        return _in_time(self._submit(prompt, timeout_s, stream=False, **params).result(), timeout_s)

    def prefill(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> Completion:
        """Prefill a prompt into the cache without generating any text.

        Later requests that start with the prompt, or continue from the returned `finish_key`, don't recompute the
        prompt. The parameters and errors are the same as for `generate`.
        """
        return self.complete(prompt, timeout_s=timeout_s, **{**params, "max_tokens": 0})

    async def agenerate(self, prompt: Prompt, *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> str:
        """Generate text like `generate`, but asynchronously. Cancelling the task frees the slot."""
        handle = self._submit(prompt, timeout_s, stream=False, **params)
        try:
            return _in_time(await asyncio.wrap_future(handle.future), timeout_s).text
        finally:
            handle.cancel()

    def stream(self, prompt: Prompt, *, timeout_s: float = CHUNK_TIMEOUT_S, **params: Any) -> Iterator[str]:
        """Yield chunks of text as soon as they are final. Leaving the loop cancels the request.

        Raises TimeoutError if a chunk takes longer than `timeout_s`. If the request fails, the request's EngineError is
        raised.
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
        """Yield chunks of text like `stream`, but asynchronously."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def append(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no reader
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
        """Return up to `most` tokens of a prefix's greedy continuation, so another model can verify these tokens.

        The result is shorter if the text ends earlier. Raises TimeoutError and the same errors as `submit`.
        """
        return self.complete(prefix, timeout_s=timeout_s, max_tokens=most, **_GREEDY).tokens

    def verify(
        self,
        prefix: Prompt,
        candidates: Sequence[int],
        *,
        most: int | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> Verdict:
        """Count the leading candidates that match the prefix's greedy continuation, and return the token after them.

        `most` limits the number of candidates. Raises TimeoutError, InvalidRequest and the same errors as `submit`.
        Raises PromptTooLong if the prefix and the candidates leave no room for another token.
        """
        check_int("most", len(candidates) if most is None else most, 0)
        drafts = tuple(candidates[:most])
        tokens = self.complete(
            prefix,
            timeout_s=timeout_s,
            max_tokens=len(drafts) + 1,
            prediction=drafts,
            only_checks=True,
            **_GREEDY,
        ).tokens
        pairs = list(zip(tokens, drafts, strict=False))
        accepted = next((index for index, (token, draft) in enumerate(pairs) if token != draft), len(pairs))
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
            raise InvalidRequest(
                f"n: {params['n']} is not supported by this method; use submit for several completions"
            )
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
        """Return the token ids of a prompt.

        If the prompt continues a parent's context, no special tokens are inserted between the context and the prompt.
        """
        if parent_key is None:
            return tuple(self.vocabulary.tokenize(prompt) if isinstance(prompt, str) else prompt)
        context = self.context_of(parent_key, params.get("cache_scope", ""), params.get("adapters"))
        follows = self.vocabulary.tokenize(prompt, add_special=False) if isinstance(prompt, str) else prompt
        return (*context, *follows)

    def context_of(self, key: str, scope: str = "", adapters: AdapterChoice = None) -> tuple[int, ...]:
        """Return the tokens of the context with this `finish_key`, for a request with this scope and these adapters.

        This method never waits for the engine thread. Raises UnknownAdapter. Raises UnknownKey if the engine doesn't
        have the context, or if the context was created with a different scope or different adapters.
        """
        tokens: tuple[int, ...] | None = None
        if isinstance(key, str) and is_key(key):
            seed = self._seed(scope, adapters)
            tokens = self._core.requests.recent.find(key, seed)
            if tokens is None and self.store is not None and (stored := self.store.context(key)) is not None:
                tokens = tuple(stored[1]) if stored[0] == seed and key_of(seed, stored[1]) == key else None
        if tokens is None:
            raise UnknownKey(
                f"parent_key: {str(key)[:80]!r} is not stored in this engine for cache_scope {scope!r} and these "
                "adapters; send the whole prompt without parent_key"
            )
        return tokens

    @property
    def identity(self) -> bytes:
        """A digest of everything that determines KV cells, except tokens, adapters and scope (ADR 014)."""
        return self._backend.identity

    def key_of(self, tokens: Sequence[int], scope: str = "", adapters: AdapterChoice = None) -> str:
        """Return the key of the context with these tokens, scope and adapters. Raises UnknownAdapter."""
        return key_of(self._seed(scope, adapters), tokens)

    def _seed(self, scope: str, adapters: AdapterChoice) -> bytes:
        chosen = self._chosen_adapters(adapters)
        return seed_of(self._backend.identity, adapters_key(chosen), scope)

    def _chosen_adapters(self, adapters: AdapterChoice) -> AdapterSet:
        chosen = self.adapters.acquire(adapters)
        self.adapters.release(chosen)
        return chosen

    def _note_end(self, handle: Handle) -> None:
        self.adapters.release(handle.adapters)
        self._inbox.end()

    @property
    def is_busy(self) -> bool:
        """Return whether any request is still unfinished."""
        return self._inbox.is_busy

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until every request has finished. Return False if a request is still unfinished after `timeout_s`."""
        return self._inbox.wait_until_idle(timeout_s)

    @property
    def last_submit(self) -> float:
        """The Unix time of the last submission, or 0 if no request has been submitted."""
        return self._inbox.last_submit

    def add_listener(self, listener: Listener) -> None:
        """Register a listener that the engine thread calls once per step with all new events.

        The listener must return quickly.
        """
        self._core.output.listeners.append(listener)

    def add_step_listener(self, listener: Callable[[StepStats], None]) -> None:
        """Register a listener that the engine thread calls after every step."""
        self._core.telemetry.on_step.append(listener)

    def add_request_listener(self, listener: Callable[[RequestStats], None]) -> None:
        """Register a listener that the engine thread calls whenever a request has finished."""
        self._core.telemetry.on_request.append(listener)

    def count_steps(self, counts: StepCounts) -> None:
        """Register histograms in which the engine thread counts every step and every gap between tokens."""
        self._core.telemetry.step_counts.append(counts)

    def snapshot(self) -> EngineSnapshot:
        """Return a snapshot of the current state without waiting for the engine thread."""
        return self._core.telemetry.snapshot

    @property
    def last_cache_hit(self) -> PrefixHit | None:
        """The prefix hit of the request that most recently got a slot, or None if no request has received a slot yet.

        Reading this property never blocks.
        """
        return self._core.telemetry.last_cache_hit

    @property
    def threads(self) -> int:
        """The number of threads that each engine step uses."""
        return self._core.num_threads

    def use_threads(self, count: int) -> None:
        """Set the number of threads, starting with the next step."""
        self._core.num_threads = count

    # KV states

    def cached_prefix(
        self, tokens: Sequence[int], scope: str = "", adapters: AdapterChoice = None
    ) -> dict[CacheTier, int]:
        """Return how many leading prompt tokens are on the device, in RAM and on disk.

        Only states with this scope and these adapters are considered. This method never waits for the engine thread, so
        the result may be slightly out of date. Raises UnknownAdapter.
        """
        key, prompt = adapters_key(self._chosen_adapters(adapters)), tuple(tokens)
        found: dict[CacheTier, int] = {**self._core.probe(prompt, (scope, key) if key else scope), "disk": 0}
        if self._core.disk is not None:
            match = self._core.disk.find(seed_of(self._backend.identity, key, scope), prompt)
            found["disk"] = 0 if match is None else match.usable(len(prompt))
        return found

    def save_states(self, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Write reusable states, including those of running requests, to the cache directory.

        Return the number of written states. States that are not written within `timeout_s` are skipped. If the engine
        has no cache directory, nothing is written.
        """
        if self.store is None:
            return 0
        deadline, before = time.monotonic() + timeout_s, self.store.counters.saves
        with contextlib.suppress(EngineStopped, TimeoutError):
            for slot in self._do(self._core.slots_to_save, deadline):
                self._do(partial(self._core.save_slot, slot), deadline)  # requests continue between these calls
            saved = self._do(self._core.saved_states, deadline)
            while saved:  # one by one, because the queue of the writer is limited
                self._do(partial(self._core.offer, saved.pop()), deadline)
                self.store.flush(deadline)
        return self.store.counters.saves - before

    def evict(self, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Save states like `save_states`, then empty idle slots and the RAM tier. Return the number of written states.

        The model stays loaded, and running requests continue. Raises EngineStopped, and TimeoutError if a step takes
        too long.
        """
        num_saved = self.save_states(timeout_s)
        self._do(self._core.forget_idle, time.monotonic() + CALL_TIMEOUT_S)
        give_memory_back()
        return num_saved

    def _do(self, action: Callable[[], T], deadline: float) -> T:
        """Run an action on the engine thread between two steps, and return its result.

        Raises EngineStopped and TimeoutError.
        """
        call = EngineCall(action)
        if not self._inbox.put(call):
            raise EngineStopped("the engine is closed; load the model again")
        try:
            return call.future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            call.future.cancel()
            raise TimeoutError("the current step is taking longer than the timeout; retry or allow more time") from None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fail unfinished requests with EngineStopped and free the backend.

        Return False if the current step has not finished after `timeout_s`. To keep the states that are in RAM, call
        `save_states` before this method.
        """
        if self._inbox.close():
            self._backend.abort()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self.store is not None:
            self.store.close()
        return True

    def _request_cancel(self, handle: Handle, reason: CancelReason) -> None:
        # A late abort hits the next decode call, which is retried.
        if handle.done or not self._inbox.put(Command(reason, handle)):
            return
        if self._core.forward.abortable_handle is handle:
            self._backend.abort()

    # The engine thread

    def _run(self) -> None:
        reason = "the engine was closed before the request finished"
        try:
            while self._wait():
                self._core.step()
        except BaseException as error:  # the boundary of the thread
            log.exception("engine thread failed", thread=self.pulse.name, detail="all requests to this engine fail")
            self.pulse.die(repr(error))
            reason = f"the engine thread failed: {error!r}; restart the worker"
            self._core.telemetry.stopped()
        self._core.close(EngineStopped(reason))
        self.pulse.close()

    def _wait(self) -> bool:
        """Wait until the engine has work. Return False if the engine must stop."""
        inbox, core = self._inbox, self._core
        if (pause_s := core.pause_s) and not inbox:
            self.pulse.rest()
            inbox.wait(pause_s)
        while not (core.has_work or inbox or inbox.is_closed):
            if core.save_one_idle():
                continue  # idle time: states are copied to RAM while no request waits for a step
            core.rest()
            self.pulse.rest()
            inbox.wait()
        return not inbox.is_closed


def _in_time(completion: Completion, timeout_s: float) -> Completion:
    if completion.finish_reason == "timeout":
        raise TimeoutError(f"generation took longer than {timeout_s} s; raise timeout_s or lower max_tokens")
    return completion


def _too_slow(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"no text was generated for {timeout_s} s; raise timeout_s, or send fewer requests at a time")
