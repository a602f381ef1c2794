"""Streams of waiting jobs are kept open by comments with the position of the job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cellama.api.client.client import Client
from cellama.api.http.gateway import wait_at
from cellama.api.machine.redis_server import RedisServer

from ...conftest import PATIENCE_S, WorkerProcess
from ...gateways import GatewayProcess

NUM_SLOTS = 16  # of the worker
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}


@pytest.fixture(scope="module")
def impatient(worker: WorkerProcess, redis_server: RedisServer, tmp_path_factory: Any) -> Iterator[GatewayProcess]:
    """A gateway that sends comments every second, in front of a worker whose slots are all busy."""
    folder: Path = tmp_path_factory.mktemp("impatient")
    gateway = GatewayProcess(folder, redis_server.url, CELLAMA_GATEWAY_KEEPALIVE_S="1").wait_ready()
    with Client() as client, worker.slowed():
        params: Any = {"max_tokens": 1900, "ignore_eos": True, "priority": 0}
        jobs = [client.generate("tiny", f"Fox {number}", **params) for number in range(NUM_SLOTS)]
        try:
            for job in jobs:
                next(iter(job.stream()))
            yield gateway
        finally:
            for job in jobs:
                job.cancel()
            gateway.stop()


@pytest.mark.parametrize("path", BODIES)
def test_keep_alive_comments_contain_the_position_of_a_waiting_job(impatient: GatewayProcess, path: str) -> None:
    body = {"model": "tiny", "stream": True, "service_tier": "flex", **BODIES[path]}
    with httpx.stream("POST", f"{impatient.url}{path}", json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        comment = next(line for line in answer.iter_lines() if line.startswith(":"))
    assert re.fullmatch(r": position \d+(, about \d+ s)?", comment), comment


def test_estimated_wait_is_proportional_to_the_position_in_the_queue() -> None:
    classes: Any = {
        "interactive": {"waiting": 3, "oldest_s": 1.0, "eta_s": 8.0},
        "bulk": {"waiting": 6, "oldest_s": 1.0, "eta_s": None},
    }
    assert wait_at(0, classes, "interactive") == 2.0
    assert wait_at(3, classes, "interactive") == wait_at(9, classes, "interactive") == 8.0
    assert wait_at(4, classes, "bulk") is None
    assert wait_at(4, {}, "bulk") is None
