"""The decode calls of a step, and how a failure is traced to the request that causes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from cellama.engine.backend import ABORTED, NO_FREE_CELLS, Backend, Chunk, DecodeError
from cellama.engine.errors import DecodeFailed
from cellama.engine.scheduling.bulk_policy import Interruptions
from cellama.engine.scheduling.micro_batches import micro_batches_of
from cellama.engine.scheduling.scheduler import Scheduler
from cellama.engine.scheduling.sequence import Sequence, SlotWork, State, work_of
from cellama.engine.speculation.drafting import Drafting
from cellama.engine.system.watchdog import FIRST_S, Pulse

from .handle import Handle
from .requests import EngineRequests

log = logging.getLogger(__name__)

ATTEMPTS_ALONE = 2  # of a request in a decode call of its own before it fails: once may have been the machine
BROKEN = 3  # requests that failed alone one after another, with nothing computed between: then it is not their fault


class Deferred(DecodeError):
    """Not started, because an interactive request has arrived: a later step does it."""


class BackendBroken(Exception):
    """No request can be computed any more: it is not their fault."""


class Computed(NamedTuple):
    """What one decode call computed."""

    works: list[SlotWork]
    num_tokens: int
    at: float  # time.monotonic() at its end
    seconds: float


class Forward:
    """Computes the work of a step. Engine thread only, but for `make_way`, and `worth_aborting`, which others read."""

    def __init__(
        self, backend: Backend, scheduler: Scheduler, requests: EngineRequests, drafting: Drafting, pulse: Pulse
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._drafting = drafting
        self._requests = requests
        self._pulse = pulse
        self._interruptions = Interruptions()
        self._num_failed_alone = 0  # since something was computed
        self.worth_aborting: Handle | None = None  # whose cancel ends the decode call that runs now
        self._yields = False  # that decode call ends when an interactive request comes
        self._has_come = False  # one has, since the step began

    def begin_step(self) -> None:
        """Note that no interactive request has arrived yet: called before the inbox is read."""
        self._has_come = False

    def make_way(self) -> None:
        """End bulk work early, and start no more in this step: an interactive request is in the inbox. Any thread."""
        self._has_come = True
        if self._yields:
            self._backend.abort()

    def run(self, works: list[SlotWork]) -> Iterator[Computed]:
        """Decode micro-batch by micro-batch, and yield each: what it samples has to be sampled before the next.

        What fails is tried alone; what fails alone ends its request. Raises BackendBroken where another process can
        go on.
        """
        self._drafting.begin_step()
        checks, works = self._drafting.take_checks(works)
        for check in checks:
            yield from self._compute([check])
        if works and self._may_draft():
            micro_batches = self._drafting.plan_calls(works)
        else:
            micro_batches = micro_batches_of(works, unified=self._backend.unified)
        for micro_batch in micro_batches:
            yield from self._compute(micro_batch)

    def _may_draft(self) -> bool:
        """Return whether every slot decodes, all interactive or all bulk: drafts delay no prompt and no stream."""
        if not self._drafting.is_active:
            return False
        kinds = {(sequence.state, sequence.request.is_interactive) for sequence in self._scheduler.slots.running}
        return len(kinds) == 1 and next(iter(kinds))[0] is State.DECODING

    def _compute(self, works: list[SlotWork]) -> Iterator[Computed]:
        # Only what its slot still has to compute next: a request may have ended, or lost its slot, meanwhile.
        works = [work for work in works if work[0].slot == work[1].slot and work[0].num_computed == work[1].position]
        if not works:
            return
        works, padding = self._scheduler.layout.fill(works)
        num_tokens = sum([len(chunk.tokens) for _, chunk in works])
        chunks = [chunk for _, chunk in works]
        if padding:
            chunks = sorted(chunks + padding, key=lambda chunk: chunk.slot)
        is_bulk = not any(sequence.request.is_interactive for sequence, _ in works)
        may_yield = self._may_yield(num_tokens) and is_bulk
        started = time.monotonic()
        try:
            error = self._decode(works, chunks, num_tokens, may_yield=may_yield)
        finally:
            self._scheduler.layout.take_off(padding)
        if error is not None:
            if isinstance(error, Deferred):
                self._interruptions.observe_deferred()
            elif may_yield and isinstance(error, DecodeError) and error.code == ABORTED:
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
        self, works: list[SlotWork], chunks: list[Chunk], num_tokens: int, *, may_yield: bool
    ) -> Exception | None:
        """Decode these chunks, those of the works among them, in one call; return what it failed with."""
        self.worth_aborting = self._main_request(works, num_tokens)
        self._yields = may_yield
        self._pulse.beat("decode", [sequence.request.id for sequence, _ in works], num_tokens, first_s=FIRST_S)
        try:
            if may_yield and self._has_come:  # after _yields is set: a request that arrives from now on aborts the call
                raise Deferred(ABORTED)
            self._backend.decode(chunks, works[0].sequence.adapters)
        except DecodeError as error:
            return error
        except Exception as error:  # perhaps of one request's tokens or adapters: the others must not fail
            log.exception("a decode call of %d requests failed in an unforeseen way", len(works))
            return error
        finally:
            self.worth_aborting, self._yields = None, False
            self._pulse.beat("sample", size=len(works))
        return None

    def _main_request(self, works: list[SlotWork], num_tokens: int) -> Handle | None:
        """Return the request that most of the batch is computed for: if it is cancelled, the call is aborted."""
        if num_tokens == len(works) > 1 or not self._backend.partial_reuse:
            return None  # a token of each
        sequence, chunk = max(works, key=lambda work: len(work.chunk.tokens))
        return self._requests.handle_of(sequence) if 2 * len(chunk.tokens) > num_tokens else None

    def _may_yield(self, num_tokens: int) -> bool:
        """Return whether a decode call of so many bulk tokens is given up for an interactive request."""
        is_long = self._scheduler.strategy.may_yield(num_tokens)
        return self._backend.partial_reuse and (is_long or self._interruptions.are_affordable)

    def _recover(self, works: list[SlotWork], error: Exception) -> Iterator[Computed]:
        """Roll the slots back, then try each alone: only a request that fails alone ends."""
        for work in works:
            self._scheduler.rollback(work)
        code = error.code if isinstance(error, DecodeError) else None
        if code == ABORTED:
            return
        if any(work.chunk.num_drafts for work in works):
            yield from self._compute([work_of(sequence, 1) for sequence, _ in works])
            return
        if code == NO_FREE_CELLS and self._backend.unified and self._scheduler.free_cells(1, time.monotonic()):
            return  # the next step tries with what is left
        if len(works) == 1:
            self._fail_alone(works[0].sequence, error)
            return
        log.warning("%r for a batch of %d requests; trying them one by one", error, len(works))
        for work in works:
            yield from self._compute([work])

    def _fail_alone(self, sequence: Sequence, error: Exception) -> None:
        sequence.failures_alone += 1
        if sequence.failures_alone < ATTEMPTS_ALONE:
            return
        self._num_failed_alone += 1
        if self._num_failed_alone >= BROKEN and self._pulse.is_watched:
            raise BackendBroken(f"{self._num_failed_alone} requests in a row can't be computed; the last: {error!r}")
        failure = DecodeFailed(f"{error} for this request alone; the others were not affected")
        self._requests.fail(sequence, failure)
