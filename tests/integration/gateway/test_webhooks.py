"""Test that webhooks report the end of batches and responses to an endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from redis import Redis

from cellama.api.webhooks.endpoints import Endpoint, new_id, new_secret
from cellama.tasks.contract.keys import webhooks_key

from ...conftest import WorkerProcess, wait_until
from ...receivers import Receiver, receiving
from .test_batches import create_batch, ended, request
from .test_responses import LONG, REQUEST

Registered = tuple[Endpoint, Receiver]


@pytest.fixture
def registered(redis_client: Redis) -> Iterator[Registered]:
    """Register an endpoint for callers without a key, which also gets events of other tests."""
    with receiving() as receiver:
        endpoint = Endpoint(id=new_id(), url=receiver.url, secret=new_secret())
        redis_client.hset(webhooks_key(), endpoint.id, endpoint.model_dump_json(exclude_none=True))
        yield endpoint, receiver
        redis_client.hdel(webhooks_key(), endpoint.id)


def received_events(client: OpenAI, registered: Registered, thing_id: str) -> list[Any]:
    """Return the types of an object's events, after checking their signatures. There is at least one."""
    endpoint, receiver = registered

    def calls() -> list[tuple[str, dict[str, str], bytes]]:
        return [call for call in receiver.calls if thing_id.encode() in call[2]]

    wait_until(lambda: bool(calls()), "the call")
    return [client.webhooks.unwrap(body, headers, secret=endpoint.secret).type for _, headers, body in calls()]


def test_webhook_is_sent_when_a_batch_ends(openai: OpenAI, registered: Registered) -> None:
    completed = ended(openai, create_batch(openai, [request(1)]))
    failed = ended(openai, create_batch(openai, [request(1), request(1)]))
    assert received_events(openai, registered, completed.id) == ["batch.completed"]
    assert received_events(openai, registered, failed.id) == ["batch.failed"]


def test_webhook_is_sent_when_a_background_response_ends(
    openai: OpenAI, registered: Registered, worker: WorkerProcess
) -> None:
    waited = openai.responses.create(**REQUEST)
    completed = openai.responses.create(**REQUEST, background=True)
    with worker.slowed():
        cancelled = openai.responses.cancel(openai.responses.create(**LONG, background=True).id)
    assert received_events(openai, registered, completed.id) == ["response.completed"]
    assert received_events(openai, registered, cancelled.id) == ["response.cancelled"]
    assert not [body for _, _, body in registered[1].calls if waited.id.encode() in body]
