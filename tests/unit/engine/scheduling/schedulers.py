"""Schedulers on the fake backend, and their steps."""

from __future__ import annotations

from typing import Any

from cellama.engine import Request
from cellama.engine.backend import Chunk
from cellama.engine.fake import FakeBackend
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence, SlotWork
from cellama.engine.scheduling.slot_layout import runs_of
from cellama.engine.scheduling.strategies import (
    DecodeMaximal,
    SlotView,
    Strategy,
    TokenAllocation,
)

LIMITS = Limits(budget=8, chunk_size=4)


def new_scheduler(
    strategy: Strategy | None = None, limits: Limits = LIMITS, ram_bytes: int = 0, **memory: Any
) -> Scheduler:
    backend = FakeBackend(**{"n_slots": 3, "ctx_per_slot": 40, **memory})
    return Scheduler(limits, strategy or DecodeMaximal(), backend, ram_bytes)


def sequence(num_prompt: int = 5, priority: int = 3, timeout_s: float | None = None, **params: Any) -> Sequence:
    request = Request("r", tuple(range(num_prompt)), priority=priority, timeout_s=timeout_s, **params)
    return Sequence(request, seed=0, submitted_at=0.0, tokens=list(request.prompt))


def run_step(scheduler: Scheduler, now: float = 0.0, *, pass_s: float = 1.0, row_s: float = 1.0) -> list[Chunk]:
    """Run one step as the engine does, in one decode call, and return its chunks. Each sampled token is 7.

    Passes and rows take the given times, and moves take none.
    """
    scheduler.admit(now)
    scheduler.layout.execute(scheduler.layout.plan_moves(), lambda: now)
    works = scheduler.schedule(now)
    scheduled = [work.chunk for work in works]
    if works:
        works = decode(scheduler, works, pass_s, row_s)
    for work in works:
        scheduler.commit(work)
        if work.chunk.samples:
            work.sequence.tokens.append(7)
            if scheduler.is_full(work.sequence):
                scheduler.release(work.sequence)
    return scheduled


def decode(scheduler: Scheduler, works: list[SlotWork], pass_s: float, row_s: float) -> list[SlotWork]:
    """Run a decode call with its holes filled, and return the computed work."""
    backend, layout = scheduler.cache.memory, scheduler.layout
    assert isinstance(backend, FakeBackend)
    works, padding = layout.fill(works)
    chunks = sorted([*(work.chunk for work in works), *padding])
    backend.decode(chunks)
    layout.remove_padding(padding)
    scheduler.observe_decode(chunks, len(runs_of([chunk.slot for chunk in chunks])) * pass_s + len(chunks) * row_s)
    return works


class Mine(Strategy):
    """A user's strategy that serves one slot at a time."""

    def build_batch(
        self, slots: list[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        return [(slots[0].slot, min(slots[0].num_pending, budget, chunk_size))]
