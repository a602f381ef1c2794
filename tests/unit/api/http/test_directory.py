"""What requests want to know of the queue is asked for once for all of them, and keeps none of them waiting."""

from __future__ import annotations

import asyncio

import pytest

from cellama.api.http.gateway import Cached


class Asked:
    """Answers 0, 1, …, those after the first when they are let go; and a clock."""

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


def test_value_is_asked_for_once_while_it_is_fresh() -> None:
    async def run() -> None:
        asked = Asked()
        assert await asyncio.gather(*(asked.kept.get(1.0) for _ in range(5))) == [0] * 5
        asked.now += 0.9
        assert await asked.kept.get(1.0) == 0
        assert asked.count == 1

    asyncio.run(run())


def test_value_that_is_asked_for_again_is_the_one_before_meanwhile() -> None:
    async def run() -> None:
        asked = Asked()
        await asked.kept.get(1.0)
        asked.now += 1.5
        assert await asked.kept.get(1.0) == 0
        asked.now += 1.0  # too old
        waiting = asyncio.create_task(asked.kept.get(1.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        asked.go.set()
        assert await waiting == 1
        assert asked.count == 2

    asyncio.run(run())


def test_value_as_of_now_is_waited_for() -> None:
    async def run() -> None:
        asked = Asked()
        await asked.kept.get(1.0)
        asked.now += 0.1
        asked.go.set()
        assert await asked.kept.get(0.0) == 1

    asyncio.run(run())


def test_failure_is_told_to_who_waits_and_asked_for_again_by_the_next() -> None:
    async def run() -> None:
        asked = Asked()
        await asked.kept.get(1.0)
        asked.go.set()
        asked.fails, asked.now = True, asked.now + 3
        with pytest.raises(OSError, match="gone"):
            await asked.kept.get(1.0)
        asked.fails = False
        assert await asked.kept.get(1.0) == 2

    asyncio.run(run())
