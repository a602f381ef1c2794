"""Authenticate requests by API key, and admit them within the key's limits."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cellama.api.http.auth import Access, Admission, Caller, LoopbackOnly, Unlimited, is_loopback
from cellama.api.http.errors import ApiError
from cellama.api.keys.entry import KeyEntry, parse_key, sent_key
from cellama.api.keys.store import KeyFile, KeyLookup, KeyStore
from cellama.config import Settings, SettingsError
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import connect_async

from .limiter import CallBatcher, LimitDecision, Limiter, Reservation

log = event_logger(__name__)

JOBS_RETRY_S = 1.0  # the time at which one of a key's jobs ends is unknown
OUTAGE_RETRY_S = 1.0  # for clients, while Redis is unreachable
ANSWER_S = 2.0  # timeout for a reply of Redis, because clients would rather retry than wait longer
_KEY_HELP = "send `Authorization: Bearer sk-…` or `x-api-key: sk-…`; `cellama keys create` creates a key"
_LIMITED = ("requests", "tokens")
RATE_HEADER_NAMES = tuple(
    name
    for unit in _LIMITED
    for part in ("limit", "remaining", "reset")
    for name in (f"x-ratelimit-{part}-{unit}", f"anthropic-ratelimit-{unit}-{part}")
)


@dataclass(frozen=True, slots=True)
class KeyCaller(Caller):
    """A caller with an API key."""

    entry: KeyEntry | None = None


class KeyAccess:
    """Admits requests that have a valid API key. If Redis does not answer, no requests are admitted.

    While no key exists, `keyless` handles all requests. If `keyless` is None, all requests are rejected.
    After the first key has been seen, `keyless` is never used again, so the gateway keeps rejecting requests
    without keys even if Redis loses its data.
    """

    def __init__(
        self,
        redis: Redis,
        file: KeyFile | None = None,
        *,
        keyless: Access | None = None,
        model_aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Create the access control. A key that lists a model's alias may use that model."""
        self._redis = redis
        self._aliases = model_aliases or {}
        self._store = KeyStore(redis, file)
        self._limiter = Limiter(redis)
        self._keyless = keyless if file is None else None
        self._lookups = CallBatcher(self._store.look_up_all)
        self._uses = CallBatcher(self._store.record_uses)

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Return the owner of the key in the headers, or the caller returned by `keyless`. Raises ApiError."""
        sent = sent_key(headers)
        key = None if sent is None else parse_key(sent)
        with _redis_errors_as_503():
            found = await self._lookups.call("" if key is None else key.id)
            if found.num_keys:
                self._keyless = None
            elif self._keyless is not None:
                return await self._keyless.authenticate(headers)
            if sent is None:
                raise _unauthorized(f"the request has no API key; {_KEY_HELP}")
            if key is None or found.entry is None or not key.has_digest(found.entry.digest):
                raise _unauthorized(f"the API key is invalid; {_KEY_HELP}")
            _check_state(found)
            if found.is_use_due:
                await self._uses.call(found)
        return self._owner(found.entry)

    async def owner_of(self, key_id: str, digest: str) -> KeyCaller | None:
        """Return the owner of a key that `authenticate` accepted earlier.

        Return None if the key is no longer active or its digest has changed. Raises ApiError (503).
        """
        with _redis_errors_as_503():
            found = await self._lookups.call(key_id)
            if found.entry is None or found.entry.digest != digest or found.entry.state(found.now) != "active":
                return None
            if found.is_use_due:
                await self._uses.call(found)
        return self._owner(found.entry)

    async def admit(self, caller: Caller) -> Admission:
        """Charge the request to the caller's key. Raises ApiError (429) if a limit is reached."""
        entry = caller.entry if isinstance(caller, KeyCaller) else None
        if entry is None or not entry.has_limits:
            return Unlimited()
        with _redis_errors_as_503():
            reserved, decision = await self._limiter.admit(entry)
        headers = rate_headers(entry, decision)
        if not decision.is_admitted:
            raise _over_limit(entry, decision, 0, 1, headers)
        return _Admitted(headers, entry, self._limiter, reserved)

    async def close(self) -> None:
        await self._redis.aclose()

    def _owner(self, entry: KeyEntry) -> KeyCaller:
        models = entry.models
        return KeyCaller(
            tenant=entry.tenant,
            key_id=entry.id,
            models=None if models is None else frozenset(self._aliases.get(name, name) for name in models),
            priority=entry.priority,
            max_tokens=entry.tokens_per_minute,
            adapters=entry.adapters,
            entry=entry,
        )


