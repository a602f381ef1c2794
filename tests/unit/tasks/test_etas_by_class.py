"""The estimated wait of each class of a model is read from Redis once if both classes wait for the same jobs."""

from __future__ import annotations

from typing import Any

import pytest
from fakeredis import FakeRedis

from cellama.tasks.contract.names import queue_name
from cellama.tasks.estimates import position
from cellama.tasks.estimates.position import ListedJob, WaitEstimate, Waiting, eta_by_class
from cellama.tasks.estimates.samples import JobClass
from cellama.tasks.state.ledger import JobsAhead, JobWork

NONE, TWO = Waiting(0, 0.0), Waiting(2, 1.0)


def running(priority: int) -> ListedJob:
    return ListedJob(JobClass(queue_name("tiny"), "generate", is_bulk=priority > 5), JobWork("generate"), priority)


@pytest.mark.parametrize(
    ("jobs", "waiting", "estimated"),
    [
        ([], {"interactive": NONE, "bulk": NONE}, [(0, 5)]),
        ([running(3)], {"interactive": TWO, "bulk": NONE}, [(2, 5)]),
        ([running(7)], {"interactive": TWO, "bulk": NONE}, [(2, 5), (2, 9)]),
        ([running(3)], {"interactive": NONE, "bulk": TWO}, [(0, 5), (2, 9)]),
    ],
)
def test_classes_share_an_estimate_unless_the_less_urgent_class_has_jobs(
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[ListedJob],
    waiting: dict[str, Waiting],
    estimated: list[tuple[int, int]],
) -> None:
    calls: list[tuple[int, int]] = []

    def estimate(_: Any, __: Any, ___: Any, queue: str, ahead: JobsAhead, priority: int) -> WaitEstimate:
        calls.append((ahead.num_jobs, priority))
        return WaitEstimate(float(ahead.num_jobs + priority))

    monkeypatch.setattr(position, "estimate", estimate)
    etas = eta_by_class(FakeRedis(), [], jobs, "tiny", waiting)
    assert calls == estimated
    assert list(etas.values()) == [float(sum(calls[0])), float(sum(calls[-1]))]
