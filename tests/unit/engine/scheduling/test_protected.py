"""Protected requests: short steps while they are decoded, and requests that can't meet their deadlines."""

from __future__ import annotations

from itertools import pairwise

from cellama.engine.scheduling.decode_costs import DecodeCosts
from cellama.engine.scheduling.scheduler import Limits
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.scheduling.strategies import (
    GAP_STRETCH,
    MAX_SHORT,
    MIN_SHORT,
    START_STEPS,
    Adaptive,
    SlotView,
    TokenAllocation,
    fluent_rows,
)

from .schedulers import new_scheduler, run_step, sequence

SINGLE_S = 0.01


def measured_costs(row_s: float, max_rows: int = 16) -> DecodeCosts:
    """Return costs of one pass with SINGLE_S for the first row, and `row_s` for each further row."""
    costs = DecodeCosts()
    for _ in range(20):
        for rows in range(1, max_rows + 1):
            costs.observe([rows], SINGLE_S + row_s * (rows - 1))
    return costs


def adaptive_with(costs: DecodeCosts) -> Adaptive:
    strategy = Adaptive()
    strategy.costs = costs
    strategy.observe(512, 1.0)  # the prefill rate
    return strategy


def next_step(strategy: Adaptive, views: list[SlotView], seconds: float = SINGLE_S) -> list[TokenAllocation]:
    allocations = strategy.build_batch(views, 512, 512, 0)
    strategy.observe(sum(count for _, count in allocations), seconds)
    return allocations


def is_short(allocations: list[TokenAllocation], num_rows: int) -> bool:
    return len(allocations) <= num_rows and all(count == 1 for _, count in allocations)


def test_short_step_takes_at_most_twice_as_long_as_a_single_row() -> None:
    costs = measured_costs(0.0025)
    assert 3 <= len(fluent_rows(range(16), costs)) <= 1 + (GAP_STRETCH - 1) * SINGLE_S / 0.002
    assert len(fluent_rows(range(16), measured_costs(0.00001))) == 16
    assert list(fluent_rows(range(16), measured_costs(0.02))) == [0]


def test_youngest_protected_streams_wait_when_all_of_them_would_be_too_slow() -> None:
    strategy = adaptive_with(measured_costs(0.005))
    oldest_first = [SlotView(2, 1, True, 0), SlotView(1, 1, True, 0), SlotView(0, 1, True, 0), SlotView(3, 1, True, 3)]
    assert dict(next_step(strategy, oldest_first)).keys() == {1, 2}


def test_default_rows_precede_bulk_rows_in_short_steps() -> None:
    strategy = adaptive_with(measured_costs(0.005))
    views = [SlotView(0, 1, True, 9), SlotView(1, 1, True, 0), SlotView(2, 1, True, 3)]
    assert dict(next_step(strategy, views)).keys() == {1, 2}


def test_prompts_of_other_requests_wait_until_a_protected_stream_has_had_enough_short_gaps() -> None:
    strategy = adaptive_with(measured_costs(0.005))
    views = [SlotView(0, 1, True, 0), *(SlotView(1 + i, 1, True, 3) for i in range(8)), SlotView(9, 100, False, 3)]
    steps = [next_step(strategy, views) for _ in range(START_STEPS + 3 * (MIN_SHORT + 1))]
    long_steps = [number for number, step in enumerate(steps) if not is_short(step, 2)]
    assert long_steps[0] == START_STEPS
    assert {after - before for before, after in pairwise(long_steps)} == {MIN_SHORT + 1}
    assert all({0, 9} <= dict(steps[number]).keys() for number in long_steps)


def test_protected_prompt_is_prefilled_at_once_and_other_rows_skip_this_step() -> None:
    strategy = adaptive_with(measured_costs(0.005))
    defaults = [*(SlotView(1 + i, 1, True, 3) for i in range(8)), SlotView(9, 100, False, 3)]
    assert next_step(strategy, [SlotView(0, 80, False, 1), *defaults]) == [(0, 80)]
    long_prompt = [SlotView(0, 2000, False, 1), *defaults]
    assert dict(next_step(strategy, long_prompt)).keys() == set(range(9)), "rows don't wait for a long prompt"


def test_prompts_that_arrive_soon_after_each_other_share_a_long_gap() -> None:
    strategy = adaptive_with(measured_costs(0.005))
    stream, prompt = SlotView(0, 1, True, 0), SlotView(1, 128, False, 0)
    next_step(strategy, [SlotView(0, 80, False, 0)], 0.2)
    steps = [next_step(strategy, [stream, prompt]) for _ in range(40)]
    waited_s = next(number for number, step in enumerate(steps) if (1, 128) in step) * SINGLE_S
    assert 0.2 <= waited_s <= 0.3, "the prefill takes 0.25 s at 512 tokens/s"


def test_other_work_never_stops_while_protected_prompts_keep_arriving() -> None:
    strategy = adaptive_with(measured_costs(0.005))
    others = [SlotView(1, 1, True, 0), SlotView(2, 100, False, 3)]
    num_steps = 0
    while not any(slot == 2 for slot, _ in next_step(strategy, [SlotView(0, 40, False, 0), *others])):
        num_steps += 1
        assert num_steps < 2 * MAX_SHORT


def test_prompt_that_would_miss_its_deadline_is_not_prefilled() -> None:
    scheduler = new_scheduler(limits=Limits(512, 512), ctx_per_slot=1000, n_batch=512)
    first = sequence(600, timeout_s=0.1)
    scheduler.enqueue(first, 0.0)
    late: list[Sequence] = []
    assert scheduler.admit(0.0, None, late.append) == [first], "the prefill rate is unknown"
    for _ in range(2):
        run_step(scheduler, pass_s=1.0, row_s=0.0)
    doomed, possible = sequence(600, timeout_s=1.0), sequence(600, timeout_s=10.0)
    for each in (doomed, possible):
        scheduler.enqueue(each, 0.0)
    scheduler.release(first, keep=False)

    def end(each: Sequence) -> None:
        late.append(each)
        scheduler.release(each)

    assert scheduler.admit(0.0, None, end) == [possible]
    assert late == [doomed]
    assert scheduler.num_waiting == 0
