"""Apply API key limits. Redis counts usage based on its own clock, so limits are exact with any number of gateways.

Requests and tokens count toward the limits for 60 s after they are charged, so a key's usage doesn't exceed its limits
in any 60 s interval. A request is charged and counts as one job before its body is read. Once the body is known, the
request's estimated tokens are charged. When the request ends, the number of tokens that the request used replaces the
estimate. Each job has a lease, which its gateway renews. If a gateway dies, its jobs stop counting towards the limit
after LEASE_S.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cellama.api.keys.entry import KeyEntry
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import lua_source
from cellama.tasks.contract.keys import key_admissions_key, key_charges_key, key_jobs_key

MAX_CALLS = 256  # in one round trip, so that the first of many calls does not wait for the last

Q = TypeVar("Q")
A = TypeVar("A")


class CallBatcher(Generic[Q, A]):
    """Sends concurrent calls to Redis in batches, which requires only one connection and few round trips.

    Calls that arrive while a batch is being sent form the next batch. A batcher belongs to one event loop.
    """

    def __init__(self, send: Callable[[Sequence[Q]], Awaitable[Sequence[A | BaseException]]]) -> None:
        """Create a batcher.

        `send` returns a result or an error for each call. If `send` raises an error, the whole batch fails.
        """
        self._send = send
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._working: asyncio.Task[None] | None = None

    async def call(self, argument: Q) -> A:
        """Return the result for this argument. Cancelling the caller does not cancel the call."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((argument, future))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_CALLS], self._waiting[MAX_CALLS:]
            results: Sequence[A | BaseException]
            try:
                results = await self._send([argument for argument, _ in batch])
            except Exception as error:  # the callers of this batch get it, and later batches are still sent
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():
                    continue  # cancelled
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)


log = event_logger(__name__)

WINDOW_S = 60  # limits are per minute
LEASE_S = 20  # jobs of a dead gateway count this long: short for its clients, long enough for a slow Redis
RENEW_S = 5.0  # three renewals may fail
SCRIPTS = ("admit", "settle", "renew")

Call = tuple[str, list[str], list[Any]]  # name, keys and arguments of a script


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """The decision to admit or reject a request under its key's limits, and the key's usage including this request."""

    verdict: str  # "in", "requests", "tokens", "jobs"; "too large" and "too many" can never be admitted
    wait_s: float
    num_requests: int
    num_tokens: int
    empty_in_s: float

    @property
    def is_admitted(self) -> bool:
        return self.verdict == "in"

    @property
    def is_permanent(self) -> bool:
        """Whether retrying the same request is certain to fail."""
        return self.verdict in ("too large", "too many")


@dataclass(frozen=True, slots=True)
class Reservation:
    """The charge of an admitted request."""

    id: str
    key_id: str
    num_tokens: int = 0
    num_jobs: int = 1

    @property
    def leases(self) -> list[str]:
        """The names of the request's leases, with one lease per job."""
        return [f"{self.id}:{number}" for number in range(1, self.num_jobs + 1)]


class Limiter:
    """Applies the limits of all keys in one event loop."""

    def __init__(self, redis: Redis, now: Callable[[], float] | None = None) -> None:
        """Create a limiter. `now` replaces the Redis clock in tests."""
        self._redis = redis
        self._now = now
        self._scripts = {name: redis.register_script(lua_source(__package__, "prelude", name)) for name in SCRIPTS}
        self._calls: CallBatcher[Call, Any] = CallBatcher(self._run_all)
        self._running: dict[str, Reservation] = {}  # requests that hold leases
        self._renewing: asyncio.Task[None] | None = None

    async def admit(self, entry: KeyEntry) -> tuple[Reservation, LimitDecision]:
        """Charge one request and one job, unless the request is rejected. Raises RedisError."""
        reserved = Reservation(uuid.uuid4().hex, entry.id)
        return reserved, await self._charge(entry, reserved, num_requests=1)

    async def reserve(self, entry: KeyEntry, reserved: Reservation) -> LimitDecision:
        """Charge the tokens and jobs of an admitted request. If the charge exceeds a limit, nothing is charged.

        Raises RedisError.
        """
        return await self._charge(entry, reserved, num_requests=0)

    async def _charge(self, entry: KeyEntry, reserved: Reservation, num_requests: int) -> LimitDecision:
        limits = (entry.requests_per_minute, entry.tokens_per_minute, entry.concurrent_jobs)
        limit_arguments = ("" if limit is None else limit for limit in limits)
        charge = (num_requests, reserved.num_tokens, reserved.num_jobs)
        arguments = [reserved.id, *limit_arguments, *charge, WINDOW_S, LEASE_S]
        verdict, wait_s, num_used, taken, empty_in_s = await self._run("admit", _keys_of(entry.id), arguments)
        decision = LimitDecision(
            verdict=verdict.decode(),
            wait_s=float(wait_s),
            num_requests=num_used,
            num_tokens=taken,
            empty_in_s=float(empty_in_s),
        )
        if decision.is_admitted and entry.concurrent_jobs is not None:
            self._hold(reserved)
        return decision

    async def settle(self, reserved: Reservation, num_tokens: int | None) -> None:
        """Replace the estimate with the number of tokens that the request used.

        If `num_tokens` is None, keep the estimate. If this call raises RedisError, the leases expire by themselves.
        """
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
                log.warning("job leases not renewed", detail=f"{error}; retrying in {RENEW_S:g} s")

    async def renew(self) -> None:
        """Renew the leases of all requests in progress. Raises RedisError."""
        held = dict(self._running)
        if held:
            leases = [(key_jobs_key(one.key_id), lease) for one in held.values() for lease in one.leases]
            await self._run("renew", [key for key, _ in leases], [LEASE_S], after=[lease for _, lease in leases])
        for request_id in held.keys() - self._running.keys():  # settled during the renewal, perhaps before it
            await self._redis.zrem(key_jobs_key(held[request_id].key_id), *held[request_id].leases)

    async def _run(self, name: str, keys: list[str], arguments: list[Any], after: list[str] | None = None) -> Any:
        now = "" if self._now is None else f"{self._now():.6f}"
        return await self._calls.call((name, keys, [*arguments, now, *(after or ())]))

    async def _run_all(self, calls: Sequence[Call]) -> list[Any]:
        """Run all calls in one round trip. An error in one call does not affect the others."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name, keys, arguments in calls:
                await self._scripts[name](keys=keys, args=arguments, client=pipe)
            return await pipe.execute(raise_on_error=False)


def _keys_of(key_id: str) -> list[str]:
    return [key_admissions_key(key_id), key_charges_key(key_id), key_jobs_key(key_id)]
