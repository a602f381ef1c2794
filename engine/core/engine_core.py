"""The engine without its thread: the code that runs one step.

step:  receive → expire → admit → move → schedule → forward → update → emit

An `EngineCore` owns the backend, the cache, the scheduler and all sequences. Only one thread at a time may use an
`EngineCore`. Other threads send commands through the inbox and read snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from itertools import islice
from typing import Any, Literal, NamedTuple

from cellama.config.logging import event_logger
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
from cellama.engine.scheduling.strategies import make_strategy
from cellama.engine.speculation.draft_model import DraftModel
from cellama.engine.speculation.drafting import Drafting
from cellama.engine.system.inbox import Inbox
from cellama.engine.system.watchdog import Pulse

from .forward import BackendBroken, Computed, Forward
from .requests import CancelReason, EngineCall, EngineRequests, EventOutput, Handle
from .telemetry import Telemetry

log = event_logger(__name__)

MAX_COMMANDS_PER_STEP = 512  # commands that run between two decode calls: more would delay every stream
PAUSE_S = 0.05  # longest pause in seconds while the engine waits for a file: about one decode step
MAX_FAULTS = 3  # consecutive failed steps whose requests succeed alone, before the engine counts as broken


class Command(NamedTuple):
    """A command to submit a request or to end it early."""

    kind: Literal["submit"] | CancelReason
    handle: Handle


class EngineCore:
    """Serves many requests concurrently, step by step. `Engine` runs an `EngineCore` on its own thread."""

    def __init__(
        self,
        backend: Backend,
        options: EngineOptions,
        pulse: Pulse,
        model: str = "engine",
        store: StateStore | None = None,
        draft: Backend | None = None,
    ) -> None:
        """Create a core that reports its current activity to the watchdog through `pulse`.

        `model` is the model's name in telemetry, `store` is the cache directory, and `draft` is the backend of a draft
        model. Raises InvalidRequest, and ModelLoadFailed if the draft model can't decode.
        """
        self.inbox: Inbox[Command | EngineCall[Any]] = Inbox()
        self._backend = backend
        # A step is one micro-batch, because llama.cpp would split a larger batch into parts too small to be fast.
        limits = Limits(options.pass_tokens, options.chunk_tokens, options.max_queue, options.bulk_slots)
        ram_bytes = options.saved_bytes if options.cache_prompt else 0
        self.scheduler = Scheduler(limits, make_strategy(options.batch_strategy), backend, ram_bytes)
        self._backends = [backend] if draft is None else [backend, draft]
        draft_model = None if draft is None else DraftModel(draft, options.of_draft.pass_tokens)
        self.drafting = Drafting(
            self.scheduler.cache, self.scheduler.layout, self.scheduler.costs, options, draft_model
        )
        ram, nudge = self.scheduler.cache.ram, self.inbox.nudge
        self.disk = None if store is None else DiskTier(store, backend, ram, backend.identity, nudge)
        self.scheduler.finder.disk = self.disk
        self.telemetry = Telemetry(self.scheduler, self.drafting, self.inbox, model, self.disk)
        self.output = EventOutput(backend.vocabulary)
        self._pulse = pulse
        self.requests = EngineRequests(backend, self.scheduler, self.drafting, self.output, self.telemetry, pulse)
        self.forward = Forward(backend, self.scheduler, self.requests, self.drafting, pulse)
        self.num_threads = backend.threads  # number of threads for the next step; any thread may set it
        self._num_faults = 0  # consecutive failed steps that no single request caused

    @property
    def has_work(self) -> bool:
        """Return whether any sequence is waiting or has a slot."""
        return self.scheduler.has_work

    def step(self) -> None:
        """Run all pending commands and compute the next tokens. An idle engine makes no decode call.

        A failure caused by a single request ends only that request. Raises BackendBroken. If steps fail repeatedly and
        no single request is the cause, the last step's error is raised.
        """
        self._receive()
        self._pulse.beat("step")
        started = time.monotonic()
        cpu_started = time.thread_time() if self.telemetry.on_step else 0.0  # a system call
        try:
            self._expire(started)
            self._admit(started)
            self._move()
            active_slots = self.scheduler.num_busy
            computed: list[Computed] = []
            for micro_batch in self.forward.run(self.scheduler.schedule(started)):
                self._update(micro_batch)  # the next micro-batch overwrites the logits of this one
                self.output.flush()
                computed.append(micro_batch)
            self.output.flush()  # even without a decode call, because requests may have finished
            self._copy_running_state()
            self._account(computed, active_slots, started, cpu_started)
        except BackendBroken:
            raise
        except Exception as error:
            self._isolate(error)

    def _receive(self) -> None:
        """Run the commands from other threads, and apply changes to the number of threads."""
        if self.num_threads != self._backend.threads:
            for backend in self._backends:
                backend.set_threads(self.num_threads)
        if self.disk is not None:
            self.disk.store.note_busy(True)
            self.disk.receive(time.monotonic())
        self.forward.begin_step()
        for command in self.inbox.take(MAX_COMMANDS_PER_STEP):
            self._serve(command)

    def _serve(self, command: Command | EngineCall[Any]) -> None:
        if isinstance(command, EngineCall):
            self._pulse.beat("call")
            return command.run()
        self._pulse.beat(command.kind, (command.handle.request.id,))
        if command.kind == "submit":
            return self.requests.enqueue(command.handle)
        return self.requests.end(command.handle, command.kind)

    def _expire(self, now: float) -> None:
        """End requests whose deadlines have passed."""
        if self.scheduler.queue.next_deadline > now:
            return
        for sequence in islice(self.scheduler.queue.expired(now), MAX_COMMANDS_PER_STEP):
            self.requests.time_out(sequence)

    def _admit(self, now: float) -> None:
        """Assign slots and samplers to waiting sequences."""
        for sequence in self.scheduler.admit(now, self.requests.fail, self.requests.time_out):
            self.requests.start(sequence)

    def _move(self) -> None:
        """Move sequences to neighboring slots if this makes decoding faster."""
        layout = self.scheduler.layout
        if moves := layout.plan_moves():
            self._pulse.beat("move", [move.sequence.request.id for move in moves])
            layout.execute(moves, time.monotonic)
            self._pulse.beat("step")

    def _update(self, computed: Computed) -> None:
        """Commit the computed chunks and sample the tokens after them, including accepted draft tokens."""
        for work in computed.works:
            self.scheduler.commit(work)
            if work.chunk.decode and len(work.chunk.tokens) > 1:
                self.drafting.begin_verifying(work)
        if len(computed.works) > 1:
            self._backend.presample(
                [(sequence.sampler, chunk.slot) for sequence, chunk in computed.works if chunk.samples]
            )
        for sequence, chunk in computed.works:
            sequence.failures_alone = 0
            if chunk.samples and sequence.slot is not None:  # it may have ended with another sequence of its request
                self.requests.sample(sequence, chunk, computed.at)

    def _account(self, computed: list[Computed], active_slots: int, started: float, cpu_started: float) -> None:
        """Report the step's duration to the strategy and to telemetry."""
        eval_s, num_tokens, num_decoded, has_drafts = 0.0, 0, 0, False
        for micro_batch in computed:
            eval_s += micro_batch.seconds
            for _, chunk in micro_batch.works:
                count = len(chunk.tokens)
                num_tokens += count
                if chunk.decode:
                    num_decoded += count
                    has_drafts = has_drafts or chunk.num_drafts > 0
        self.scheduler.strategy.observe(0 if has_drafts else num_tokens, eval_s)
        if self.disk is not None:
            self._measure_prefill(computed, self.disk.prefill_rate)
        step_s = time.monotonic() - started
        wait_s = step_s - (time.thread_time() - cpu_started) if cpu_started else 0.0
        self.telemetry.step(
            num_tokens, num_decoded, active_slots=active_slots, eval_s=eval_s, step_s=step_s, wait_s=wait_s
        )
        self._num_faults = 0

    def _copy_running_state(self) -> None:
        """Offer a sequence's state to the disk tier, so another process can resume the sequence after a crash."""
        if self.disk is None or not self.disk.may_copy(time.monotonic()):
            return
        for slot, sequence in enumerate(self.scheduler.slots):
            if sequence is not None and sequence.needs_copy:
                sequence.num_stored = sequence.num_computed
                self.disk.save_running(slot, sequence.tokens[: sequence.num_computed], sequence.scope)
                return

    def _measure_prefill(self, computed: list[Computed], rate: RunningRate) -> None:
        for micro_batch in computed:
            num_decoded = sum(len(chunk.tokens) for _, chunk in micro_batch.works if chunk.decode)
            if num_decoded * 8 < micro_batch.num_tokens:
                rate.add(micro_batch.num_tokens, micro_batch.seconds)

    def _isolate(self, error: Exception) -> None:
        """Run each request in a separate step to find the requests that caused a step to fail.

        A request fails if its separate step fails. If the separate steps of several requests all fail, none of these
        requests is the cause, and the error is raised. The error is also raised after more than MAX_FAULTS consecutive
        failed steps.
        """
        self._num_faults += 1
        if self._num_faults > MAX_FAULTS:
            raise error
        log.error("step failed", exc_info=error, detail="unexpected error; each request will be retried individually")
        self.scheduler.settle()
        running = [sequence for sequence in self.scheduler.slots if sequence is not None]
        failed = [(sequence, fault) for sequence in running if (fault := self._step_alone(sequence)) is not None]
        if len(failed) == len(running) > 1:
            _, first_fault = failed[0]
            raise first_fault
        for sequence, fault in failed:
            self.requests.fail(sequence, fault)
        self.output.flush()  # requests may have ended here, and another step may never come

    def _step_alone(self, sequence: Sequence) -> Exception | None:
        """Run a step for a single sequence, and return the error if the step fails. Raises BackendBroken."""
        self._pulse.beat("alone", [sequence.request.id])
        self.forward.begin_step()
        try:
            if sequence.slot is not None:  # it may have ended with another sequence of its request
                for computed in self.forward.run(self.scheduler.schedule(time.monotonic(), only=sequence.slot)):
                    self._update(computed)
        except BackendBroken:
            raise
        except Exception as error:
            return error
        return None

    def rest(self) -> None:
        """Stop the idle compute threads while there is no work, and receive states that were read from disk."""
        for backend in self._backends:
            backend.rest()
        if self.disk is not None:
            self.disk.store.note_busy(False)
            self.disk.receive(time.monotonic())

    @property
    def pause_s(self) -> float:
        """The time in seconds to wait for files, or 0 if the engine has other work or isn't expecting a file."""
        if self.disk is None or self.scheduler.num_busy or not self.scheduler.num_waiting:
            return 0.0
        return max(0.0, min(PAUSE_S, self.disk.wait_s(time.monotonic())))

    def slots_to_save(self) -> list[int]:
        """Return the busy slots, and the idle slots whose reusable states have not been saved to RAM."""
        running = [slot for slot, holder in enumerate(self.scheduler.slots) if holder and holder.request.cache_prompt]
        return self.scheduler.cache.unsaved() + running

    def save_slot(self, slot: int) -> None:
        """Copy a slot's state to RAM if necessary. The RAM tier then offers the state to the disk tier."""
        cache, sequence = self.scheduler.cache, self.scheduler.slots[slot]
        if sequence is None:
            cache.save_unsaved(slot)
        elif sequence.request.cache_prompt:
            cache.save(slot, sequence.tokens[: sequence.num_computed], sequence.scope)

    def saved_states(self) -> list[SavedState]:
        """Return all states in RAM, sorted by probability of reuse.

        The states that are least likely to be reused come first. Among equally likely states, the least recently used
        come first.
        """
        return sorted(self.scheduler.cache.ram.states(), key=lambda state: state.note.reuse_probability)

    def offer(self, state: SavedState) -> None:
        """Offer a state to the disk tier."""
        if self.disk is not None:
            self.disk.offer(state)

    def probe(self, tokens: tuple[int, ...], scope: Hashable) -> dict[CacheTier, int]:
        """Return how many leading tokens are on the device and in RAM. Any thread may call this method."""
        slots = list(self.scheduler.slots)
        running = [None if s is None else (s.tokens[: s.num_computed], s.scope) for s in slots]
        return self.scheduler.cache.probe(running, tokens, scope)

    def forget_idle(self) -> None:
        """Empty the idle slots and discard the states in RAM."""
        self.drafting.forget_idle()
        for slot, holder in enumerate(self.scheduler.slots):
            if holder is None:
                self.scheduler.cache.clear(slot)  # recently retired states are offered to the disk first
        for state in self.scheduler.cache.ram.states():
            self.scheduler.cache.ram.forget(state)

    def save_one_idle(self) -> bool:
        """Copy one idle slot's cells to RAM between two steps. Return False if no idle slot needs saving."""
        self._pulse.beat("save")
        return self.scheduler.cache.save_one_idle()

    def close(self, error: EngineError) -> None:
        """End all requests with this error, close the inbox and free the backends."""
        self.inbox.close()
        for command in self.inbox.take():
            self._serve(command)
        self.requests.fail_all(error)
        self.output.flush()
        for backend in self._backends:
            backend.close()
