"""Who may begin beside whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellama.tasks.worker.runtime import Quarantine

PATIENCE_S = 30


class Job:
    """A job on a thread of its own that passes the gate, proves itself and ends when it is told to."""

    def __init__(self, gate: Quarantine, pool: ThreadPoolExecutor, *, alone: bool) -> None:
        self.begun, self.interrupted, self._end = threading.Event(), threading.Event(), threading.Event()
        self.stands = threading.Event()  # at the gate, which asks whether it is interrupted
        self.prove: Callable[[], None]
        self._gate, self._alone = gate, alone
        self._run = pool.submit(self._body)

    def _body(self) -> None:
        with self._gate.passed(self._is_interrupted, alone=self._alone) as self.prove:
            self.begun.set()
            assert self._end.wait(PATIENCE_S)

    def _is_interrupted(self) -> bool:
        self.stands.set()
        return self.interrupted.is_set()

    def stays(self) -> bool:
        """True if the gate finds once more that it must not pass."""
        self.stands.clear()
        return self.stands.wait(PATIENCE_S) and not self.begun.is_set()

    def begins(self) -> None:
        assert self.begun.wait(PATIENCE_S)

    def ends(self) -> None:
        self._end.set()
        self._run.result(PATIENCE_S)


class World:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._gate = pool, Quarantine()

    def job(self, *, alone: bool = False) -> Job:
        return Job(self._gate, self._pool, alone=alone)

    def waiting(self, *, alone: bool = False) -> Job:
        """A job that stands at the gate, and does not pass."""
        job = self.job(alone=alone)
        assert job.stays()
        return job


@pytest.fixture
def world() -> World:
    return World(ThreadPoolExecutor(8))


def test_jobs_begin_side_by_side(world: World) -> None:
    jobs = [world.job() for _ in range(3)]
    for job in jobs:
        job.begins()
    for job in jobs:
        job.ends()


def test_suspect_waits_for_the_unproven_and_new_ones_for_it(world: World) -> None:
    embedding, story = world.job(), world.job()
    embedding.begins()
    story.begins()
    suspect = world.waiting(alone=True)
    fresh = world.waiting()
    embedding.ends()
    assert suspect.stays()
    story.prove()
    suspect.begins()
    assert fresh.stays()
    suspect.prove()
    fresh.begins()  # beside the other two, which go on
    for job in (story, suspect, fresh):
        job.ends()


def test_suspects_begin_one_by_one(world: World) -> None:
    first = world.job(alone=True)
    first.begins()
    second, fresh = world.waiting(alone=True), world.waiting()
    first.ends()
    second.begins()
    assert fresh.stays()
    second.ends()
    fresh.begins()
    fresh.ends()


def test_who_is_interrupted_waits_no_longer_and_holds_nobody_up(world: World) -> None:
    story = world.job()
    story.begins()
    suspect = world.waiting(alone=True)
    suspect.interrupted.set()
    suspect.begins()
    suspect.ends()
    fresh = world.job()
    fresh.begins()
    for job in (story, fresh):
        job.ends()
        job.prove()  # too late to count a second time
    last = world.job(alone=True)
    last.begins()
    last.ends()
