"""An engine whose decode calls cost nothing, on the thread of its caller: what is left is the time of Python."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from cellama.engine import EngineOptions, Pulse, Request, SamplingParams
from cellama.engine.backend import AdapterSet, Chunk
from cellama.engine.core.engine_core import Command, EngineCore
from cellama.engine.core.handle import Handle
from cellama.engine.fake import FakeBackend, FakeCheckpoint, FakePlan

LETTER = 97
PROMPT_TOKENS, FAMILY_TOKENS, FAMILIES = 128, 64, 50
WARM_UP_STEPS = 50


class Weightless(FakeBackend):
    """Computes nothing, and every next token is the same."""

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        pass

    def next_token(self, slot: int, draw: int, ban_end: bool, row: int = 0) -> int:
        return LETTER

    def trim(self, slot: int, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        return True

    def copy(self, source: int, target: int, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        return True

    def state_bytes(self, slot: int) -> int:
        return 0


class Crowd:
    """So many slots, all busy, and so many requests that wait for one. Seeded."""

    def __init__(self, slots: int, waiting: int, *, families: bool, ends: bool) -> None:
        """With `families` prompts share their first half with others; with `ends` some end and begin in each step."""
        self._random = random.Random(1)
        self._heads = [self._tokens(FAMILY_TOKENS) for _ in range(FAMILIES)] if families else [()]
        self._ends = ends
        self._waiting = waiting
        backend = Weightless(n_slots=slots, ctx_per_slot=1 << 20)
        options = EngineOptions(n_parallel=slots, ctx_per_slot=1 << 20, n_batch=2048, cache_ram_bytes=0)
        self.core = EngineCore(backend, options, Pulse("bench"))
        self._submit(slots + waiting)
        while self.core.inbox or self.core.scheduler.num_waiting > waiting:
            self.core.step()
        for _ in range(WARM_UP_STEPS):
            self.step()

    def _tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(256), k=number))

    def _submit(self, number: int) -> None:
        for _ in range(number):
            head = self._random.choice(self._heads)
            prompt = head + self._tokens(PROMPT_TOKENS - len(head))
            length = self._random.randrange(32, 224) if self._ends else 1 << 19
            greedy = SamplingParams(temperature=0)
            request = Request("r", prompt, greedy, max_tokens=length, ignore_eos=True, submitted_at=time.monotonic())
            handle = Handle(request, lambda _handle, _reason: None, None, plan=FakePlan(greedy))
            self.core.inbox.submit(Command("submit", handle))

    def step(self) -> float:
        """One step, before which as many requests come as have slots or places free; the seconds of processor time."""
        scheduler = self.core.scheduler
        idle = 0 if self._waiting else scheduler.slots.count(None)
        self._submit(max(0, self._waiting + idle - scheduler.num_waiting))
        started = time.thread_time()
        self.core.step()
        return time.thread_time() - started
