"""Test which class of a client library's errors each situation of the gateway raises.

Timeouts of a body (408), cancelled jobs (499), plain 500s, answers that `max_tokens` cuts, and errors in the middle of
a stream are not in the table. These classes can't be caused: 402, 412, 422, 431, 501, 502 and 504 are statuses that the
gateway never sends, it has no content filter (`ContentFilterFinishReasonError`, `ContentPolicyViolationError`), and its
bodies are valid (`APIResponseValidationError`).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cellama.api.machine.redis_server import LOOPBACK, RedisServer, free_port

from ...conftest import PATIENCE_S, WorkerProcess, clean_environment, empty_database, wait_until
from ...gateways import GatewayProcess
from ..test_gateway_tenants import Keyed
from . import raising_clients
from .conftest import CHAT

DATABASE = 15
MAX_BODY_BYTES = 100_000
CLIENTS = list(raising_clients.CLIENTS)

# The situation, and the exception of each client in the order of CLIENTS
EXPECTED = {
    "wrong key": (
        "AuthenticationError",
        "AuthenticationError",
        "AuthenticationError",
        "AuthenticationError",
        "OpenAIAuthenticationError",
        "AnthropicAuthenticationError",
    ),
    "model not allowed": (
        "PermissionDeniedError",
        "PermissionDeniedError",
        "APIError",
        "PermissionDeniedError",
        "OpenAIPermissionDeniedError",
        "AnthropicPermissionDeniedError",
    ),
    "unknown model": (
        "NotFoundError",
        "NotFoundError",
        "NotFoundError",
        "NotFoundError",
        "OpenAIModelNotFoundError",
        "AnthropicModelNotFoundError",
    ),
    "invalid request": (
        "BadRequestError",
        "BadRequestError",
        "BadRequestError",
        "BadRequestError",
        "OpenAIInvalidRequestError",
        "AnthropicInvalidRequestError",
    ),
    "prompt too long": (
        "BadRequestError",
        "BadRequestError",
        "ContextWindowExceededError",
        "ContextWindowExceededError",
        "OpenAIContextOverflowError",
        "AnthropicContextOverflowError",
    ),
    "key used again": (
        "ConflictError",
        "ConflictError",
        "APIError",
        "BadRequestError",
        "ConflictError",
        "ConflictError",
    ),
    "body too large": (
        "APIStatusError",
        "ContentTooLargeError",
        "BadRequestError",
        "BadRequestError",
        "APIStatusError",
        "ContentTooLargeError",
    ),
    "rate limit": (
        "RateLimitError",
        "RateLimitError",
        "RateLimitError",
        "RateLimitError",
        "OpenAIRateLimitError",
        "AnthropicRateLimitError",
    ),
    "overload": (
        "InternalServerError",
        "OverloadedError",
        "ServiceUnavailableError",
        "InternalServerError",
        "OpenAIAPIError",
        "AnthropicOverloadedError",
    ),
    "no worker": (
        "InternalServerError",
        "ServiceUnavailableError",
        "ServiceUnavailableError",
        "InternalServerError",
        "OpenAIAPIError",
        "AnthropicAPIError",
    ),
    "no answer": (
        "APITimeoutError",
        "APITimeoutError",
        "Timeout",
        "Timeout",
        "OpenAITimeoutError",
        "AnthropicTimeoutError",
    ),
    "no server": (
        "APIConnectionError",
        "APIConnectionError",
        "InternalServerError",
        "InternalServerError",
        "OpenAIConnectionError",
        "AnthropicConnectionError",
    ),
}


@pytest.fixture(scope="module")
def raised(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, str]]]:
    """The name of the exception per situation and client."""
    with ExitStack() as ending:
        keyed = Keyed(
            tmp_path_factory.mktemp("keyed"), redis_server.url, CELLAMA_GATEWAY_MAX_BODY_BYTES=str(MAX_BODY_BYTES)
        )
        ending.callback(keyed.process.stop)
        empty = ending.enter_context(empty_database(redis_server, DATABASE))
        unserved, full = (
            GatewayProcess(tmp_path_factory.mktemp(name), empty, **settings)
            for name, settings in (
                ("unserved", {}),
                ("full", {"CELLAMA_GATEWAY_MAX_REQUESTS": "1", "CELLAMA_GATEWAY_BODY_TIMEOUT_S": "600"}),
            )
        )
        ending.callback(unserved.stop)
        ending.callback(full.stop)
        keyed.add()
        keyed.process.wait_ready()
        unserved.wait_ready("/health")
        full.wait_ready("/health")
        ending.enter_context(held_request(full))
        silent = ending.enter_context(socket.create_server((LOOPBACK, 0)))
        key = keyed.add().text
        used = uuid.uuid4().hex
        served = {"url": keyed.process.url, "key": key, "model": "tiny", "text": "Hi", "timeout": PATIENCE_S}
        with keyed.client(key) as client:
            assert client.chat.completions.create(**CHAT, extra_headers={"Idempotency-Key": used}).choices
        situations = {
            "wrong key": {"key": "sk-wrong"},
            "model not allowed": {"key": keyed.add(models=["other"]).text},
            "unknown model": {"model": "nope"},
            "invalid request": {"headers": {"Idempotency-Key": "x" * 300}},
            "prompt too long": {"text": "x " * 9000},
            "key used again": {"headers": {"Idempotency-Key": used}},
            "body too large": {"text": "x" * (MAX_BODY_BYTES + 1)},
            "rate limit": {"key": keyed.add(tokens_per_minute=1).text},
            "overload": {"url": full.url},
            "no worker": {"url": unserved.url},
            "no answer": {"url": "http://{}:{}".format(*silent.getsockname()), "timeout": 1.0},
            "no server": {"url": f"http://{LOOPBACK}:{free_port()}"},
        }
        requests = [{"headers": {}, **served, **situations[name]} for name in EXPECTED]
        done = subprocess.run(
            [sys.executable, raising_clients.__file__],
            cwd=tmp_path_factory.mktemp("clients"),
            env=clean_environment(LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false"),
            input=json.dumps(requests),
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        yield dict(zip(EXPECTED, json.loads(done.stdout), strict=True))


def held_request(gateway: GatewayProcess) -> socket.socket:
    """Start a request whose body never arrives, so that it stays in progress until the connection is closed."""
    connection = socket.create_connection((LOOPBACK, gateway.port))
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: 2\r\n\r\n".encode())
    wait_until(lambda: gateway.get("/v1/models").status_code == 503, "an overload")
    return connection


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("situation", EXPECTED)
def test_client_raises_the_exception_for_the_situation(
    raised: dict[str, dict[str, str]], situation: str, client: str
) -> None:
    assert raised[situation][client] == EXPECTED[situation][CLIENTS.index(client)]
