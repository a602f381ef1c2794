"""The quarantine decides which jobs may start concurrently."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellama.tasks.worker.runtime import Quarantine

PATIENCE_S = 30


class Job:
    """A job on its own thread, which passes the quarantine, becomes proven and ends on request of the test."""

    def __init__(self, gate: Quarantine, pool: ThreadPoolExecutor, *, alone: bool) -> None:
        self.started, self.interrupted, self._end = threading.Event(), threading.Event(), threading.Event()
        self.checked = threading.Event()  # set when the quarantine checks whether the job is interrupted
        self.prove: Callable[[], None]
        self._gate, self._alone = gate, alone
        self._run = pool.submit(self._body)

    def _body(self) -> None:
        with self._gate.passed(self._is_interrupted, alone=self._alone) as self.prove:
            self.started.set()
            assert self._end.wait(PATIENCE_S)

    def _is_interrupted(self) -> bool:
        self.checked.set()
        return self.interrupted.is_set()

    def is_waiting(self) -> bool:
        """Return whether the quarantine makes the job wait."""
        self.checked.clear()
        return self.checked.wait(PATIENCE_S) and not self.started.is_set()

    def wait_for_start(self) -> None:
        assert self.started.wait(PATIENCE_S)

    def finish(self) -> None:
        self._end.set()
        self._run.result(PATIENCE_S)


class World:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._gate = pool, Quarantine()

    def job(self, *, alone: bool = False) -> Job:
        return Job(self._gate, self._pool, alone=alone)

    def waiting(self, *, alone: bool = False) -> Job:
        """Return a job that waits in the quarantine."""
        job = self.job(alone=alone)
        assert job.is_waiting()
        return job


@pytest.fixture
def world() -> World:
    return World(ThreadPoolExecutor(8))


def test_unsuspected_jobs_start_concurrently(world: World) -> None:
    jobs = [world.job() for _ in range(3)]
    for job in jobs:
        job.wait_for_start()
    for job in jobs:
        job.finish()


def test_suspect_waits_for_unproven_jobs_and_new_jobs_wait_for_the_suspect(world: World) -> None:
    embedding, story = world.job(), world.job()
    embedding.wait_for_start()
    story.wait_for_start()
    suspect = world.waiting(alone=True)
    fresh = world.waiting()
    embedding.finish()
    assert suspect.is_waiting()
    story.prove()
    suspect.wait_for_start()
    assert fresh.is_waiting()
    suspect.prove()
    fresh.wait_for_start()  # while the other two are still running
    for job in (story, suspect, fresh):
        job.finish()


def test_suspects_start_one_at_a_time(world: World) -> None:
    first = world.job(alone=True)
    first.wait_for_start()
    second, fresh = world.waiting(alone=True), world.waiting()
    first.finish()
    second.wait_for_start()
    assert fresh.is_waiting()
    second.finish()
    fresh.wait_for_start()
    fresh.finish()


def test_interrupted_job_leaves_the_quarantine_and_blocks_no_other_job(world: World) -> None:
    story = world.job()
    story.wait_for_start()
    suspect = world.waiting(alone=True)
    suspect.interrupted.set()
    suspect.wait_for_start()
    suspect.finish()
    fresh = world.job()
    fresh.wait_for_start()
    for job in (story, fresh):
        job.finish()
        job.prove()  # a second call has no effect
    last = world.job(alone=True)
    last.wait_for_start()
    last.finish()
