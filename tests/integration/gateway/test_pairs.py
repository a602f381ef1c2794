"""Requests of other servers' tests get the expected replies, or differ as documented."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import httpx
import pytest
import schemathesis

from cellama.api.http.app import API_ROUTES
from cellama.api.http.openapi import gateway_document
from cellama.api.keys.entry import KeyText
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.models.synthetic import write_model

from ...bert_model import BertShape
from ...conftest import MODELS, PATIENCE_S, WorkerProcess, empty_database
from ...gateways import GatewayProcess
from ...pairs import Ask, Pair, Table, llama_server, open_responses, run, vllm
from ...pairs.asks import rank
from ..test_gateway_tenants import Keyed
from .openapi_hooks import close_answers

TABLES = {"llama-server": llama_server.TABLE, "vllm": vllm.TABLE, "open-responses": open_responses.TABLE}
PAIRS = [pytest.param(pair, id=f"{name}-{pair.name}") for name, table in TABLES.items() for pair in table.pairs]
DATABASE = 11
RANKS = BertShape(
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_head_kv=4,
    n_ff=128,
    n_vocab=300,
    n_ctx=128,
    head=True,
    pooling=gguf.PoolingType.RANK,
)
Clients = Callable[[Ask], httpx.Client]


@pytest.fixture(scope="module")
def clients(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """Return a function that chooses the client of a request: of a gateway without keys, or with keys."""
    folder = tmp_path_factory.mktemp("pairs")
    write_model(folder / "ranks.gguf", RANKS, file_type="F32", seed=5)
    models = [*json.loads(MODELS), {"id": "ranks", "source": str(folder / "ranks.gguf"), "threads": 1}]
    with empty_database(redis_server, DATABASE) as url:
        worker = WorkerProcess(folder, url, CELLAMA_MODELS=json.dumps(models), CELLAMA_REASONING_KEY="a secret")
        gateway = GatewayProcess(folder, url)
        (folder / "keyed").mkdir()
        keyed = Keyed(folder / "keyed", url)
        try:
            worker.wait_ready()
            gateway.wait_ready()
            key = keyed.add()
            keyed.process.wait_ready()
            with (
                httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client,
                httpx.Client(base_url=keyed.process.url, timeout=PATIENCE_S) as with_keys,
            ):
                yield lambda ask: client if ask.key is None else _authorized(with_keys, ask.key, key)
        finally:
            codes = [process.stop() for process in (keyed.process, gateway, worker)]
    assert codes == [0, 0, 0]
    assert "Traceback" not in gateway.log() + worker.log()


def _authorized(client: httpx.Client, kind: str, key: KeyText) -> httpx.Client:
    text = key.text if kind in ("valid", "x-api-key") else kind
    client.headers.pop("authorization", None)
    client.headers.pop("x-api-key", None)
    if kind:
        client.headers.update({"x-api-key": text} if kind == "x-api-key" else {"authorization": f"Bearer {text}"})
    return client


@pytest.mark.parametrize("pair", PAIRS)
def test_request_of_each_pair_gets_the_expected_reply(clients: Clients, pair: Pair) -> None:
    assert run(clients, pair) == []


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/reranking", "/v2/rerank"])
@pytest.mark.parametrize("options", [{}, {"return_documents": True, "top_n": 2}], ids=["scores", "documents"])
def test_ranking_has_the_documented_format(clients: Clients, path: str, options: dict[str, Any]) -> None:
    document = json.loads(json.dumps(gateway_document(API_ROUTES)))
    close_answers(document)
    ask = rank(path, documents=["w3 w4 w5", {"text": "w6"}, "w7 w8"], **options)
    answer = clients(ask).post(path, json=ask.body)
    assert answer.status_code == 200, answer.text
    schemathesis.openapi.from_dict(document)[path]["POST"].validate_response(answer)
    results = answer.json()["results"]
    assert len(results) == options.get("top_n", 3)
    assert all("document" in result for result in results) == options.get("return_documents", False)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_each_row_of_the_documentation_has_a_request_pair(table: Table) -> None:
    assert {pair.differs for pair in table.pairs} - {""} == set(table.differences)
    assert [name for name, number in Counter(pair.name for pair in table.pairs).items() if number > 1] == []
