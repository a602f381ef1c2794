"""Encoders and rerankers in a real worker run `embed` and `rerank` through Celery, and refuse invalid calls."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from cellama.api import AsyncClient, Client
from cellama.api.cli import app as commands
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.models.synthetic import write_model
from cellama.engine.llama import LlamaModel
from cellama.tasks import app, embed, generate, rerank
from cellama.tasks.contract.errors import InvalidJob, JobFailed

from ..bert_model import BertShape
from ..conftest import PATIENCE_S, WorkerProcess
from ..contract.bert_reference import BertReference

TOLERANCE = 1e-3
SMALL: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_head_kv": 4, "n_ff": 128, "n_vocab": 300}
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "encoder.gguf"
    write_model(path, BertShape(**SMALL, n_ctx=128, head=True, pooling=gguf.PoolingType.RANK), file_type="F32", seed=5)
    return path


@pytest.fixture(scope="module", autouse=True)
def encoders(redis_server: RedisServer, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a worker with the file as three models: one embeds texts, one returns a vector per token, and one ranks."""
    models = [
        {"id": "texts", "source": str(encoder), "threads": 1, "pooling": "mean", "capabilities": ["embed"]},
        {"id": "tokens", "source": str(encoder), "threads": 1, "pooling": "none"},
        {"id": "ranks", "source": str(encoder), "threads": 1},
    ]
    folder = tmp_path_factory.mktemp("encoders")
    worker = WorkerProcess(folder, redis_server.url, name="encoders", CELLAMA_MODELS=json.dumps(models))
    try:
        worker.wait_ready()
        yield
    finally:
        worker.stop()


@pytest.fixture(scope="module")
def reference(encoder: Path) -> BertReference:
    return BertReference(encoder, n_head=4)


