"""The engine: one thread that admits, schedules, decodes and samples, and hands out what it did once per step.

    while there is work:  receive → expire → admit → schedule → forward → update → tell

The thread owns the backend, the scheduler and all sequences. Others reach it through the inbox and read snapshots.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

from .backend import Backend, DecodeError
from .errors import DecodeFailed, EngineError, EngineStopped, InvalidRequest, nearest
from .events import EngineSnapshot, Event, Finished, FinishReason, RequestStats, Started, StepStats, Text
from .handle import CancelReason, Handle
from .params import MAX_SEED, EngineOptions, Request, SamplingParams
from .scheduler import Chunk, Limits, Scheduler
from .sequence import Sequence
from .strategies import make_strategy
from .telemetry import Telemetry
from .text import StopMatch

log = logging.getLogger(__name__)

ABORTED = 2  # llama.h: llama_decode; nothing of the batch counts, the same batch may be tried again
GENERATE_TIMEOUT_S = 60.0
CHUNK_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 30.0

Errand = Literal["submit", "stop"] | CancelReason
Listener = Callable[[tuple[Event, ...]], None]


class Engine:
    """Serves many requests at once on one backend. Every method may be called from any thread."""

    def __init__(self, backend: Backend, options: EngineOptions, name: str = "engine") -> None:
        self._backend = backend
        self._vocabulary = backend.vocabulary
        limits = Limits(
            options.n_parallel, backend.ctx_per_slot, options.n_batch, options.chunk_size, options.max_queue
        )
        self._scheduler = Scheduler(limits, make_strategy(options.batch_strategy))
        self._telemetry = Telemetry(self._scheduler)
        self._listeners: list[Listener] = []
        self._events: list[Event] = []
        self._sequences: dict[Handle, Sequence] = {}
        self._handles: dict[Sequence, Handle] = {}
        self._inbox: queue.SimpleQueue[tuple[Errand, Handle | None]] = queue.SimpleQueue()
        self._closed = False
        self._hand_over = threading.Lock()  # nothing enters the inbox after `_closed`
        self._thread = threading.Thread(target=self._run, name=f"cellama-{name}", daemon=True)
        self._thread.start()

    # For callers

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Handle:
        """Hands a request to the engine. `on_event` is called on the engine thread: it must only hand over.

        Raises InvalidRequest, PromptTooLong, EngineStopped at once; QueueFull comes through the handle.
        """
        self._scheduler.check(len(request.prompt))
        if not all(0 <= token < self._backend.n_vocab for token in request.prompt):
            raise InvalidRequest(f"the prompt has token ids outside 0..{self._backend.n_vocab - 1}")
        if request.submitted_at is None:
            request = replace(request, submitted_at=time.monotonic())
        handle = Handle(request, self._ask_to_cancel, on_event)
        if not self._put("submit", handle):
            raise EngineStopped("the engine is closed; the request was not taken")
        return handle

    def generate(self, prompt: str | Seq[int], *, timeout_s: float = GENERATE_TIMEOUT_S, **params: Any) -> str:
        """The text that follows a prompt (text or token ids). `params` as in Request and SamplingParams.

        Raises TimeoutError when it takes longer than `timeout_s`; the slot is free then.
        """
        completion = self.submit(self._request(prompt, timeout_s, stream=False, **params)).result()
        if completion.finish_reason == "timeout":
            raise TimeoutError(f"the generation took longer than {timeout_s} s; raise timeout_s or lower max_tokens")
        return completion.text

    def stream(self, prompt: str | Seq[int], *, timeout_s: float = CHUNK_TIMEOUT_S, **params: Any) -> Iterator[str]:
        """Chunks of text as they become final; leaving the loop cancels the request.

        Raises TimeoutError when a chunk takes longer than `timeout_s`, and the request's EngineError.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        handle = self.submit(self._request(prompt, None, stream=True, **params), events.put)
        try:
            while True:
                try:
                    event = events.get(timeout=timeout_s)
                except queue.Empty:
                    raise TimeoutError(f"no text for {timeout_s} s; raise timeout_s or see the engine's load") from None
                if isinstance(event, Text):
                    yield event.text
                elif isinstance(event, Finished):
                    handle.result()
                    return
        finally:
            handle.cancel()

    def add_listener(self, listener: Listener) -> None:
        """Calls `listener` once per step with all events, on the engine thread: it must only hand over."""
        self._listeners.append(listener)

    def add_step_listener(self, listener: Callable[[StepStats], None]) -> None:
        """Calls `listener` after every step, on the engine thread."""
        self._telemetry.on_step.append(listener)

    def add_request_listener(self, listener: Callable[[RequestStats], None]) -> None:
        """Calls `listener` at the end of every request, on the engine thread."""
        self._telemetry.on_request.append(listener)

    def snapshot(self) -> EngineSnapshot:
        """The state after the last step. Never waits."""
        return self._telemetry.snapshot

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fails what is unfinished with EngineStopped and frees the backend; False if a step takes longer."""
        self._put("stop", None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _request(self, prompt: str | Seq[int], timeout_s: float | None, *, stream: bool, **params: Any) -> Request:
        tokens = self._vocabulary.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        sampling = {name: params.pop(name) for name in SamplingParams.__dataclass_fields__ if name in params}
        known = Request.__dataclass_fields__.keys() | SamplingParams.__dataclass_fields__.keys()
        for name in params.keys() - known:
            raise InvalidRequest(f"unknown parameter {name!r}; {nearest(name, known)}")
        request_id = params.pop("id", None) or uuid4().hex
        return Request(
            request_id, tuple(tokens), SamplingParams(**sampling), timeout_s=timeout_s, stream=stream, **params
        )

    def _put(self, what: Errand, handle: Handle | None) -> bool:
        with self._hand_over:
            if self._closed:
                return False
            self._inbox.put((what, handle))
            return True

    def _ask_to_cancel(self, handle: Handle, reason: CancelReason) -> None:
        if not handle.done:
            self._put(reason, handle)

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
        for sequence in self._scheduler.unfinished():
            self._fail(sequence, error)
        self._tell()
        self._telemetry.step([], 0.0, 0.0)
        self._backend.close()

    def _receive(self) -> bool:
        """Takes everything from the inbox, waiting only when there is nothing else to do; False to stop."""
        while not self._inbox.empty() or not self._scheduler.has_work:
            what, handle = self._inbox.get()
            if what == "stop" or handle is None:
                return False
            if what == "submit":
                self._enqueue(handle)
            elif handle in self._sequences:
                self._finish(self._sequences[handle], what)
            if not self._scheduler.has_work:
                self._tell()
                self._telemetry.step([], 0.0, 0.0)
        return True

    def _enqueue(self, handle: Handle) -> None:
        request = handle.request
        assert request.submitted_at is not None
        seed = request.sampling.seed
        seed = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
        sequence = Sequence(request, seed, request.submitted_at, list(request.prompt))
        try:
            self._scheduler.enqueue(sequence)
        except EngineError as error:
            handle.deliver(self._report(Finished(request.id, error=error)))
            return
        self._sequences[handle] = sequence
        self._handles[sequence] = handle

    def _step(self) -> None:
        started = time.monotonic()
        for sequence in self._scheduler.expired(started):
            self._finish(sequence, "timeout")
        for sequence in self._scheduler.admit():
            self._start(sequence, started)
        chunks = self._scheduler.schedule()
        eval_s = self._forward(chunks) if chunks else 0.0
        self._tell()
        self._telemetry.step(chunks, eval_s, time.monotonic() - started)

    def _start(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        sequence.admitted_at = now
        sequence.sampler = self._backend.new_sampler(
            request.sampling, sequence.seed, request.prompt, ban_end=request.ignore_eos
        )
        assert sequence.slot is not None
        self._emit(sequence, Started(request.id, sequence.slot, sequence.num_prompt, sequence.num_cached))

    def _forward(self, chunks: list[Chunk]) -> float:
        """Decodes and samples; returns the seconds inside decode. A failure is traced to its request."""
        started = time.monotonic()
        try:
            self._backend.decode(chunks)
        except DecodeError as error:
            return time.monotonic() - started + self._recover(chunks, error)
        now = time.monotonic()
        for chunk in chunks:
            sequence = self._scheduler.computed(chunk)
            if chunk.samples:
                assert sequence.sampler is not None
                self._take(sequence, sequence.sampler.sample(chunk.slot), now)
        return now - started

    def _recover(self, chunks: list[Chunk], error: DecodeError) -> float:
        """Puts the slots back to where they were, then tries each alone: only what fails alone is failed."""
        for chunk in chunks:
            self._backend.trim(chunk.slot, chunk.position)
        if error.code == ABORTED:
            return 0.0
        if len(chunks) > 1:
            log.warning("%s for a batch of %d requests; trying them one by one", error, len(chunks))
            return sum(self._forward([chunk]) for chunk in chunks)
        sequence = self._scheduler.slots[chunks[0].slot]
        assert sequence is not None
        self._fail(sequence, DecodeFailed(f"{error} for this request alone; the others were not affected"))
        return 0.0

    def _take(self, sequence: Sequence, token: int, now: float) -> None:
        """Accounts a sampled token: text, stop strings, end."""
        sequence.last_token_at = now
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        if self._vocabulary.is_end(token):
            return self._finish(sequence, "stop")
        sequence.tokens.append(token)
        self._telemetry.token()
        released = sequence.text_stream.push(self._vocabulary.token_bytes(token))
        if isinstance(released, StopMatch):
            self._release_text(sequence, released.released)
            return self._finish(sequence, "stop", released.stop)
        self._release_text(sequence, released)
        if sequence.num_output >= sequence.request.max_tokens or self._scheduler.is_full(sequence):
            return self._finish(sequence, "length")
        return None

    def _release_text(self, sequence: Sequence, text: str) -> None:
        if not text:
            return
        sequence.texts.append(text)
        if sequence.request.stream:
            first = sequence.num_prompt + sequence.num_reported
            new = tuple(sequence.tokens[first:])
            sequence.num_reported += len(new)
            self._emit(sequence, Text(sequence.request.id, text, new))

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_sequence: str | None = None) -> None:
        if stop_sequence is None:
            self._release_text(sequence, sequence.text_stream.flush())
        completion = sequence.completion(reason, stop_sequence, time.monotonic())
        self._end(sequence, Finished(sequence.request.id, completion=completion))

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        self._end(sequence, Finished(sequence.request.id, error=error))

    def _end(self, sequence: Sequence, event: Finished) -> None:
        """The only way out: slot, cells and sampler are free before anybody hears of it."""
        slot = self._scheduler.release(sequence)
        if slot is not None:
            self._backend.trim(slot, 0)
        if sequence.sampler is not None:
            sequence.sampler.close()
        self._telemetry.request(sequence, event.completion, time.monotonic())
        handle = self._handles.pop(sequence)
        del self._sequences[handle]
        handle.deliver(self._report(event))

    def _emit(self, sequence: Sequence, event: Event) -> None:
        self._handles[sequence].deliver(self._report(event))

    def _report(self, event: Event) -> Event:
        if self._listeners:
            self._events.append(event)
        return event

    def _tell(self) -> None:
        if not self._events:
            return
        events, self._events = tuple(self._events), []
        for listener in self._listeners:
            listener(events)
