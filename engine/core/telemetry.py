"""An engine's telemetry: request timings, counters, rates, snapshots and listeners.

The engine thread writes the counters. Any thread can take a snapshot. A snapshot reads single numbers and copies of
lists without a lock, so every snapshot is up to date, even during a long step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from cellama.config.logging import event_logger
from cellama.engine.events import Completion, PrefixHit, RequestStats, RequestTimings, RequestUsage, StepStats
from cellama.engine.kvcache.disk_tier import DiskTier
from cellama.engine.kvstore.states import StoreCounters
from cellama.engine.request import Request
from cellama.engine.scheduling.scheduler import Scheduler
from cellama.engine.scheduling.sequence import Sequence, State
from cellama.engine.snapshots import EngineSnapshot, Phase
from cellama.engine.speculation.drafting import Drafting
from cellama.engine.system.inbox import Inbox

log = event_logger(__name__)
T = TypeVar("T")

RATE_WINDOW_S = 1.0  # seconds over which a rate is measured: a shorter window would show single prefills
MEAN_WEIGHT = 0.05  # weight of a new value in a running mean: about the last twenty count


def timings_of(sequence: Sequence, now: float) -> RequestTimings:
    """Return a request's timings up to `now`: the waiting time, the time to first token, and the token rates."""
    admitted, first, last = sequence.admitted_at, sequence.first_token_at, sequence.last_token_at
    waiting_since = sequence.prefix_wait_since
    prefix_wait_s = sequence.prefix_wait_s + (0.0 if waiting_since is None else now - waiting_since)
    prefilled = now if sequence.request.prefill_only and not sequence.num_pending else first
    prefill_s = None if prefilled is None or admitted is None else prefilled - admitted
    decode_s = None if first is None or last is None else last - first
    return RequestTimings(
        queue_ms=((now if admitted is None else admitted) - sequence.submitted_at) * 1e3,
        ttft_ms=None if first is None else (first - sequence.submitted_at) * 1e3,
        duration_ms=(now - sequence.submitted_at) * 1e3,
        prompt_eval_rate=_rate(sequence.num_prompt - sequence.num_cached, prefill_s),
        generation_rate=_rate(sequence.num_output - 1, decode_s),
        delivery_ms=max(0.0, sequence.received_at - sequence.submitted_at) * 1e3,
        prefix_wait_ms=prefix_wait_s * 1e3,
        prefix_cache_ratio=sequence.num_cached / sequence.num_prompt,
    )


def _rate(count: int, seconds: float | None) -> float | None:
    return count / seconds if seconds and count > 0 else None


class StepCounts:
    """Histograms of the gaps between consecutive tokens of a sequence, and of batch sizes.

    Only the engine thread writes the histograms. Any thread may copy the lists. At worst, a copy includes only part of
    the most recent gap or step.
    """

    def __init__(self, gap_bounds_s: Iterable[float], batch_bounds: Iterable[float]) -> None:
        """Create buckets with these ascending upper bounds, and a bucket for all larger values."""
        self._gap_bounds_s, self._batch_bounds = tuple(gap_bounds_s), tuple(batch_bounds)
        self.gaps = [0] * (len(self._gap_bounds_s) + 1)
        self.gaps_s = 0.0  # sum of all gaps, in seconds
        self.batches = [0] * (len(self._batch_bounds) + 1)
        self.tokens = 0  # tokens in all batches

    def gap(self, seconds: float) -> None:
        """Count the gap between a sequence's last two tokens."""
        self.gaps[bisect_left(self._gap_bounds_s, seconds)] += 1
        self.gaps_s += seconds

    def step(self, num_tokens: int) -> None:
        """Count a step whose batch has this number of tokens."""
        self.batches[bisect_left(self._batch_bounds, num_tokens)] += 1
        self.tokens += num_tokens


