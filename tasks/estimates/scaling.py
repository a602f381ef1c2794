"""Compute how many workers a pool needs (docs/adr/030-scaling.md). This module uses neither Redis nor a clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDemand:
    """The work for a pool's workers at one point in time."""

    num_jobs: int = 0  # waiting and running jobs
    num_useful: int = 0  # workers that these jobs can occupy, given the slots per worker and the limits
    backlog_s: float | None = 0.0  # time in which one worker could finish these jobs; None if it can't be estimated
    num_workers: int = 0  # live workers
    idle_s: float = 0.0  # time since the workers' last request
    start_s: float = 0.0  # time that a new worker needs until its models are loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """The limits and times for the number of workers of a pool."""

    min_workers: int = 0
    max_workers: int = 1_000_000
    target_wait_s: float = 60.0  # time in which the workers should finish the backlog
    cool_down_s: float = 300.0  # time without jobs after which the last worker is stopped
    scale_down_s: float = 120.0  # time for which fewer workers must suffice before workers are stopped


def wanted_workers(demand: PoolDemand, policy: ScalingPolicy) -> int:
    """Return the number of workers that finish the backlog within the target time.

    A worker computes at least as long as it takes to start, so a backlog that the live workers finish sooner starts no
    worker. The number never decreases if there is more work.
    """
    return max(policy.min_workers, min(_needed(demand, policy), policy.max_workers))


def _needed(demand: PoolDemand, policy: ScalingPolicy) -> int:
    if not demand.num_jobs:
        return int(demand.num_workers > 0 and demand.idle_s < policy.cool_down_s)
    if demand.backlog_s is None:
        return 1
    horizon_s = max(policy.target_wait_s, 2 * demand.start_s)
    left_s = demand.backlog_s - demand.num_workers * horizon_s  # the live workers don't finish this work in time
    if left_s > 0:
        needed = demand.num_workers + math.ceil(left_s / (horizon_s - demand.start_s))
    else:
        needed = math.ceil(demand.backlog_s / horizon_s)
    return max(1, min(needed, demand.num_useful))


@dataclass(slots=True)
class PoolScaler:
    """The number of workers of one pool over time.

    The number increases immediately. It decreases to the largest number that was needed in the last `scale_down_s`
    seconds, so a pause between two bursts stops no workers. Without jobs, the number becomes 0 after `cool_down_s`.
    """

    policy: ScalingPolicy
    _needed: deque[tuple[float, int]] = field(default_factory=deque)  # times and numbers, largest number first
    _busy_at: float | None = None

    def next(self, demand: PoolDemand, now: float) -> int:
        """Return the number of workers at the time `now`, in seconds of any clock that never goes back.

        The first call treats the live workers as needed, so restarting the caller stops no workers.
        """
        if demand.num_jobs or self._busy_at is None:
            self._busy_at = now - (0.0 if demand.num_jobs else demand.idle_s)
            if not self._needed:
                self._keep(now, min(demand.num_workers, self.policy.max_workers))
        number = wanted_workers(replace(demand, idle_s=now - self._busy_at), self.policy)
        if number == 0:
            self._needed.clear()  # the cool-down has already delayed this decrease
        while self._needed and self._needed[0][0] <= now - self.policy.scale_down_s:
            self._needed.popleft()
        self._keep(now, number)
        return self._needed[0][1]

    def _keep(self, now: float, number: int) -> None:
        """Add a number, and drop earlier numbers that are not larger, because they no longer determine the maximum."""
        while self._needed and self._needed[-1][1] <= number:
            self._needed.pop()
        self._needed.append((now, number))
