"""The pool of job threads: cancellation, time limits and draining."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from cellama.tasks.broker.pool import Interruption, JobControl, TaskPool, current_job

from ....conftest import wait_until

PATIENCE_S = 30


@pytest.fixture
def pool() -> Iterator[TaskPool]:
    pool = TaskPool(limit=4)
    pool.start()
    yield pool
    pool.stop()


class Job:
    """A job that waits until it is interrupted or released."""

    def __init__(self) -> None:
        self.started, self.end = threading.Event(), threading.Event()
        self.interruption: Interruption | None = None
        self.results: list[Any] = []
        self.returned = threading.Event()

    def __call__(self) -> str:
        control = current_job()
        control.when_interrupted(lambda _: self.end.set())
        self.started.set()
        assert self.end.wait(PATIENCE_S)
        self.interruption = control.interruption
        self.returned.set()
        return "result"


def test_pool_runs_jobs_concurrently_and_reports_each_result_once(pool: TaskPool) -> None:
    jobs = [Job() for _ in range(4)]
    numbers: list[int] = []
    for job in jobs:
        pool.on_apply(job, callback=job.results.append, accept_callback=lambda pid, _: numbers.append(pid))
    assert all(job.started.wait(PATIENCE_S) for job in jobs)
    assert pool.info["running-jobs"] == 4
    for job in jobs:
        job.end.set()
    pool.on_stop()
    assert [job.results for job in jobs] == [["result"]] * 4
    assert len(set(numbers)) == 4


def test_terminate_job_interrupts_the_job_with_the_given_number(pool: TaskPool) -> None:
    first, second = Job(), Job()
    numbers: dict[str, int] = {}
    pool.on_apply(first, callback=first.results.append, accept_callback=lambda pid, _: numbers.update(first=pid))
    pool.on_apply(second, callback=second.results.append)
    assert first.started.wait(PATIENCE_S)
    assert second.started.wait(PATIENCE_S)
    pool.terminate_job(numbers["first"])
    pool.terminate_job(999)
    assert first.returned.wait(PATIENCE_S)
    assert first.interruption is Interruption.CANCELLED
    assert not second.returned.is_set()
    second.end.set()


def test_hard_time_limit_is_reported_to_celery_and_the_later_result_is_dropped(pool: TaskPool) -> None:
    job = Job()
    reported: list[tuple[bool, float]] = []
    arguments: dict[str, Any] = {
        "soft_timeout": 0.05,
        "timeout": 2.0,
        "timeout_callback": lambda *a: reported.append(a),
    }
    job.end = Unstoppable()
    pool.on_apply(job, callback=job.results.append, **arguments)
    assert job.returned.wait(PATIENCE_S)
    pool.on_stop()
    wait_until(lambda: len(reported) == 2, "both limits")
    assert reported == [(True, 0.05), (False, 2.0)]
    assert job.interruption is Interruption.HARD_LIMIT
    assert job.results == []


class Unstoppable(threading.Event):
    """An event that is set by the second interruption, so that the soft limit alone does not end the job."""

    calls = 0

    def set(self) -> None:
        self.calls += 1
        if self.calls == 2:
            super().set()


def test_interruption_before_a_job_is_registered_stops_it_immediately() -> None:
    control = JobControl(1)
    control.terminate()
    stopped: list[Interruption] = []
    control.when_interrupted(stopped.append)
    control.interrupt(Interruption.SOFT_LIMIT)
    assert stopped == [Interruption.CANCELLED]


def test_pool_grows_and_shrinks() -> None:
    pool = TaskPool(limit=2)
    pool.grow(3)
    pool.shrink(1)
    assert pool.num_processes == 4


def test_idle_thread_has_no_reference_to_its_last_job(pool: TaskPool) -> None:
    def job() -> None:
        seen.append(weakref.ref(current_job()))

    seen: list[weakref.ref[JobControl]] = []
    done = threading.Event()
    pool.on_apply(job, callback=lambda _: done.set())
    assert done.wait(PATIENCE_S)
    wait_until(lambda: seen[0]() is None, "the job gone")
