"""The engine: one thread that admits, schedules, decodes and samples, and hands out what it did once per step.

    while there is work:  receive → expire → admit → schedule → forward → update → tell

The thread owns the backend, the scheduler, the cache and all sequences. Others reach it through the inbox and read
snapshots.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from .adapters import Adapters
from .backend import Backend, DecodeError, Vocabulary
from .calling import Generating
from .errors import DecodeFailed, EngineError, EngineStopped, InvalidRequest
from .events import EngineSnapshot, Event, Finished, FinishReason, RequestStats, Started, StepStats
from .group import Group
from .handle import CancelReason, Handle
from .kvcache import KvCache
from .output import Listener, Output
from .params import MAX_SEED, EngineOptions, Request
from .passes import passes_of
from .scheduler import Chunk, Limits, Scheduler
from .sequence import Sequence
from .strategies import INTERACTIVE_PRIORITY, make_strategy
from .telemetry import Telemetry

log = logging.getLogger(__name__)

NO_ROOM, ABORTED = 1, 2  # llama.h: llama_decode; nothing of the batch counts, it may be tried again
ATTEMPTS_ALONE = 2  # of a request in a batch of its own, before it fails
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
        self._groups: dict[Handle, Group] = {}
        self._inbox: queue.SimpleQueue[tuple[Errand, Handle | None]] = queue.SimpleQueue()
        self._closed = False
        self._num_open = 0  # requests that have not ended
        self.last_submit = 0.0  # unix seconds
        self._hand_over = threading.Lock()  # nothing enters the inbox after `_closed`
        self._worth_aborting: Handle | None = None  # whose cancel ends the decode call that runs now
        self._yields = False  # that decode call ends when an interactive request comes
        self._thread = threading.Thread(target=self._run, name=f"cellama-{name}", daemon=True)
        self._thread.start()

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
        self._backend.check(request.sampling)
        request = replace(
            request,
            submitted_at=time.monotonic() if request.submitted_at is None else request.submitted_at,
            cache_prompt=request.cache_prompt and self._options.cache_prompt,
        )
        handle = Handle(request, self._ask_to_cancel, on_event, self.adapters.take(request.adapters))
        if not self._put("submit", handle):
            self.adapters.give_back(handle.adapters)
            raise EngineStopped("the engine is closed; the request was not taken")
        if self._yields and request.priority <= INTERACTIVE_PRIORITY:
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
        if not handle.done and self._put(reason, handle) and self._worth_aborting is handle:
            self._backend.abort()

    # The engine thread

    def _run(self) -> None:
        reason = "the engine was closed before the request ended"
        try:
            while self._receive():
                self._step()
        except Exception as error:
            log.exception("the engine thread died")
            reason = f"the engine thread died of {error!r}; restart the worker"
        self._shut(EngineStopped(reason))

    def _shut(self, error: EngineStopped) -> None:
        with self._hand_over:
            self._closed = True
        while not self._inbox.empty():
            what, handle = self._inbox.get()
            if what == "submit" and handle is not None:
                self._enqueue(handle)
        for group in list(self._groups.values()):
            self._fail(group, error)
        self._output.tell()
        self._telemetry.idle()
        self._backend.close()

    def _receive(self) -> bool:
        """Takes everything from the inbox, waiting only when there is nothing else to do; False to stop."""
        while not self._inbox.empty() or not self._scheduler.has_work:
            if self._inbox.empty() and self._cache.save_one_idle():
                continue  # states go to RAM while nobody waits for a step
            what, handle = self._inbox.get()
            if what == "stop" or handle is None:
                return False
            if what == "submit":
                self._enqueue(handle)
            elif handle in self._groups:
                self._end_all(self._groups[handle], what)
            if not self._scheduler.has_work:
                self._output.tell()
                self._telemetry.idle()
        return True

    def _enqueue(self, handle: Handle) -> None:
        request = handle.request
        assert request.submitted_at is not None
        seed = request.sampling.seed
        seed = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
        group = Group(handle)
        self._groups[handle] = group
        try:
            for index in range(request.n):
                seed_of_it, prompt = (seed + index) % (MAX_SEED + 1), list(request.prompt)
                sequence = Sequence(request, seed_of_it, request.submitted_at, prompt, index, handle.adapters)
                sequence.group = group
                self._scheduler.enqueue(sequence, time.monotonic())
                group.running.append(sequence)
            self._resume(group)
        except EngineError as error:
            self._fail(group, error)

    def _resume(self, group: Group) -> None:
        """Gives the sequences of a request the output that they have already; some may be at their end with it."""
        for sequence, resumed in zip(list(group.running), group.handle.request.resume, strict=False):
            sequence.tokens += resumed.tokens
            sequence.logprobs += resumed.logprobs
            sequence.num_reported = len(resumed.tokens)
            stop = self._output.replay(sequence, resumed.tokens)
            if stop is not None:
                self._end(sequence, "stop", stop)
            elif self._is_complete(sequence):
                self._end(sequence, "length")

    def _step(self) -> None:
        started, cpu_started = time.monotonic(), time.thread_time()
        for sequence in self._scheduler.line.expired(started):
            self._end_all(sequence.group, "timeout")
        for sequence in self._scheduler.admit(started):
            self._start(sequence)
        chunks = self._scheduler.schedule(started)
        eval_s = 0.0
        for part in passes_of(chunks, self._scheduler.slots, unified=self._backend.unified):
            eval_s += self._forward(part)
            self._output.tell()
        self._output.tell()  # also of a step without a pass, in which requests came to their end
        step_s = time.monotonic() - started
        self._scheduler.observe(sum(len(chunk.tokens) for chunk in chunks), eval_s)
        self._telemetry.step(chunks, eval_s, step_s, step_s - (time.thread_time() - cpu_started))

    def _start(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.sampler is not None:
            return  # it was preempted, and goes on
        try:
            sequence.sampler = self._backend.new_sampler(
                request.sampling,
                sequence.seed,
                sequence.tokens,
                ban_end=request.ignore_eos,
                num_chosen=sequence.num_output,
                num_unbound=0 if sequence.reply is None else sequence.reply.num_unbound,
            )
        except EngineError as error:
            self._fail(sequence.group, error)
            return
        if sequence.index == 0:
            assert sequence.slot is not None
            started = Started(request.id, sequence.slot, sequence.num_prompt, sequence.num_cached, sequence.seed)
            self._output.emit(sequence.group.handle, started)

    def _forward(self, chunks: list[Chunk]) -> float:
        """Decodes and samples; returns the seconds inside decode. A failure is traced to its request."""
        chunks = [chunk for chunk in chunks if self._stands(chunk)]  # not that of a request that just ended elsewhere
        if not chunks:
            return 0.0
        self._worth_aborting = self._main_request(chunks)
        self._yields = self._is_long_bulk(chunks)
        first = self._scheduler.slots[chunks[0].slot]
        started = time.monotonic()
        try:
            self._backend.decode(chunks, first.adapters if first is not None else ())
        except DecodeError as error:
            return time.monotonic() - started + self._recover(chunks, error)
        finally:
            self._worth_aborting, self._yields = None, False
        now = time.monotonic()
        decoded = [(self._scheduler.computed(chunk), chunk) for chunk in chunks]
        for sequence, chunk in decoded:
            sequence.failures_alone = 0
            if chunk.samples and sequence.slot is not None:  # None: it ended with another one of its request
                self._sample(sequence, chunk.slot, now)
        return now - started

    def _main_request(self, chunks: list[Chunk]) -> Handle | None:
        """The request that most of the batch is computed for: without it the others are better served anew."""
        largest = max(chunks, key=lambda chunk: len(chunk.tokens))
        if 2 * len(largest.tokens) <= sum(len(chunk.tokens) for chunk in chunks):
            return None
        sequence = self._scheduler.slots[largest.slot]
        return sequence.group.handle if sequence is not None and self._backend.partial_reuse else None

    def _is_long_bulk(self, chunks: list[Chunk]) -> bool:
        """True for a pass that is worth giving up for somebody who waits for each token."""
        if not self._backend.partial_reuse or not self._scheduler.may_yield(sum(len(chunk.tokens) for chunk in chunks)):
            return False
        served = [self._scheduler.slots[chunk.slot] for chunk in chunks]
        return all(sequence is not None and sequence.request.priority > INTERACTIVE_PRIORITY for sequence in served)

    def _recover(self, chunks: list[Chunk], error: DecodeError) -> float:
        """Puts the slots back to where they were, then tries each alone: only what fails alone is failed."""
        for chunk in chunks:
            self._scheduler.undo(chunk)
        if error.code == ABORTED:
            return 0.0
        if error.code == NO_ROOM and self._backend.unified and self._scheduler.make_room(1, time.monotonic()):
            return 0.0  # the next step tries with what is left
        if len(chunks) > 1:
            log.warning("%s for a batch of %d requests; trying them one by one", error, len(chunks))
            return sum(self._forward([chunk]) for chunk in chunks)
        sequence = self._scheduler.slots[chunks[0].slot]
        assert sequence is not None
        sequence.failures_alone += 1
        if sequence.failures_alone >= ATTEMPTS_ALONE:
            failure = DecodeFailed(f"{error} for this request alone; the others were not affected")
            self._fail(sequence.group, failure)
        return 0.0

    def _stands(self, chunk: Chunk) -> bool:
        """True if the chunk is still what its slot has to compute next."""
        sequence = self._scheduler.slots[chunk.slot]
        return sequence is not None and sequence.num_computed == chunk.position

    def _sample(self, sequence: Sequence, slot: int, now: float) -> None:
        assert sequence.sampler is not None
        try:
            forced = None if sequence.reply is None else sequence.reply.forced_token
            token, logprob = sequence.sampler.sample(slot, forced)
        except EngineError as error:
            self._fail(sequence.group, error)
            return
        if logprob is not None:
            sequence.logprobs.append(logprob)
        self._take(sequence, token, now)

    def _take(self, sequence: Sequence, token: int, now: float) -> None:
        """Accounts a sampled token: text, stop strings, end."""
        sequence.last_token_at = now
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        if self._vocabulary.is_end(token):
            del sequence.logprobs[sequence.num_output :]
            return self._end(sequence, "stop")
        sequence.tokens.append(token)
        self._telemetry.token()
        stop = self._output.take(sequence, token)
        if stop is not None:
            return self._end(sequence, "stop", stop)
        return self._end(sequence, "length") if self._is_complete(sequence) else None

    def _is_complete(self, sequence: Sequence) -> bool:
        return sequence.num_output >= sequence.request.max_tokens or self._scheduler.is_full(sequence)

    def _end_all(self, group: Group, reason: FinishReason) -> None:
        for sequence in list(group.running):
            self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_sequence: str | None = None) -> None:
        """Ends one sequence; its request ends with the last of them."""
        self._output.finish(sequence, stopped=stop_sequence is not None)
        group = sequence.group
        group.finished.append(sequence.completion(reason, stop_sequence, time.monotonic()))
        self._free(sequence)
        if not group.running:
            self._close_group(group, Finished(sequence.request.id, completion=group.completion()))

    def _fail(self, group: Group, error: EngineError) -> None:
        for sequence in list(group.running):
            self._free(sequence, keep=False)
        self._close_group(group, Finished(group.handle.request.id, error=error))

    def _free(self, sequence: Sequence, *, keep: bool = True) -> None:
        """The only way out: slot and sampler are free before anybody hears of it."""
        sequence.group.running.remove(sequence)
        self._scheduler.release(sequence, keep=keep)
        sequence.slot = None
        if sequence.sampler is not None:
            sequence.sampler.close()

    def _close_group(self, group: Group, event: Finished) -> None:
        del self._groups[group.handle]
        self._telemetry.request(group.handle.request, event.completion, time.monotonic())
        self._output.emit(group.handle, event)
