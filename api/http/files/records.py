"""Store file and batch records in Redis.

Each record is a hash, and each tenant has an index of its records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis.asyncio import Redis

from cellama.api.http.auth import Caller
from cellama.api.http.errors import ApiError, not_found
from cellama.api.http.parsing import PageQuery
from cellama.tasks.connection.connections import lua_source, seconds_of
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.keys import (
    MAX_WEBHOOK_EVENTS,
    http_lease_key,
    http_record_key,
    http_records_key,
    webhook_events_key,
)

Kind = Literal["file", "batch"]
Record = dict[str, Any]
GRACE_S = 86_400  # a record stays for a day after it expires, so that a sweep can delete the contents
MAX_LIFE_S = 90 * 86_400  # longer than any record lives: 30 days of a batch, 30 after it, and one until the sweep
ENTRIES_PER_READ = 100  # OpenAI's largest page of batches, which takes one round trip
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}(-[a-z]+)?")  # other ids could be parts of other keys


@dataclass(frozen=True, slots=True)
class FileQuota:
    """The limits on a tenant's files, which include the output files of batches."""

    max_files: int
    max_bytes: int

    def check(self, num_files: int, num_bytes: int) -> None:
        """Raise ApiError (429) if this number of files or this number of bytes exceeds the tenant's limits."""
        if num_files <= self.max_files and num_bytes <= self.max_bytes:
            return
        raise ApiError(
            429,
            f"the tenant would have {num_files} files with {num_bytes} bytes, and the limits are {self.max_files} "
            f"(gateway_tenant_files) and {self.max_bytes} (gateway_tenant_file_bytes); delete some files",
            code="file_quota_exceeded",
            headers={"x-should-retry": "false"},
        )


