"""Test which class of a client library's errors each situation of the gateway raises.

These classes can't be caused: 402, 412, 422, 431, 501, 502 and 504 are statuses that the gateway never sends, it has no
content filter (`ContentFilterFinishReasonError`, `ContentPolicyViolationError`), and its bodies are valid
(`APIResponseValidationError`).
"""

from __future__ import annotations

import json
import re
import socket
import socketserver
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import LOOPBACK, RedisServer, free_port
from cellama.bench.harness.scripted import PROCESSOR, SCRIPT_FILE, temperature_of, write_script

from ...conftest import PATIENCE_S, WorkerProcess, clean_environment, empty_database, wait_until
from ...gateways import GatewayProcess
from ..test_gateway_tenants import Keyed
from . import raising_clients
from .conftest import CHAT

DATABASE = 15
MAX_BODY_BYTES = 100_000
CLIENTS = list(raising_clients.CLIENTS)
FAILING, ENDLESS = "failing", "endless"  # models
FAILS_AT_ONCE, FAILS_LATER, REPEATED = 1, 2, 3  # scripted replies
NO_TOKEN = 10**9  # allowing a token that the vocabulary lacks raises IndexError in the worker
BODY = re.compile(rb"content-length: (\d+).*?\r\n\r\n(.*)", re.DOTALL | re.IGNORECASE)

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
    "slow body": (
        "APIStatusError",
        "RequestTimeoutError",
        "Timeout",
        "Timeout",
        "APIStatusError",
        "RequestTimeoutError",
    ),
    "cancelled job": (
        "APIStatusError",
        "ClientClosedRequestError",
        "APIError",
        "BadRequestError",
        "APIStatusError",
        "ClientClosedRequestError",
    ),
    "failed job": (
        "InternalServerError",
        "InternalServerError",
        "InternalServerError",
        "InternalServerError",
        "OpenAIAPIError",
        "AnthropicAPIError",
    ),
    "failed stream": (
        "APIError",
        "APIStatusError",
        "MidStreamFallbackError",
        "MidStreamFallbackError",
        "APIError",
        "APIStatusError",
    ),
    "cancelled stream": (
        "APIError",
        "APIStatusError",
        "MidStreamFallbackError",
        "MidStreamFallbackError",
        "APIError",
        "APIStatusError",
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
        unserved, full, hasty = (
            GatewayProcess(tmp_path_factory.mktemp(name), empty, **settings)
            for name, settings in (
                ("unserved", {}),
                ("full", {"CELLAMA_GATEWAY_MAX_REQUESTS": "1", "CELLAMA_GATEWAY_BODY_TIMEOUT_S": "600"}),
                ("hasty", {"CELLAMA_GATEWAY_BODY_TIMEOUT_S": "1"}),
            )
        )
        failing = ending.enter_context(failing_worker(tmp_path_factory.mktemp("failing"), redis_server.url))
        keyed.add()
        keyed.process.wait_ready()
        for gateway in (unserved, full, hasty):
            ending.callback(gateway.stop)
            gateway.wait_ready("/health")
        ending.enter_context(held_request(full))
        ending.enter_context(failing.slowed())
        ending.enter_context(cancelling(ENDLESS))
        silent = ending.enter_context(socket.create_server((LOOPBACK, 0)))
        key = keyed.add().text
        used = uuid.uuid4().hex
        served = {"url": keyed.process.url, "key": key, "model": "tiny", "text": "Hi", "timeout": PATIENCE_S}
        served |= {"max_tokens": 4, "temperature": 0, "stream": False, "headers": {}}
        endless = {"model": ENDLESS, "max_tokens": 1900, "temperature": temperature_of(REPEATED)}
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
            "slow body": {"url": ending.enter_context(incomplete_bodies(hasty))},
            "cancelled job": endless,
            "failed job": {"model": FAILING, "temperature": temperature_of(FAILS_AT_ONCE)},
            "failed stream": {"model": FAILING, "temperature": temperature_of(FAILS_LATER), "stream": True},
            "cancelled stream": {**endless, "stream": True},
            "no worker": {"url": unserved.url},
            "no answer": {"url": "http://{}:{}".format(*silent.getsockname()), "timeout": 1.0},
            "no server": {"url": f"http://{LOOPBACK}:{free_port()}"},
        }
        requests = [{**served, **situations[name]} for name in EXPECTED]
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


@contextmanager
def failing_worker(folder: Path, redis_url: str) -> Iterator[WorkerProcess]:
    """Run a worker with a model whose requests fail at a scripted token, and with the same model for long replies."""
    token = 300  # any ordinary token
    replies = {FAILS_AT_ONCE: [NO_TOKEN], FAILS_LATER: [token, token, NO_TOKEN], REPEATED: [token] * 2000}
    write_script(folder / "script.json", replies)
    options = {"source": "bundled://tiny", "n_parallel": 1, "threads": 1, "logits_processors": [PROCESSOR]}
    models = json.dumps([{"id": name, **options} for name in (FAILING, ENDLESS)])
    script = {SCRIPT_FILE: str(folder / "script.json")}
    worker = WorkerProcess(folder, redis_url, name="failing", CELLAMA_MODELS=models, **script)
    try:
        yield worker.wait_ready()
    finally:
        worker.stop()


@contextmanager
def cancelling(model: str) -> Iterator[None]:
    """Cancel each job of a model after its first token, within the `with` block."""
    ended = threading.Event()

    def cancel() -> None:
        with Client() as client:
            while not ended.wait(0.02):
                for job in client.jobs(model):
                    next(event for event in client.stream(job.job_id) if event["type"] in ("token", "done", "error"))
                    client.cancel(job.job_id)

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def incomplete_bodies(gateway: GatewayProcess) -> Iterator[str]:
    """Yield the URL of a proxy that sends each request without its last byte, and the answer unchanged."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            request = b""
            while not (found := BODY.search(request)) or len(found[2]) < int(found[1]):
                request += self.request.recv(65536)
            with socket.create_connection((LOOPBACK, gateway.port)) as connection:
                connection.sendall(request[:-1])
                while part := connection.recv(65536):
                    self.request.sendall(part)

    with socketserver.ThreadingTCPServer((LOOPBACK, 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield "http://{}:{}".format(*server.server_address)
        finally:
            server.shutdown()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("situation", EXPECTED)
def test_client_raises_the_expected_exception_for_each_error(
    raised: dict[str, dict[str, str]], situation: str, client: str
) -> None:
    assert raised[situation][client] == EXPECTED[situation][CLIENTS.index(client)]
