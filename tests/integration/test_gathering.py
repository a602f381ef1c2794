"""Scripts of many threads share a round trip on a real Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError, ResponseError

from cellama.tasks.contract.keys import job_key
from cellama.tasks.state.ledger import Ledger, new_run
from cellama.tasks.state.scripts import Gathered

from ..conftest import PATIENCE_S, wait_until
from .ledgers import submit


class HeldRedis(Redis):
    """A Redis that counts round trips, delays the first one until the test releases it, and can be disconnected."""

    goes_on: threading.Event
    num_pages = 0
    is_cut = False

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self.goes_on.wait(PATIENCE_S)
        return super().execute_command(*args, **options)

    def pipeline(self, *args: Any, **options: Any) -> Any:
        self.num_pages += 1
        if self.is_cut:
            raise RedisConnectionError("cut off")
        return super().pipeline(*args, **options)


@pytest.fixture
def held(redis_client: Redis) -> Iterator[HeldRedis]:
    with HeldRedis(connection_pool=redis_client.connection_pool) as client:
        client.goes_on = threading.Event()
        yield client
        client.goes_on.set()


def begin_together(held: HeldRedis, job_ids: list[str]) -> list[Future[Any]]:
    """Begin the first job, whose round trip is delayed, and then all others, which share the next round trip."""
    ledger = Ledger(held, gathers=True)
    gathered: Gathered = ledger._run_begin.__self__  # type: ignore[attr-defined]
    pool = ThreadPoolExecutor(len(job_ids))
    futures = [pool.submit(ledger.begin, job_ids[0], new_run(), "w", alone=True)]
    wait_until(lambda: gathered._is_sending and not gathered._waiting, "the first call in flight")
    futures += [pool.submit(ledger.begin, job_id, new_run(), "w", alone=True) for job_id in job_ids[1:]]
    wait_until(lambda: len(gathered._waiting) == len(job_ids) - 1, "the other calls waiting")
    pool.shutdown(wait=False)
    return futures


@pytest.fixture
def job_ids(redis_client: Redis) -> Iterator[list[str]]:
    job_ids = [submit(Ledger(redis_client), "cellama:queue:gathered") for _ in range(5)]
    yield job_ids
    redis_client.delete(*map(job_key, job_ids))  # one key has another type, on which a purge would fail


def test_calls_during_a_round_trip_share_the_next_round_trip(held: HeldRedis, job_ids: list[str]) -> None:
    futures = begin_together(held, job_ids)
    held.goes_on.set()
    assert [future.result(PATIENCE_S).verdict for future in futures] == ["run"] * 5
    assert held.num_pages == 1
    alone = Ledger(held, gathers=True).begin(job_ids[0], new_run(), "w", alone=True)
    assert (alone.number, held.num_pages) == (2, 1)  # a single call does not wait


def test_failing_call_does_not_affect_other_calls_in_its_round_trip(
    held: HeldRedis, job_ids: list[str], redis_client: Redis
) -> None:
    redis_client.delete(job_key(job_ids[2]))
    redis_client.set(job_key(job_ids[2]), "of another type")
    futures = begin_together(held, job_ids)
    held.goes_on.set()
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        futures.pop(2).result(PATIENCE_S)
    assert [future.result(PATIENCE_S).verdict for future in futures] == ["run"] * 4


def test_lost_connection_fails_each_call_and_later_calls_succeed(held: HeldRedis, job_ids: list[str]) -> None:
    futures = begin_together(held, job_ids)
    held.is_cut = True
    held.goes_on.set()
    assert futures[0].result(PATIENCE_S).verdict == "run"
    for future in futures[1:]:
        with pytest.raises(RedisConnectionError):
            future.result(PATIENCE_S)
    held.is_cut = False
    held.goes_on.clear()
    again = begin_together(held, job_ids[1:])
    held.goes_on.set()
    assert [future.result(PATIENCE_S).verdict for future in again] == ["run"] * 4


def test_scripts_are_reloaded_when_redis_has_lost_them(
    held: HeldRedis, job_ids: list[str], redis_client: Redis
) -> None:
    futures = begin_together(held, job_ids)
    redis_client.script_flush()
    held.goes_on.set()
    assert [future.result(PATIENCE_S).number for future in futures] == [1] * 5
