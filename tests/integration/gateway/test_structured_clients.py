"""Unmodified clients of other projects with common pydantic models. `cellama bench clients` covers more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellama.api.machine.redis_server import RedisServer
from cellama.bench.benchmarks.structured.everyday_schemas import MODELS
from cellama.bench.benchmarks.structured.structured_clients import (
    BY_CLIENT,
    CLIENTS,
    LOOSE,
    MODEL,
    NUM_AT_ONCE,
    VALID,
    SchemaCall,
    SchemaClient,
    installed,
    is_refused_rightly,
)
from cellama.bench.models.brief import brief_sampling

from ...conftest import WorkerProcess, clean_environment, empty_database
from ...gateways import GatewayProcess

TIMEOUT_S = 300.0  # timeout for all calls, which take 15 to 40 s on two cores


@pytest.fixture(scope="module")
def made(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SchemaCall]]:
    """Return a call of each client with each model, to a worker whose answers are short."""
    model = {"id": MODEL, "source": "bundled://tiny", "n_parallel": NUM_AT_ONCE, "ctx_per_slot": 2048, "threads": 1}
    models = json.dumps([{**model, "default": True, "sampling": brief_sampling()}])
    folders = [tmp_path_factory.mktemp(name) for name in ("worker", "gateway")]
    with empty_database(redis_server, 13) as url:
        worker = WorkerProcess(folders[0], url, name="structured", CELLAMA_MODELS=models)
        gateway = GatewayProcess(folders[1], url)
        try:
            worker.wait_ready()
            yield _calls(gateway.wait_ready().url, folders[1])
        finally:
            gateway.stop()
            worker.stop()


def _calls(url: str, folder: Path) -> list[SchemaCall]:
    argv = [sys.executable, "-m", "cellama.bench.benchmarks.structured.structured_clients", url]
    environment = clean_environment(LANGSMITH_TRACING="false")
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return [SchemaCall(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    "client",
    [client for client in CLIENTS if client.package in installed()],
    ids=lambda client: f"{client.package} {client.how}",
)
def test_client_gets_a_valid_object_for_each_pydantic_model(made: list[SchemaCall], client: SchemaClient) -> None:
    of_client = [call for call in made if (call.client, call.how) == (client.package, client.how)]
    assert {call.model for call in of_client} == MODELS.keys()
    accepted = [call for call in of_client if call.outcome != BY_CLIENT and not is_refused_rightly(call)]
    assert [call for call in accepted if call.outcome not in (VALID, LOOSE)] == []
    assert sum(call.outcome == VALID for call in accepted) >= len(MODELS) / 2
