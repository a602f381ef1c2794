"""Aliases of models, from producers with cellama and with plain Celery, and at the gateway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import generate

from ..conftest import PATIENCE_S
from ..gateways import GatewayProcess
from .conftest import GREEDY
from .test_gateway_tenants import Keyed

STORY = "Once upon a time"
SENT: dict[str, Any] = {"max_tokens": 4, **GREEDY}


@pytest.fixture
def alias(
    model: str, start_worker: Callable[..., Any], settings_environment: Callable[..., None], redis_server: RedisServer
) -> str:
    """Return an alias of a model, which the worker and this process use."""
    name = f"gpt-{model}"
    settings_environment(redis_url=redis_server.url, model_aliases=f"{name}={model}")
    start_worker(model_aliases=f"{name}={model}")
    return name


def test_alias_is_resolved_to_its_model_for_jobs_from_every_producer(
    alias: str, model: str, plain: Celery, redis_client: Redis, redis_server: RedisServer, tmp_path: Path
) -> None:
    job = generate.delay(alias, STORY, **SENT)
    assert redis_client.hget(f"cellama:job:{job.id}", "queue") == f"cellama:queue:{model}".encode()
    expected = job.get(timeout=PATIENCE_S)
    assert expected["model"] == model
    with Client() as client:
        assert client.generate(alias, STORY, **SENT).result(PATIENCE_S)["text"] == expected["text"]
    for queue in (f"cellama:queue:{alias}", f"cellama:queue:{model}"):
        sent = plain.send_task("cellama.generate", [alias, STORY], SENT, queue=queue)
        assert sent.get(timeout=PATIENCE_S)["text"] == expected["text"]

    gateway = GatewayProcess(tmp_path, redis_server.url, CELLAMA_MODEL_ALIASES=f"{alias}={model}")
    try:
        gateway.wait_ready()
        body = {"model": alias, "prompt": STORY, **SENT}
        answer = gateway.post("/v1/completions", json=body).raise_for_status().json()
        assert (answer["model"], answer["choices"][0]["text"]) == (model, expected["text"])
        listed = {entry["id"]: entry for entry in gateway.get("/v1/models").json()["data"]}
        assert {**listed[alias], "id": model} == listed[model]
        assert gateway.get(f"/v1/models/{alias}").json()["id"] == alias
        assert gateway.post("/v1/completions", json={**body, "model": "gpt-x"}).status_code == 404
        tags = gateway.get("/api/tags").json()["models"]
        assert f"{alias}:latest" in [entry["name"] for entry in tags]
        for name in (alias, f"{alias}:latest"):
            sent = {"model": name, "prompt": STORY, "raw": True, "stream": False, **SENT}
            shown = gateway.post("/api/generate", json=sent).raise_for_status().json()
            assert (shown["model"], shown["response"]) == (name, expected["text"])
    finally:
        gateway.stop()


def test_key_for_a_model_or_its_alias_allows_both_names(
    alias: str, model: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    keyed = Keyed(tmp_path, redis_server.url, CELLAMA_MODEL_ALIASES=f"{alias}={model}")
    keyed.add()
    try:
        keyed.process.wait_ready()
        for allowed in (alias, model):
            headers = {"authorization": f"Bearer {keyed.add(models=[allowed]).text}"}
            listed = keyed.process.get("/v1/models", headers=headers).json()["data"]
            assert {entry["id"] for entry in listed} == {alias, model}
            for name in (alias, model):
                body = {"model": name, "prompt": STORY, **SENT}
                assert keyed.process.post("/v1/completions", json=body, headers=headers).status_code == 200
            body = {"model": "other", "prompt": STORY}
            assert keyed.process.post("/v1/completions", json=body, headers=headers).status_code == 403
    finally:
        keyed.process.stop()
