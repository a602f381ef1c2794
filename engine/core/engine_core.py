"""An engine without its thread: what one step does, with all that it needs.

    step:  receive → expire → admit → move → schedule → forward → update → emit

It owns the backend, the cache, the scheduler and all sequences. One thread at a time may use it; others reach it
through the inbox, and read snapshots.
"""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import Literal, NamedTuple

from cellama.engine.backend import Backend
from cellama.engine.errors import EngineError
from cellama.engine.options import EngineOptions
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.scheduling.strategies import make_strategy
from cellama.engine.system.inbox import Inbox
from cellama.engine.system.watchdog import Pulse

from .forward import BackendBroken, Computed, Forward
from .handle import CancelReason, Handle
from .output import Output
from .requests import Requests
from .telemetry import Telemetry

log = logging.getLogger(__name__)

MOST_AT_ONCE = 512  # requests that begin or end between two decode calls: thousands would be a gap in every stream
MAX_FAULTS = 3  # steps in a row that fail although each of their requests goes on alone


class Command(NamedTuple):
    """What becomes of a request: it is submitted, or ended before its time."""

    what: Literal["submit"] | CancelReason
    handle: Handle


class EngineCore:
    """Serves many requests at once, step by step."""

    def __init__(self, backend: Backend, options: EngineOptions, pulse: Pulse, model: str = "engine") -> None:
        """`pulse` is told what is done just now; telemetry names the `model`. Raises InvalidRequest."""
        self.inbox: Inbox[Command] = Inbox()
        self._backend = backend
        # One micro-batch of llama.cpp: it would cut a larger batch into pieces of all sequences, too small to be fast.
        limits = Limits(options.pass_tokens, options.chunk_tokens, options.max_queue)
        ram_bytes = options.saved_bytes if options.cache_prompt else 0
        self.scheduler = Scheduler(limits, make_strategy(options.batch_strategy), backend, ram_bytes)
        self.telemetry = Telemetry(self.scheduler, self.inbox, model)
        self.output = Output(backend.vocabulary)
        self._pulse = pulse
        self.requests = Requests(backend, self.scheduler, self.output, self.telemetry, pulse)
        self.forward = Forward(backend, self.scheduler, self.requests, pulse)
        self.num_threads = backend.threads  # for the next step; any thread may set it
        self._num_faults = 0  # steps in a row that failed for no request in particular

    @property
    def has_work(self) -> bool:
        """True while sequences wait or have slots."""
        return self.scheduler.has_work

    def step(self) -> None:
        """Serves all commands and computes the next tokens; returns without a decode call if there is nothing to do.

        What one request is the cause of ends that one. Raises BackendBroken, and what fails again and again although
        no request alone is the cause.
        """
        self._receive()
        self._pulse.beat("step")
        started, cpu_started = time.monotonic(), time.thread_time()
        try:
            self._expire(started)
            self._admit(started)
            self._move()
            active_slots = self.scheduler.num_busy
            computed: list[Computed] = []
            for micro_batch in self.forward.run(self.scheduler.schedule(started)):
                self._update(micro_batch)  # before the next one: its logits would take the place of these
                self.output.flush()
                computed.append(micro_batch)
            self.output.flush()  # also without a decode call: requests may have come to their end
            self._account(computed, active_slots, started, cpu_started)
        except BackendBroken:
            raise
        except Exception as error:
            self._isolate(error)

    def _receive(self) -> None:
        """Serves what other threads have put into the inbox, and uses as many threads as they say."""
        if self.num_threads != self._backend.threads:
            self._backend.set_threads(self.num_threads)
        for command in self.inbox.take(MOST_AT_ONCE):
            self._pulse.beat(command.what, (command.handle.request.id,))
            self._serve(command)

    def _serve(self, command: Command) -> None:
        if command.what == "submit":
            self.requests.enqueue(command.handle)
        else:
            self.requests.end(command.handle, command.what)

    def _expire(self, now: float) -> None:
        """Ends requests whose deadline has passed."""
        for sequence in islice(self.scheduler.queue.expired(now), MOST_AT_ONCE):
            self.requests.time_out(sequence)

    def _admit(self, now: float) -> None:
        """Gives slots and samplers to waiting sequences."""
        for sequence in self.scheduler.admit(now, self.requests.fail):
            self.requests.start(sequence)

    def _move(self) -> None:
        """Moves sequences next to each other, where that makes decoding faster."""
        layout = self.scheduler.layout
        if moves := layout.next_moves():
            self._pulse.beat("move", [move.sequence.request.id for move in moves])
            layout.carry_out(moves, time.monotonic)
            self._pulse.beat("step")

    def _update(self, computed: Computed) -> None:
        """Commits what was computed, and samples the tokens that follow it."""
        for work in computed.works:
            self.scheduler.commit(work)
        for sequence, chunk in computed.works:
            sequence.failures_alone = 0
            if chunk.samples and sequence.slot is not None:  # None: it ended with another one of its request
                self.requests.sample(sequence, chunk.slot, computed.at)

    def _account(self, computed: list[Computed], active_slots: int, started: float, cpu_started: float) -> None:
        """Tells strategy and telemetry what the step took."""
        chunks = [chunk for micro_batch in computed for _, chunk in micro_batch.works]
        eval_s = sum(micro_batch.seconds for micro_batch in computed)
        step_s = time.monotonic() - started
        self.scheduler.strategy.observe(sum(micro_batch.num_tokens for micro_batch in computed), eval_s)
        self.telemetry.step(chunks, active_slots, eval_s, step_s, step_s - (time.thread_time() - cpu_started))
        self._num_faults = 0

    def _isolate(self, error: Exception) -> None:
        """After a step that failed for no request in particular: every one that has a slot makes a step alone.

        Those for which it fails again end. If it fails for all of several, then none of them is to blame: that is
        raised, as is the error of a step after MAX_FAULTS others.
        """
        self._num_faults += 1
        if self._num_faults > MAX_FAULTS:
            raise error
        log.error("a step failed in an unforeseen way; its requests are tried one by one", exc_info=error)
        self.scheduler.settle()
        running = [sequence for sequence in self.scheduler.slots if sequence is not None]
        failed = [(sequence, fault) for sequence in running if (fault := self._step_alone(sequence)) is not None]
        if len(failed) == len(running) > 1:
            raise failed[0][1]
        for sequence, fault in failed:
            self.requests.fail(sequence, fault)
        self.output.flush()  # of those that ended in it: there may be no other step

    def _step_alone(self, sequence: Sequence) -> Exception | None:
        """A step for one sequence; what it failed with, if it did. Raises BackendBroken."""
        self._pulse.beat("alone", [sequence.request.id])
        try:
            if sequence.slot is not None:  # it did not end with another one
                for computed in self.forward.run(self.scheduler.schedule(time.monotonic(), only=sequence.slot)):
                    self._update(computed)
        except BackendBroken:
            raise
        except Exception as error:
            return error
        return None

    def save_one_idle(self) -> bool:
        """Copies the cells of one idle slot to RAM, if they are worth it; False if there are none. Between steps."""
        self._pulse.beat("save")
        return self.scheduler.cache.save_one_idle()

    def close(self, error: EngineError) -> None:
        """Ends all requests with this error, closes the inbox and frees the backend."""
        self.inbox.close()
        for command in self.inbox.take():
            self._serve(command)
        self.requests.fail_all(error)
        self.output.flush()
        self._backend.close()