@pytest.fixture(scope="module")
def vocabulary(encoder: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(encoder, vocab_only=True)
    yield model
    model.close()


def expected_scores(reference: BertReference, vocabulary: LlamaModel, query: str, documents: list[str]) -> list[float]:
    head = vocabulary.tokenize(query)
    return [reference.score([*head, *vocabulary.tokenize(document)[1:]]) for document in documents]


def test_workers_report_capabilities_read_from_model_files() -> None:
    with Client() as client:
        able = {model["id"]: model["capabilities"] for model in client.models()}
    assert {model: able[model] for model in ("texts", "tokens", "ranks")} == {
        "texts": ["embed"],
        "tokens": ["embed", "rerank"],
        "ranks": ["rerank"],
    }


def test_embeddings_from_an_encoder_equal_the_reference(reference: BertReference, vocabulary: LlamaModel) -> None:
    result = embed.delay("texts", TEXTS).get(timeout=PATIENCE_S)
    for text, vector in zip(TEXTS, result["embeddings"], strict=True):
        expected = reference.pooled(vocabulary.tokenize(text), "mean")
        assert np.abs(np.array(vector) - expected / np.linalg.norm(expected)).max() < TOLERANCE
    assert result["usage"]["prompt_tokens"] == sum(len(vocabulary.tokenize(text)) for text in TEXTS)
    ids = [vocabulary.tokenize(text) for text in TEXTS]
    for given, expected in ((ids, result["embeddings"]), ([TEXTS[0], *ids[1:]], result["embeddings"])):
        assert np.allclose(embed.delay("texts", given).get(timeout=PATIENCE_S)["embeddings"], expected, atol=TOLERANCE)
    (alone,) = embed.delay("texts", ids[1]).get(timeout=PATIENCE_S)["embeddings"]
    assert np.allclose(alone, result["embeddings"][1], atol=TOLERANCE)
    with pytest.raises(JobFailed, match="token ids outside the range 0 to 299"):
        embed.delay("texts", [[1, 300]]).get(timeout=PATIENCE_S)


def test_embed_returns_a_vector_per_token_as_lists_or_base64_with_shapes() -> None:
    listed = embed.delay("tokens", TEXTS, dimensions=16).get(timeout=PATIENCE_S)
    packed = embed.delay("tokens", TEXTS, dimensions=16, encoding="base64").get(timeout=PATIENCE_S)
    assert packed["shapes"] == [[5, 16], [3, 16], [7, 16]]
    for rows, data, shape in zip(listed["embeddings"], packed["embeddings"], packed["shapes"], strict=True):
        decoded = np.frombuffer(base64.b64decode(data), dtype="<f4").reshape(shape)
        assert np.allclose(decoded, rows, atol=1e-6)
        assert np.allclose(np.linalg.norm(decoded, axis=1), 1, atol=1e-5)
    assert "shapes" not in embed.delay("texts", TEXTS, encoding="base64").get(timeout=PATIENCE_S)


def test_rerank_returns_documents_and_scores_best_first(reference: BertReference, vocabulary: LlamaModel) -> None:
    documents = [f"w{i} w{i + 1} w{3 * i}" for i in range(30)]
    result = rerank.delay("ranks", "w1 w2", documents).get(timeout=PATIENCE_S)
    expected = expected_scores(reference, vocabulary, "w1 w2", documents)
    scores = {entry["index"]: entry["score"] for entry in result["results"]}
    assert [scores[i] for i in range(30)] == pytest.approx(expected, abs=TOLERANCE)
    in_order = [entry["score"] for entry in result["results"]]
    assert in_order == sorted(in_order, reverse=True)
    assert result["usage"]["prompt_tokens"] == 30 * (4 + 4)
    best = rerank.delay("ranks", "w1 w2", documents, top_n=3).get(timeout=PATIENCE_S)["results"]
    assert [entry["index"] for entry in best] == [entry["index"] for entry in result["results"][:3]]


def test_bulk_run_ranks_documents_like_single_calls(tmp_path: Path) -> None:
    ranked = rerank.delay("ranks", "w1 w2", TEXTS).get(timeout=PATIENCE_S)
    body = {"model": "ranks", "query": "w1 w2", "documents": TEXTS, "return_documents": True}
    lines = [
        {"custom_id": "a", "url": "/v1/rerank", "body": body},
        {"custom_id": "b", "url": "/v1/rerank", "body": {**body, "model": "texts"}},
        {"id": "c", "model": "ranks", "query": "w1 w2", "documents": TEXTS, "top_n": 1},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(commands, ["batch", "run", str(source), "-o", str(output)])
    assert done.exit_code == 1, done.output  # one line failed
    results = {line.get("custom_id", line.get("id")): line for line in map(json.loads, output.read_text().splitlines())}
    assert results.keys() == {"a", "c"}
    found = results["a"]["response"]["body"]["results"]
    assert [entry["index"] for entry in found] == [entry["index"] for entry in ranked["results"]]
    assert [entry["relevance_score"] for entry in found] == pytest.approx([e["score"] for e in ranked["results"]])
    assert [entry["document"]["text"] for entry in found] == [TEXTS[entry["index"]] for entry in found]
    assert results["c"]["results"] == [pytest.approx(ranked["results"][0])]
    assert "wrong_capability" in next(tmp_path.glob("out*errors*")).read_text()


async def _ranked(query: str, documents: list[str]) -> list[dict[str, Any]]:
    async with AsyncClient() as client:
        result = await (await client.rerank("ranks", query, documents)).result(timeout=PATIENCE_S)
    found: list[dict[str, Any]] = result["results"]
    return found


def test_clients_and_plain_celery_return_the_same_ranking() -> None:
    with Client() as client:
        ours = client.rerank("ranks", "w1", TEXTS).result(timeout=PATIENCE_S)["results"]
    plain = app.send_task("cellama.rerank", ["ranks", "w1", TEXTS], queue="cellama:queue:ranks").get(timeout=PATIENCE_S)
    orders = [
        [entry["index"] for entry in found] for found in (ours, plain["results"], asyncio.run(_ranked("w1", TEXTS)))
    ]
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        (lambda: rerank.delay("texts", "w1", TEXTS), "wrong_capability", "'texts' is loaded for embed, not for rerank"),
        (lambda: embed.delay("ranks", TEXTS), "wrong_capability", "'ranks' is loaded for rerank, not for embed"),
        (lambda: generate.delay("texts", "w1"), "wrong_capability", "'texts' is loaded for embed, not for generate"),
        (
            lambda: rerank.delay("ranks", "w1", ["w2", "w3 " * 200]),
            "prompt_too_long",
            r"documents\.1: .* but the limit is 128",
        ),
        (lambda: embed.delay("tokens", ["w1 " * 126] * 9999), "invalid_request", "the limit is 4194304 numbers"),
    ],
)
def test_vector_jobs_fail_when_the_model_does_not_support_the_call(call: Any, code: str, message: str) -> None:
    with pytest.raises(JobFailed, match=message) as caught:
        call().get(timeout=PATIENCE_S)
    assert caught.value.code == code


def test_invalid_rerank_calls_are_rejected_before_queueing() -> None:
    for arguments, message in (
        (("ranks", "", ["a"]), "query is '': the text is empty"),
        (("ranks", "q", []), "documents is .*provide at least one"),
        (("ranks", "q"), "documents is missing"),
    ):
        with pytest.raises(InvalidJob, match=message):
            rerank.delay(*arguments)
    with pytest.raises(InvalidJob, match="top_n is 0"):
        rerank.delay("ranks", "q", ["a"], top_n=0)


def test_long_documents_are_truncated_when_requested() -> None:
    result = rerank.delay("ranks", "w1", ["w2", "w3 " * 200], truncate=True).get(timeout=PATIENCE_S)
    assert sorted(entry["index"] for entry in result["results"]) == [0, 1]
    assert result["usage"]["prompt_tokens"] == 5 + 128


def test_rerank_command_prints_a_table_or_json() -> None:
    ranked = rerank.delay("ranks", "w1", TEXTS).get(timeout=PATIENCE_S)
    shown = CliRunner().invoke(commands, ["rerank", "ranks", "w1", *TEXTS])
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.output.splitlines() if line.strip()]
    assert rows[0] == ["score", "index", "document"]
    assert [row[1] for row in rows[2:]] == [str(entry["index"]) for entry in ranked["results"]]
    piped = CliRunner().invoke(
        commands, ["rerank", "ranks", "w1", "-", "--json", "--top-n", "1"], input="\n".join(TEXTS)
    )
    assert [entry["index"] for entry in json.loads(piped.output)["results"]] == [ranked["results"][0]["index"]]
