"""An engine's requests, from submission to the terminal event.

This module manages request handles, output events, and the sequences of each request. A failed request doesn't affect
other requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from cellama.config import limits
from cellama.config.logging import event_logger
from cellama.engine.backend import AdapterSet, Backend, Chunk, Vocabulary
from cellama.engine.errors import EngineError, RequestFailed
from cellama.engine.events import Completion, Event, Finished, FinishReason, Started, Text
from cellama.engine.kvcache.ram_tier import RecentContexts
from cellama.engine.kvstore.states import StateMatch
from cellama.engine.request import Request, with_texts
from cellama.engine.scheduling.scheduler import Scheduler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.speculation.drafting import Drafting
from cellama.engine.system.watchdog import Pulse
from cellama.engine.text.detokenizer import StopMatch
from cellama.engine.text.formats.calls import CallDelta
from cellama.engine.text.reply_reader import Kind, ReplyPart

from .telemetry import Telemetry, timings_of

log = event_logger(__name__)

T = TypeVar("T")
CancelReason = Literal["cancelled", "timeout"]


class Handle:
    """Lets a caller wait for, observe or cancel one request. A handle is thread-safe."""

    def __init__(
        self,
        request: Request,
        cancel: Callable[[Handle, CancelReason], None],
        on_event: Callable[[Event], None] | None,
        adapters: AdapterSet = (),
        plan: Any = None,
    ) -> None:
        """Create a handle.

        `adapters` stay in use until the request has finished. Samplers are created from `plan`.
        """
        self.request = request
        self.received_at = time.monotonic()
        self.adapters = adapters
        self.plan = plan
        self.match: StateMatch | None = None  # a stored state with a prefix of its prompt
        self.future: Future[Completion] = Future()
        self.future.set_running_or_notify_cancel()  # only the engine may end it: see `cancel`
        self._cancel = cancel
        self._on_event = on_event

    def result(self, timeout_s: float | None = None) -> Completion:
        """Return the completion.

        Raises the request's EngineError, or TimeoutError if the request has not finished after `timeout_s`.
        """
        return self.future.result(timeout_s)

    def cancel(self, reason: CancelReason = "cancelled") -> None:
        """Ask the engine to end the request at the next step. Calling this method again has no effect."""
        self._cancel(self, reason)

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback` on the engine thread when the request finishes, or immediately if it has already finished."""
        self.future.add_done_callback(lambda _: callback(self))

    @property
    def done(self) -> bool:
        """Return whether the request has finished, failed or been cancelled."""
        return self.future.done()

    def deliver(self, event: Event) -> None:
        """Deliver an event to the caller. Only the engine thread may call this method."""
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # the callback's code, on the engine thread
                log.exception(
                    "event callback failed", request=self.request.id, detail="the callback will not be called again"
                )
                self._on_event = None
        if isinstance(event, Finished):
            if event.error is not None:
                self.future.set_exception(event.error)
            elif event.completion is not None:
                self.future.set_result(event.completion)


