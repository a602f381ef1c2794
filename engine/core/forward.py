"""The decode calls of a step, and how a failure is traced to the request that causes it."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from cellama.engine.backend import Backend, Chunk, DecodeError
from cellama.engine.errors import DecodeFailed
from cellama.engine.scheduling.scheduler import Scheduler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.scheduling.strategies import INTERACTIVE_PRIORITY
from cellama.engine.system.watchdog import FIRST_S, Pulse

from .handle import Handle
from .requests import Requests

log = logging.getLogger(__name__)

NO_ROOM, ABORTED = 1, 2  # llama.h: llama_decode; nothing of the batch counts, it may be tried again
ATTEMPTS_ALONE = 2  # of a request in a batch of its own, before it fails
BROKEN = 3  # requests that failed alone, one after another, and nothing was computed between


class BackendBroken(Exception):
    """No request can be computed any more: it is not their fault."""


class Work(NamedTuple):
    """What was computed, and the seconds that it took."""

    chunks: list[Chunk]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Forward:
    """Computes chunks and samples what follows them. Engine thread only, but for the two flags, which others read."""

    def __init__(self, backend: Backend, scheduler: Scheduler, requests: Requests, pulse: Pulse) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._requests = requests
        self._pulse = pulse
        self._num_failed_alone = 0  # since something was computed
        self.worth_aborting: Handle | None = None  # whose cancel ends the decode call that runs now
        self.yields = False  # that decode call ends when an interactive request comes

    def run(self, chunks: list[Chunk]) -> Work:
        """Decodes chunks in one call and samples. What fails is tried alone; what fails alone ends its request.

        Raises BackendBroken where another process can go on.
        """
        chunks = [chunk for chunk in chunks if self._stands(chunk)]  # not that of a request that just ended elsewhere
        if not chunks:
            return Work([], 0.0)
        started = time.monotonic()
        try:
            self._decode(chunks)
        except DecodeError as error:
            return self._recover(chunks, error, error.code)
        except Exception as error:  # of a request's tokens or adapters, perhaps: its neighbours shall not pay
            log.exception("a decode call of %d requests failed in a way that nobody foresaw", len(chunks))
            return self._recover(chunks, error)
        now = time.monotonic()
        self._num_failed_alone = 0
        decoded = [(self._scheduler.computed(chunk), chunk) for chunk in chunks]
        for sequence, chunk in decoded:
            sequence.failures_alone = 0
            if chunk.samples and sequence.slot is not None:  # None: it ended with another one of its request
                self._requests.sample(sequence, chunk.slot, now)
        return Work(chunks, now - started)

    def _decode(self, chunks: list[Chunk]) -> None:
        served = [sequence for chunk in chunks if (sequence := self._scheduler.slots[chunk.slot]) is not None]
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        self.worth_aborting = self._main_request(chunks)
        self.yields = self._is_long_bulk(chunks, num_tokens)
        self._pulse.beat("decode", [sequence.request.id for sequence in served], num_tokens, first_s=FIRST_S)
        try:
            self._backend.decode(chunks, served[0].adapters)
        finally:
            self.worth_aborting, self.yields = None, False
            self._pulse.beat("sample", size=len(chunks))

    def _stands(self, chunk: Chunk) -> bool:
        """True if the chunk is still what its slot has to compute next."""
        sequence = self._scheduler.slots[chunk.slot]
        return sequence is not None and sequence.num_computed == chunk.position

    def _main_request(self, chunks: list[Chunk]) -> Handle | None:
        """The request that most of the batch is computed for: without it the others are better served anew."""
        largest = max(chunks, key=lambda chunk: len(chunk.tokens))
        if 2 * len(largest.tokens) <= sum(len(chunk.tokens) for chunk in chunks):
            return None
        sequence = self._scheduler.slots[largest.slot]
        return self._requests.handle_of(sequence) if sequence is not None and self._backend.partial_reuse else None

    def _is_long_bulk(self, chunks: list[Chunk], num_tokens: int) -> bool:
        """True for a pass that is worth giving up for somebody who waits for each token."""
        if not self._backend.partial_reuse or not self._scheduler.strategy.may_yield(num_tokens):
            return False
        served = [self._scheduler.slots[chunk.slot] for chunk in chunks]
        return all(sequence is not None and sequence.request.priority > INTERACTIVE_PRIORITY for sequence in served)

    def _recover(self, chunks: list[Chunk], error: Exception, code: int | None = None) -> Work:
        """Puts the slots back to where they were, then tries each alone: only what fails alone is failed."""
        for chunk in chunks:
            self._scheduler.undo(chunk)
        if code == ABORTED:
            return Work([], 0.0)
        if code == NO_ROOM and self._backend.unified and self._scheduler.make_room(1, time.monotonic()):
            return Work([], 0.0)  # the next step tries with what is left
        if len(chunks) > 1:
            log.warning("%r for a batch of %d requests; trying them one by one", error, len(chunks))
            works = [self.run([chunk]) for chunk in chunks]
            return Work([chunk for work in works for chunk in work.chunks], sum(work.seconds for work in works))
        self._fail_alone(chunks[0], error)
        return Work([], 0.0)

    def _fail_alone(self, chunk: Chunk, error: Exception) -> None:
        sequence = self._scheduler.slots[chunk.slot]
        assert sequence is not None
        sequence.failures_alone += 1
        if sequence.failures_alone < ATTEMPTS_ALONE:
            return
        self._num_failed_alone += 1
        if self._num_failed_alone >= BROKEN and self._pulse.is_watched:
            raise BackendBroken(f"{self._num_failed_alone} requests in a row can't be computed; the last: {error!r}")
        failure = DecodeFailed(f"{error} for this request alone; the others were not affected")
        self._requests.fail(sequence, failure)

    def isolate(self) -> None:
        """After a step that failed for no request in particular: every one that has a slot makes a step alone.

        Those for which it fails again end; if it fails for all of several, it is raised: then none of them is to blame.
        """
        self._scheduler.settle()
        running = [sequence for sequence in self._scheduler.slots if sequence is not None]
        failed: list[tuple[Sequence, Exception]] = []
        for sequence in running:
            self._pulse.beat("alone", [sequence.request.id])
            try:
                if sequence.slot is not None:  # it did not end with another one
                    self.run(self._scheduler.schedule(time.monotonic(), only=sequence.slot))
            except BackendBroken:
                raise
            except Exception as error:
                failed.append((sequence, error))
        if len(failed) == len(running) > 1:
            raise failed[0][1]
        for sequence, reason in failed:
            self._requests.fail(sequence, reason)
