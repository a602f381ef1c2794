"""Files: a record of each, its contents, and when it expires."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from redis.asyncio import Redis

from cellama.api.http.auth import Caller
from cellama.api.http.background import FILES, in_thread
from cellama.api.http.errors import ApiError
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.keys import http_expiring_key

from .records import KEPT_S, Quota, Record, RecordStore
from .store import FileStore, blocks_of, give_identity, identity_of, unavailable

DEFAULT_LIFE_S = 30 * 86_400  # as OpenAI's files for batches
MIN_LIFE_S = 3600  # OpenAI's limit
MAX_LIFE_S = 30 * 86_400  # OpenAI's limit, and the longest that tenants can fill a disk
SWEPT_AT_ONCE = 500  # files: some seconds of a slow store, once a minute


def life_of(value: Any, param: str) -> int:
    """Return the seconds in `{"anchor": "created_at", "seconds": 3600}`; None is the default. Raises ApiError."""
    if value is None:
        return DEFAULT_LIFE_S
    if not isinstance(value, dict) or value.keys() - {"anchor", "seconds"}:
        raise ApiError(400, f"{param} is {shorten(value)}; it has anchor and seconds", param=param)
    anchor, seconds = value.get("anchor"), value.get("seconds")
    if anchor != "created_at":
        raise ApiError(400, f"{param}.anchor is {shorten(anchor)}; it must be created_at", param=param)
    if type(seconds) is not int or not MIN_LIFE_S <= seconds <= MAX_LIFE_S:
        message = f"{param}.seconds is {shorten(seconds)}; it must be a number from {MIN_LIFE_S} to {MAX_LIFE_S}"
        raise ApiError(400, message, param=param)
    return seconds


class FileService:
    """All files of all tenants, for one event loop."""

    def __init__(self, store: FileStore, redis: Redis) -> None:
        self.store = store
        self.known_place: str | None = None  # as it was at the last look
        self.records = RecordStore(redis, "file")
        self._redis = redis
        self._incoming: dict[str | None, list[int]] = {}  # by tenant, the sizes of uploads to this gateway

    async def place(self) -> str:
        """Return the id of the store: only gateways with this store can drive its batches. Raises OSError."""
        if self.known_place is None:
            self.known_place = await in_thread(FILES, give_identity, self.store)
        return self.known_place

    async def look_at_place(self) -> str | None:
        """Read the id of the store again. Return None while the store is empty. Raises OSError."""
        self.known_place = await in_thread(FILES, identity_of, self.store)
        return self.known_place

    @contextlib.asynccontextmanager
    async def receiving(self, caller: Caller, num_bytes: int, quota: Quota) -> AsyncIterator[None]:
        """An upload of at least this size, which counts against the quota from now on, as do others that are under way
        here. Raises ApiError (429)."""
        incoming = self._incoming.setdefault(caller.tenant, [])
        incoming.append(num_bytes)
        try:
            num_files, num_used = await self.records.used(caller)
            quota.check(num_files + len(incoming), num_used + sum(incoming))
            yield
        finally:
            incoming.remove(num_bytes)
            if not incoming:
                self._incoming.pop(caller.tenant, None)

    async def add(
        self,
        local: Path,
        name: str,
        purpose: str,
        caller: Caller,
        life_s: int,
        *,
        file_id: str | None = None,
        quota: Quota | None = None,
    ) -> Record:
        """A copy of a local file, under a new id, or in place of what was there under that id.

        The contents come first: a record without contents would be a promise that is not kept. Raises OSError, and
        ApiError (429) if the quota, which is for new ids only, has no room for it.
        """
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        now = await self.records.now()
        record: Record = {
            "id": file_id,
            "tenant": caller.tenant,
            "status": "processed",
            "created_at": int(now),
            "gone_at": math.ceil(now) + life_s,
            "bytes": (await in_thread(FILES, local.stat)).st_size,
            "filename": name,
            "purpose": purpose,
        }
        expiring = http_expiring_key(await self.place())
        with reaching_redis():  # first of all: whatever becomes of this, the sweep finds it
            await self._redis.zadd(expiring, {file_id: record["gone_at"]})
            await self._redis.expire(expiring, MAX_LIFE_S + KEPT_S)  # no file is there for longer
        await in_thread(FILES, self.store.put, local, file_id)
        try:
            is_new = await self.records.add(record, life_s, quota)
        except ApiError:
            if quota is not None:
                await self._forget_contents(file_id, expiring)
            raise
        if not is_new:
            await self.records.advance(file_id, record, of=(record["status"],), life_s=life_s)
        return record

    async def open(self, file_id: str) -> BinaryIO:
        """Open the contents. Raises ApiError: 404 if they are gone, 503 if the store can't be reached."""
        try:
            return await in_thread(FILES, self.store.open, file_id)
        except FileNotFoundError:
            raise ApiError(404, f"the contents of {file_id!r} are gone", code="not_found") from None
        except OSError as error:
            raise unavailable(error) from None

    async def blocks(self, file_id: str) -> Iterator[bytes]:
        """Return the contents in pieces. Reading them blocks. Raises ApiError."""
        return blocks_of(await self.open(file_id))

    async def delete(self, record: Mapping[str, Any]) -> None:
        """Delete a file: first for clients, then in the store. Raises OSError."""
        await self.records.forget(record["id"], record["tenant"])
        # What lies in another place is deleted by the sweep there.
        await self._forget_contents(record["id"], http_expiring_key(await self.place()))

    async def _forget_contents(self, file_id: str, expiring: str) -> None:
        await in_thread(FILES, self.store.delete, file_id)
        with reaching_redis():
            await self._redis.zrem(expiring, file_id)

    async def sweep(self) -> int:
        """Deletes what has expired; returns how many it looked at. What can't be deleted is tried again. Contents of
        which Redis has lost all go when no file can be so old."""
        now, expiring = await self.records.now(), http_expiring_key(await self.place())
        with reaching_redis():
            ids: Any = await self._redis.zrangebyscore(expiring, "-inf", now, start=0, num=SWEPT_AT_ONCE)
        for raw in ids:
            file_id = raw.decode()
            record = await self.records.read(file_id)
            if record is not None:  # it was written again under this id, and lives longer
                with reaching_redis():
                    await self._redis.zadd(expiring, {file_id: record["gone_at"]})
                continue
            await self._forget_contents(file_id, expiring)
        for file_id in await in_thread(FILES, self.store.old, now - MAX_LIFE_S - KEPT_S):
            with reaching_redis():
                is_known = await self._redis.zscore(expiring, file_id) is not None
            if not is_known:  # else the clock of who has put it is wrong
                await in_thread(FILES, self.store.delete, file_id)
        return len(ids)


def shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """A file as OpenAI's clients read it."""
    shown = {name: record[name] for name in ("id", "bytes", "created_at", "filename", "purpose", "status")}
    return {**shown, "object": "file", "expires_at": record["gone_at"], "status_details": None}
