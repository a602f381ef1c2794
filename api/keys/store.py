"""The API keys of a file, or in Redis. The answers are as of now: nothing is cached."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from redis.asyncio import Redis

from cellama.config import SettingsError
from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.keys import api_keys_key, api_keys_used_key

from .entry import KeyEntry

log = logging.getLogger(__name__)


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[KeyEntry]


class KeyFile:
    """The keys of a file as it is now: it is read again when it has changed.

    If it can't be read then, that is logged, and the keys that were read last stay valid.
    """

    def __init__(self, path: Path) -> None:
        """Raises SettingsError if the file is not there, or wrong."""
        self._path = path
        self._seen = self._look()
        self._entries = read_keys(path)

    def entries(self) -> dict[str, KeyEntry]:
        """By their ids."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._entries = read_keys(self._path)
                log.info("%d key(s) read from %s", len(self._entries), self._path)
            except SettingsError as error:
                log.error("the keys stay as they were: %s", error)
        return self._entries

    def _look(self) -> tuple[int, ...]:
        """What differs once the file was written or replaced."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def read_keys(path: Path) -> dict[str, KeyEntry]:
    """Raises SettingsError with all problems of the file."""
    try:
        text = path.read_text(encoding="utf-8")
        values: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"the file of keys {str(path)!r} can't be read: {error}") from None
    try:
        keys = _Keys.model_validate(values).keys
    except ValidationError as error:
        message = "\n".join(f"{path}: {_explain(problem)}" for problem in error.errors())
        raise SettingsError(message) from None
    entries = {key.id: key for key in keys}
    if len(entries) < len(keys):
        twice = sorted({key.id for key in keys if sum(key.id == other.id for other in keys) > 1})
        raise SettingsError(f"{path}: the key(s) {', '.join(twice)} stand there more than once; delete all but one")
    return entries


def _explain(problem: Any) -> str:
    """Without the value: it may be a key that was put where its digest belongs."""
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"{where}: no such field; known: {', '.join(KeyEntry.model_fields)}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


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
            time, num_keys, values, used = await pipe.execute()
        if self._file is None:
            entries = [_parsed(value) for value in values]
        else:
            known = self._file.entries()
            entries, num_keys = [known.get(key_id) for key_id in key_ids], len(known)
        pairs = zip(entries, used, strict=True)
        now = seconds_of(time)
        return [Found(entry=entry, used_at=_time(at), now=now, num_keys=num_keys) for entry, at in pairs]

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
            time, values, used = await pipe.execute()
        stored = [entry for value in values.values() if (entry := _parsed(value)) is not None]
        entries = stored if self._file is None else list(self._file.entries().values())
        last = {key_id.decode(): _time(at) for key_id, at in used.items()}
        now, num_keys = seconds_of(time), len(entries)
        found = [Found(entry=one, used_at=last.get(one.id), now=now, num_keys=num_keys) for one in entries]
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


def _time(value: bytes | None) -> float | None:
    """None also for what is none: the next use writes over it."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _parsed(value: bytes | None) -> KeyEntry | None:
    """None also for what is no entry, or says more than this version knows: such a key lets no one in."""
    if value is None:
        return None
    try:
        return KeyEntry.model_validate_json(value)
    except ValidationError as error:
        log.error("an entry of %s can't be read, so its key is not accepted: %s", api_keys_key(), error)
        return None
