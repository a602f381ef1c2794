"""Counters of one engine, its snapshot, and the callbacks that want numbers. Written by the engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from cellama.engine.backend import Chunk
from cellama.engine.events import Completion, EngineSnapshot, Phase, RequestStats, StepStats, Usage
from cellama.engine.request import Request
from cellama.engine.scheduling.scheduler import Scheduler
from cellama.engine.scheduling.sequence import State

log = logging.getLogger(__name__)
T = TypeVar("T")

RATE_WINDOW_S = 1.0
MEAN_WEIGHT = 0.05  # of a new value in a running mean
SNAPSHOT_S = 0.02  # a snapshot costs as much as a slot's share of a step: not one for each


class Telemetry:
    """Counts what happens. `snapshot` is replaced as a whole, so any thread can read it without waiting."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps = self._mixed_steps = 0
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._finished = self._failed = 0
        self._rate = 0.0
        self._mean_slot_s = 0.0
        self._window = (time.monotonic(), 0)  # start, generated tokens at the start
        self._renewed_at = 0.0
        self._is_stopped = False
        self.on_step: list[Callable[[StepStats], None]] = []
        self.on_request: list[Callable[[RequestStats], None]] = []
        self.snapshot = self._snapshot()

    def idle(self) -> None:
        """Renews the snapshot when there is no step to do it."""
        self._measure_rate(time.monotonic(), idle=not self._scheduler.has_work)
        self.snapshot = self._snapshot()

    def stopped(self) -> None:
        """Says from now on that nothing is served here."""
        self._is_stopped = True
        self.snapshot = self._snapshot()

    def step(self, chunks: list[Chunk], eval_s: float, step_s: float, wait_s: float) -> None:
        """Accounts one step, by what it computed."""
        decode = sum([chunk.decode for chunk in chunks])
        total = sum([len(chunk.tokens) for chunk in chunks])
        self._steps += bool(chunks)
        self._mixed_steps += 0 < decode < total
        if self.on_step and chunks:
            waiting = self._scheduler.num_waiting
            times = (eval_s * 1e3, step_s * 1e3, max(0.0, wait_s) * 1e3)
            stats = StepStats(total, decode, total - decode, len(chunks), waiting, *times)
            _call(self.on_step, stats)
        now = time.monotonic()
        if now - self._renewed_at >= SNAPSHOT_S or not self._scheduler.has_work:
            self._renewed_at = now
            self._measure_rate(now, idle=not self._scheduler.has_work)
            self.snapshot = self._snapshot()

    def request(self, request: Request, completion: Completion | None, now: float) -> None:
        """Accounts the end of a request; without a completion it failed."""
        self._finished += completion is not None
        self._failed += completion is None
        if completion is not None:
            self._prompt_tokens += completion.usage.prompt_tokens
            self._cached_tokens += completion.usage.cached_tokens
            slot_s = max(0.0, completion.timings.duration_ms - completion.timings.queue_ms) / 1e3
            self._mean_slot_s += (slot_s - self._mean_slot_s) * (MEAN_WEIGHT if self._mean_slot_s else 1.0)
        if self.on_request:
            _call(self.on_request, _request_stats(request, completion, now))

    def token(self) -> None:
        self._generated_tokens += 1

    def _measure_rate(self, now: float, *, idle: bool) -> None:
        start, tokens = self._window
        if idle:
            self._rate = 0.0
            self._window = (now, self._generated_tokens)
        elif now - start >= RATE_WINDOW_S:
            self._rate = (self._generated_tokens - tokens) / (now - start)
            self._window = (now, self._generated_tokens)

    def _snapshot(self) -> EngineSnapshot:
        scheduler, cache = self._scheduler, self._scheduler.cache
        counters = cache.counters
        decoding = sum(1 for s in scheduler.slots if s is not None and s.state is State.DECODING)
        busy = sum(1 for s in scheduler.slots if s is not None)
        phase: Phase = "generating" if decoding else "prefilling" if busy else "idle"
        phase = "stopped" if self._is_stopped else phase
        return EngineSnapshot(
            phase=phase,
            slots_total=len(scheduler.slots),
            slots_prefilling=busy - decoding,
            slots_decoding=decoding,
            queue_depth=scheduler.num_waiting,
            kv_used_tokens=scheduler.kv_used_tokens,
            kv_cached_tokens=scheduler.kv_cached_tokens,
            kv_total_tokens=cache.cells.total,
            ram_states=len(cache.ram),
            ram_used_bytes=cache.ram.used_bytes + cache.checkpoints.used_bytes,
            preemptions=scheduler.num_preemptions,
            cache_hits=counters.hits_slot + counters.hits_copy + counters.hits_ram,
            cache_misses=counters.misses,
            steps=self._steps,
            mixed_steps=self._mixed_steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            requests_finished=self._finished,
            requests_failed=self._failed,
            generation_rate=self._rate,
            mean_slot_s=self._mean_slot_s,
        )


def _call(callbacks: list[Callable[[T], None]], stats: T) -> None:
    for callback in list(callbacks):
        try:
            callback(stats)
        except Exception:  # other people's code, on the engine thread
            log.exception("a listener of the telemetry failed and is not called again")
            callbacks.remove(callback)


def _request_stats(request: Request, completion: Completion | None, now: float) -> RequestStats:
    mode: Literal["generate", "stream"] = "stream" if request.stream else "generate"
    usage = completion.usage if completion else Usage(len(request.prompt), 0)
    timings = completion.timings if completion else None
    return RequestStats(
        request_id=request.id,
        mode=mode,
        seq_id=completion.slot if completion else None,
        finish_reason=completion.finish_reason if completion else "error",
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.completion_tokens,
        duration_ms=(now - (request.submitted_at or now)) * 1e3,
        ttft_ms=timings.ttft_ms if timings else None,
        prompt_eval_rate=timings.prompt_eval_rate if timings else None,
        generation_rate=timings.generation_rate if timings else None,
        prefix_cache_tokens=usage.cached_tokens,
        prefix_cache_ratio=usage.cached_tokens / usage.prompt_tokens,
    )
