"""Questions of many requests that go to Redis together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

MOST_AT_ONCE = 256  # so that the first of very many need not wait for the last

Q = TypeVar("Q")
A = TypeVar("A")


class Gathering(Generic[Q, A]):
    """Questions that come while others are answered go together when these are: however many requests come at once,
    they take one connection and few round trips. For one event loop."""

    def __init__(self, answer: Callable[[Sequence[Q]], Awaitable[Sequence[A | BaseException]]]) -> None:
        """`answer` gives an answer to each question, or what it meets with it; what it raises is told to all."""
        self._answer = answer
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._working: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """The answer. If the one who asks is cancelled, the question is asked all the same."""
        told: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, told))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await told

    async def _work(self) -> None:
        while self._waiting:
            page, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
            answers: Sequence[A | BaseException]
            try:
                answers = await self._answer([question for question, _ in page])
            except Exception as error:  # it is for those who have asked, and the others are still to be answered
                answers = [error] * len(page)
            for (_, told), answer in zip(page, answers, strict=True):
                if told.done():
                    continue  # cancelled
                if isinstance(answer, BaseException):
                    told.set_exception(answer)
                else:
                    told.set_result(answer)
