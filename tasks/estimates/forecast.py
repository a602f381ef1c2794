"""When a slot becomes free for a job, from how long the jobs before it are likely to take. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Standard deviations from the estimate to each end of the range. In the simulation of tests/unit/tasks/test_forecast.py
# the range holds for 82 % of the jobs or more in each case; with 1.4 deviations it holds for 74 % in the worst case.
NUM_DEVIATIONS = 1.7
SPEED_DEVIATION = 0.15  # of the estimate: heartbeats report the speed of a single second, which varies
GUESS_DEVIATION = 0.5  # of the estimate, while no job of these classes has ended and lengths are guessed
HANDLING_S = 1.0  # seconds that queue, worker and engine may need in addition


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """Seconds that a job occupies slots, in all, as a mean and a variance; `num_slots` of them at the same time."""

    mean_s: float
    variance: float
    num_slots: int = 1


@dataclass(frozen=True, slots=True)
class WaitEstimate:
    """Seconds until a job gets a slot: the estimate and its range, and the number of ended jobs that it rests on.

    `eta_s` and `most_s` are absent (None) if it is unknown how long such jobs take.
    """

    eta_s: float | None = None
    least_s: float = 0.0
    most_s: float | None = None
    learnt_from: int = 0


def service_time(seconds: Sequence[float], elapsed_s: float = 0.0, num_slots: int = 1) -> ServiceTime:
    """Return the time that remains of a job that may take any of these `seconds`, of which `elapsed_s` have passed.

    A job that has taken longer than all of them is taken to need another tenth.
    """
    left = [each - elapsed_s for each in seconds if each > elapsed_s] or [0.1 * elapsed_s]
    mean_s = sum(left) / len(left)
    return ServiceTime(mean_s, sum((each - mean_s) ** 2 for each in left) / len(left), num_slots)


def forecast(
    num_slots: int,
    running: Sequence[ServiceTime],
    ahead: Sequence[ServiceTime],
    num_ahead: int,
    learnt_from: int = 0,
) -> WaitEstimate:
    """Return when the job behind all these gets a slot.

    Each job takes its mean time in the slot that is free first. `ahead` are the jobs that wait before it, or an even
    sample of these `num_ahead` jobs.
    """
    free_at = sorted(job.mean_s / job.num_slots for job in running for _ in range(job.num_slots))[-num_slots:]
    free_at = [0.0] * (num_slots - len(free_at)) + free_at
    for job in ahead:
        for _ in range(job.num_slots):
            heapq.heapreplace(free_at, free_at[0] + job.mean_s / job.num_slots)
    left_out = num_ahead / len(ahead) - 1 if ahead else 0.0  # jobs that each of the sample stands for, besides itself
    eta_s = free_at[0] + left_out * sum(job.mean_s for job in ahead) / num_slots
    if not eta_s:
        return WaitEstimate(0.0, least_s=0.0, most_s=HANDLING_S, learnt_from=learnt_from)
    variance = sum(job.variance for job in running) + (1 + left_out) * sum(job.variance for job in ahead)
    relative = SPEED_DEVIATION if learnt_from else GUESS_DEVIATION
    spread_s = NUM_DEVIATIONS * math.hypot(math.sqrt(variance) / num_slots, relative * eta_s) + HANDLING_S
    return WaitEstimate(eta_s, least_s=max(0.0, eta_s - spread_s), most_s=eta_s + spread_s, learnt_from=learnt_from)
