"""The engine: a thread around an `EngineCore`, and what callers on other threads use of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from cellama.engine.backend import Backend, Vocabulary
from cellama.engine.backend import key_of as adapters_key
from cellama.engine.errors import EngineStopped, InvalidRequest, UnknownKey
from cellama.engine.events import CacheHit, Event, RequestStats, StepStats
from cellama.engine.kvstore.keys import is_key, key_of, seed_of
from cellama.engine.options import EngineOptions
from cellama.engine.request import Request
from cellama.engine.sampling_params import sampling_of
from cellama.engine.snapshots import EngineSnapshot
from cellama.engine.system.threads import start_deep
from cellama.engine.system.watchdog import Pulse

from .adapters import Adapters
from .engine_core import Command, EngineCore
from .generation import AdapterChoice, Generating
from .handle import CancelReason, Handle
from .output import Listener

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class Engine(Generating):
    """Serves many requests at once on one backend. Every method may be called from any thread."""

    def __init__(self, backend: Backend, options: EngineOptions, name: str = "engine") -> None:
        """Starts the engine thread, which owns the backend from now on. Telemetry names the model by `name`.

        Raises InvalidRequest, GrammarFailed.
        """
        self.sampling_defaults = options.sampling_defaults
        backend.prepare(sampling_of({}, self.sampling_defaults), None)  # a broken grammar would fail every request
        self._backend = backend
        self._cache_prompt = options.cache_prompt
        self.adapters = Adapters(backend)
        self.pulse = Pulse(f"cellama-{name}")
        self._core = EngineCore(backend, options, self.pulse, name)
        self._inbox = self._core.inbox
        self._thread = start_deep(self._run, self.pulse.name)

    # For callers, with generate and stream from Generating

    @property
    def vocabulary(self) -> Vocabulary:  # type: ignore[override]
        """Text to tokens and back, from any thread."""
        return self._backend.vocabulary

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Handle:
        """Hands a request to the engine. `on_event` is called on the engine thread: it must only hand over.

        Raises InvalidRequest, PromptTooLong, UnknownAdapter, EngineStopped at once; QueueFull comes through the handle.
        """
        self._core.scheduler.check(len(request.prompt))
        for what, tokens in (("the prompt", request.prompt), *(("what it resumes", r.tokens) for r in request.resume)):
            if not all(0 <= token < self._backend.n_vocab for token in tokens):
                raise InvalidRequest(f"{what} has token ids outside 0..{self._backend.n_vocab - 1}")
        plan = self._backend.prepare(request.sampling, dict(request.reply.visible) if request.reply else None)
        request = replace(
            request,
            submitted_at=time.monotonic() if request.submitted_at is None else request.submitted_at,
            cache_prompt=request.cache_prompt and self._cache_prompt,
        )
        handle = Handle(request, self._ask_to_cancel, on_event, self.adapters.take(request.adapters), plan)
        if not self._inbox.submit(Command("submit", handle)):
            self.adapters.give_back(handle.adapters)
            raise EngineStopped("the engine is closed; the request was not taken")
        if self._core.forward.yields and request.is_interactive:
            self._backend.abort()
        handle.add_done_callback(self._note_end)
        return handle

    def context_of(self, key: str, scope: str = "", adapters: AdapterChoice = None) -> tuple[int, ...]:
        """The tokens of the context that a `finish_key` names, for a request of this scope with these adapters.

        Never waits for the engine thread. Raises UnknownKey where it is gone, or was another scope's or other
        adapters', and UnknownAdapter.
        """
        tokens = None
        if isinstance(key, str) and is_key(key):
            tokens = self._core.requests.recent.find(key, self._seed(scope, adapters))
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

    def snapshot(self) -> EngineSnapshot:
        """The state just now. Never waits for the engine thread."""
        return self._core.telemetry.snapshot

    @property
    def last_cache_hit(self) -> CacheHit | None:
        """What the request that got a slot last took over; None before the first. Never waits."""
        return self._core.telemetry.last_cache_hit

    @property
    def threads(self) -> int:
        """With how many a step is computed."""
        return self._core.num_threads

    def use_threads(self, count: int) -> None:
        """Steps are computed with so many threads, from the next one on."""
        self._core.num_threads = count

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fails what is unfinished with EngineStopped and frees the backend; False if a step takes longer."""
        if self._inbox.close():
            self._backend.abort()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
        while not (core.has_work or inbox or inbox.is_closed):
            if core.save_one_idle():
                continue  # states go to RAM while no request waits for a step
            self.pulse.rest()
            inbox.wait()
        return not inbox.is_closed
