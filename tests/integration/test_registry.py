"""The registry on a real Redis: who lives is seen, whatever its chores run into."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
from kombu.exceptions import OperationalError
from redis import Redis

from cellama.engine import CoreSharing, ManagerSnapshot
from cellama.engine.models.totals import totals_of
from cellama.tasks.contract.keys import WORKERS_KEY
from cellama.tasks.state.bulk_runs import Batches
from cellama.tasks.state.registry import KEPT_S, Registration, live_workers, recent_workers

from ..conftest import wait_until


class Models:
    """A manager without models."""

    default: str | None = None
    cores = CoreSharing(list)

    def entries(self) -> list[Any]:
        return []

    def snapshot(self) -> ManagerSnapshot:
        return totals_of([])

    def memory(self) -> dict[str, Any]:
        return {}


@contextmanager
def registered(redis: Redis, name: str, *chores: Any) -> Iterator[Registration]:
    registration = Registration(redis, name, Models(), chores, dict)  # type: ignore[arg-type]
    try:
        yield registration
    finally:
        registration.close()


def test_worker_and_run_are_seen_whatever_the_clocks_of_machines_say(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, right = f"w-{uuid.uuid4().hex[:8]}@host", time.time
    for wrong_s in (-3600.0, 3600.0):
        monkeypatch.setattr(time, "time", lambda wrong_s=wrong_s: right() + wrong_s)
        with registered(redis_client, name):
            wait_until(lambda: redis_client.hexists(WORKERS_KEY, name), "the entry")
            Batches(redis_client).write(name, state="in_progress")
            monkeypatch.setattr(time, "time", right)  # the reader is another machine
            assert name in [worker.name for worker in live_workers(redis_client)]
            run = Batches(redis_client).read(name)
            assert run is not None
            assert run["alive"]


def test_worker_is_seen_until_it_ends_although_a_chore_fails(redis_client: Redis) -> None:
    name, beats = f"w-{uuid.uuid4().hex[:8]}@host", []

    def fail() -> None:
        raise OperationalError("the broker is away")

    def seen() -> bool:
        return any(worker.name == name for worker in live_workers(redis_client))

    with registered(redis_client, name, fail, lambda: beats.append(1)) as registration:
        for count in (1, 2, 3):
            wait_until(lambda count=count: len(beats) >= count, f"{count} beats")
            registration.beat_now()
        assert seen()
    assert not seen()


def test_worker_that_ended_is_kept_for_jobs_that_wait_for_a_successor_and_no_longer(redis_client: Redis) -> None:
    name = f"w-{uuid.uuid4().hex[:8]}@host"
    with registered(redis_client, name):
        wait_until(lambda: redis_client.hexists(WORKERS_KEY, name), "the entry")
    assert name not in [worker.name for worker in live_workers(redis_client)]
    (kept,) = [worker for worker in recent_workers(redis_client) if worker.name == name]
    assert kept.has_ended
    old = replace(kept, seen_at=kept.seen_at - KEPT_S - 1)
    redis_client.hset(WORKERS_KEY, name, json.dumps(asdict(old)))
    assert name not in [worker.name for worker in recent_workers(redis_client)]
    with registered(redis_client, f"{name}-2"):
        wait_until(lambda: not redis_client.hexists(WORKERS_KEY, name), "the entry pruned")
