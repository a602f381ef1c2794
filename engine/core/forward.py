"""Run a step's decode calls. If a call fails, its requests are retried individually to find the cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence as Seq
from typing import NamedTuple

from cellama.config.logging import event_logger
from cellama.engine.backend import ABORTED, NO_FREE_CELLS, Backend, Chunk, DecodeError
from cellama.engine.errors import DecodeFailed
from cellama.engine.request import Request
from cellama.engine.scheduling.scheduler import Scheduler
from cellama.engine.scheduling.sequence import Sequence, SlotWork, work_of
from cellama.engine.scheduling.strategies import MIN_CHUNK, Interruptions, prefill_order
from cellama.engine.speculation.drafting import Drafting
from cellama.engine.system.watchdog import FIRST_S, Pulse

from .requests import EngineRequests, Handle

log = event_logger(__name__)

ATTEMPTS_ALONE = 2  # decode calls for a request alone before it fails: a single failure may have another cause
BROKEN = 3  # consecutive requests that fail alone before the backend counts as broken


class Deferred(DecodeError):
    """Raised if a decode call is postponed because an interactive request has arrived.

    A later step then makes the decode call.
    """


class BackendBroken(Exception):
    """Raised if the backend can no longer compute requests, and no single request is the cause."""


class Computed(NamedTuple):
    """The result of one decode call."""

    works: list[SlotWork]
    num_tokens: int
    at: float  # end of the call, as time.monotonic()
    seconds: float  # duration of the call


class Forward:
    """Runs the decode calls of a step.

    Only the engine thread may use this class, except for `note_arrival` and reads of `abortable_handle`.
    """

    def __init__(
        self, backend: Backend, scheduler: Scheduler, requests: EngineRequests, drafting: Drafting, pulse: Pulse
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._drafting = drafting
        self._requests = requests
        self._pulse = pulse
        self._interruptions = Interruptions()
        self._num_failed_alone = 0  # consecutive requests that failed alone
        self.abortable_handle: Handle | None = None  # cancelling this request aborts the current decode call
        self._is_interruptible = False  # an arriving interactive request aborts the current decode call
        self._has_arrival = False  # an interactive request has arrived since the step started
        self._has_protected_arrival = False  # a protected request has arrived since the step started

    def begin_step(self) -> None:
        """Clear the flags that are set when an interactive request arrives.

        This method must be called before the inbox is read.
        """
        self._has_arrival = self._has_protected_arrival = False

    def note_arrival(self, request: Request) -> None:
        """Stop this step's bulk work if an interactive request has arrived. Any thread may call this method.

        If a protected request has arrived, all decode calls without protected requests are left to a later step.
        """
        self._has_protected_arrival |= request.is_protected
        if not request.is_interactive:
            return
        self._has_arrival = True
        if self._is_interruptible:
            self._backend.abort()

    def run(self, works: list[SlotWork]) -> Iterator[Computed]:
        """Decode and yield one micro-batch at a time.

        The caller must sample a micro-batch's tokens before requesting the next micro-batch. If a micro-batch fails,
        each of its requests is retried individually. A request that fails again ends with an error. Raises
        BackendBroken if the backend is broken and another process can take over.
        """
        self._drafting.begin_step()
        checks, works = self._drafting.take_checks(works)
        for check in checks:
            yield from self._compute([check])
        if works and self._drafting.is_active and self._scheduler.only_decodes:  # otherwise drafts would delay others
            micro_batches = self._drafting.plan_calls(works)
        else:
            micro_batches = micro_batches_of(works, unified=self._backend.unified)
        for micro_batch in micro_batches:
            if not self._has_protected_arrival or any(work.sequence.request.is_protected for work in micro_batch):
                yield from self._compute(micro_batch)

    def _compute(self, works: list[SlotWork]) -> Iterator[Computed]:
        # Skip work that is out of date, because its request has ended or lost its slot.
        works = [work for work in works if work[0].slot == work[1].slot and work[0].num_computed == work[1].position]
        if not works:
            return
        works, padding = self._scheduler.layout.fill(works)
        num_tokens = sum([len(chunk.tokens) for _, chunk in works])
        chunks = [chunk for _, chunk in works]
        if padding:
            chunks = sorted(chunks + padding, key=lambda chunk: chunk.slot)
        is_bulk = not any(sequence.request.is_interactive for sequence, _ in works)
        may_interrupt = is_bulk and self._may_interrupt(num_tokens)
        started = time.monotonic()
        try:
            error = self._decode(works, chunks, num_tokens, may_interrupt=may_interrupt)
        finally:
            self._scheduler.layout.remove_padding(padding)
        if error is not None:
            if isinstance(error, Deferred):
                self._interruptions.observe_deferred()
            elif may_interrupt and isinstance(error, DecodeError) and error.code == ABORTED:
                self._interruptions.observe_aborted(time.monotonic() - started)
            yield from self._recover(works, error)
            return
        now = time.monotonic()
        self._num_failed_alone = 0
        self._interruptions.observe(now - started, is_bulk=is_bulk)
        self._scheduler.observe_decode(chunks, now - started)
        self._drafting.observe(chunks, now - started)
        yield Computed(works, num_tokens, at=now, seconds=now - started)

    def _decode(
        self, works: list[SlotWork], chunks: list[Chunk], num_tokens: int, *, may_interrupt: bool
    ) -> Exception | None:
        """Decode the chunks and the padding in one call. Return the error if the call fails."""
        self.abortable_handle = self._main_request(works, num_tokens)
        self._is_interruptible = may_interrupt
        self._pulse.beat("decode", [sequence.request.id for sequence, _ in works], num_tokens, FIRST_S)
        try:
            if may_interrupt and self._has_arrival:  # later arrivals abort the call, because the flag is already set
                raise Deferred(ABORTED)
            self._backend.decode(chunks, works[0].sequence.adapters)
        except DecodeError as error:
            return error
        except Exception as error:  # the tokens or adapters of one request may be the cause
            log.exception("decode call failed", num_requests=len(works), detail="unexpected error")
            return error
        finally:
            self.abortable_handle, self._is_interruptible = None, False
            self._pulse.beat("sample", size=len(works))
        return None

    def _main_request(self, works: list[SlotWork], num_tokens: int) -> Handle | None:
        """Return the request that accounts for most of the batch's tokens, or None.

        Cancelling this request aborts the call.
        """
        if num_tokens == len(works) > 1 or not self._backend.partial_reuse:
            return None  # each request has one token
        if len(works) == 1:
            return self._requests.handle_of(works[0].sequence)
        sequence, chunk = max(works, key=lambda work: len(work.chunk.tokens))
        return self._requests.handle_of(sequence) if 2 * len(chunk.tokens) > num_tokens else None

    def _may_interrupt(self, num_tokens: int) -> bool:
        """Return whether an interactive request may abort a decode call with this number of bulk tokens."""
        is_long = self._scheduler.strategy.may_yield(num_tokens)
        return self._backend.partial_reuse and (is_long or self._interruptions.are_affordable)

    def _recover(self, works: list[SlotWork], error: Exception) -> Iterator[Computed]:
        """Restore the slots, then retry each request individually. Only requests that fail again end with an error."""
        for work in works:
            self._scheduler.rollback(work)
        code = error.code if isinstance(error, DecodeError) else None
        if code == ABORTED:
            return
        if any(work.chunk.num_drafts for work in works):
            yield from self._compute([work_of(sequence, 1) for sequence, _ in works])
            return
        if code == NO_FREE_CELLS and self._backend.unified and self._scheduler.free_cells(1, time.monotonic()):
            return  # the next step works with the remaining cells
        if len(works) == 1:
            self._fail_alone(works[0].sequence, error)
            return
        log.warning(
            "decode call failed",
            error=repr(error),
            num_requests=len(works),
            detail="each request will be retried individually",
        )
        for work in works:
            yield from self._compute([work])

    def _fail_alone(self, sequence: Sequence, error: Exception) -> None:
        sequence.failures_alone += 1
        if sequence.failures_alone < ATTEMPTS_ALONE:
            return
        self._num_failed_alone += 1
        if self._num_failed_alone >= BROKEN and self._pulse.is_watched:
            raise BackendBroken(
                f"{self._num_failed_alone} consecutive requests failed when retried individually; last error: {error!r}"
            )
        failure = DecodeFailed(f"{error} for this request alone; other requests were not affected")
        self._requests.fail(sequence, failure)


def micro_batches_of(works: Seq[SlotWork], *, unified: bool) -> list[list[SlotWork]]:
    """Split the work of a step into decode calls, in order. Each chunk is in exactly one call.

    If each slot has its own stream of cells (not `unified`), single tokens and longer chunks are decoded in separate
    calls. In a combined call, llama.cpp would compute the first token of every slot in one pass and the remaining
    tokens in another pass. The remaining chunks would then no longer fill llama.cpp's tiles of 64 rows
    (docs/adr/002-prefill-chunks.md). Calls with longer chunks always come first. If the order varied, two calls with
    longer chunks could come between two tokens of a stream. The last chunks of interactive prompts are decoded
    individually, in order of admission. The first request therefore doesn't wait for the second request.
    """
    if unified:
        return [list(works)] if works else []
    lengths = Counter([len(work.chunk.tokens) for work in works])
    if len(lengths) == 1 and 1 in lengths:
        return [list(works)]
    awaited: list[tuple[float, SlotWork]] = []
    others: list[SlotWork] = []
    single: list[SlotWork] = []
    for work in works:
        if len(work.chunk.tokens) == 1:
            single.append(work)
        elif _is_awaited(work) and (len(work.chunk.tokens) >= MIN_CHUNK or lengths[len(work.chunk.tokens)] == 1):
            awaited.append((prefill_order(work.sequence), work))
        else:
            others.append(work)
    awaited.sort(key=lambda entry: entry[0])
    parts = [*([work] for _, work in awaited), others, single]
    return [part for part in parts if part]


def _is_awaited(work: SlotWork) -> bool:
    """Return whether this chunk completes an interactive prompt, after which the request's first token is sampled."""
    return work.sequence.request.is_interactive and work.chunk.samples