@dataclass(slots=True)
class _Admitted:
    headers: Mapping[str, str]
    _entry: KeyEntry = field(repr=False)
    _limiter: Limiter = field(repr=False)
    _reserved: Reservation
    _ending: asyncio.Task[None] | None = None

    async def reserve(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Charge tokens and jobs. If this call raises ApiError (429), the earlier charges remain."""
        if self._entry.tokens_per_minute is None and (self._entry.concurrent_jobs is None or num_jobs == 1):
            return
        # Set before Redis answers: if the answer is lost, `end` returns what may have been reserved.
        self._reserved = replace(self._reserved, num_tokens=num_tokens, num_jobs=num_jobs)
        with _redis_errors_as_503():
            decision = await self._limiter.reserve(self._entry, self._reserved)
        self.headers = rate_headers(self._entry, decision)
        if not decision.is_admitted:
            self._reserved = replace(self._reserved, num_tokens=0)
            raise _over_limit(self._entry, decision, num_tokens, num_jobs, dict(self.headers))

    async def end(self, num_tokens: int | None) -> None:
        """Settle the charge, even if the request's task is cancelled."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._settle(num_tokens))
        await asyncio.shield(self._ending)

    async def _settle(self, num_tokens: int | None) -> None:
        try:
            await self._limiter.settle(self._reserved, num_tokens if self._reserved.num_tokens else 0)
        except RedisError as error:
            log.warning(
                "API key usage not updated",
                key=self._reserved.key_id,
                request=self._reserved.id,
                detail=f"{error}; the estimated tokens still count towards the key's limit",
            )


def _check_state(found: KeyLookup) -> None:
    assert found.entry is not None
    state = found.entry.state(found.now)
    if state != "active":
        raise _unauthorized(f"the API key {found.entry.id} is {state}; create another key with `cellama keys create`")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _over_limit(
    entry: KeyEntry, decision: LimitDecision, num_tokens: int, num_jobs: int, headers: dict[str, str]
) -> ApiError:
    requests, tokens, jobs = entry.requests_per_minute, entry.tokens_per_minute, entry.concurrent_jobs
    reason = {
        "requests": f"{decision.num_requests} of {requests} requests per minute are used; retry later",
        "tokens": f"{decision.num_tokens} of {tokens} tokens per minute are used, and this request may use "
        f"{num_tokens} more; retry later",
        "jobs": f"it may have {jobs} jobs at the same time, and this request would exceed that; retry later",
        "too large": f"this request may use {num_tokens} tokens, and the limit is {tokens} per minute; request fewer",
        "too many": f"this request creates {num_jobs} jobs, and the limit is {jobs} at the same time; request "
        "fewer prompts or choices",
    }[decision.verdict]
    message = f"the API key {entry.id} is at its limit: {reason}"
    if decision.is_permanent:
        return ApiError(429, message, code="rate_limit_exceeded", headers={**headers, "x-should-retry": "false"})
    wait_s = JOBS_RETRY_S if decision.verdict == "jobs" else decision.wait_s
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s, headers=headers)


@contextlib.contextmanager
def _redis_errors_as_503() -> Iterator[None]:
    """Convert Redis errors into ApiError (503). The reason is logged, but hidden from clients."""
    try:
        yield
    except RedisError as error:
        log.error("API key check failed", detail=f"Redis: {error!r}; the request fails with status 503")
        raise ApiError(
            503,
            "API keys can't be checked because Redis does not answer; retry shortly",
            code="redis_unreachable",
            retry_after_s=OUTAGE_RETRY_S,
        ) from None


def rate_headers(entry: KeyEntry, decision: LimitDecision) -> dict[str, str]:
    """Return OpenAI's and Anthropic's headers for each limit of the key.

    OpenAI's `reset` is the duration until the whole limit is available again, and Anthropic's `reset` is the
    corresponding point in time.
    """
    headers: dict[str, str] = {}
    full_at = datetime.now(UTC) + timedelta(seconds=math.ceil(decision.empty_in_s))
    used = {
        "requests": (entry.requests_per_minute, decision.num_requests),
        "tokens": (entry.tokens_per_minute, decision.num_tokens),
    }
    for unit, (limit, num_used) in used.items():
        if limit is not None:
            values = {"limit": str(limit), "remaining": str(max(0, limit - num_used))}
            for part, value in values.items():
                headers[f"x-ratelimit-{part}-{unit}"] = headers[f"anthropic-ratelimit-{unit}-{part}"] = value
            headers[f"x-ratelimit-reset-{unit}"] = duration(decision.empty_in_s)
            headers[f"anthropic-ratelimit-{unit}-reset"] = full_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def duration(seconds: float) -> str:
    """Format a duration as OpenAI does: "20ms", "1.5s", "6m0s"."""
    total_ms = round(seconds * 1000)
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, ms = divmod(total_ms, 60_000)
    return f"{minutes}m{ms / 1000:g}s" if minutes else f"{ms / 1000:g}s"


def connect_keys(url: str | None = None) -> Redis:
    """Connect to Redis at this URL, or at the URL in the settings.

    Failed calls are retried once, which is safe because each call can be repeated.
    """
    retry = Retry(NoBackoff(), 1)
    return connect_async(url, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S, retry=retry)


def key_access(settings: Settings, host: str | None = None) -> KeyAccess:
    """Return the access control for a gateway that listens on `host`.

    On loopback, requests from this machine don't need a key while no keys exist. Raises SettingsError if the key file
    is invalid, or if other machines can reach the host while no keys exist.
    """
    file = None if settings.gateway_keys_file is None else KeyFile(settings.gateway_keys_file)
    keyless = LoopbackOnly() if host is not None and is_loopback(host) else None
    if host is not None and keyless is None:
        asyncio.run(_check_keys(settings, file, host))
    redis = connect_keys(settings.redis_url)
    return KeyAccess(redis, file, keyless=keyless, model_aliases=settings.model_aliases)


async def _check_keys(settings: Settings, file: KeyFile | None, host: str) -> None:
    async with connect_keys(settings.redis_url) as redis:
        try:
            has_keys = bool(await KeyStore(redis, file).all())
        except RedisError as error:
            log.warning(
                "API keys not read", detail=f"Redis: {error}; requests fail with status 503 until Redis answers"
            )
            return
    if not has_keys:
        raise SettingsError(
            f"host: {host} can be reached from other machines, and no API key exists, so anyone could use your models; "
            "create a key (`cellama keys create TENANT`), or listen on 127.0.0.1"
        )
