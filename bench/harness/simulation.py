"""Simulate batch strategies with the real scheduler and a virtual clock, so results are the same on every machine.

The differences between strategies are smaller than the measurement noise of a machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cellama.engine import Request
from cellama.engine.backend import Chunk
from cellama.engine.core.forward import micro_batches_of
from cellama.engine.fake import FakeBackend
from cellama.engine.request import DEFAULT_PRIORITY
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence as Running, SlotWork
from cellama.engine.scheduling.slot_layout import runs_of
from cellama.engine.scheduling.strategies import Strategy

from .workloads import Line

TOKEN = 7  # any
SAVED_BYTES = 1 << 20  # bytes per saved token of sequences that lose their slots


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a llama.cpp pass and of each row in the pass, in milliseconds."""

    pass_ms: float
    prompt_row_ms: float
    decode_row_ms: float
    decode_ms: Mapping[int, float] = field(default_factory=dict)  # measured passes of single tokens in ms, by rows

    def of(self, chunks: Sequence[Chunk]) -> float:
        """Return the duration of a decode call in seconds."""
        return sum(self.of_pass(length, rows) for length, rows in passes_of(chunks)) / 1e3

    def of_pass(self, length: int, rows: int) -> float:
        """Return the duration in milliseconds of a pass with `rows` chunks of `length` tokens each."""
        if length > 1:
            return self.pass_ms + self.prompt_row_ms * length * rows
        if not self.decode_ms:
            return self.pass_ms + self.decode_row_ms * rows
        return float(np.interp(rows, list(self.decode_ms), list(self.decode_ms.values())))


def passes_of(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Return the length and number of the chunks in each pass.

    A pass consists of equally long chunks in consecutive slots.
    """
    slots: dict[int, list[int]] = {}
    for chunk in chunks:
        slots.setdefault(len(chunk.tokens), []).append(chunk.slot)
    return [(length, run.size) for length, of_length in slots.items() for run in runs_of(sorted(of_length))]


MEASURED = {1: 6.9, 2: 17.0, 8: 26.0, 16: 29.0, 32: 58.0, 64: 100.0}  # docs/adr/008
CPU = Costs(9.0, 1.3, 1.5, MEASURED)  # 174M in Q8_0 on 2 cores
CHEAP_ROWS = Costs(20.0, 0.02, 0.05)  # passes cost about the same, however many rows they have
LOOK_S = 1.5e-3  # seconds between two checks of the clock while sequences are moved; a move takes one or two periods


@dataclass
class Simulated:
    """The result of a simulated load."""

    seconds: float = 0.0
    num_passes: int = 0
    texts_s: dict[str, list[float]] = field(default_factory=dict)  # when each token of a request came

    @property
    def ttft_ms(self) -> list[float]:
        """Return the time to first token, in milliseconds, of each request that arrived at the start."""
        return [times[0] * 1e3 for times in self.texts_s.values()]

    @property
    def gaps_ms(self) -> list[float]:
        return self.gaps_of(self.texts_s)

    def gaps_of(self, names: Iterable[str]) -> list[float]:
        """Return the gaps between the tokens of these requests, in milliseconds."""
        pairs = (pair for name in names for pair in pairwise(self.texts_s[name]))
        return [(after - before) * 1e3 for before, after in pairs]


def simulate(
    strategy: Strategy,
    lines: Sequence[Line],
    slots: int,
    priority: int,
    costs: Costs,
    arriving: Sequence[tuple[float, Line]] = (),
) -> Simulated:
    """Simulate a load. All lines arrive at the start, and interactive requests arrive at the given times in seconds."""
    context = max(len(line.prompt) + line.num_new for line in [*lines, *(line for _, line in arriving)]) + 1
    backend = FakeBackend(n_slots=slots, ctx_per_slot=context, n_batch=2048)
    scheduler, found = Scheduler(Limits(512, 512), strategy, backend, SAVED_BYTES), Simulated()
    coming = deque(arriving)
    for line in lines:
        _enqueue(scheduler, line, priority, 0.0)
    while scheduler.has_work or coming:
        if not scheduler.has_work:
            found.seconds = max(found.seconds, coming[0][0])
        while coming and coming[0][0] <= found.seconds:
            at, line = coming.popleft()
            _enqueue(scheduler, line, DEFAULT_PRIORITY, at)
        scheduler.admit(found.seconds)
        _move(scheduler, found)
        began, num_tokens = found.seconds, 0
        for works in micro_batches_of(scheduler.schedule(began), unified=False):
            num_tokens += _decode(scheduler, works, costs, found)
        scheduler.strategy.observe(num_tokens, found.seconds - began)
    return found


def _move(scheduler: Scheduler, found: Simulated) -> None:
    def look() -> float:
        found.seconds += LOOK_S
        return found.seconds

    if moves := scheduler.layout.plan_moves():
        scheduler.layout.execute(moves, look)


def _decode(scheduler: Scheduler, works: list[SlotWork], costs: Costs, found: Simulated) -> int:
    """Simulate one of the engine's decode calls, and return its number of tokens."""
    layout, backend = scheduler.layout, scheduler.cache.memory
    assert isinstance(backend, FakeBackend)
    works, padding = layout.fill(works)
    chunks = sorted([*(work.chunk for work in works), *padding])
    backend.decode(chunks)
    backend.batches.clear()
    layout.remove_padding(padding)
    seconds = costs.of(chunks)
    found.seconds += seconds
    found.num_passes += len(passes_of(chunks))
    scheduler.observe_decode(chunks, seconds)
    for work in works:
        _commit(scheduler, work, found)
    return sum(len(work.chunk.tokens) for work in works)


def _enqueue(scheduler: Scheduler, line: Line, priority: int, now: float) -> None:
    request = Request(line.custom_id, line.prompt, max_tokens=line.num_new, priority=priority)
    scheduler.enqueue(Running(request, seed=0, submitted_at=now, tokens=list(line.prompt)), now)


def _commit(scheduler: Scheduler, work: SlotWork, found: Simulated) -> None:
    scheduler.commit(work)
    sequence = work.sequence
    if work.chunk.samples:
        sequence.tokens.append(TOKEN)
        found.texts_s.setdefault(sequence.request.id, []).append(found.seconds)
        if len(sequence.tokens) - sequence.num_prompt >= sequence.request.max_tokens:
            scheduler.release(sequence)