class EngineCall(Generic[T]):
    """A function for the engine thread to call between two steps, while another thread waits for the result."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self.future: Future[T] = Future()

    def run(self) -> None:
        """Call the function. Only the engine thread may call this method."""
        if not self.future.set_running_or_notify_cancel():
            return  # the other thread no longer waits
        try:
            self.future.set_result(self._action())
        except Exception as error:  # the boundary between the engine and one call
            self.future.set_exception(error)


# Tokens after which an event is emitted even without final text, so that another worker can resume after them.
HELD_BACK_TOKENS = 16

Listener = Callable[[tuple[Event, ...]], None]


class EventOutput:
    """Turns sequences' tokens into events, and delivers the events to the listeners once per step.

    Only the engine thread may use this class.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.listeners: list[Listener] = []
        self._vocabulary = vocabulary
        self._events: list[Event] = []

    def append(self, handle: Handle, sequence: Sequence, token: int) -> str | None:
        """Emit the text that becomes final with this token. Return the stop string that ends the sequence, or None."""
        released = self._text_after(sequence, token, sequence.num_output)
        if isinstance(released, StopMatch):
            self._release(handle, sequence, released.released)
            return released.stop
        self._release(handle, sequence, released)
        return None

    def replay(self, sequence: Sequence, tokens: tuple[int, ...]) -> str | None:
        """Process tokens that were reported earlier, without emitting events.

        Return the stop string that ends the sequence, or None.
        """
        for count, token in enumerate(tokens, 1):
            released = self._text_after(sequence, token, count)
            text = released.released if isinstance(released, StopMatch) else released
            sequence.add_parts([ReplyPart("text", text)] if sequence.reply is None else sequence.reply.push(text))
            if isinstance(released, StopMatch):
                return released.stop
        return None

    def finish(self, handle: Handle, sequence: Sequence, *, stopped: bool, cut: bool) -> None:
        """Emit a finished sequence's held-back text, unless the sequence ended at a stop string (`stopped`).

        `cut` is true if the sequence was ended before the model finished its reply.
        """
        if not stopped:
            self._release(handle, sequence, sequence.text_stream.flush())
        if sequence.reply is not None:
            parts, sequence.tool_calls = sequence.reply.finish(cut=cut)
            self._release_parts(handle, sequence, parts)

    def emit(self, handle: Handle, event: Event) -> None:
        """Pass an event to its request immediately, and to the listeners with the next `flush`."""
        if self.listeners:
            self._events.append(event)
        handle.deliver(event)

    def flush(self) -> None:
        """Pass all new events to the listeners."""
        if not self._events:
            return
        events, self._events = tuple(self._events), []
        for listener in self.listeners:
            try:
                listener(events)
            except Exception:  # the callback's code, on the engine thread
                log.exception("event listener failed", detail="the listener will still receive later events")

    def _text_after(self, sequence: Sequence, token: int, count: int) -> str | StopMatch:
        """Return the text that becomes final with this token.

        `count` is the number of output tokens, including this token.
        """
        visible = None
        if sequence.reply is not None:
            sequence.reply.note_token()
            visible = sequence.reply.text_of(token)
        data = self._vocabulary.token_bytes(token) if visible is None else visible
        return sequence.text_stream.push(data, can_stop=count > sequence.request.sampling.min_tokens)

    def _release(self, handle: Handle, sequence: Sequence, text: str) -> None:
        if sequence.reply is not None:
            parts = sequence.reply.push(text)
            if sequence.sampler is not None and sequence.reply.num_unbound is not None:
                sequence.sampler.bind()
            self._release_parts(handle, sequence, parts)
        elif text:
            sequence.texts.append(text)
            self._emit_text(handle, sequence, text, "text")

    def _release_parts(self, handle: Handle, sequence: Sequence, parts: list[ReplyPart]) -> None:
        """Emit the parts of a chat reply that have become final.

        While text is held back for a long time, empty text events are emitted to report the new tokens.
        """
        sequence.add_parts(parts)
        for part in parts:
            if part.kind == "reasoning_end":
                self._emit_text(handle, sequence, sequence.reasoning or "", part.kind)
            else:
                self._emit_text(handle, sequence, part.text, part.kind, part.calls)
        if not parts and sequence.num_output - sequence.num_reported >= HELD_BACK_TOKENS:
            self._emit_text(handle, sequence, "", "text")

    def _emit_text(
        self, handle: Handle, sequence: Sequence, text: str, kind: Kind, calls: tuple[CallDelta, ...] = ()
    ) -> None:
        if sequence.request.stream:
            first, sequence.num_reported = sequence.num_reported, sequence.num_output
            tokens = tuple(sequence.tokens[sequence.num_prompt + first :])
            logprobs = tuple(sequence.logprobs[first:]) if sequence.logprobs else ()
            mu = None if sequence.sampler is None else sequence.sampler.mirostat_mu
            event = Text(
                request_id=sequence.request.id,
                text=text,
                tokens=tokens,
                index=sequence.index,
                logprobs=logprobs,
                kind=kind,
                mirostat_mu=mu,
                calls=calls,
            )
            self.emit(handle, event)


Arguments = ParamSpec("Arguments")


@dataclass(eq=False, slots=True)
class RequestGroup:
    """A request's sequences. Each sequence generates one of the request's `n` completions.

    The request ends when its last sequence ends. Only the engine thread may use this class.
    """

    handle: Handle
    sequences: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)  # unfinished sequences
    finished: list[Completion] = field(default_factory=list)  # in the order in which they finished

    def completion(self) -> Completion:
        """Return the first completion, with the other completions as its alternatives.

        The usage covers all completions.
        """
        first, *others = sorted(self.finished, key=lambda completion: completion.index)
        if not others:
            return first
        parts = [completion.usage for completion in self.finished]
        usage = replace(
            first.usage,
            completion_tokens=sum(part.completion_tokens for part in parts),
            accepted_prediction_tokens=sum(part.accepted_prediction_tokens for part in parts),
            rejected_prediction_tokens=sum(part.rejected_prediction_tokens for part in parts),
        )
        return replace(first, usage=usage, alternatives=tuple(others))


