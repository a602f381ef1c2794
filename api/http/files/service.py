"""Manage the records, contents and expiry of all tenants' files."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from cellama.api.http.auth import Caller
from cellama.api.http.background import FILES, in_thread
from cellama.api.http.errors import ApiError
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.keys import http_expiring_key

from .records import GRACE_S, FileQuota, Record, RecordStore
from .store import FileStore, blocks_of, ensure_store_id, read_store_id, unavailable

DEFAULT_LIFE_S = 30 * 86_400  # as in OpenAI's API for batch files
MIN_LIFE_S = 3600  # OpenAI's limit
MAX_LIFE_S = 30 * 86_400  # OpenAI's limit, which also bounds how long a tenant can fill a disk
MAX_SWEPT = 500  # files per minute, which take some seconds in a slow store


def life_of(value: Any, param: str) -> int:
    """Return the seconds in `{"anchor": "created_at", "seconds": 3600}`, or the default for None. Raises ApiError."""
    if value is None:
        return DEFAULT_LIFE_S
    if not isinstance(value, dict) or value.keys() - {"anchor", "seconds"}:
        raise ApiError(400, f"{param} is {shorten(value)}; it must contain anchor and seconds", param=param)
    anchor, seconds = value.get("anchor"), value.get("seconds")
    if anchor != "created_at":
        raise ApiError(400, f"{param}.anchor is {shorten(anchor)}; it must be created_at", param=param)
    if type(seconds) is not int or not MIN_LIFE_S <= seconds <= MAX_LIFE_S:
        message = f"{param}.seconds is {shorten(seconds)}; it must be a number from {MIN_LIFE_S} to {MAX_LIFE_S}"
        raise ApiError(400, message, param=param)
    return seconds


class FileService:
    """Stores, reads and deletes the files of all tenants, in one event loop."""

    def __init__(self, store: FileStore, redis: Redis) -> None:
        self.store = store
        self.known_store_id: str | None = None  # when it was last read
        self.records = RecordStore(redis, "file")
        self._redis = redis
        self._incoming: dict[str | None, list[int]] = {}  # by tenant, the sizes of uploads to this gateway

    async def store_id(self) -> str:
        """Return the store's id. Only gateways that use this store can drive its batches. Raises OSError."""
        if self.known_store_id is None:
            self.known_store_id = await in_thread(FILES, ensure_store_id, self.store)
        return self.known_store_id

    async def read_store_id(self) -> str | None:
        """Read the store's id again, and return it, or None if the store is empty. Raises OSError."""
        self.known_store_id = await in_thread(FILES, read_store_id, self.store)
        return self.known_store_id

    @contextlib.asynccontextmanager
    async def count_upload(self, caller: Caller, num_bytes: int, quota: FileQuota) -> AsyncIterator[None]:
        """Count an upload of at least `num_bytes` bytes against the quota while this gateway is receiving it.

        Other uploads in progress also count against the quota. Raises ApiError (429).
        """
        incoming = self._incoming.setdefault(caller.tenant, [])
        incoming.append(num_bytes)
        try:
            num_files, num_used = await self.records.usage(caller)
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
        quota: FileQuota | None = None,
    ) -> Record:
        """Store a copy of a local file under a new id, or replace the file with the given id.

        The contents are stored before the record, so every record has contents. Raises OSError, and ApiError (429) if
        the quota is exceeded. The quota is checked only for new ids.
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
        expiring = http_expiring_key(await self.store_id())
        with reaching_redis():  # first, so that the sweep finds the contents if one of the next steps fails
            await self._redis.zadd(expiring, {file_id: record["gone_at"]})
            await self._redis.expire(expiring, MAX_LIFE_S + GRACE_S)  # longer than any file lives
        await in_thread(FILES, self.store.put, local, file_id)
        try:
            is_new = await self.records.add(record, life_s, quota)
        except ApiError:
            if quota is not None:
                await self._delete_contents(file_id, expiring)
            raise
        if not is_new:
            await self.records.advance(file_id, record, expected=(record["status"],), life_s=life_s)
        return record

    async def blocks(self, file_id: str) -> Iterator[bytes]:
        """Return the contents as an iterator over blocks.

        Each read blocks the calling thread. Raises ApiError (404 if the contents no longer exist, 503 if the store
        can't be reached).
        """
        try:
            return blocks_of(await in_thread(FILES, self.store.open, file_id))
        except FileNotFoundError:
            message = f"the contents of {file_id!r} no longer exist; upload the file again"
            raise ApiError(404, message, code="not_found") from None
        except OSError as error:
            raise unavailable(error) from None

    async def delete(self, record: Mapping[str, Any]) -> None:
        """Delete a file's record, then its contents. Raises OSError."""
        await self.records.delete(record["id"], record["tenant"])
        # If the contents are in another store, the sweep of its gateways deletes them.
        await self._delete_contents(record["id"], http_expiring_key(await self.store_id()))

    async def _delete_contents(self, file_id: str, expiring: str) -> None:
        await in_thread(FILES, self.store.delete, file_id)
        with reaching_redis():
            await self._redis.zrem(expiring, file_id)

    async def sweep(self) -> int:
        """Delete expired files, and return the number of files checked. The next sweep retries failed deletions.

        If Redis has lost the record of a file, the contents are deleted once they are older than the maximum
        lifetime of files.
        """
        now, expiring = await self.records.now(), http_expiring_key(await self.store_id())
        with reaching_redis():
            ids: Any = await self._redis.zrangebyscore(expiring, "-inf", now, start=0, num=MAX_SWEPT)
        for raw in ids:
            file_id = raw.decode()
            record = await self.records.read(file_id)
            if record is not None:  # the file was replaced, and lives longer
                with reaching_redis():
                    await self._redis.zadd(expiring, {file_id: record["gone_at"]})
                continue
            await self._delete_contents(file_id, expiring)
        for file_id in await in_thread(FILES, self.store.older_than, now - MAX_LIFE_S - GRACE_S):
            with reaching_redis():
                is_known = await self._redis.zscore(expiring, file_id) is not None
            if not is_known:  # else the clock of the gateway that stored it was wrong
                await in_thread(FILES, self.store.delete, file_id)
        return len(ids)


def file_view(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file in OpenAI's format."""
    members = {name: record[name] for name in ("id", "bytes", "created_at", "filename", "purpose", "status")}
    return {**members, "object": "file", "expires_at": record["gone_at"], "status_details": None}
