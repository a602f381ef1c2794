"""An engine without its thread: what one step does, with all that it needs.

    step:  receive → expire → admit → move → schedule → forward → update → emit

It owns the backend, the cache, the scheduler and all sequences. One thread at a time may use it; others reach it
through the inbox, and read snapshots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from itertools import islice
from typing import Any, Literal, NamedTuple

from cellama.engine.backend import Backend
from cellama.engine.errors import EngineError
from cellama.engine.events import CacheTier
from cellama.engine.kvcache.disk_tier import DiskTier
from cellama.engine.kvcache.ram_tier import SavedState
from cellama.engine.kvstore.benefit import RunningRate
from cellama.engine.kvstore.store import StateStore
from cellama.engine.options import EngineOptions
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.scheduling.strategy_registry import make_strategy
from cellama.engine.speculation.draft_model import DraftModel
from cellama.engine.speculation.drafting import Drafting
from cellama.engine.system.inbox import Inbox
from cellama.engine.system.watchdog import Pulse

from .forward import BackendBroken, Computed, Forward
from .handle import CancelReason, EngineCall, Handle
from .output import EventOutput
from .requests import EngineRequests
from .telemetry import Telemetry

log = logging.getLogger(__name__)

MOST_AT_ONCE = 512  # requests that begin or end between two decode calls: thousands would be a gap in every stream
PAUSE_S = 0.05  # seconds at most until an engine that waits for a file looks again: about one decode step
MAX_FAULTS = 3  # steps in a row that fail although each request succeeds alone; more mean that the engine is broken


class Command(NamedTuple):
    """What becomes of a request: it is submitted, or ended before its time."""

    what: Literal["submit"] | CancelReason
    handle: Handle


class EngineCore:
    """Serves many requests at once, step by step."""

    def __init__(
        self,
        backend: Backend,
        options: EngineOptions,
        pulse: Pulse,
        model: str = "engine",
        store: StateStore | None = None,
        draft: Backend | None = None,
    ) -> None:
        """`pulse` is told what is done just now; telemetry names the `model`; `store` is its folder of states.

        `draft` guesses its tokens. Raises InvalidRequest, and ModelLoadFailed for a `draft` that can't decode.
        """
        self.inbox: Inbox[Command | EngineCall[Any]] = Inbox()
        self._backend = backend
        # One micro-batch of llama.cpp: it would cut a larger batch into pieces of all sequences, too small to be fast.
        limits = Limits(options.pass_tokens, options.chunk_tokens, options.max_queue)
        ram_bytes = options.saved_bytes if options.cache_prompt else 0
        self.scheduler = Scheduler(limits, make_strategy(options.batch_strategy), backend, ram_bytes)
        self._backends = [backend] if draft is None else [backend, draft]
        guessing = None if draft is None else DraftModel(draft, options.of_draft.pass_tokens)
        self.drafting = Drafting(self.scheduler.cache, self.scheduler.layout, self.scheduler.costs, options, guessing)
        ram, nudge = self.scheduler.cache.ram, self.inbox.nudge
        self.disk = None if store is None else DiskTier(store, backend, ram, backend.identity, nudge)
        self.scheduler.finder.disk = self.disk
        self.telemetry = Telemetry(self.scheduler, self.drafting, self.inbox, model, self.disk)
        self.output = EventOutput(backend.vocabulary)
        self._pulse = pulse
        self.requests = EngineRequests(backend, self.scheduler, self.drafting, self.output, self.telemetry, pulse)
        self.forward = Forward(backend, self.scheduler, self.requests, self.drafting, pulse)
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
            self._copy_a_running_one()
            self._account(computed, active_slots, started, cpu_started)
        except BackendBroken:
            raise
        except Exception as error:
            self._isolate(error)

    def _receive(self) -> None:
        """Serves what other threads have put into the inbox, and uses as many threads as they say."""
        if self.num_threads != self._backend.threads:
            for backend in self._backends:
                backend.set_threads(self.num_threads)
        if self.disk is not None:
            self.disk.store.note_busy(True)
            self.disk.receive(time.monotonic())
        self.forward.begin_step()
        for command in self.inbox.take(MOST_AT_ONCE):
            self._serve(command)

    def _serve(self, command: Command | EngineCall[Any]) -> None:
        if isinstance(command, EngineCall):
            self._pulse.beat("call")
            return command.run()
        self._pulse.beat(command.what, (command.handle.request.id,))
        if command.what == "submit":
            return self.requests.enqueue(command.handle)
        return self.requests.end(command.handle, command.what)

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
        if moves := layout.plan_moves():
            self._pulse.beat("move", [move.sequence.request.id for move in moves])
            layout.carry_out(moves, time.monotonic)
            self._pulse.beat("step")

    def _update(self, computed: Computed) -> None:
        """Commits what was computed, and samples the tokens that follow it, drafts as far as they are right."""
        for work in computed.works:
            self.scheduler.commit(work)
            if work.chunk.decode and len(work.chunk.tokens) > 1:
                self.drafting.begin_verifying(work)
        for sequence, chunk in computed.works:
            sequence.failures_alone = 0
            if chunk.samples and sequence.slot is not None:  # None: it ended with another one of its request
                self.requests.sample(sequence, chunk, computed.at)

    def _account(self, computed: list[Computed], active_slots: int, started: float, cpu_started: float) -> None:
        """Tells strategy and telemetry what the step took."""
        chunks = [chunk for micro_batch in computed for _, chunk in micro_batch.works]
        eval_s = sum(micro_batch.seconds for micro_batch in computed)
        step_s = time.monotonic() - started
        has_drafts = any(chunk.num_drafts for chunk in chunks)
        num_tokens = 0 if has_drafts else sum(micro_batch.num_tokens for micro_batch in computed)
        self.scheduler.strategy.observe(num_tokens, eval_s)
        if self.disk is not None:
            self._measure_prefill(computed, self.disk.prefill_rate)
        self.telemetry.step(chunks, active_slots, eval_s, step_s, step_s - (time.thread_time() - cpu_started))
        self._num_faults = 0

    def _copy_a_running_one(self) -> None:
        """Another process goes on from what is on disk of a running sequence, if this one ends: one copy at a time."""
        if self.disk is None or not self.disk.may_copy(time.monotonic()):
            return
        for slot, sequence in enumerate(self.scheduler.slots):
            if sequence is not None and sequence.is_due_to_be_copied:
                sequence.num_kept = sequence.num_computed
                self.disk.save_running(slot, sequence.tokens[: sequence.num_computed], sequence.scope)
                return

    def _measure_prefill(self, computed: list[Computed], rate: RunningRate) -> None:
        for micro_batch in computed:
            num_decoded = sum(len(chunk.tokens) for _, chunk in micro_batch.works if chunk.decode)
            if num_decoded * 8 < micro_batch.num_tokens:
                rate.add(micro_batch.num_tokens, micro_batch.seconds)

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
            _, first_fault = failed[0]
            raise first_fault
        for sequence, fault in failed:
            self.requests.fail(sequence, fault)
        self.output.flush()  # of those that ended in it: there may be no other step

    def _step_alone(self, sequence: Sequence) -> Exception | None:
        """A step for one sequence; what it failed with, if it did. Raises BackendBroken."""
        self._pulse.beat("alone", [sequence.request.id])
        self.forward.begin_step()
        try:
            if sequence.slot is not None:  # it did not end with another one
                for computed in self.forward.run(self.scheduler.schedule(time.monotonic(), only=sequence.slot)):
                    self._update(computed)
        except BackendBroken:
            raise
        except Exception as error:
            return error
        return None

    def rest(self) -> None:
        """There is nothing to do: others may have the machine, and what the folder's threads have read is taken."""
        for backend in self._backends:
            backend.rest()
        if self.disk is not None:
            self.disk.store.note_busy(False)
            self.disk.receive(time.monotonic())

    @property
    def pause_s(self) -> float:
        """How long there is nothing to do but to wait for files; 0 if there is anything else, or they don't come."""
        if self.disk is None or self.scheduler.num_busy or not self.scheduler.num_waiting:
            return 0.0
        return max(0.0, min(PAUSE_S, self.disk.wait_s(time.monotonic())))

    def slots_to_save(self) -> list[int]:
        """Those whose states are not in RAM, and worth it, and those that run."""
        running = [slot for slot, holder in enumerate(self.scheduler.slots) if holder and holder.request.cache_prompt]
        return self.scheduler.cache.unsaved() + running

    def save_slot(self, slot: int) -> None:
        """Copies one of these, if it is still so, to RAM, and offers it to the folder."""
        cache, sequence = self.scheduler.cache, self.scheduler.slots[slot]
        if sequence is None:
            cache.save_unsaved(slot)
        elif sequence.request.cache_prompt:
            cache.save(slot, sequence.tokens[: sequence.num_computed], sequence.scope)

    def saved_states(self) -> list[SavedState]:
        """All that is in RAM; what is likeliest to be of use, and of that what was used last, comes last."""
        return sorted(self.scheduler.cache.ram.states(), key=lambda state: state.note.reuse_probability)

    def offer(self, state: SavedState) -> None:
        """The folder is offered one of these."""
        if self.disk is not None:
            self.disk.offer(state)

    def probe(self, tokens: tuple[int, ...], scope: Hashable) -> dict[CacheTier, int]:
        """How many of these are on the device and in RAM. Any thread."""
        slots = list(self.scheduler.slots)
        running = [None if s is None else (s.tokens[: s.num_computed], s.scope) for s in slots]
        return self.scheduler.cache.probe(running, tokens, scope)

    def forget_idle(self) -> None:
        """Idle slots are empty, and RAM has no states."""
        self.drafting.forget_idle()
        for slot, holder in enumerate(self.scheduler.slots):
            if holder is None:
                self.scheduler.cache.clear(slot)  # what has just been retired is offered before
        for state in self.scheduler.cache.ram.states():
            self.scheduler.cache.ram.forget(state)

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
        for backend in self._backends:
            backend.close()
