"""Test that a rejected response leaves no data behind."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from starlette.requests import Request

from cellama.api.http.auth import Caller
from cellama.api.http.context import RequestContext
from cellama.api.http.errors import ApiError
from cellama.api.http.gateway import Gateway
from cellama.api.http.parsing import ParsedRequest
from cellama.api.http.responses.creating import NewResponse, _submit
from cellama.api.http.responses.store import ResponseStore
from cellama.api.http.running import RunningJobs
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.keys import response_key

from ...openai.responses.journals import ID, record
from .conftest import Scenario

MESSAGES = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


def submit(error: Exception, headers: list[tuple[bytes, bytes]]) -> Scenario:
    """Submit a background response whose job fails with this error."""

    class Refused(RunningJobs):
        async def submit(self, *_: Any) -> None:
            raise error

    async def scenario(gateway: Gateway) -> None:
        request = Request({"type": "http", "headers": headers})
        sent = ParsedRequest(request, RequestContext(gateway), Caller("acme"), {"model": "tiny"})
        order = NewResponse(record(items=[MESSAGES], background=True), "default", False, 10)
        with pytest.raises(ApiError):
            await _submit(Refused(sent, "tiny", "default"), order, ResponseStore(gateway))

    return scenario


TOO_LONG = ApiError(429, "about 100 s would go by", code="queue_full")


@pytest.mark.parametrize(
    "error", [TOO_LONG, InvalidJob("temperature is -1; it must be 0 or more")], ids=["too long", "wrong"]
)
def test_rejected_response_leaves_no_record(run: Any, redis: Redis, error: Exception) -> None:
    run(submit(error, []))
    assert redis.keys() == []


def test_record_is_kept_when_job_continues_for_its_idempotency_key(run: Any, redis: Redis) -> None:
    run(submit(TOO_LONG, [(b"idempotency-key", b"k")]))
    assert redis.exists(response_key(ID))
