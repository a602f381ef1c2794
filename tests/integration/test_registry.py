"""Live workers stay in the registry on a real Redis, even if their periodic tasks fail."""

from __future__ import annotations

import contextlib
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
from cellama.engine.system.processors import machine_id
from cellama.tasks.connection.connections import redis_time
from cellama.tasks.contract.keys import machine_key, reaper_key, workers_key
from cellama.tasks.state import registry
from cellama.tasks.state.bulk_runs import Batches
from cellama.tasks.state.registry import ENTRY_TTL_S, STALE_S, Registration, live_workers, recent_workers
from cellama.tasks.worker.neighbours import Neighbour, Neighbours

from ..conftest import wait_until, worker_entry


class Models:
    """A model manager without models."""

    default: str | None = None
    cores = CoreSharing(list)

    def entries(self) -> list[Any]:
        return []

    def snapshot(self) -> ManagerSnapshot:
        return ManagerSnapshot.sum_of([])

    def memory(self) -> dict[str, Any]:
        return {}


@contextmanager
def registered(redis: Redis, name: str, *chores: Any) -> Iterator[Registration]:
    registration = Registration(redis, name, Models(), periodic_tasks=chores)  # type: ignore[arg-type]
    registration.start()
    try:
        yield registration
    finally:
        registration.close()


def test_workers_and_runs_are_listed_despite_wrong_clocks(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    right = time.time
    for wrong_s in (-3600.0, 3600.0):
        name = f"w-{uuid.uuid4().hex[:8]}@host"
        monkeypatch.setattr(time, "time", lambda wrong_s=wrong_s: right() + wrong_s)
        with registered(redis_client, name):
            wait_until(lambda name=name: redis_client.hexists(workers_key(), name), "the entry")
            Batches(redis_client).write(name, state="in_progress")
            monkeypatch.setattr(time, "time", right)  # the reader runs on another machine
            assert name in [worker.name for worker in live_workers(redis_client)]
            run = Batches(redis_client).read(name)
            assert run is not None
            assert run["alive"]


def test_worker_stays_listed_when_a_periodic_duty_fails(redis_client: Redis) -> None:
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


def test_stopped_worker_is_kept_while_jobs_wait_for_its_weights(redis_client: Redis) -> None:
    name = f"w-{uuid.uuid4().hex[:8]}@host"
    with registered(redis_client, name):
        wait_until(lambda name=name: redis_client.hexists(workers_key(), name), "the entry")
    assert name not in [worker.name for worker in live_workers(redis_client)]
    (kept,) = [worker for worker in recent_workers(redis_client) if worker.name == name]
    assert kept.has_ended
    old = replace(kept, seen_at=kept.seen_at - ENTRY_TTL_S - 1)
    redis_client.hset(workers_key(), name, json.dumps(asdict(old)))
    assert name not in [worker.name for worker in recent_workers(redis_client)]
    redis_client.delete(reaper_key("registry"))  # the workers of other tests take turns with this one
    with registered(redis_client, f"{name}-2"):
        wait_until(lambda: not redis_client.hexists(workers_key(), name), "the entry pruned")


def test_cost_of_a_heartbeat_is_independent_of_workers_on_other_machines(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, read = f"w-{uuid.uuid4().hex[:8]}@host", []
    entry_of = registry._entry_of
    monkeypatch.setattr(registry, "_entry_of", lambda data: read.append(data) or entry_of(data))
    far = {f"far-{number}@{name}": json.dumps(asdict(worker_entry(f"far-{number}@{name}"))) for number in range(200)}
    redis_client.hset(workers_key(), mapping=far)
    redis_client.set(reaper_key("registry"), "another worker", px=60_000)  # its turn
    try:
        neighbours, beats = Neighbours(redis_client, name, CoreSharing(list)), list[int]()
        with registered(redis_client, name, neighbours.share_cores, lambda: beats.append(1)) as registration:
            for count in range(1, 11):
                wait_until(lambda count=count: len(beats) >= count, f"{count} beats")
                registration.beat_now()
        assert read == []  # even with 2000 entries
    finally:
        redis_client.hdel(workers_key(), *far)
        redis_client.delete(reaper_key("registry"))


def test_one_of_many_workers_prunes_the_registry_in_each_period(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned: list[str] = []
    prune = Registration._prune

    def note(registration: Registration, now: float) -> None:
        pruned.append(registration._worker)
        prune(registration, now)

    monkeypatch.setattr(Registration, "_prune", note)
    redis_client.delete(reaper_key("registry"))
    names = [f"w{number}-{uuid.uuid4().hex[:8]}@host" for number in range(5)]
    with contextlib.ExitStack() as stack:
        beats: list[str] = []
        for name in names:
            stack.enter_context(registered(redis_client, name, lambda name=name: beats.append(name)))
        wait_until(lambda: set(beats) == set(names), "a beat of each")
    assert len(pruned) <= 1  # 0 if a worker of another test was faster


def test_neighbours_are_the_running_workers_on_the_same_machine(redis_client: Redis) -> None:
    names = [f"{letter}-{uuid.uuid4().hex[:8]}@host" for letter in "abc"]
    first, second = (Neighbours(redis_client, name, CoreSharing(list)) for name in names[:2])
    key = machine_key(machine_id())
    silent = Neighbour(names[2], "host", redis_time(redis_client) - STALE_S - 1, CoreSharing(list).report())
    redis_client.hset(key, names[2], json.dumps(asdict(silent)))
    redis_client.hset(key, "of another version", "{}")
    for each in (first, second, first):
        each.share_cores()
    assert len(first._cores._peers) >= 1
    assert {names[0].encode(), names[1].encode()} <= set(redis_client.hkeys(key))
    assert {names[2].encode(), b"of another version"}.isdisjoint(redis_client.hkeys(key))
    assert 0 < redis_client.ttl(key) <= ENTRY_TTL_S
    second.close()
    assert names[1].encode() not in redis_client.hkeys(key)
    first.close()
