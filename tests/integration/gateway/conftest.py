"""Fixtures of a gateway in front of the worker, and of an unmodified OpenAI client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from cellama.api.client.client import Client

from ...gateways import GatewayProcess

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 1900,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
def openai(gateway: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def queue(gateway: GatewayProcess) -> Iterator[Client]:
    """Return a client of the queue behind the gateway."""
    with Client() as client:
        yield client


@pytest.fixture
def jobs_of_test(queue: Client) -> Callable[[], list[str]]:
    """Return a function for the ids of jobs that run or wait since the test started. Other tests may add some."""
    before = {job.job_id for job in queue.jobs()}
    return lambda: [job.job_id for job in queue.jobs() if job.job_id not in before]
