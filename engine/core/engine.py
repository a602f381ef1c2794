"""The engine: one thread that admits, schedules, decodes and samples, and hands out what it did once per step.

    while there is work:  receive → expire → admit → schedule → forward → update → tell

The thread owns the backend, the scheduler, the cache and all sequences. Others reach it through the inbox and read
snapshots.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from cellama.engine.backend import Backend, Chunk, Vocabulary
from cellama.engine.errors import EngineStopped, InvalidRequest
from cellama.engine.events import EngineSnapshot, Event, RequestStats, StepStats
from cellama.engine.kvcache.manager import KvCache
from cellama.engine.options import EngineOptions
from cellama.engine.request import Request
from cellama.engine.scheduling.micro_batches import passes_of
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.strategies import INTERACTIVE_PRIORITY, make_strategy
from cellama.engine.system.threads import start_deep
from cellama.engine.system.watchdog import Pulse

from .adapters import Adapters
from .forward import BackendBroken, Forward
from .generation import Generating
from .handle import CancelReason, Handle
from .output import Listener, Output
from .requests import Requests
from .telemetry import Telemetry

log = logging.getLogger(__name__)

MAX_FAULTS = 3  # steps in a row that fail although each of their requests goes on alone
CLOSE_TIMEOUT_S = 30.0

Errand = Literal["submit", "stop"] | CancelReason


class Engine(Generating):
    """Serves many requests at once on one backend. Every method may be called from any thread."""

    def __init__(self, backend: Backend, options: EngineOptions, name: str = "engine") -> None:
        """Starts the engine thread, which owns the backend from now on. Raises InvalidRequest."""
        self._backend = backend
        self._vocabulary = backend.vocabulary
        self._options = options
        self._cache = KvCache(backend, options.cache_ram_bytes if options.cache_prompt else 0)
        # One pass of llama.cpp: it would cut a larger batch into pieces of all sequences, each too small to be fast.
        limits = Limits(options.pass_tokens, options.chunk_size, options.max_queue)
        self._scheduler = Scheduler(limits, make_strategy(options.batch_strategy), self._cache)
        self.adapters = Adapters(backend)
        self._telemetry = Telemetry(self._scheduler)
        self._output = Output(backend.vocabulary)
        self.pulse = Pulse(f"cellama-{name}")
        self._requests = Requests(backend, self._scheduler, self._output, self._telemetry, self.pulse)
        self._forward = Forward(backend, self._scheduler, self._requests, self.pulse)
        self._num_faults = 0  # steps in a row that failed for no request in particular
        self._inbox: queue.SimpleQueue[tuple[Errand, Handle | None]] = queue.SimpleQueue()
        self._threads = backend.threads  # for the next step
        self._closed = False
        self._num_open = 0  # requests that have not ended
        self.last_submit = 0.0  # unix seconds
        self._hand_over = threading.Lock()  # nothing enters the inbox after `_closed`
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
        self._scheduler.check(len(request.prompt))
        for what, tokens in (("the prompt", request.prompt), *(("what it resumes", r.tokens) for r in request.resume)):
            if not all(0 <= token < self._backend.n_vocab for token in tokens):
                raise InvalidRequest(f"{what} has token ids outside 0..{self._backend.n_vocab - 1}")
        plan = self._backend.prepare(request.sampling, dict(request.reply.visible) if request.reply else None)
        request = replace(
            request,
            submitted_at=time.monotonic() if request.submitted_at is None else request.submitted_at,
            cache_prompt=request.cache_prompt and self._options.cache_prompt,
        )
        handle = Handle(request, self._ask_to_cancel, on_event, self.adapters.take(request.adapters), plan)
        if not self._put("submit", handle):
            self.adapters.give_back(handle.adapters)
            raise EngineStopped("the engine is closed; the request was not taken")
        if self._forward.yields and request.priority <= INTERACTIVE_PRIORITY:
            self._backend.abort()
        self.last_submit = time.time()
        handle.add_done_callback(self._note_end)
        return handle

    def _note_end(self, handle: Handle) -> None:
        self.adapters.give_back(handle.adapters)
        with self._hand_over:
            self._num_open -= 1

    @property
    def is_busy(self) -> bool:
        """True while requests have not ended."""
        return self._num_open > 0

    def add_listener(self, listener: Listener) -> None:
        """Calls `listener` once per step with all events, on the engine thread: it must only hand over."""
        self._output.listeners.append(listener)

    def add_step_listener(self, listener: Callable[[StepStats], None]) -> None:
        """Calls `listener` after every step, on the engine thread."""
        self._telemetry.on_step.append(listener)

    def add_request_listener(self, listener: Callable[[RequestStats], None]) -> None:
        """Calls `listener` at the end of every request, on the engine thread."""
        self._telemetry.on_request.append(listener)

    def snapshot(self) -> EngineSnapshot:
        """The state a moment ago. Never waits."""
        return self._telemetry.snapshot

    @property
    def threads(self) -> int:
        """With how many a step is computed."""
        return self._threads

    def use_threads(self, count: int) -> None:
        """Steps are computed with so many threads, from the next one on."""
        self._threads = count

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fails what is unfinished with EngineStopped and frees the backend; False if a step takes longer."""
        if self._put("stop", None):
            self._backend.abort()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, what: Errand, handle: Handle | None) -> bool:
        with self._hand_over:
            if self._closed:
                return False
            self._inbox.put((what, handle))
            self._num_open += what == "submit"
            return True

    def _ask_to_cancel(self, handle: Handle, reason: CancelReason) -> None:
        # An abort that comes late hits the next decode call, which is tried again.
        if not handle.done and self._put(reason, handle) and self._forward.worth_aborting is handle:
            self._backend.abort()

    # The engine thread

    def _run(self) -> None:
        reason = "the engine was closed before the request ended"
        try:
            while self._receive():
                self._step_or_isolate()
        except BaseException as error:  # the boundary of the thread
            log.exception("the engine thread died")
            self.pulse.die(repr(error))
            reason = f"the engine thread died of {error!r}; restart the worker"
            self._telemetry.stopped()
        self._shut(EngineStopped(reason))

    def _shut(self, error: EngineStopped) -> None:
        with self._hand_over:
            self._closed = True
        while not self._inbox.empty():
            what, handle = self._inbox.get()
            if what == "submit" and handle is not None:
                self._requests.enqueue(handle)
        self._requests.fail_all(error)
        self._output.tell()
        self._telemetry.idle()
        self._backend.close()
        self.pulse.close()

    def _receive(self) -> bool:
        """Takes everything from the inbox, waiting only when there is nothing else to do; False to stop."""
        while not self._inbox.empty() or not self._scheduler.has_work:
            self.pulse.beat("save")
            if self._inbox.empty() and self._cache.save_one_idle():
                continue  # states go to RAM while nobody waits for a step
            self.pulse.rest()
            if not self._take(*self._inbox.get()):
                return False
        return True

    def _take(self, what: Errand, handle: Handle | None) -> bool:
        if what == "stop" or handle is None:
            return False
        self.pulse.beat(what, (handle.request.id,))
        if what == "submit":
            self._requests.enqueue(handle)
        else:
            self._requests.end(handle, what)
        if not self._scheduler.has_work:
            self._output.tell()
            self._telemetry.idle()
        return True

    def _step_or_isolate(self) -> None:
        """A step; one that fails for no request in particular is made again request by request.

        Raises what fails again and again although no request alone is the cause.
        """
        try:
            self._step()
            self._num_faults = 0
        except BackendBroken:
            raise
        except Exception:
            self._num_faults += 1
            if self._num_faults > MAX_FAULTS:
                raise
            log.exception("a step failed in a way that nobody foresaw; its requests are tried one by one")
            self._forward.isolate()
            self._output.tell()  # of those that ended in it: there may be no other step
            self._telemetry.idle()

    def _step(self) -> None:
        self.pulse.beat("step")
        started, cpu_started = time.monotonic(), time.thread_time()
        if self._threads != self._backend.threads:
            self._backend.set_threads(self._threads)
        for sequence in self._scheduler.line.expired(started):
            self._requests.time_out(sequence)
        for sequence in self._scheduler.admit(started, self._requests.fail):
            self._requests.start(sequence)
        chunks: list[Chunk] = []
        eval_s = 0.0
        planned = self._scheduler.schedule(started)
        for part in passes_of(planned, self._scheduler.slots, unified=self._backend.unified):
            work = self._forward.run(part)
            chunks += work.chunks
            eval_s += work.seconds
            self._output.tell()
        self._output.tell()  # also of a step without a pass, in which requests came to their end
        step_s = time.monotonic() - started
        self._scheduler.strategy.observe(sum(len(chunk.tokens) for chunk in chunks), eval_s)
        self._telemetry.step(chunks, eval_s, step_s, step_s - (time.thread_time() - cpu_started))
