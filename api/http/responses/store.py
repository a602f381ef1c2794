"""Store response records in Redis."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
import uuid

from cellama.api.http.auth import Caller
from cellama.api.http.errors import key_reused, not_found
from cellama.api.http.gateway import Gateway
from cellama.api.openai.responses.record import ResponseRecord
from cellama.api.webhooks import notify_on_end
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.keys import (
    announcement_key,
    context_key,
    due_key,
    job_key,
    journal_key,
    response_key,
    result_key,
)

_ID = re.compile(r"resp_[0-9a-f]{32}")
RESULT_WAIT_S = 10.0  # until Celery has the result of a finished job: longer only if the worker dies in between
RESULT_POLL_S = 0.02  # pause between two checks for the result


def new_id(key: str | None) -> str:
    """Return a new id, or the id that belongs to a tenant's idempotency key."""
    if key is None:
        return f"resp_{uuid.uuid4().hex}"
    return f"resp_{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def digest_of(body: object) -> str:
    """Return a body's digest, which does not depend on the order of the body's members."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class ResponseStore:
    """Stores the records of all responses. All methods may raise ApiError, RedisUnreachable or RedisRefused."""

    def __init__(self, gateway: Gateway) -> None:
        self._redis = gateway.redis
        self._ttl_s = gateway.settings.journal_ttl_s + gateway.settings.result_ttl_s

    async def create(self, record: ResponseRecord) -> ResponseRecord:
        """Store a record before its job is queued, and return the stored record.

        If the idempotency key was already used with the same body, return the earlier record.
        """
        with reaching_redis():
            if await self._redis.set(response_key(record.id), record.to_json(), nx=True, ex=self._ttl_s):
                return record
            found = await self._redis.get(response_key(record.id))
        if found is None:  # it expired between the two
            return await self.create(record)
        first = ResponseRecord.of_json(found)
        if first.digest != record.digest:
            raise key_reused()
        return first

    async def notify_on_end(self, record: ResponseRecord) -> None:
        """Request that the tenant's webhooks are notified when the job ends.

        Call this method before the job is queued.
        """
        with reaching_redis():
            await notify_on_end(self._redis, record.job_id, "response", record.id, record.tenant, self._ttl_s)

    async def read(self, response_id: str, caller: Caller) -> ResponseRecord:
        """Return a record.

        Raises ApiError (404) if the record does not exist, has `store: false`, or belongs to another tenant. The error
        is also raised if the caller may not use the record's model.
        """
        if _ID.fullmatch(response_id):
            with reaching_redis():
                found = await self._redis.get(response_key(response_id))
            record = None if found is None else ResponseRecord.of_json(found)
            if record and record.tenant == caller.tenant and record.store and caller.may_use_model(record.model):
                return record
        raise not_found("response", response_id)

    async def has_context(self, key: str | None) -> bool:
        """Return whether Redis still stores the context with this key, so that a job can continue it."""
        if key is None:
            return False
        with reaching_redis():
            return bool(await self._redis.exists(context_key(key)))

    async def withdraw(self, record: ResponseRecord) -> None:
        """Delete the record of a response whose job was rejected."""
        with reaching_redis():
            await self._redis.delete(response_key(record.id), announcement_key(record.job_id))

    async def delete(self, record: ResponseRecord) -> None:
        """Delete all data of a response whose job has ended.

        A job's result is stored in Celery's result backend shortly after the job ends. This method waits for the result
        so that no data remains.
        """
        deadline = time.monotonic() + RESULT_WAIT_S
        while time.monotonic() < deadline and not await self._has_result(record.job_id):
            await asyncio.sleep(RESULT_POLL_S)
        with reaching_redis():
            await self._redis.delete(*(key(record.job_id) for key in (job_key, journal_key, result_key)))
        await self.withdraw(record)

    async def _has_result(self, job_id: str) -> bool:
        """Return whether the result of a job that has ended is stored in Celery's result backend."""
        with reaching_redis():
            return await self._redis.zscore(due_key(), job_id) is None
