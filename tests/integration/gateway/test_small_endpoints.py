"""Test tokens, health, tiers, tenant scopes, mounting the gateway into another app, and the gateway command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from cellama.api.client.client import Client
from cellama.api.http import create_app
from cellama.config import Settings

from ...conftest import PATIENCE_S, clean_environment
from ...gateways import COMMAND, GatewayProcess
from .conftest import CHAT, TOOL


def test_tokenize_works_in_both_formats(gateway: GatewayProcess, queue: Client) -> None:
    def post(path: str, **body: Any) -> Any:
        return gateway.post(path, json=body).raise_for_status().json()

    expected = queue.tokenize("tiny", "Hello, fox").result(60)["tokens"]
    assert post("/tokenize", content="Hello, fox")["tokens"] == expected
    received = post("/tokenize", model="tiny", prompt="Hello, fox", add_special_tokens=True)
    assert (received["tokens"], received["count"], received["max_model_len"]) == (expected, len(expected), 2048)
    assert post("/detokenize", tokens=expected)["content"] == "Hello, fox"
    chat = queue.apply_chat_template("tiny", CHAT["messages"], tools=[TOOL]).result(60)["tokens"]
    assert post("/tokenize", model="tiny", messages=CHAT["messages"], tools=[TOOL])["tokens"] == chat
    pieces = post("/tokenize", content="Hello, fox é", with_pieces=True, return_token_strs=True)
    assert b"".join(_bytes(token["piece"]) for token in pieces["tokens"]) == "Hello, fox é".encode()
    assert [token["id"] for token in pieces["tokens"]] == post("/tokenize", content="Hello, fox é")["tokens"]
    assert pieces["token_strs"][0] == pieces["tokens"][0]["piece"]
    assert gateway.post("/tokenize", json={"content": 3}).status_code == 400
    assert gateway.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def _bytes(piece: Any) -> bytes:
    """Return the bytes of a piece, which is a text, or a list of bytes that are only part of a character."""
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def test_chat_parameters_change_the_end_of_the_prompt(gateway: GatewayProcess) -> None:
    def prompt(*turns: Any, **body: Any) -> str:
        sent = {"messages": [*CHAT["messages"], *turns], "return_token_strs": True, **body}
        return "".join(gateway.post("/tokenize", json=sent).raise_for_status().json()["token_strs"])

    started = prompt()
    ended = prompt(add_generation_prompt=False)
    assert started.startswith(ended)
    assert started != ended
    reply = {"role": "assistant", "content": "It is"}
    continued = prompt(reply)
    assert continued == started + "It is"
    assert continued == prompt(reply, continue_final_message=True, add_generation_prompt=False)
    closed = prompt(reply, continue_final_message=False, add_generation_prompt=False)
    assert closed.startswith(continued)
    assert prompt(reply, continue_final_message=False) == closed + started.removeprefix(ended)
    answer = gateway.post("/v1/chat/completions", json={**CHAT, "continue_final_message": True})
    assert answer.status_code == 400
    assert "the last message is not an assistant message with text" in answer.json()["error"]["message"]


@pytest.mark.parametrize("base", ["", "/v1/", "/v1/v1"])
def test_endpoints_are_found_when_the_base_url_is_slightly_wrong(gateway: GatewayProcess, base: str) -> None:
    with OpenAI(base_url=gateway.url + base, api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).choices[0].message.content
        assert client.completions.create(model="tiny", prompt="Once", max_tokens=2).choices[0].text
        assert client.embeddings.create(model="tiny", input="Once").data
        assert client.responses.create(model="tiny", input="Hi", max_output_tokens=2).output
        assert client.models.retrieve("tiny").id == "tiny"


def test_body_with_byte_order_mark_is_accepted(gateway: GatewayProcess) -> None:
    content = b"\xef\xbb\xbf" + json.dumps(CHAT).encode()
    answer = gateway.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("tier", "priority", "shown"), [(None, 3, "default"), ("flex", 9, "flex"), ("priority", 0, "priority")]
)
def test_service_tier_sets_the_priority_of_the_job(
    openai: OpenAI, queue: Client, redis_client: Any, tier: Any, priority: int, shown: str
) -> None:
    more = {} if tier is None else {"service_tier": tier}
    answer = openai.chat.completions.create(**CHAT, **more)
    assert answer.service_tier == shown
    job_id = answer.id.removeprefix("chatcmpl-")
    assert int(redis_client.hget(f"cellama:job:{job_id}", "priority")) == priority


def test_prefixes_are_shared_only_by_requests_with_the_same_salt(openai: OpenAI) -> None:
    def cached(salt: str) -> int:
        question = [{"role": "user", "content": f"Tell of {'a fox and ' * 20} a bear"}]
        sent: Any = {**CHAT, "messages": question, "max_tokens": 1, "extra_body": {"cache_salt": salt}}
        usage = openai.chat.completions.create(**sent).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached("one") == 0
    assert cached("one") > 20
    assert cached("two") == 0


def test_gateway_works_when_mounted_in_another_app(gateway: GatewayProcess, redis_server: Any) -> None:
    mounted = create_app(Settings(redis_url=redis_server.url))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with mounted.router.lifespan_context(mounted):
            yield

    app = Starlette(routes=[Mount("/llm", mounted)], lifespan=lifespan)
    with TestClient(app) as client:
        assert client.get("/llm/ready").json() == {"status": "ready"}
        answer = client.post("/llm/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text
        lines = client.post("/llm/v1/chat/completions", json={**CHAT, "stream": True}).text.splitlines()
        assert lines[-2] == "data: [DONE]"


def test_gateway_without_redis_is_healthy_but_not_ready(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, "redis://someone@127.0.0.1:1/0").wait_ready("/health")
    ready = gateway.get("/ready")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
    assert ready.json()["error"]["message"] == "Redis does not answer, or temporarily refuses commands"
    assert "someone@127.0.0.1:1/0 does not answer" in gateway.log()
    answer = gateway.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert gateway.stop() == 0


def test_public_address_is_rejected_without_keys(redis_server: Any, tmp_path: Path) -> None:
    environment = clean_environment(CELLAMA_REDIS_URL=redis_server.url)
    argv = [*COMMAND, "--host", "0.0.0.0", "--port", "18000"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "0.0.0.0 can be reached from other machines" in done.stderr
    assert "Traceback" not in done.stderr
