"""The gateway's door where there are keys: who a request comes from, and whether it may run now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cellama.api.http.auth import Access, Admission, Caller, LoopbackOnly, Unlimited, is_loopback
from cellama.api.http.errors import ApiError
from cellama.api.keys.entry import KeyEntry, given_key, parse_key
from cellama.api.keys.store import Found, KeyFile, KeyStore
from cellama.config import Settings, SettingsError
from cellama.tasks.connection.connections import connect_async

from .limiter import Gathering, LimitDecision, Limiter, Reservation

log = logging.getLogger(__name__)

JOBS_RETRY_S = 1.0  # when one of a key's jobs ends can't be known
OUTAGE_RETRY_S = 1.0  # for clients, while Redis is away
ANSWER_S = 2.0  # for a reply of Redis: clients would rather retry than wait longer for a check of their key
_HOW = "send `Authorization: Bearer sk-…` or `x-api-key: sk-…`; `cellama keys create` makes a key"
RATE_HEADER_NAMES = tuple(
    f"x-ratelimit-{part}-{of}" for part in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)


@dataclass(frozen=True, slots=True)
class KeyCaller(Caller):
    """A caller with a key."""

    entry: KeyEntry | None = None


class KeyAccess:
    """Lets in who has a key that counts now. Without Redis it lets no one in.

    While there are no keys at all `keyless` lets in, and without that no one. Once there were some, it is over: keys
    that are gone, as with a Redis that lost its data, open nothing.
    """

    def __init__(self, redis: Redis, file: KeyFile | None = None, *, keyless: Access | None = None) -> None:
        self._redis = redis
        self._store = KeyStore(redis, file)
        self._limiter = Limiter(redis)
        self._keyless = keyless if file is None else None
        self._looks = Gathering(self._store.look_all)
        self._uses = Gathering(self._store.note_uses)

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """The owner of the key in the headers; a caller without a tenant while the gateway is open. Raises ApiError."""
        given = given_key(headers)
        key = None if given is None else parse_key(given)
        with _asking():
            found = await self._looks.ask("" if key is None else key.id)
            if found.num_keys:
                self._keyless = None
            elif self._keyless is not None:
                return await self._keyless.authenticate(headers)
            if given is None:
                raise _refused(f"no API key was sent: {_HOW}")
            if key is None or found.entry is None or not key.is_of(found.entry.digest):
                raise _refused(f"the API key is not one of this gateway; {_HOW}")
            _check_state(found)
            if found.is_use_due:
                await self._uses.ask(found)
        entry = found.entry
        return KeyCaller(
            tenant=entry.tenant,
            key_id=entry.id,
            models=entry.models,
            priority=entry.priority,
            max_tokens=entry.tokens_per_minute,
            adapters=entry.adapters,
            entry=entry,
        )

    async def admit(self, caller: Caller) -> Admission:
        """Charge the request to the caller's key. Raises ApiError (429) if a limit is reached."""
        entry = caller.entry if isinstance(caller, KeyCaller) else None
        if entry is None or not entry.has_limits:
            return Unlimited()
        with _asking():
            reserved, decision = await self._limiter.admit(entry)
        headers = rate_headers(entry, decision)
        if not decision.is_in:
            raise _over_limit(entry, decision, 0, 1, headers)
        return _Admitted(headers, entry, self._limiter, reserved)

    async def close(self) -> None:
        await self._redis.aclose()


