"""The forecast of when a job gets a slot, in single cases and in simulated queues that measure its range."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cellama.tasks.estimates.position import HANDLING_S, ServiceTime, WaitEstimate, forecast, service_time
from cellama.tasks.estimates.samples import JobClass, Sample, Samples

KIND = JobClass("q", "generate", is_bulk=False)


def test_forecast_is_zero_when_a_slot_is_free() -> None:
    assert forecast(2, [ServiceTime(9.0, 1.0)], [], 0, 5) == WaitEstimate(0.0, 0.0, HANDLING_S, 5)


def test_forecast_assigns_jobs_ahead_to_the_first_slot_that_becomes_free() -> None:
    found = forecast(2, [ServiceTime(8.0, 0.0), ServiceTime(2.0, 0.0)], [ServiceTime(3.0, 0.0)], 1)
    assert found.eta_s == 5.0
    assert found.min_s < 5.0 < (found.max_s or 0.0)


def test_forecast_supports_several_slots_per_job_and_extrapolates_from_a_sample() -> None:
    job = ServiceTime(20.0, 4.0, num_slots=2)
    assert [forecast(2, [], [job] * 2, num_ahead).eta_s for num_ahead in (2, 8)] == [20.0, 80.0]


def test_service_time_is_assumed_to_be_a_tenth_longer_when_a_job_exceeds_all_samples() -> None:
    assert service_time([1.0, 2.0, 6.0], elapsed_s=1.5) == ServiceTime(2.5, 4.0)
    assert service_time([1.0], elapsed_s=100.0) == ServiceTime(10.0, 0.0)


def test_estimated_range_is_wider_while_lengths_are_assumed() -> None:
    guessed, learnt = (forecast(1, [ServiceTime(10.0, 0.0)], [], 0, learnt_from) for learnt_from in (0, 1))
    assert guessed.min_s < learnt.min_s < (learnt.max_s or 0.0) < (guessed.max_s or 0.0)


@dataclass
class Queue:
    """Slots that serve jobs in turn. Each arriving job gets an estimate from the samples of finished jobs."""

    num_slots: int
    length: Callable[[random.Random], tuple[int, float]]  # requested and generated tokens
    load: float
    chance: random.Random
    speed: float = 20.0  # tokens per second and slot

    def hits(self, num_jobs: int) -> list[bool]:
        """Return for each job that had to wait whether its wait was within the range."""
        lengths = [self.length(self.chance) for _ in range(num_jobs)]
        gap_s = sum(made for _, made in lengths) / num_jobs / self.speed / self.num_slots / self.load
        now, samples, running, waiting = 0.0, list[Sample](), list[tuple[float, int]](), list[int]()
        estimates, arrived, hits = dict[int, WaitEstimate](), dict[int, float](), list[bool]()
        upcoming = list(range(num_jobs - 1, -1, -1))
        next_at = 0.0
        while upcoming or running:
            ended = None
            if running and (not upcoming or running[0][0] <= next_at):
                now, ended = heapq.heappop(running)
                samples.insert(0, Sample(*lengths[ended], self.speed))
            else:
                now, job = next_at, upcoming.pop()
                next_at += self.chance.expovariate(1 / gap_s) if job % 50 else 30 * gap_s  # bursts of 50, then a pause
                arrived[job] = now
                if len(running) == self.num_slots and samples:
                    estimates[job] = self._estimate(now, lengths, samples, running, waiting)
                waiting.append(job)
            while waiting and len(running) < self.num_slots:
                job = waiting.pop(0)
                heapq.heappush(running, (now + lengths[job][1] / self.speed, job))
                if (estimate := estimates.get(job)) is not None:
                    hits.append(estimate.min_s <= now - arrived[job] <= (estimate.max_s or 0.0))
        return hits

    def _estimate(
        self,
        now: float,
        lengths: list[tuple[int, float]],
        samples: list[Sample],
        running: list[tuple[float, int]],
        waiting: list[int],
    ) -> WaitEstimate:
        learnt = Samples({KIND: samples[:128]})
        speed = self.speed * self.chance.uniform(0.85, 1.15)  # with the error of an engine's report

        def time_of(job: int, elapsed_s: float = 0.0) -> ServiceTime:
            return service_time([amount / speed for amount in learnt.amounts(KIND, lengths[job][0])], elapsed_s)

        in_slots = [time_of(job, now - (end - lengths[job][1] / self.speed)) for end, job in running]
        return forecast(self.num_slots, in_slots, [time_of(job) for job in waiting], len(waiting), learnt.num_samples)


def mixed(chance: random.Random) -> tuple[int, float]:
    """Return the length of a request for 8 to 512 tokens, of which some end early."""
    requested = round(2 ** chance.uniform(3, 9))
    return requested, max(1.0, requested * chance.choice([0.1, 0.4, 1.0, 1.0])) * chance.uniform(1.0, 1.3)


def equal(chance: random.Random) -> tuple[int, float]:
    return 100, 100 * chance.uniform(1.0, 1.3)


def unlimited(chance: random.Random) -> tuple[int, float]:
    """Return the length of a request with the default limit, most of which end far below it."""
    return 256, min(256.0, 256 * chance.lognormvariate(-1.5, 0.8))


@pytest.mark.parametrize("load", [0.9, 1.3])
@pytest.mark.parametrize("num_slots", [1, 4, 16])
@pytest.mark.parametrize("length", [mixed, equal, unlimited])
def test_estimated_range_covers_80_percent_of_the_waits(
    length: Callable[[random.Random], tuple[int, float]], num_slots: int, load: float
) -> None:
    hits = [hit for seed in range(3) for hit in Queue(num_slots, length, load, random.Random(seed)).hits(600)]
    assert len(hits) > 100
    assert sum(hits) / len(hits) >= 0.8, f"{sum(hits)} of {len(hits)}"
