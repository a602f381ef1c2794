"""The keys that there are: those of a file, or those in Redis. What is asked is as it is now: nothing is cached."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError
from redis.asyncio import Redis

from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.keys import api_keys_key, api_keys_used_key

from .entry import KeyEntry
from .key_file import KeyFile

log = logging.getLogger(__name__)

USED_EVERY_S = 60.0  # how exact the last use is
GONE_AFTER_S = 30 * 86_400.0  # since the last use of a key that is not known: no one asks for it any more


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a key id at a time of Redis' clock (unix s)."""

    entry: KeyEntry | None
    used_at: float | None
    now: float
    num_keys: int  # that there are, of whatever state

    @property
    def is_use_due(self) -> bool:
        """Whether its use now was not noted within the last minute."""
        return self.entry is not None and (self.used_at is None or self.now - self.used_at >= USED_EVERY_S)


class KeyStore:
    """Methods raise RedisError."""

    def __init__(self, redis: Redis, file: KeyFile | None = None) -> None:
        """With a file its keys are all that there are; Redis has the clock then, and their last use."""
        self._redis = redis
        self._file = file

    async def look(self, key_id: str) -> Found:
        """The id need not be that of a key."""
        [found] = await self.look_all([key_id])
        return found

    async def look_all(self, key_ids: Sequence[str]) -> list[Found]:
        """`look` for each of them, in one round trip."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.hlen(api_keys_key())
            pipe.hmget(api_keys_key(), key_ids)
            pipe.hmget(api_keys_used_key(), key_ids)
            time, num_keys, told, used = await pipe.execute()
        if self._file is None:
            entries = [_parsed(value) for value in told]
        else:
            known = self._file.entries()
            entries, num_keys = [known.get(key_id) for key_id in key_ids], len(known)
        pairs = zip(entries, used, strict=True)
        return [Found(entry, _time(at), seconds_of(time), num_keys) for entry, at in pairs]

    async def note_uses(self, uses: Sequence[Found]) -> list[None]:
        """Keeps that keys are in use now."""
        times: dict[Any, Any] = {found.entry.id: f"{found.now:.0f}" for found in uses if found.entry is not None}
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(api_keys_used_key(), mapping=times)
            pipe.hlen(api_keys_used_key())
            _, num_used = await pipe.execute()
        if uses and num_used > uses[-1].num_keys:
            await self._forget_gone(uses[-1].now)
        return [None] * len(uses)

    async def _forget_gone(self, now: float) -> None:
        """Forget the last use of keys that are gone. Another gateway may have a file with keys that are not known here,
        so their last use must be long ago."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hkeys(api_keys_key())
            pipe.hgetall(api_keys_used_key())
            kept, used = await pipe.execute()
        known = {key_id.decode() for key_id in kept} | set(() if self._file is None else self._file.entries())
        last = {key_id.decode(): _time(at) or 0.0 for key_id, at in used.items()}
        gone = [key_id for key_id, at in last.items() if key_id not in known and now - at > GONE_AFTER_S]
        if gone:
            await self._redis.hdel(api_keys_used_key(), *gone)

    async def all(self) -> list[Found]:
        """Every key, the oldest first."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.hgetall(api_keys_key())
            pipe.hgetall(api_keys_used_key())
            time, told, used = await pipe.execute()
        told = [entry for value in told.values() if (entry := _parsed(value)) is not None]
        entries = told if self._file is None else list(self._file.entries().values())
        last = {key_id.decode(): _time(at) for key_id, at in used.items()}
        found = [Found(entry, last.get(entry.id), seconds_of(time), len(entries)) for entry in entries]
        return sorted(found, key=_age)

    async def now(self) -> datetime:
        """By Redis' clock."""
        time: Any = await self._redis.time()
        return datetime.fromtimestamp(int(seconds_of(time)), UTC)

    async def write(self, entry: KeyEntry) -> None:
        """Redis has the key from now on, as it is here."""
        await self._redis.hset(api_keys_key(), entry.id, entry.model_dump_json(exclude_none=True))


def _age(found: Found) -> tuple[float, str]:
    assert found.entry is not None
    created_at = found.entry.created_at
    return (0.0 if created_at is None else created_at.timestamp(), found.entry.id)


def _time(told: bytes | None) -> float | None:
    """None also for what is none: the next use writes over it."""
    try:
        return None if told is None else float(told)
    except ValueError:
        return None


def _parsed(told: bytes | None) -> KeyEntry | None:
    """None also for what is no entry, or says more than this version knows: such a key lets no one in."""
    if told is None:
        return None
    try:
        return KeyEntry.model_validate_json(told)
    except ValidationError as error:
        log.error("an entry of %s can't be read, so its key is not accepted: %s", api_keys_key(), error)
        return None