class RecordStore:
    """Stores the records of either all files or all batches. All methods may raise RedisUnreachable or RedisRefused."""

    def __init__(self, redis: Redis, kind: Kind) -> None:
        self._redis = redis
        self._kind: Kind = kind
        self._add, self._count = (
            redis.register_script(lua_source(__package__, "usage", name)) for name in ("add", "count")
        )
        self._advance = redis.register_script(lua_source(__package__, "advance"))

    async def now(self) -> float:
        """Return the Redis clock's time in Unix seconds. All gateways use this clock."""
        with reaching_redis():
            return seconds_of(await self._redis.time())

    async def usage(self, caller: Caller) -> tuple[int, int]:
        """Return the number of files that belong to the caller's tenant, and their total size in bytes.

        The number and the size are computed from the records on each call, so they are exact even after a gateway died
        while adding a file.
        """
        arguments = [http_record_key(self._kind, ""), ""]
        with reaching_redis():
            found: Any = await self._count(keys=[http_records_key(self._kind, caller.tenant)], args=arguments)
        num_files, num_bytes = found
        return int(num_files), int(num_bytes)

    async def add(self, record: Mapping[str, Any], life_s: int, quota: FileQuota | None = None) -> bool:
        """Store a record and add it to its tenant's list.

        If the id already exists, return False and change nothing. `record` contains the fields `id`, `tenant`,
        `created_at` and `status`, and optionally `gone_at`, the time at which it expires. Raises ApiError (429)
        if the tenant's quota is exceeded.
        """
        object_id, life_s = record["id"], life_s + GRACE_S
        keys = [http_record_key(self._kind, object_id), http_records_key(self._kind, record["tenant"])]
        limits = ["", ""] if quota is None else [quota.max_files, quota.max_bytes]
        size = [http_record_key(self._kind, ""), record.get("bytes", 0), ""]
        arguments: Any = [object_id, record["created_at"], life_s, MAX_LIFE_S, *limits, *size, *_flat(_encoded(record))]
        with reaching_redis():
            added, num_files, num_bytes = await self._add(keys=keys, args=arguments)
        if added == -1 and quota is not None:
            quota.check(num_files + 1, num_bytes + record["bytes"])
        return bool(added == 1)

    async def find(self, object_id: str, caller: Caller) -> Record:
        """Return a record that belongs to the caller's tenant.

        Raises ApiError (404) if the record does not exist or belongs to another tenant.
        """
        record = await self.read(object_id) if _ID.fullmatch(object_id) else None
        if record is None or record["tenant"] != caller.tenant:
            raise not_found(self._kind, object_id)
        return record

    async def read(self, object_id: str) -> Record | None:
        """Return a record that belongs to any tenant, or None if the record does not exist or has expired."""
        return next(iter(await self.read_all([object_id])), None)

    async def advance(
        self,
        object_id: str,
        fields: Mapping[str, Any],
        *,
        expected: Sequence[str],
        life_s: int,
        lease_token: str | None = None,
        announced: Mapping[str, str] | None = None,
    ) -> tuple[bool, str]:
        """Change fields and announce an event in one step if the status is one of `expected`.

        If `lease_token` is given, the lease named after the record must also have this token. Return whether the record
        was changed, and the record's status afterwards (or "" if the record does not exist).
        """
        lease_key = "" if lease_token is None else http_lease_key(object_id)
        keys = [http_record_key(self._kind, object_id), lease_key, webhook_events_key()]
        conditions = [lease_token or "", json.dumps(list(expected)), life_s + GRACE_S]
        event, changed = _flat(announced or {}), _flat(_encoded(fields))
        arguments: Any = [*conditions, MAX_WEBHOOK_EVENTS, len(event), *event, *changed]
        with reaching_redis():
            done, status = await self._advance(keys=keys, args=arguments)
        return bool(done), json.loads(status) if status else ""

    async def delete(self, object_id: str, tenant: str | None) -> bool:
        """Delete a record, and remove it from its tenant's list. Return False if the record did not exist."""
        with reaching_redis():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(http_record_key(self._kind, object_id))
                pipe.zrem(http_records_key(self._kind, tenant), object_id)
                deleted, _ = await pipe.execute()
        return bool(deleted)

    async def page(
        self, caller: Caller, query: PageQuery, fits: Callable[[Record], bool] = lambda record: True
    ) -> list[Record]:
        """Return a page of the records for which `fits` returns True, and one more record if there is a next page.

        Raises ApiError (404) if the page starts after an id that is not in the list.
        """
        index, found = http_records_key(self._kind, caller.tenant), list[Record]()
        start = await self._rank_after(index, query)
        while len(found) <= query.limit:
            with reaching_redis():
                ids: Any = await self._redis.zrange(
                    index, start, start + ENTRIES_PER_READ - 1, desc=query.order == "desc"
                )
            if not ids:
                break
            start += len(ids)
            found += [record for record in await self.read_all([one.decode() for one in ids]) if fits(record)]
        return found[: query.limit + 1]

    async def _rank_after(self, index: str, query: PageQuery) -> int:
        if query.after is None:
            return 0
        rank_of = self._redis.zrevrank if query.order == "desc" else self._redis.zrank
        with reaching_redis():
            rank: Any = await rank_of(index, query.after)
        if rank is None:
            message = f"after: {self._kind} {shorten(query.after)} does not exist, or has expired"
            raise ApiError(404, message, param="after", code="not_found")
        return int(rank) + 1

    async def read_all(self, ids: Sequence[str]) -> list[Record]:
        """Return the records with these ids that exist and have not expired."""
        with reaching_redis():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.time()
                for object_id in ids:
                    pipe.hgetall(http_record_key(self._kind, object_id))
                now, *hashes = await pipe.execute()
        records = [{name.decode(): json.loads(value) for name, value in found.items()} for found in hashes]
        return [record for record in records if record and record.get("gone_at", math.inf) > seconds_of(now)]


def _encoded(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in values.items()}


def _flat(values: Mapping[str, str]) -> list[str]:
    return [text for pair in values.items() for text in pair]
