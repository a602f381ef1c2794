"""Fixtures of a gateway in front of the worker, and of an unmodified OpenAI client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from cellama.api.client.client import Client
from cellama.api.keys.entry import KeyText
from cellama.api.machine.redis_server import RedisServer

from ...browser import Browser, Page, browsing
from ...conftest import PATIENCE_S, WorkerProcess
from ...gateways import GatewayProcess
from ..test_gateway_tenants import Keyed

HTML = {"accept": "text/html"}
OWN = {**HTML, "sec-fetch-site": "same-origin"}  # as a browser sends a form of the console
Visit = Callable[..., httpx.Client]

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


@pytest.fixture(scope="module")
def keyed(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keyed]:
    """A gateway with keys in front of the worker."""
    keyed = Keyed(tmp_path_factory.mktemp("console"), redis_server.url)
    try:
        keyed.add()
        keyed.process.wait_ready()
        yield keyed
    finally:
        keyed.process.stop()


@pytest.fixture
def visit(keyed: Keyed) -> Iterator[Visit]:
    """Returns a browser that has signed in with a key."""
    opened = []

    def visit(key: KeyText | None = None) -> httpx.Client:
        browser = httpx.Client(base_url=keyed.process.url, headers=OWN, timeout=PATIENCE_S)
        opened.append(browser)
        if key is not None:
            assert browser.post("/console/sign-in", data={"key": key.text}).status_code == 303
        return browser

    yield visit
    for browser in opened:
        browser.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Page:
    return Page(browser)
