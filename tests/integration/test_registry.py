"""The registry on a real Redis: who lives is seen, whatever its chores run into."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu.exceptions import OperationalError
from redis import Redis

from cellama.engine import CoreSharing
from cellama.tasks.registry import Registration, live_workers

from ..conftest import wait_until


class Models:
    """A manager without models."""

    default: str | None = None
    cores = CoreSharing(list)

    def entries(self) -> list[Any]:
        return []

    def memory(self) -> dict[str, Any]:
        return {}


@contextmanager
def registered(redis: Redis, name: str, *chores: Any) -> Iterator[Registration]:
    registration = Registration(redis, name, Models(), chores, dict)  # type: ignore[arg-type]
    try:
        yield registration
    finally:
        registration.close()


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