class EngineRequests:
    """Owns the sequences of all requests. Only the engine thread may use this class.

    The methods never raise errors that are caused by a single request. Such an error ends only that request.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        drafting: Drafting,
        output: EventOutput,
        telemetry: Telemetry,
        pulse: Pulse,
    ) -> None:
        self._backend = backend
        self._vocabulary = backend.vocabulary
        self._scheduler = scheduler
        self._drafting = drafting
        self._output = output
        self._telemetry = telemetry
        self._pulse = pulse
        self._groups: dict[Handle, RequestGroup] = {}
        self._group_of: dict[Sequence, RequestGroup] = {}
        self.recent = RecentContexts()

    def _guarded(
        self,
        group: RequestGroup,
        action: Callable[Arguments, object],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Run an action for a request. If the action fails, only this request ends."""
        try:
            action(*args, **kwargs)
        except Exception as error:  # the boundary between one request and all others
            self._fail(group, error)

    def handle_of(self, sequence: Sequence) -> Handle | None:
        """Return the handle of a sequence's request, or None if the request has ended."""
        group = self._group_of.get(sequence)
        return None if group is None else group.handle

    # Starting

    def enqueue(self, handle: Handle) -> None:
        """Add a request to the waiting queue, or fail the request."""
        group = self._groups[handle] = RequestGroup(handle)
        self._guarded(group, self._enqueue, group)

    def _enqueue(self, group: RequestGroup) -> None:
        handle, request = group.handle, group.handle.request
        assert request.submitted_at is not None
        seed = request.sampling.seed
        seed = secrets.randbelow(limits.MAX_SEED + 1) if seed is None else seed
        for index in range(request.n):
            sequence = Sequence(
                request,
                seed=(seed + index) % (limits.MAX_SEED + 1),
                submitted_at=request.submitted_at,
                tokens=list(request.prompt),
                index=index,
                adapters=handle.adapters,
                identity=self._backend.identity,
                received_at=handle.received_at,
            )
            if index == 0 or not request.resume:  # otherwise, the match was found for the tokens of another sequence
                sequence.match = handle.match
            group.sequences.append(sequence)
            self._group_of[sequence] = group
            self._scheduler.enqueue(sequence, time.monotonic())
            group.running.append(sequence)
        self._resume(group)

    def _resume(self, group: RequestGroup) -> None:
        """Add the earlier output to the sequences of a resumed request.

        As a result, some sequences may already be finished.
        """
        if group.handle.request.prefill_only:
            return  # it ends when its prompt has been computed
        for sequence, resumed in zip(list(group.running), group.handle.request.resume, strict=False):
            sequence.tokens += resumed.tokens
            sequence.logprobs += resumed.logprobs
            sequence.num_reported = len(resumed.tokens)
            sequence.mirostat_mu = resumed.mirostat_mu
            stop = self._output.replay(sequence, resumed.tokens)
            if stop is not None:
                self._end(group, sequence, "stop", stop)
            elif resumed.tokens and resumed.tokens[-1] in sequence.request.sampling.stop_token_ids:
                self._end(group, sequence, "stop")
            elif self._is_complete(sequence):
                self._end(group, sequence, "length")

    def start(self, sequence: Sequence) -> None:
        """Create a sampler for a sequence that has received a slot, and emit Started.

        If creating the sampler fails, the request fails.
        """
        group = self._group_of.get(sequence)
        if group is not None and sequence.sampler is None:  # a preempted sequence already has a sampler
            self._pulse.beat("start", (sequence.request.id,))
            self._guarded(group, self._start, group.handle, sequence)

    def _start(self, handle: Handle, sequence: Sequence) -> None:
        request = sequence.request
        sequence.sampler = self._backend.new_sampler(
            handle.plan,
            sequence.seed,
            sequence.tokens,
            ban_end=request.ignore_eos,
            num_sampled=sequence.num_output,
            num_unbound=0 if sequence.reply is None else sequence.reply.num_unbound,
            mirostat_mu=sequence.mirostat_mu,
        )
        if sequence.index == 0:
            assert sequence.slot is not None
            started = Started(
                request.id,
                slot=sequence.slot,
                num_prompt_tokens=sequence.num_prompt,
                num_cached_tokens=sequence.num_cached,
                seed=sequence.seed,
            )
            self._output.emit(handle, started)
            self._telemetry.last_cache_hit = sequence.usage.cache_hit

    # Tokens

    def sample(self, sequence: Sequence, chunk: Chunk, now: float) -> None:
        """Sample a sequence's next token and process it. The token may make text final or end the sequence.

        As long as the sampled token matches the chunk's next draft token, the token after the draft token is also
        sampled.
        """
        self._pulse.suspect = sequence.request.id  # cheaper than a beat, which would add a third to the time per token
        if (group := self._group_of.get(sequence)) is None:
            return
        try:  # not `_guarded`, because its calls would take as long as sampling
            self._sample(group, sequence, chunk.slot, now)
            for row, draft in enumerate(chunk.drafts if chunk.num_drafts else (), 1):
                if sequence.slot is None or sequence.tokens[-1] != draft:
                    break
                self._drafting.accept(sequence)
                self._sample(group, sequence, chunk.slot, now, row)
            self._drafting.end_verifying(sequence)
        except Exception as error:  # the boundary between one request and all others
            self._fail(group, error)

    def _sample(self, group: RequestGroup, sequence: Sequence, slot: int, now: float, row: int = 0) -> None:
        assert sequence.sampler is not None
        if sequence.request.prefill_only:
            return self._end(group, sequence, "length")
        forced = None if sequence.reply is None else sequence.reply.forced_token
        token, logprob = sequence.sampler.sample(slot, forced, row)
        if logprob is not None:
            sequence.logprobs.append(with_texts(logprob, self._vocabulary.token_bytes))
        gap_s = None if sequence.last_token_at is None or row else now - sequence.last_token_at
        sequence.last_token_at = now
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        is_stop = token in sequence.request.sampling.stop_token_ids
        if self._vocabulary.is_end(token) or (is_stop and not sequence.request.include_stop_str_in_output):
            del sequence.logprobs[sequence.num_output :]
            return self._end(group, sequence, "stop")
        sequence.tokens.append(token)
        self._telemetry.token(gap_s)
        stop = self._output.append(group.handle, sequence, token)
        if stop is not None:
            return self._end(group, sequence, "stop", stop)
        if is_stop:
            return self._end(group, sequence, "stop")
        is_complete = self._is_complete(sequence) or (sequence.request.only_checks and not sequence.matches_prediction)
        return self._end(group, sequence, "length") if is_complete else None

    def _is_complete(self, sequence: Sequence) -> bool:
        return sequence.num_output >= sequence.request.max_tokens or self._scheduler.is_full(sequence)

    # Finishing

    def end(self, handle: Handle, reason: FinishReason) -> None:
        """End a request early, and complete it with the output generated so far.

        If the request has already ended, do nothing.
        """
        if (group := self._groups.get(handle)) is not None:
            self._guarded(group, self._end_all, group, reason)

    def time_out(self, sequence: Sequence) -> None:
        """End the request of a sequence whose deadline has passed, and complete it with the output generated so far."""
        if (handle := self.handle_of(sequence)) is not None:
            self.end(handle, "timeout")

    def _end_all(self, group: RequestGroup, reason: FinishReason) -> None:
        for sequence in list(group.running):
            self._end(group, sequence, reason)

    def _end(
        self, group: RequestGroup, sequence: Sequence, reason: FinishReason, stop_sequence: str | None = None
    ) -> None:
        """End one sequence. The request ends together with its last sequence."""
        self._output.finish(group.handle, sequence, stopped=stop_sequence is not None, cut=reason != "stop")
        completion = sequence.completion(reason, stop_sequence, timings_of(sequence, time.monotonic()))
        group.finished.append(completion)
        if completion.context is not None:
            self.recent.add(completion.context)
        self._free(group, sequence)
        if not group.running:
            self._close(group, Finished(sequence.request.id, completion=group.completion()))

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence's request with an error. If the request has already ended, do nothing."""
        if (group := self._group_of.get(sequence)) is not None:
            self._fail(group, error)

    def _fail(self, group: RequestGroup, error: Exception) -> None:
        """End a request with an error. An unexpected error is logged and reported as RequestFailed."""
        if group.handle not in self._groups:
            return  # it has already ended
        request_id = group.handle.request.id
        if not isinstance(error, EngineError):
            log.error("request failed", exc_info=error, request=request_id, detail="unexpected error")
            error = RequestFailed(f"{type(error).__name__}: {error}; other requests were not affected")
        for sequence in list(group.running):
            try:
                self._free(group, sequence, keep=False)
            except Exception:  # the request still has to end
                log.exception("slot not released", request=request_id)
        self._close(group, Finished(request_id, error=error))

    def fail_all(self, error: EngineError) -> None:
        """End all requests with an error."""
        for group in list(self._groups.values()):
            self._fail(group, error)

    def _free(self, group: RequestGroup, sequence: Sequence, *, keep: bool = True) -> None:
        """Free a sequence's slot before its caller is notified."""
        group.running.remove(sequence)
        try:
            self._drafting.end(sequence)
        except Exception:  # the content of the slot is unknown
            log.exception("draft tokens not removed", request=sequence.request.id)
            keep = False
        self._scheduler.release(sequence, keep=keep)

    def _close(self, group: RequestGroup, event: Finished) -> None:
        del self._groups[group.handle]
        for sequence in group.sequences:
            del self._group_of[sequence]
        self._telemetry.request(group.handle.request, event.completion, time.monotonic())
        self._output.emit(group.handle, event)
