"""What a key may take, counted in Redis by its clock: exact, however many gateways ask.

Requests and tokens count for 60 s from the moment at which they are charged, so no 60 s have more of them than the
limit. A request is charged before its body is read, and counts as a job then. Once the body has been read its tokens
are charged as an estimate, and at the end as what they were. A job holds a lease, which its gateway renews: when that
dies, its jobs stop counting after LEASE_S.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cellama.api.keys.entry import KeyEntry
from cellama.tasks.connection.redis_clock import lua_source
from cellama.tasks.contract.keys import key_admissions_key, key_charges_key, key_jobs_key

MOST_AT_ONCE = 256  # questions in one round trip: the first of very many does not wait for the last

Q = TypeVar("Q")
A = TypeVar("A")


class Gathering(Generic[Q, A]):
    """Questions that come while others are answered go together when these are: however many requests come at once,
    they take one connection and few round trips. For one event loop."""

    def __init__(self, answer: Callable[[Sequence[Q]], Awaitable[Sequence[A | BaseException]]]) -> None:
        """`answer` returns an answer or an error for each question. If it raises, all callers get the error."""
        self._answer = answer
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._working: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """Return the answer. A caller that is cancelled does not cancel the question."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            page, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
            answers: Sequence[A | BaseException]
            try:
                answers = await self._answer([question for question, _ in page])
            except Exception as error:  # it is for those who have asked, and the others are still to be answered
                answers = [error] * len(page)
            for (_, future), answer in zip(page, answers, strict=True):
                if future.done():
                    continue  # cancelled
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


log = logging.getLogger(__name__)

WINDOW_S = 60  # limits are per minute
LEASE_S = 20  # jobs of a gateway that died count for so long: short for its clients, long for a Redis that is slow
RENEW_S = 5.0  # three renewals may fail
SCRIPTS = ("admit", "settle", "renew")

Call = tuple[str, list[str], list[Any]]  # of a script: its name, keys and arguments


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """What the limits of a key say to a request, and how much of them is used with it."""

    said: str  # "in", "requests", "tokens", "jobs"; "too large", "too many": so much is never let in
    wait_s: float
    num_requests: int
    num_tokens: int
    empty_in_s: float

    @property
    def is_in(self) -> bool:
        return self.said == "in"

    @property
    def is_hopeless(self) -> bool:
        """Whether the same request may as well not be made again."""
        return self.said in ("too large", "too many")


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request that was let in."""

    id: str
    key_id: str
    num_tokens: int = 0
    num_jobs: int = 1

    @property
    def leases(self) -> list[str]:
        """One for each job."""
        return [f"{self.id}:{place}" for place in range(1, self.num_jobs + 1)]


class Limiter:
    """The limits of all keys, for one event loop."""

    def __init__(self, redis: Redis, now: Callable[[], float] | None = None) -> None:
        """`now` is for tests: the time instead of Redis' own."""
        self._redis = redis
        self._now = now
        self._scripts = {name: redis.register_script(lua_source(__package__, "prelude", name)) for name in SCRIPTS}
        self._calls: Gathering[Call, Any] = Gathering(self._run_all)
        self._running: dict[str, Reservation] = {}  # those that hold leases
        self._renewing: asyncio.Task[None] | None = None

    async def admit(self, entry: KeyEntry) -> tuple[Reservation, LimitDecision]:
        """Let a request in that is one job and no tokens so far, unless the decision refuses it. Raises RedisError."""
        reserved = Reservation(uuid.uuid4().hex, entry.id)
        return reserved, await self._charge(entry, reserved, num_requests=1)

    async def reserve(self, entry: KeyEntry, reserved: Reservation) -> LimitDecision:
        """Charge the tokens and jobs of a request that was let in, unless the decision refuses them: then nothing
        changes. Raises RedisError."""
        return await self._charge(entry, reserved, num_requests=0)

    async def _charge(self, entry: KeyEntry, reserved: Reservation, num_requests: int) -> LimitDecision:
        limits = (entry.requests_per_minute, entry.tokens_per_minute, entry.concurrent_jobs)
        shown = ("" if limit is None else limit for limit in limits)
        charge = (num_requests, reserved.num_tokens, reserved.num_jobs)
        arguments = [reserved.id, *shown, *charge, WINDOW_S, LEASE_S]
        said, wait_s, num_used, taken, empty_in_s = await self._run("admit", _keys_of(entry.id), arguments)
        decision = LimitDecision(
            said=said.decode(),
            wait_s=float(wait_s),
            num_requests=num_used,
            num_tokens=taken,
            empty_in_s=float(empty_in_s),
        )
        if decision.is_in and entry.concurrent_jobs is not None:
            self._hold(reserved)
        return decision

    async def settle(self, reserved: Reservation, num_tokens: int | None) -> None:
        """The request has ended and took so many tokens; None: all that it reserved. Raises RedisError; its lease ends
        by itself then."""
        self._running.pop(reserved.id, None)
        taken = reserved.num_tokens if num_tokens is None else num_tokens
        arguments = [reserved.id, reserved.num_tokens, taken, reserved.num_jobs, WINDOW_S]
        await self._run("settle", _keys_of(reserved.key_id), arguments)

    def _hold(self, reserved: Reservation) -> None:
        self._running[reserved.id] = reserved
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew_while_held())

    async def _renew_while_held(self) -> None:
        while self._running:
            await asyncio.sleep(RENEW_S)
            try:
                await self.renew()
            except RedisError as error:
                log.warning("leases of running requests are not renewed now: %s", error)

    async def renew(self) -> None:
        """Says that the requests that were let in here, and have not ended, go on. Raises RedisError."""
        held = dict(self._running)
        if held:
            leases = [(key_jobs_key(one.key_id), lease) for one in held.values() for lease in one.leases]
            await self._run("renew", [key for key, _ in leases], [LEASE_S], after=[lease for _, lease in leases])
        for request_id in held.keys() - self._running.keys():  # it ended meanwhile, perhaps before it was renewed
            await self._redis.zrem(key_jobs_key(held[request_id].key_id), *held[request_id].leases)

    async def _run(self, name: str, keys: list[str], arguments: list[Any], after: list[str] | None = None) -> Any:
        now = "" if self._now is None else f"{self._now():.6f}"
        return await self._calls.ask((name, keys, [*arguments, now, *(after or ())]))

    async def _run_all(self, calls: Sequence[Call]) -> list[Any]:
        """Each on its own: what Redis says to one it does not say to the others."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name, keys, arguments in calls:
                await self._scripts[name](keys=keys, args=arguments, client=pipe)
            return await pipe.execute(raise_on_error=False)


def _keys_of(key_id: str) -> list[str]:
    return [key_admissions_key(key_id), key_charges_key(key_id), key_jobs_key(key_id)]
