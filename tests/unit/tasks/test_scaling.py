"""The number of workers that a pool needs: examples, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from cellama.tasks.estimates.scaling import PoolDemand, PoolScaler, ScalingPolicy, wanted_workers

from ...conftest import EXAMPLES

POLICY = ScalingPolicy(target_wait_s=60.0, cool_down_s=300.0, scale_down_s=120.0)
IDLE = PoolDemand(num_workers=2, idle_s=1e9)

demands = st.builds(
    PoolDemand,
    num_jobs=st.integers(0, 50),
    num_useful=st.integers(1, 50),
    backlog_s=st.none() | st.floats(0, 1e5),
    num_workers=st.integers(0, 20),
    idle_s=st.floats(0, 1000),
    start_s=st.floats(0, 600),
)
policies = st.builds(
    ScalingPolicy,
    min_workers=st.integers(0, 3),
    max_workers=st.integers(3, 30),
    target_wait_s=st.floats(1, 600),
    cool_down_s=st.floats(0, 600),
    scale_down_s=st.floats(0, 600),
)


def busy(backlog_s: float | None, num_workers: int = 0, *, start_s: float = 0.0, num_useful: int = 100) -> PoolDemand:
    return PoolDemand(num_jobs=8, num_useful=num_useful, backlog_s=backlog_s, num_workers=num_workers, start_s=start_s)


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (busy(0.1), 1),
        (busy(150.0), 3),  # 3 workers finish 150 s of work in less than 60 s
        (busy(150.0, start_s=10.0), 3),  # 50 s each, after 10 s for loading
        (busy(150.0, start_s=30.0), 5),  # 30 s each
        (busy(100.0, 1, start_s=100.0), 1),  # the worker needs 100 s, and a new worker would need as long to load
        (busy(300.0, 1, start_s=100.0), 2),
        (busy(1000.0, num_useful=2), 2),  # more workers would have no job
        (busy(None), 1),  # the duration of the jobs is unknown
        (busy(None, 4), 1),
    ],
)
def test_wanted_workers_finish_the_backlog_in_the_target_time(demand: PoolDemand, expected: int) -> None:
    assert wanted_workers(demand, POLICY) == expected


def test_wanted_workers_are_zero_after_the_cool_down() -> None:
    assert wanted_workers(replace(IDLE, idle_s=299.0), POLICY) == 1
    assert wanted_workers(IDLE, POLICY) == 0
    assert wanted_workers(replace(IDLE, num_workers=0, idle_s=0.0), POLICY) == 0
    assert wanted_workers(IDLE, replace(POLICY, min_workers=2)) == 2


@given(demand=demands, more_s=st.floats(0, 1e5), more_jobs=st.integers(0, 50), policy=policies)
@settings(max_examples=300 * EXAMPLES)
def test_more_work_never_needs_fewer_workers(
    demand: PoolDemand, more_s: float, more_jobs: int, policy: ScalingPolicy
) -> None:
    demand = replace(demand, num_jobs=demand.num_jobs + 1, backlog_s=demand.backlog_s or 0.0)
    assert demand.backlog_s is not None
    more = replace(
        demand,
        num_jobs=demand.num_jobs + more_jobs,
        num_useful=demand.num_useful + more_jobs,
        backlog_s=demand.backlog_s + more_s,
    )
    assert wanted_workers(demand, policy) <= wanted_workers(more, policy)


@given(demand=demands, policy=policies)
@settings(max_examples=300 * EXAMPLES)
def test_number_is_within_its_limits_and_waiting_jobs_need_a_worker(demand: PoolDemand, policy: ScalingPolicy) -> None:
    number = wanted_workers(demand, policy)
    assert policy.min_workers <= number <= policy.max_workers
    assert number >= 1 or not demand.num_jobs


@given(
    steps=st.lists(st.tuples(st.floats(0.1, 100), demands), min_size=1, max_size=20),
    policy=policies,
)
@settings(max_examples=100 * EXAMPLES)
def test_number_stays_for_the_scale_down_time_unless_it_becomes_zero(
    steps: list[tuple[float, PoolDemand]], policy: ScalingPolicy
) -> None:
    scaler, now = PoolScaler(policy), 0.0
    needed: list[tuple[float, int]] = []  # since the number was 0 the last time
    for pause_s, demand in steps:
        now += pause_s
        number = scaler.next(demand, now)
        if demand.num_jobs:
            needed.append((now, wanted_workers(demand, policy)))
        recent = [count for at, count in needed if at > now - policy.scale_down_s]
        assert policy.min_workers <= number <= policy.max_workers
        assert number >= max(recent, default=0) or not number
        if not number:
            assert not demand.num_jobs
            needed.clear()


def test_pause_between_bursts_stops_no_worker() -> None:
    scaler = PoolScaler(POLICY)
    burst, pause = busy(170.0, 3), busy(5.0, 3)
    numbers = [scaler.next(burst if at % 100 < 20 else pause, float(at)) for at in range(0, 600, 5)]
    assert set(numbers) == {3}
    assert scaler.next(pause, 820.0) == 1


def test_restarted_scaler_keeps_the_live_workers_for_the_scale_down_time() -> None:
    scaler = PoolScaler(POLICY)
    assert scaler.next(busy(5.0, 4), 1000.0) == 4
    assert scaler.next(busy(5.0, 4), 1119.0) == 4
    assert scaler.next(busy(5.0, 4), 1121.0) == 1


def test_last_worker_stops_after_the_cool_down() -> None:
    scaler = PoolScaler(POLICY)
    assert scaler.next(busy(5.0, 1), 0.0) == 1
    idle = PoolDemand(num_workers=1, idle_s=1e9)  # the last request started long ago
    assert [scaler.next(idle, at) for at in (1.0, 299.0, 301.0)] == [1, 1, 0]
    assert scaler.next(busy(100.0), 302.0) == 2
