"""What a strategy comes to when a pass costs so much: the real scheduler under a computed clock, the same everywhere.

Machines are noisy, and strategies differ by little: by how many passes there are, and by who waits for which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cellama.engine import Request
from cellama.engine.fake import FakeBackend
from cellama.engine.request import DEFAULT_PRIORITY
from cellama.engine.scheduling.micro_batches import micro_batches_of
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence as Running
from cellama.engine.scheduling.sequence import Work
from cellama.engine.scheduling.strategies import Strategy

from .workloads import Line

TOKEN = 7  # any


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a pass of llama.cpp, and of each of its rows."""

    pass_ms: float
    prompt_row_ms: float
    decode_row_ms: float

    def of(self, works: Sequence[Work]) -> float:
        """Seconds of a decode call: chunks of different lengths are passes of their own (docs/adr/011)."""
        lengths = [len(work.chunk.tokens) for work in works]
        row_ms = self.decode_row_ms if max(lengths) == 1 else self.prompt_row_ms
        return (self.pass_ms * len(set(lengths)) + row_ms * sum(lengths)) / 1e3


CPU = Costs(9.0, 1.3, 1.5)  # 174M in Q8_0 on 2 cores
CHEAP_ROWS = Costs(20.0, 0.02, 0.05)  # where a pass costs the same however full it is, nearly


@dataclass
class Simulated:
    """What came of a load."""

    seconds: float = 0.0
    num_passes: int = 0
    texts_s: dict[str, list[float]] = field(default_factory=dict)  # when each token of a request came

    @property
    def ttft_ms(self) -> list[float]:
        """Of requests that came at the beginning."""
        return [times[0] * 1e3 for times in self.texts_s.values()]

    @property
    def gaps_ms(self) -> list[float]:
        return self.gaps_of(self.texts_s)

    def gaps_of(self, names: Iterable[str]) -> list[float]:
        """Milliseconds between the tokens of these requests."""
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
    """All lines at once, and interactive ones of other names at their times, in seconds."""
    context = max(len(line.prompt) + line.num_new for line in [*lines, *(line for _, line in arriving)]) + 1
    backend = FakeBackend(n_slots=slots, ctx_per_slot=context, n_batch=2048)
    scheduler, found, coming = Scheduler(Limits(512, 512), strategy, backend), Simulated(), deque(arriving)
    for line in lines:
        _enqueue(scheduler, line, priority, 0.0)
    while scheduler.has_work or coming:
        if not scheduler.has_work:
            found.seconds = max(found.seconds, coming[0][0])
        while coming and coming[0][0] <= found.seconds:
            at, line = coming.popleft()
            _enqueue(scheduler, line, DEFAULT_PRIORITY, at)
        scheduler.admit(found.seconds)
        began, num_tokens = found.seconds, 0
        for works in micro_batches_of(scheduler.schedule(began), unified=False):
            backend.decode(sorted(work.chunk for work in works))
            found.seconds += costs.of(works)
            found.num_passes += len({len(work.chunk.tokens) for work in works})
            num_tokens += sum(len(work.chunk.tokens) for work in works)
            for work in works:
                _commit(scheduler, work, found)
        scheduler.strategy.observe(num_tokens, found.seconds - began)
    return found


def _enqueue(scheduler: Scheduler, line: Line, priority: int, now: float) -> None:
    request = Request(line.custom_id, line.prompt, max_tokens=line.num_new, priority=priority)
    scheduler.enqueue(Running(request, seed=0, submitted_at=now, tokens=list(line.prompt)), now)


def _commit(scheduler: Scheduler, work: Work, found: Simulated) -> None:
    scheduler.commit(work)
    sequence = work.sequence
    if work.chunk.samples:
        sequence.tokens.append(TOKEN)
        found.texts_s.setdefault(sequence.request.id, []).append(found.seconds)
        if len(sequence.tokens) - sequence.num_prompt >= sequence.request.max_tokens:
            scheduler.release(sequence)
