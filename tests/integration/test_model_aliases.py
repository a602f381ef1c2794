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


def test_alias_names_the_model_of_jobs_from_every_producer(
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
    finally:
        gateway.stop()
