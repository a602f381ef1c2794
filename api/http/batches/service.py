"""Create, cancel and format batch records, and parse batch requests."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from cellama.api.http.auth import Caller
from cellama.api.http.errors import ApiError, key_reused
from cellama.api.http.files.records import Record, RecordStore
from cellama.api.http.files.service import life_of
from cellama.api.http.parsing import check_known
from cellama.api.openai.responses.bodies import metadata_of
from cellama.api.webhooks import BATCH_ENDS, announcement
from cellama.config import Settings
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.keys import batch_key, http_open_key
from cellama.tasks.traces.gate import current_headers

from .input_check import ENDPOINTS

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
RECORD_LIFE_S = 30 * 86_400  # lifetime of a record after the latest end of its batch
BUSY_RETRY_S = 60.0  # for clients with too many open batches, which take minutes or hours
OpenBatch = tuple[str, str | None, float]  # id, tenant, time of creation
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
MIN_WINDOW_S = 60
MAX_WINDOW_S = 30 * 86_400  # the longest lifetime of an input file
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
BATCH_PARAMETERS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A parsed batch creation request."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None
    output_life_s: int


class BatchService:
    """Manages the batches of all tenants in one event loop. All methods may raise RedisUnreachable or RedisRefused."""

    def __init__(self, settings: Settings, redis: Redis) -> None:
        self._settings = settings
        self._redis = redis
        self.records = RecordStore(redis, "batch")

    async def create(self, order: BatchOrder, caller: Caller, key: str | None, store_id: str = "") -> Record:
        """Create a batch that is waiting for a driver, or return the earlier batch with this idempotency key.

        `store_id` identifies the store that contains the batch's files. Raises ApiError: 429 if the tenant has too many
        open batches, 409 if the key was already used with a different body.
        """
        now = int(await self.records.now())
        record: Record = {
            "id": f"batch_{uuid.uuid4().hex if key is None else _digest(key)[:32]}",
            "tenant": caller.tenant,
            "place": store_id,
            "status": "validating",
            "created_at": now,
            "expires_at": now + order.window_s,
            "gone_at": now + order.window_s + RECORD_LIFE_S,
            "asked": _digest(repr(order)),
            "trace": current_headers(),
            "models": None if caller.models is None else sorted(caller.models),
            "adapters": None if caller.adapters is None else sorted(caller.adapters),
            **{name: getattr(order, name) for name in BatchOrder.__slots__},
        }
        if key is not None and (earlier := await self.records.read(record["id"])) is not None:
            return _same_batch(earlier, record)
        entry = json.dumps([record["id"], caller.tenant])
        with reaching_redis():
            await self._redis.zadd(http_open_key(), {entry: now})  # first, because drivers look for batches there
            await self._redis.expire(http_open_key(), MAX_WINDOW_S + RECORD_LIFE_S)  # longer than any record lives
        await self._check_limit(entry, caller)
        if not await self.records.add(record, order.window_s + RECORD_LIFE_S):
            return _same_batch(await self.records.find(record["id"], caller), record)
        return record

    async def _check_limit(self, entry: str, caller: Caller) -> None:
        limit = self._settings.gateway_open_batches
        if sum(tenant == caller.tenant for _, tenant, _ in await self.open_batches()) > limit:
            with reaching_redis():
                await self._redis.zrem(http_open_key(), entry)
            message = (
                f"{limit} batches are open, the maximum (gateway_open_batches); wait until a batch has ended, or "
                "cancel a batch"
            )
            raise ApiError(429, message, code="too_many_batches", retry_after_s=BUSY_RETRY_S)

    async def open_batches(self) -> list[OpenBatch]:
        """Return all open batches, oldest first."""
        with reaching_redis():
            found: Any = await self._redis.zrange(http_open_key(), 0, -1, withscores=True)
        return [(*json.loads(entry), created_at) for entry, created_at in found]

    async def close(self, batch_id: str, tenant: str | None) -> None:
        """Remove a batch from the list of open batches so that drivers no longer consider it."""
        with reaching_redis():
            await self._redis.zrem(http_open_key(), json.dumps([batch_id, tenant]))

    async def cancel(self, batch_id: str, caller: Caller) -> Record:
        """Set a batch's status to `cancelling` so that its driver ends the batch.

        Raises ApiError (409) if the batch can no longer be cancelled.
        """
        record = await self.records.find(batch_id, caller)
        done, status = await self.move(record, "cancelling", expected=("validating", "in_progress"))
        if not done and status not in ("cancelling", "cancelled"):
            message = f"batch {batch_id!r} is {status}; it can no longer be cancelled"
            raise ApiError(409, message, code="batch_has_ended", headers={"x-should-retry": "false"})
        return await self.records.find(batch_id, caller)

    async def take_cancel(self, batch_id: str) -> bool:
        """Return whether `cellama batch cancel` was called for the batch since the last call to this method."""
        with reaching_redis():
            return bool(await self._redis.hdel(batch_key(batch_id), "cancel"))  # like Batches.take_cancel

    async def move(
        self,
        record: Mapping[str, Any],
        status: str,
        *,
        expected: tuple[str, ...],
        lease_token: str | None = None,
        **fields: Any,
    ) -> tuple[bool, str]:
        """Change the status and other fields if the current status is one of `expected` (see RecordStore.advance).

        The time of the change is stored. Webhooks are notified when a batch ends (docs/adr/021-webhooks.md).
        """
        fields |= {"status": status, f"{status}_at": int(await self.records.now())}
        event = announcement(f"batch.{status}", record["id"], record["tenant"]) if status in BATCH_ENDS else None
        return await self.change(record, fields, expected=expected, lease_token=lease_token, announced=event)

    async def change(
        self,
        record: Mapping[str, Any],
        fields: Mapping[str, Any],
        *,
        expected: tuple[str, ...],
        lease_token: str | None = None,
        announced: Mapping[str, str] | None = None,
    ) -> tuple[bool, str]:
        """Change a batch's fields if its status is one of `expected` (see RecordStore.advance)."""
        life_s = max(1, int(record["gone_at"] - await self.records.now()))
        return await self.records.advance(
            record["id"], fields, expected=expected, life_s=life_s, lease_token=lease_token, announced=announced
        )

    async def view(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch in OpenAI's format. The counts of a running batch may be a few seconds old."""
        counts = record.get("counts")
        if counts is None:
            counts = {"total": 0, "completed": 0, "failed": 0}
            if record.get("total") is not None:
                with reaching_redis():
                    found: Any = await self._redis.hmget(batch_key(record["id"]), ("finished", "failed"))
                finished, failed = (int(value or 0) for value in found)
                counts = {"total": record["total"], "completed": finished, "failed": failed}
        required = ("id", "endpoint", "input_file_id", "completion_window", "status", "created_at", "expires_at")
        optional = ("metadata", "output_file_id", "error_file_id", "usage", "model", *(f"{name}_at" for name in _TIMES))
        return {
            "object": "batch",
            **{name: record[name] for name in required},
            **{name: record.get(name) for name in optional},
            "errors": {"object": "list", "data": record["errors"]} if record.get("errors") else None,
            "request_counts": dict(counts),
        }


def _same_batch(earlier: Record, record: Record) -> Record:
    """Return the earlier batch with the same idempotency key.

    Raises ApiError (409) if the earlier batch was created with a different body.
    """
    if earlier["asked"] != record["asked"] or earlier["tenant"] != record["tenant"]:
        raise key_reused()
    return earlier


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def parse_batch(body: Mapping[str, Any]) -> BatchOrder:
    """Parse the body of a batch creation request. Raises ApiError."""
    check_known(body, BATCH_PARAMETERS)
    file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
    if not isinstance(file_id, str) or not file_id:
        raise ApiError(400, f"input_file_id is {shorten(file_id)}; it must be the id of a file", param="input_file_id")
    if endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise ApiError(400, f"endpoint is {shorten(endpoint)}; it must be one of {known}", param="endpoint")
    window = body.get("completion_window")
    try:
        metadata = None if body.get("metadata") is None else metadata_of(body["metadata"])
    except InvalidJob as error:
        raise ApiError(400, str(error), param="metadata") from None
    life_s = life_of(body.get("output_expires_after"), "output_expires_after")
    return BatchOrder(
        input_file_id=file_id,
        endpoint=str(endpoint),
        completion_window=str(window),
        window_s=_window_s(window),
        metadata=metadata,
        output_life_s=life_s,
    )


def _window_s(window: Any) -> int:
    found = re.fullmatch(r"([0-9]{1,5})([mhd])", window) if isinstance(window, str) else None
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        message = f"completion_window is {shorten(window)}; it must be a duration from '1m' to '30d', such as '24h'"
        raise ApiError(400, message, param="completion_window")
    return seconds
