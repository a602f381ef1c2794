"""The requests of one engine: each begins, samples and ends here, and what goes wrong for one ends that one alone."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ParamSpec

from cellama.config import limits
from cellama.engine.backend import Backend, Chunk
from cellama.engine.errors import EngineError, RequestFailed
from cellama.engine.events import Completion, Finished, FinishReason, Started
from cellama.engine.kvcache.recent import RecentContexts
from cellama.engine.logprobs import with_texts
from cellama.engine.scheduling.scheduler import Scheduler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.speculation.drafting import Drafting
from cellama.engine.system.watchdog import Pulse

from .handle import Handle
from .output import EventOutput
from .telemetry import Telemetry, timings_of

log = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")


@dataclass(eq=False, slots=True)
class Group:
    """The sequences of one request: `n` completions of one prompt, which end together. Engine thread only."""

    handle: Handle
    sequences: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)  # those that have not ended
    finished: list[Completion] = field(default_factory=list)  # in the order of their ends

    def completion(self) -> Completion:
        """The first completion, with the others as its alternatives and the tokens of all in its usage."""
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
    """Owns the groups of sequences. Engine thread only. No method raises what one request is the cause of."""

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
        self._groups: dict[Handle, Group] = {}
        self._group_of: dict[Sequence, Group] = {}
        self.recent = RecentContexts()

    def _guarded(
        self, group: Group, action: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> None:
        """Does it for a request, which ends if that fails."""
        try:
            action(*args, **kwargs)
        except Exception as error:  # the boundary between one request and all others
            self._fail(group, error)

    def handle_of(self, sequence: Sequence) -> Handle | None:
        """The request that a sequence belongs to; None if it has ended."""
        group = self._group_of.get(sequence)
        return None if group is None else group.handle

    # The beginning

    def enqueue(self, handle: Handle) -> None:
        """A request waits from now on, or has failed."""
        group = self._groups[handle] = Group(handle)
        self._guarded(group, self._enqueue, group)

    def _enqueue(self, group: Group) -> None:
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
                taken_at=handle.taken_at,
            )
            if index == 0 or not request.resume:  # else what it resumes is not what was searched for
                sequence.match = handle.match
            group.sequences.append(sequence)
            self._group_of[sequence] = group
            self._scheduler.enqueue(sequence, time.monotonic())
            group.running.append(sequence)
        self._resume(group)

    def _resume(self, group: Group) -> None:
        """Gives the sequences of a request the output that they have already; some may be at their end with it."""
        if group.handle.request.prefill_only:
            return  # it ends when its prompt is read, and not before
        for sequence, resumed in zip(list(group.running), group.handle.request.resume, strict=False):
            sequence.tokens += resumed.tokens
            sequence.logprobs += resumed.logprobs
            sequence.num_reported = len(resumed.tokens)
            sequence.mirostat_mu = resumed.mirostat_mu
            stop = self._output.replay(sequence, resumed.tokens)
            if stop is not None:
                self._end(group, sequence, "stop", stop)
            elif self._is_complete(sequence):
                self._end(group, sequence, "length")

    def start(self, sequence: Sequence) -> None:
        """A sequence has a slot, and a sampler now, or its request has failed."""
        group = self._group_of.get(sequence)
        if group is not None and sequence.sampler is None:  # else it was preempted, and goes on
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
        """Chooses the next token of a sequence and accounts it: text, stop strings, end.

        As long as that is the next draft of its chunk, the one after it, too.
        """
        self._pulse.suspect = sequence.request.id  # a beat for each would cost a third of what a token costs us
        if (group := self._group_of.get(sequence)) is None:
            return
        try:  # as `_guarded`, whose calls would take as long as finding the token
            self._sample(group, sequence, chunk.slot, now)
            for row, draft in enumerate(chunk.drafts if chunk.num_drafts else (), 1):
                if sequence.slot is None or sequence.tokens[-1] != draft:
                    break
                self._drafting.accept(sequence)
                self._sample(group, sequence, chunk.slot, now, row)
            self._drafting.end_verifying(sequence)
        except Exception as error:  # the boundary between one request and all others
            self._fail(group, error)

    def _sample(self, group: Group, sequence: Sequence, slot: int, now: float, row: int = 0) -> None:
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
        if self._vocabulary.is_end(token):
            del sequence.logprobs[sequence.num_output :]
            return self._end(group, sequence, "stop")
        sequence.tokens.append(token)
        self._telemetry.token(gap_s)
        stop = self._output.append(group.handle, sequence, token)
        if stop is not None:
            return self._end(group, sequence, "stop", stop)
        is_over = self._is_complete(sequence) or (sequence.request.only_checks and not sequence.is_as_predicted)
        return self._end(group, sequence, "length") if is_over else None

    def _is_complete(self, sequence: Sequence) -> bool:
        return sequence.num_output >= sequence.request.max_tokens or self._scheduler.is_full(sequence)

    # The end

    def end(self, handle: Handle, reason: FinishReason) -> None:
        """Ends a request before its time, with what it has, unless it has ended."""
        if (group := self._groups.get(handle)) is not None:
            self._guarded(group, self._end_all, group, reason)

    def time_out(self, sequence: Sequence) -> None:
        """Ends the request of a sequence whose deadline has passed, with what it has."""
        if (handle := self.handle_of(sequence)) is not None:
            self.end(handle, "timeout")

    def _end_all(self, group: Group, reason: FinishReason) -> None:
        for sequence in list(group.running):
            self._end(group, sequence, reason)

    def _end(self, group: Group, sequence: Sequence, reason: FinishReason, stop_sequence: str | None = None) -> None:
        """Ends one sequence; its request ends with the last of them."""
        self._output.finish(group.handle, sequence, stopped=stop_sequence is not None, cut=reason != "stop")
        completion = sequence.completion(reason, stop_sequence, timings_of(sequence, time.monotonic()))
        group.finished.append(completion)
        if completion.context is not None:
            self.recent.add(completion.context)
        self._free(group, sequence)
        if not group.running:
            self._close(group, Finished(sequence.request.id, completion=group.completion()))

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """Ends the request of a sequence with an error, unless it has ended."""
        if (group := self._group_of.get(sequence)) is not None:
            self._fail(group, error)

    def _fail(self, group: Group, error: Exception) -> None:
        """Ends a request with an error; an unforeseen one is logged, and told as RequestFailed."""
        if group.handle not in self._groups:
            return  # it has ended already
        request_id = group.handle.request.id
        if not isinstance(error, EngineError):
            log.error("request %s failed in an unforeseen way; others go on", request_id, exc_info=error)
            error = RequestFailed(f"{type(error).__name__}: {error}; the other requests were not affected")
        for sequence in list(group.running):
            try:
                self._free(group, sequence, keep=False)
            except Exception:  # the request ends all the same
                log.exception("the slot of request %s could not be emptied", request_id)
        self._close(group, Finished(request_id, error=error))

    def fail_all(self, error: EngineError) -> None:
        """Ends all requests with an error."""
        for group in list(self._groups.values()):
            self._fail(group, error)

    def _free(self, group: Group, sequence: Sequence, *, keep: bool = True) -> None:
        """Free the slot of a sequence, before its caller learns that it ended."""
        group.running.remove(sequence)
        try:
            self._drafting.end(sequence)
        except Exception:  # what the slot holds is unknown
            log.exception("the drafts of request %s could not be taken back", sequence.request.id)
            keep = False
        self._scheduler.release(sequence, keep=keep)

    def _close(self, group: Group, event: Finished) -> None:
        del self._groups[group.handle]
        for sequence in group.sequences:
            del self._group_of[sequence]
        self._telemetry.request(group.handle.request, event.completion, time.monotonic())
        self._output.emit(group.handle, event)
