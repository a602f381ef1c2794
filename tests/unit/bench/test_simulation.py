"""Compare batch strategies under simulated costs, with the same result on every machine."""

from __future__ import annotations

from cellama.bench.harness.engines import percentile
from cellama.bench.harness.mixed_load import LoadShape, conversations, flat
from cellama.bench.harness.simulation import CHEAP_ROWS, CPU, Costs, Simulated, simulate
from cellama.bench.harness.workloads import Line
from cellama.engine.scheduling.strategies import STRATEGIES, make_strategy

INTERACTIVE, BULK = 3, 9


def simulated(priority: int, costs: Costs) -> dict[str, Simulated]:
    lines = flat(conversations(LoadShape(32, scale=0.5), seed=1))
    return {name: simulate(make_strategy(name), lines, 8, priority, costs) for name in STRATEGIES}


def short_streams() -> list[Line]:
    lines = flat(conversations(LoadShape(12), seed=2))
    return [Line(f"stream-{number}", line.prompt, 40) for number, line in enumerate(lines)]


def test_strategies_reach_their_target_rates_when_micro_batches_are_expensive() -> None:
    for costs in (CPU, CHEAP_ROWS):
        seconds = {name: found.seconds for name, found in simulated(BULK, costs).items()}
        assert seconds["prefill_priority"] <= seconds["balanced"] * 1.005
        assert seconds["balanced"] < seconds["decode_maximal"]
        assert seconds["adaptive"] == seconds["prefill_priority"]


def test_strategies_reach_their_target_gaps_between_tokens() -> None:
    found = simulated(BULK, CPU)
    for longest in (lambda gaps: percentile(gaps, 0.99), max):
        gaps = {name: longest(one.gaps_ms) for name, one in found.items()}
        assert gaps["decode_maximal"] < gaps["balanced"] < gaps["prefill_priority"]


def test_adaptive_strategy_matches_the_best_strategy_for_interactive_requests() -> None:
    found = simulated(INTERACTIVE, CPU)
    assert found["adaptive"].seconds <= 1.005 * min(one.seconds for one in found.values())
    first = {name: percentile(one.ttft_ms, 0.95) for name, one in found.items()}
    assert first["adaptive"] <= 1.02 * min(first.values())


def test_adaptive_strategy_limits_gaps_in_streams_while_bulk_work_progresses() -> None:
    lines = flat(conversations(LoadShape(160, scale=0.5), seed=1))
    streams = short_streams()
    arriving = [(2.0 + n, line) for n, line in enumerate(streams)]
    alone = simulate(make_strategy("adaptive"), [*lines, *streams], 32, BULK, CPU)
    beside = simulate(make_strategy("adaptive"), lines, 32, BULK, CPU, arriving)
    gaps = beside.gaps_of(line.custom_id for line in streams)
    assert percentile(gaps, 0.5) <= 50
    assert percentile(gaps, 0.95) <= 400  # in steps that prefill bulk prompts
    assert beside.seconds <= 1.25 * alone.seconds


def test_adaptive_strategy_decodes_all_bulk_rows_in_each_step_when_rows_are_cheap() -> None:
    lines = flat(conversations(LoadShape(160, scale=0.5), seed=1))
    streams = short_streams()
    alone = simulate(make_strategy("adaptive"), [*lines, *streams], 32, BULK, CHEAP_ROWS)
    arriving = [(0.5 + 0.2 * n, line) for n, line in enumerate(streams)]
    beside = simulate(make_strategy("adaptive"), lines, 32, BULK, CHEAP_ROWS, arriving)
    assert beside.seconds <= 1.15 * alone.seconds


def test_simulation_computes_each_prompt_once_and_completes_each_request() -> None:
    lines = [Line("a", tuple(range(10)), 3), Line("b", tuple(range(20, 50)), 2)]
    found = simulate(make_strategy("decode_maximal"), lines, 2, BULK, Costs(1.0, 1.0, 1.0))
    assert {name: len(times) for name, times in found.texts_s.items()} == {"a": 3, "b": 2}
    assert found.num_passes == 2 + 2  # of 10 and 30 tokens, which differ in length; then both, then one
    assert round(found.seconds * 1e3) == (1 + 1 + 40) + (1 + 2) + (1 + 1)