@dataclass(slots=True)
class _Admitted:
    headers: Mapping[str, str]
    _entry: KeyEntry = field(repr=False)
    _limiter: Limiter = field(repr=False)
    _reserved: Reservation
    _ending: asyncio.Task[None] | None = None

    async def reserve(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Raises ApiError (429); what the request was charged before stays charged."""
        if self._entry.tokens_per_minute is None and (self._entry.concurrent_jobs is None or num_jobs == 1):
            return
        # Before Redis answers: if the answer is lost, `end` gives back what may have been reserved.
        self._reserved = replace(self._reserved, num_tokens=num_tokens, num_jobs=num_jobs)
        with _asking():
            decision = await self._limiter.reserve(self._entry, self._reserved)
        self.headers = rate_headers(self._entry, decision)
        if not decision.is_in:
            self._reserved = replace(self._reserved, num_tokens=0)
            raise _over_limit(self._entry, decision, num_tokens, num_jobs, dict(self.headers))

    async def end(self, num_tokens: int | None) -> None:
        """Goes on to its end also when the request's own task is cancelled meanwhile."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._settle(num_tokens))
        await asyncio.shield(self._ending)

    async def _settle(self, num_tokens: int | None) -> None:
        try:
            await self._limiter.settle(self._reserved, num_tokens if self._reserved.num_tokens else 0)
        except RedisError as error:
            log.warning(
                "key %s stays charged for what request %s may have taken: %s",
                self._reserved.key_id,
                self._reserved.id,
                error,
            )


def _check_state(found: Found) -> None:
    assert found.entry is not None
    state = found.entry.state(found.now)
    if state != "active":
        raise _refused(f"the API key {found.entry.id} is {state}; `cellama keys create` makes another")


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _over_limit(
    entry: KeyEntry, decision: LimitDecision, num_tokens: int, num_jobs: int, headers: dict[str, str]
) -> ApiError:
    requests, tokens, jobs = entry.requests_per_minute, entry.tokens_per_minute, entry.concurrent_jobs
    reason = {
        "requests": f"{decision.num_requests} of {requests} requests per minute were made",
        "tokens": f"{decision.num_tokens} of {tokens} tokens per minute are taken, and this one may take {num_tokens}",
        "jobs": f"it may have {jobs} jobs at the same time, and with this request it would have more",
        "too large": f"this request may take {num_tokens} tokens, but {tokens} per minute are all; ask for fewer",
        "too many": f"this request is {num_jobs} jobs, but {jobs} at the same time are all; ask for fewer prompts or n",
    }[decision.said]
    message = f"the API key {entry.id} is at its limit: {reason}"
    if decision.is_hopeless:
        return ApiError(429, message, code="rate_limit_exceeded", headers={**headers, "x-should-retry": "false"})
    wait_s = JOBS_RETRY_S if decision.said == "jobs" else decision.wait_s
    headers = {**headers, "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))}
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s, headers=headers)


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Without Redis no key can be checked and nothing be counted: 503, and the reason is for the log alone."""
    try:
        yield
    except RedisError as error:
        log.error("no key can be checked: Redis does not do what it is asked: %r", error)
        raise ApiError(
            503,
            "API keys can't be checked now, because Redis does not answer; try again soon",
            code="redis_unreachable",
            retry_after_s=OUTAGE_RETRY_S,
        ) from None


def rate_headers(entry: KeyEntry, decision: LimitDecision) -> dict[str, str]:
    """`x-ratelimit-…` for each limit that the key has."""
    headers: dict[str, str] = {}
    used = {
        "requests": (entry.requests_per_minute, decision.num_requests),
        "tokens": (entry.tokens_per_minute, decision.num_tokens),
    }
    for what, (limit, num_used) in used.items():
        if limit is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, limit - num_used))
            headers[f"x-ratelimit-reset-{what}"] = duration(decision.empty_in_s)
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes it: "20ms", "1.5s", "6m0s"."""
    total_ms = round(seconds * 1000)
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, ms = divmod(total_ms, 60_000)
    return f"{minutes}m{ms / 1000:g}s" if minutes else f"{ms / 1000:g}s"


def connect_keys(url: str | None = None) -> Redis:
    """Redis at the URL, or that of the settings. What is asked again, after a lost connection, has no other effect."""
    again = Retry(NoBackoff(), 1)
    return connect_async(url, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S, retry=again)


def key_access(settings: Settings, host: str | None = None) -> KeyAccess:
    """Lets in who has a key. At a `host` on loopback it lets in requests of this machine while there are no keys.

    Raises SettingsError for a host that other machines reach if there are none, and for a wrong file of keys.
    """
    file = None if settings.gateway_keys_file is None else KeyFile(settings.gateway_keys_file)
    if host is None or is_loopback(host):
        keyless = None if host is None else LoopbackOnly()
        return KeyAccess(connect_keys(settings.redis_url), file, keyless=keyless)
    asyncio.run(_check_keys(settings, file, host))
    return KeyAccess(connect_keys(settings.redis_url), file)


async def _check_keys(settings: Settings, file: KeyFile | None, host: str) -> None:
    async with connect_keys(settings.redis_url) as redis:
        try:
            has_keys = bool(await KeyStore(redis, file).all())
        except RedisError as error:
            log.warning("whether there are API keys can't be seen yet; until then no request is let in: %s", error)
            return
    if not has_keys:
        raise SettingsError(
            f"{host} can be reached by others, and there are no API keys: each of them could use your models; "
            "make a key (`cellama keys create TENANT`), or listen on 127.0.0.1"
        )
