"""Store API keys in a file or in Redis. Nothing is cached, so changes apply from the next request."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from redis.asyncio import Redis

from cellama.config import SettingsError
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import seconds_of
from cellama.tasks.contract.keys import api_keys_key, api_keys_used_key

from .entry import KeyEntry

log = event_logger(__name__)


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[KeyEntry]


class KeyFile:
    """The keys in a file, which is read again when it changes.

    If reading fails, an error is logged, and the previously read keys stay valid.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises SettingsError if the file does not exist or is invalid."""
        self._path = path
        self._version = self._file_version()
        self._entries = read_keys(path)

    def entries(self) -> dict[str, KeyEntry]:
        """Return the keys, keyed by id."""
        version = self._file_version()
        if version != self._version:
            self._version = version
            try:
                self._entries = read_keys(self._path)
                log.info("key file loaded", path=str(self._path), num_keys=len(self._entries))
            except SettingsError as error:
                log.error("key file not loaded", detail=f"{error}; the previously loaded keys remain valid")
        return self._entries

    def _file_version(self) -> tuple[int, ...]:
        """Return the file's modification time, size and inode, which change when the file is written or replaced."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def read_keys(path: Path) -> dict[str, KeyEntry]:
    """Read the keys in a file, and return their entries keyed by id.

    Raises SettingsError with all problems in the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"gateway_keys_file: {str(path)!r} can't be read: {error}") from None
    try:
        keys = _Keys.model_validate(values).keys
    except ValidationError as error:
        message = "\n".join(f"{path}: {_explain(problem)}" for problem in error.errors())
        raise SettingsError(message) from None
    entries = {key.id: key for key in keys}
    if len(entries) < len(keys):
        twice = sorted({key.id for key in keys if sum(key.id == other.id for other in keys) > 1})
        raise SettingsError(f"{path}: the id(s) {', '.join(twice)} occur more than once; delete all but one")
    return entries


def _explain(problem: Any) -> str:
    """Describe a problem without showing the value, which may be a complete key instead of its digest."""
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown field; use one of: {', '.join(KeyEntry.model_fields)}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


USED_EVERY_S = 60.0  # accuracy of the time of last use
GONE_AFTER_S = 30 * 86_400.0  # after the last use of a deleted key, its time of last use is deleted


@dataclass(frozen=True, slots=True)
class KeyLookup:
    """The result of looking up a key id. The time is the Redis clock's time in Unix seconds."""

    entry: KeyEntry | None
    used_at: float | None
    now: float
    num_keys: int  # number of keys that exist, in any state

    @property
    def is_use_due(self) -> bool:
        """Whether the key's use should be recorded because no use was recorded in the last minute."""
        return self.entry is not None and (self.used_at is None or self.now - self.used_at >= USED_EVERY_S)


class KeyStore:
    """Reads and writes the API keys in Redis, or reads them from a file. All methods may raise RedisError."""

    def __init__(self, redis: Redis, file: KeyFile | None = None) -> None:
        """Create a store.

        If a file is given, only the keys in this file exist, and Redis is used only for its clock and the last-used
        times.
        """
        self._redis = redis
        self._file = file

    async def look_up(self, key_id: str) -> KeyLookup:
        """Look up a key by its id, which may be unknown."""
        [found] = await self.look_up_all([key_id])
        return found

    async def look_up_all(self, key_ids: Sequence[str]) -> list[KeyLookup]:
        """Look up several keys in one round trip."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.hlen(api_keys_key())
            pipe.hmget(api_keys_key(), key_ids)
            pipe.hmget(api_keys_used_key(), key_ids)
            time, num_keys, values, used = await pipe.execute()
        if self._file is None:
            entries = [_parsed(value) for value in values]
        else:
            known = self._file.entries()
            entries, num_keys = [known.get(key_id) for key_id in key_ids], len(known)
        pairs = zip(entries, used, strict=True)
        now = seconds_of(time)
        return [KeyLookup(entry=entry, used_at=_time(at), now=now, num_keys=num_keys) for entry, at in pairs]

    async def record_uses(self, uses: Sequence[KeyLookup]) -> list[None]:
        """Store the current time as the keys' last-used time."""
        times: dict[Any, Any] = {found.entry.id: f"{found.now:.0f}" for found in uses if found.entry is not None}
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(api_keys_used_key(), mapping=times)
            pipe.hlen(api_keys_used_key())
            _, num_used = await pipe.execute()
        if uses and num_used > uses[-1].num_keys:
            await self._forget_gone(uses[-1].now)
        return [None] * len(uses)

    async def _forget_gone(self, now: float) -> None:
        """Delete the last-used times of deleted keys.

        Keys missing from this gateway's file may be in another gateway's file, so only old times are deleted.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hkeys(api_keys_key())
            pipe.hgetall(api_keys_used_key())
            stored, used = await pipe.execute()
        known = {key_id.decode() for key_id in stored} | set(() if self._file is None else self._file.entries())
        last = {key_id.decode(): _time(at) or 0.0 for key_id, at in used.items()}
        gone = [key_id for key_id, at in last.items() if key_id not in known and now - at > GONE_AFTER_S]
        if gone:
            await self._redis.hdel(api_keys_used_key(), *gone)

    async def all(self) -> list[KeyLookup]:
        """Return all keys, oldest first."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.hgetall(api_keys_key())
            pipe.hgetall(api_keys_used_key())
            time, values, used = await pipe.execute()
        stored = [entry for value in values.values() if (entry := _parsed(value)) is not None]
        entries = stored if self._file is None else list(self._file.entries().values())
        last = {key_id.decode(): _time(at) for key_id, at in used.items()}
        now, num_keys = seconds_of(time), len(entries)
        found = [KeyLookup(entry=one, used_at=last.get(one.id), now=now, num_keys=num_keys) for one in entries]
        return sorted(found, key=_age)

    async def now(self) -> datetime:
        """Return the Redis clock's time."""
        time: Any = await self._redis.time()
        return datetime.fromtimestamp(int(seconds_of(time)), UTC)

    async def write(self, entry: KeyEntry) -> None:
        """Store a key, replacing its previous version."""
        await self._redis.hset(api_keys_key(), entry.id, entry.model_dump_json(exclude_none=True))


def _age(found: KeyLookup) -> tuple[float, str]:
    assert found.entry is not None
    created_at = found.entry.created_at
    return (0.0 if created_at is None else created_at.timestamp(), found.entry.id)


def _time(value: bytes | None) -> float | None:
    """Return the last-used time, or None if it is missing or malformed.

    A malformed time is overwritten when the key is next used.
    """
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _parsed(value: bytes | None) -> KeyEntry | None:
    """Return the entry, or None if it is missing, invalid or from a newer version.

    The gateway rejects keys without a valid entry.
    """
    if value is None:
        return None
    try:
        return KeyEntry.model_validate_json(value)
    except ValidationError as error:
        log.error(
            "invalid API key entry ignored", key=api_keys_key(), detail=f"{error}; requests with this key are rejected"
        )
        return None
