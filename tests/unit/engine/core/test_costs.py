"""The cost of a step does not depend on the number of waiting requests and saved states.

Costs are bytecode instructions, which are the same on any machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import count, cycle
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cellama import engine
from cellama.engine import EngineOptions, Pulse, Request, Share
from cellama.engine.backend import AdapterSet, Chunk
from cellama.engine.core.engine_core import MAX_COMMANDS_PER_STEP, Command, EngineCore
from cellama.engine.core.requests import Handle
from cellama.engine.fake import FakeBackend, FakeCheckpoint, FakePlan
from cellama.engine.options import Speculation

OURS = str(Path(engine.__file__).parent)
SLOTS, STEPS = 4, 12
LETTER = 97
FEW, MANY = 20, 600
SAME = 1.25  # a larger search tree is slightly deeper
FAMILIES = [[family] * 70 for family in range(5)]
IDS = count()


class Weightless(FakeBackend):
    """A backend that computes nothing and always samples the same token, so that only Python's time counts."""

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


class World:
    """An engine core on one thread, whose requests finish one after another and are replaced by new ones."""

    def __init__(self, shares: bool = False, speculation: Speculation = "auto", **params: Any) -> None:
        options = EngineOptions(n_parallel=SLOTS, n_batch=512, n_ubatch=512, speculation=speculation)
        self.core = EngineCore(Weightless(n_slots=SLOTS), options, Pulse("test"))
        self.params = params
        self.families = cycle(FAMILIES) if shares else cycle([[]])
        self.lengths = cycle([3, 4, 5])
        self.handles: list[Handle] = []

    def submit(self, number: int) -> None:
        for _ in range(number):
            params = {
                "max_tokens": next(self.lengths),
                "ignore_eos": True,
                "submitted_at": time.monotonic(),
                **self.params,
            }
            request = Request(str(next(IDS)), (*next(self.families), *self.own_tokens()), **params)
            handle = Handle(request, lambda _handle, _reason: None, None, plan=FakePlan(request.sampling))
            assert self.core.inbox.submit(Command("submit", handle))
            self.handles.append(handle)

    @staticmethod
    def own_tokens() -> list[int]:
        number = next(IDS)
        return [number % 256, number // 256 % 256, *range(78)]

    def save(self, number: int) -> None:
        for _ in range(number):
            tokens = [*next(self.families), *self.own_tokens()]
            self.core.scheduler.cache.ram.save(0, tokens, self.params.get("cache_scope", ""))

    def cost_of_steps(self) -> int:
        """Return the cost of STEPS steps. Before each step, as many requests arrive as were admitted."""
        waiting, cost = self.core.scheduler.num_waiting, 0
        for _ in range(STEPS):
            self.submit(waiting - self.core.scheduler.num_waiting)
            cost += operations(self.core.step)
        return cost


def operations(action: Callable[[], object]) -> int:
    """Return the number of bytecode instructions of cellama that an action executes."""
    number = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        nonlocal number
        if not frame.f_code.co_filename.startswith(OURS):  # for example, callbacks of the garbage collector
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        number += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return number


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("params", [{}, {"cache_prompt": False}, {"timeout_s": 1e6}, {"n": 2}, {"share": Share("a/b")}])
def test_cost_of_a_step_does_not_grow_with_waiting_requests(shares: bool, params: dict[str, Any]) -> None:
    costs = []
    for number in (FEW, MANY):
        world = World(shares, **params)
        world.submit(number)
        for _ in range(20):
            world.core.step()
        world.submit(number - world.core.scheduler.num_waiting)
        world.core.step()
        costs.append(world.cost_of_steps())
    assert costs[1] <= SAME * costs[0]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("params", [{}, {"cache_prompt": False}, {"priority": 9}])
def test_cost_of_a_step_does_not_grow_with_saved_states(shares: bool, params: dict[str, Any]) -> None:
    costs = []
    for number in (FEW, MANY):
        world = World(shares, **params)
        world.save(number)
        world.submit(FEW)
        for _ in range(10):
            world.core.step()
        costs.append(world.cost_of_steps())
    assert costs[1] <= SAME * costs[0]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("params", [{}, {"cache_prompt": False}])
def test_cost_of_ending_a_request_does_not_grow_with_waiting_requests(shares: bool, params: dict[str, Any]) -> None:
    costs = []
    for number in (FEW, MANY):
        # Only some steps consider drafts, and these steps cost more.
        world = World(shares, speculation="off", max_tokens=100, **params)
        world.submit(SLOTS + number)
        while world.core.inbox:
            world.core.step()
        idle = operations(world.core.step)
        for handle in world.handles[-10:]:
            world.core.inbox.put(Command("cancelled", handle))
        costs.append(operations(world.core.step) - idle)
    assert costs[1] <= SAME * costs[0]


def test_step_handles_a_limited_number_of_new_and_ending_requests() -> None:
    world = World(max_tokens=100, timeout_s=1e6)
    world.submit(SLOTS + 2 * MAX_COMMANDS_PER_STEP)
    waiting = []
    for _ in range(3):
        world.core.step()
        waiting.append(world.core.scheduler.num_waiting)
    assert waiting == [MAX_COMMANDS_PER_STEP - SLOTS, 2 * MAX_COMMANDS_PER_STEP - SLOTS, 2 * MAX_COMMANDS_PER_STEP]
    world.core._expire(1e12)
    assert world.core.scheduler.num_waiting >= MAX_COMMANDS_PER_STEP
    for _ in range(2):
        world.core._expire(1e12)
    assert all(handle.result(0).finish_reason == "timeout" for handle in world.handles)
