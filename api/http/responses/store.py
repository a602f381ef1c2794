"""The records of responses, in Redis."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
import uuid

from cellama.api.http.auth import Caller
from cellama.api.http.errors import key_reused, not_there
from cellama.api.http.gateway import Gateway
from cellama.api.openai.responses.record import ResponseRecord
from cellama.api.webhooks import heed
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.keys import (
    context_key,
    due_key,
    heeded_key,
    job_key,
    journal_key,
    response_key,
    result_key,
)

_ID = re.compile(r"resp_[0-9a-f]{32}")
TOLD_S = 10.0  # between a job's end and Celery's word of it; only a worker that dies there takes longer
TOLD_LOOK_S = 0.02  # pause between two looks for that


def new_id(key: str | None) -> str:
    """A new id, or the one that an idempotency key of a tenant stands for."""
    if key is None:
        return f"resp_{uuid.uuid4().hex}"
    return f"resp_{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def digest_of(body: object) -> str:
    """Of a body, whatever the order of its members."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class ResponseStore:
    """Methods raise ApiError, RedisUnreachable, RedisRefused."""

    def __init__(self, gateway: Gateway) -> None:
        self._redis = gateway.redis
        self._ttl_s = gateway.settings.journal_ttl_s + gateway.settings.result_ttl_s

    async def create(self, record: ResponseRecord) -> ResponseRecord:
        """Store the record before its job is queued. Return the stored one if its idempotency key was used before for
        the same body."""
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

    async def heed(self, record: ResponseRecord) -> None:
        """Have the end of the job announced to the tenant's webhooks. Call it before the job is queued."""
        with reaching_redis():
            await heed(self._redis, record.job_id, "response", record.id, record.tenant, self._ttl_s)

    async def read(self, response_id: str, caller: Caller) -> ResponseRecord:
        """Return the record. Raises ApiError (404) if there is none, if it is not stored or belongs to another tenant,
        and if the caller may not use its model."""
        if _ID.fullmatch(response_id):
            with reaching_redis():
                found = await self._redis.get(response_key(response_id))
            record = None if found is None else ResponseRecord.of_json(found)
            if record and record.tenant == caller.tenant and record.store and caller.may_ask(record.model):
                return record
        raise not_there("response", response_id)

    async def has_context(self, key: str | None) -> bool:
        """Whether a job can go on after the context of this key."""
        if key is None:
            return False
        with reaching_redis():
            return bool(await self._redis.exists(context_key(key)))

    async def withdraw(self, record: ResponseRecord) -> None:
        """There is no such response: its job was refused."""
        with reaching_redis():
            await self._redis.delete(response_key(record.id), heeded_key(record.job_id))

    async def forget(self, record: ResponseRecord) -> None:
        """Delete everything of the response. Its job must have ended. Celery gets the job's result a moment later; this
        waits for it, so that no result stays behind."""
        deadline = time.monotonic() + TOLD_S
        while time.monotonic() < deadline and not await self._is_told(record.job_id):
            await asyncio.sleep(TOLD_LOOK_S)
        with reaching_redis():
            await self._redis.delete(*(key(record.job_id) for key in (job_key, journal_key, result_key)))
        await self.withdraw(record)

    async def _is_told(self, job_id: str) -> bool:
        """Whether nothing is left to do for a job that has ended: Celery has its result."""
        with reaching_redis():
            return await self._redis.zscore(due_key(), job_id) is None
