"""Test the values that the gateway caches. They are fetched once for all concurrent requests, and delay none."""

from __future__ import annotations

import asyncio

import pytest

from cellama.api.http.gateway import Cached


class Fetch:
    """A fetch function that returns 0, 1, …, and waits for a signal after the first call; and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 0
        self.go = asyncio.Event()
        self.fails = False
        self.kept = Cached(self.ask, lambda: self.now)

    async def ask(self) -> int:
        self.count += 1
        answer = self.count - 1
        if answer:
            await self.go.wait()
        if self.fails:
            raise OSError("gone")
        return answer


def test_cached_value_is_fetched_once_while_fresh() -> None:
    async def run() -> None:
        fetch = Fetch()
        assert await asyncio.gather(*(fetch.kept.get(1.0) for _ in range(5))) == [0] * 5
        fetch.now += 0.9
        assert await fetch.kept.get(1.0) == 0
        assert fetch.count == 1

    asyncio.run(run())


def test_previous_value_is_returned_during_a_fetch() -> None:
    async def run() -> None:
        fetch = Fetch()
        await fetch.kept.get(1.0)
        fetch.now += 1.5
        assert await fetch.kept.get(1.0) == 0
        fetch.now += 1.0  # which makes the value too old
        waiting = asyncio.create_task(fetch.kept.get(1.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        fetch.go.set()
        assert await waiting == 1
        assert fetch.count == 2

    asyncio.run(run())


def test_cached_value_is_awaited_when_it_must_be_current() -> None:
    async def run() -> None:
        fetch = Fetch()
        await fetch.kept.get(1.0)
        fetch.now += 0.1
        fetch.go.set()
        assert await fetch.kept.get(0.0) == 1

    asyncio.run(run())


def test_failed_fetch_raises_for_waiters_and_is_repeated_by_next_caller() -> None:
    async def run() -> None:
        fetch = Fetch()
        await fetch.kept.get(1.0)
        fetch.go.set()
        fetch.fails, fetch.now = True, fetch.now + 3
        with pytest.raises(OSError, match="gone"):
            await fetch.kept.get(1.0)
        fetch.fails = False
        assert await fetch.kept.get(1.0) == 2

    asyncio.run(run())