class Rates:
    """The rates at which counters grow, measured over the last second of work."""

    def __init__(self, *counts: int) -> None:
        self.per_s = tuple(0.0 for _ in counts)
        self._started_at: float | None = None  # start of the window; None while idle
        self._before = counts  # counters at that time

    def measure(self, *counts: int, idle: bool, took_s: float = 0.0) -> None:
        """Record the counters after a step that took `took_s` seconds.

        While the engine is idle, all rates are 0. After an idle period, the measurement starts at the beginning of the
        next step if the step's duration is known, and otherwise at the end of the step.
        """
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = now - took_s
            self._before = self._before if took_s else counts
        window_s = now - self._started_at
        if idle:
            self.per_s, self._started_at, self._before = tuple(0.0 for _ in counts), None, counts
        elif window_s >= RATE_WINDOW_S:
            grown = zip(counts, self._before, strict=True)
            self.per_s = tuple((count - before) / window_s for count, before in grown)
            self._started_at, self._before = now, counts


class _EngineLoad(NamedTuple):
    sequences: list[Sequence]  # sequences with slots
    num_running: int  # requests of these sequences
    num_waiting: int  # requests without a slot


class Telemetry:
    """Counts the steps, tokens and requests of an engine.

    Only the engine thread may use this class, except for `snapshot`.
    """

    def __init__(
        self, scheduler: Scheduler, drafting: Drafting, inbox: Inbox[Any], model: str, disk: DiskTier | None = None
    ) -> None:
        self._disk = disk
        self._scheduler = scheduler
        self._drafting = drafting
        self._inbox = inbox
        self._model = model
        self._steps = self._mixed_steps = 0
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._prefilled_tokens = 0
        self._finished = self._failed = 0
        self._rates = Rates(0, 0)
        self._mean_slot_s = 0.0
        self._is_stopped = False
        self.last_cache_hit: PrefixHit | None = None  # hit of the request that got a slot last
        self.step_counts: list[StepCounts] = []
        self.on_step: list[Callable[[StepStats], None]] = []
        self.on_request: list[Callable[[RequestStats], None]] = []

    def stopped(self) -> None:
        """Report the phase as "stopped" from now on."""
        self._is_stopped = True

    def step(self, total: int, decode: int, *, active_slots: int, eval_s: float, step_s: float, wait_s: float) -> None:
        """Add a step to the counters: its tokens, how many of these were decoded, its busy slots and durations."""
        self._prefilled_tokens += total - decode
        self._steps += total > 0
        self._mixed_steps += 0 < decode < total
        if total:
            for counter in self.step_counts:
                counter.step(total)
        if self.on_step and total:
            stats = StepStats(
                model=self._model,
                at=time.time(),
                batch_size=total,
                decode_tokens=decode,
                prefill_tokens=total - decode,
                active_slots=active_slots,
                queue_depth=self._load().num_waiting,
                eval_ms=eval_s * 1e3,
                step_ms=step_s * 1e3,
                wait_ms=max(0.0, wait_s) * 1e3,
            )
            _call(self.on_step, stats)
        is_idle = not self._scheduler.has_work
        self._rates.measure(self._prefilled_tokens, self._generated_tokens, idle=is_idle, took_s=step_s)

    def request(self, request: Request, completion: Completion | None, now: float) -> None:
        """Count a finished request. A request without a completion counts as failed."""
        self._finished += completion is not None
        self._failed += completion is None
        if completion is not None:
            self._prompt_tokens += completion.usage.prompt_tokens
            self._cached_tokens += completion.usage.cached_tokens
            slot_s = max(0.0, completion.timings.duration_ms - completion.timings.queue_ms) / 1e3
            self._mean_slot_s += (slot_s - self._mean_slot_s) * (MEAN_WEIGHT if self._mean_slot_s else 1.0)
        if self.on_request:
            _call(self.on_request, _request_stats(self._model, request, completion, now))

    def token(self, gap_s: float | None = None) -> None:
        """Count a token, and the gap between the previous token and this token.

        `gap_s` is None for the first token and for accepted draft tokens.
        """
        self._generated_tokens += 1
        if gap_s is not None:
            for counter in self.step_counts:
                counter.gap(gap_s)

    def _load(self) -> _EngineLoad:
        """Return the running and waiting requests, including requests in the inbox. Any thread may call this method."""
        num_ended = self._finished + self._failed  # read first, so that requests ending now don't count as waiting
        sequences = [sequence for sequence in list(self._scheduler.slots) if sequence is not None]
        num_running = len({id(sequence.request) for sequence in sequences})
        num_waiting = max(0, self._inbox.num_submitted - num_ended - num_running)
        return _EngineLoad(sequences, num_running, num_waiting)

    @property
    def snapshot(self) -> EngineSnapshot:
        """A snapshot of the current state. Any thread may take a snapshot."""
        scheduler, cache, hits = self._scheduler, self._scheduler.cache, self._scheduler.cache.counters
        store = None if self._disk is None else self._disk.store
        disk = StoreCounters() if store is None else store.counters
        load = self._load()
        decoding = sum([sequence.state is State.DECODING for sequence in load.sequences])
        phase: Phase = "generating" if decoding else "prefilling" if load.num_running else "idle"
        has_requests = bool(load.num_running or load.num_waiting)
        return EngineSnapshot(
            phase="stopped" if self._is_stopped else phase,
            slots_total=len(scheduler.slots),
            slots_prefilling=len(load.sequences) - decoding,
            slots_decoding=decoding,
            requests_running=load.num_running,
            requests_waiting=load.num_waiting,
            kv_used_tokens=scheduler.kv_used_tokens,
            kv_cached_tokens=scheduler.kv_cached_tokens,
            kv_total_tokens=cache.cells.total,
            ram_states=len(cache.ram),
            ram_used_bytes=cache.ram.used_bytes + cache.checkpoints.used_bytes,
            ram_saves=cache.ram.num_saves,
            ram_evictions=cache.ram.num_evictions,
            disk_loads=disk.hits,
            disk_late=0 if self._disk is None else self._disk.num_late,
            disk_misses=disk.misses,
            disk_saves=disk.saves,
            disk_drops=disk.drops,
            disk_evictions=disk.evictions,
            disk_read_bytes=disk.read_bytes,
            disk_written_bytes=disk.written_bytes,
            disk_used_bytes=0 if store is None else store.used_bytes,
            disk_quota_bytes=0 if store is None else store.quota_bytes,
            preemptions=scheduler.num_preemptions,
            strategy_failures=scheduler.strategy.num_failures,
            cache_hits=hits.hits_slot + hits.hits_copy + hits.hits_ram + hits.hits_disk,
            cache_hits_slot=hits.hits_slot,
            cache_hits_copy=hits.hits_copy,
            cache_hits_ram=hits.hits_ram,
            cache_hits_disk=hits.hits_disk,
            cache_misses=hits.misses,
            steps=self._steps,
            mixed_steps=self._mixed_steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            drafts=self._drafting.counts,
            requests_finished=self._finished,
            requests_failed=self._failed,
            prompt_rate=self._rates.per_s[0] if has_requests else 0.0,
            generation_rate=self._rates.per_s[1] if has_requests else 0.0,
            mean_slot_s=self._mean_slot_s,
        )


def _call(callbacks: list[Callable[[T], None]], stats: T) -> None:
    for callback in list(callbacks):
        try:
            callback(stats)
        except Exception:  # the listener's code, on the engine thread
            log.exception("telemetry listener failed", detail="the listener will not be called again")
            callbacks.remove(callback)


def _request_stats(model: str, request: Request, completion: Completion | None, now: float) -> RequestStats:
    usage = completion.usage if completion else RequestUsage(len(request.prompt), 0)
    timings = completion.timings if completion else None
    return RequestStats(
        model=model,
        at=time.time(),
        request_id=request.id,
        mode=request.called_mode,
        seq_id=completion.slot if completion else None,
        finish_reason=completion.finish_reason if completion else "error",
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.completion_tokens,
        duration_ms=(now - (request.submitted_at or now)) * 1e3,
        ttft_ms=timings.ttft_ms if timings else None,
        prompt_eval_rate=timings.prompt_eval_rate if timings else None,
        generation_rate=timings.generation_rate if timings else None,
        prefix_cache_tokens=usage.cached_tokens,
        prefix_cache_ratio=timings.prefix_cache_ratio if timings else 0.0,
    )
