"""Tests that vectors and scores of encoders equal a reference in numpy, and that unsupported uses are rejected."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import (
    EngineOptions,
    InvalidRequest,
    Model,
    ModelManager,
    PromptTooLong,
    WrongCapability,
    scores_of,
)
from cellama.engine.llama import LlamaModel, PairFormat

from ..bert_model import BertShape
from .bert_reference import BertReference

PATIENCE_S = 60
TOLERANCE = 1e-3
SMALL: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_head_kv": 4, "n_ff": 128, "n_vocab": 300}
OPTIONS: dict[str, Any] = {"n_parallel": 2, "threads": 1}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with an encoder, one with a classification head, and one that is declared as a reranker."""
    folder = tmp_path_factory.mktemp("bert")
    shape = {**SMALL, "n_ctx": 256}
    write_model(folder / "plain.gguf", BertShape(**shape), file_type="F32", seed=1)
    write_model(folder / "silent.gguf", BertShape(**shape, pooling=None), file_type="F32", seed=1)
    write_model(folder / "head.gguf", BertShape(**shape, head=True), file_type="F32", seed=2)
    ranks = BertShape(**shape, head=True, pooling=gguf.PoolingType.RANK)
    write_model(folder / "ranks.gguf", ranks, file_type="F32", seed=2)
    write_model(folder / "decoder.gguf", Shape(**{**SMALL, "n_vocab": 320}, n_ctx=256), file_type="F32")
    return folder


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager()
    yield manager
    manager.close()


def load(manager: ModelManager, path: Path, capabilities: list[Any] | None = None, **options: Any) -> Model:
    return manager.load("m", str(path), options=EngineOptions(**OPTIONS, **options), capabilities=capabilities)


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(200)}" for _ in range(count))


@pytest.mark.parametrize("pooling", ["auto", "mean", "cls", "last", "none"])
def test_encoder_vectors_equal_the_reference_vectors_and_keep_the_order_of_texts(
    manager: ModelManager, folder: Path, pooling: Any
) -> None:
    model = load(manager, folder / "plain.gguf", pooling=pooling)
    rng = random.Random(3)
    texts = [model.tokenize(words(rng, count)) for count in (1, 200, 3, 17, 40, 5, 8, 2, 1, 90, 33, 7)]
    unit = model.embedder.submit(texts).result(PATIENCE_S)
    raw = model.embedder.submit(texts, normalize=False).result(PATIENCE_S)
    reference = BertReference(folder / "plain.gguf", n_head=4)
    for i, tokens in enumerate(texts):
        expected = reference.pooled(tokens, "mean" if pooling == "auto" else pooling)
        lengths = np.linalg.norm(expected, axis=-1, keepdims=True)
        assert unit[i].shape == raw[i].shape == expected.shape
        assert np.abs(unit[i] - expected / lengths).max() < TOLERANCE
        assert (np.abs(raw[i] - expected) / lengths).max() < TOLERANCE


def test_token_vectors_are_truncated_and_normalized_one_by_one(manager: ModelManager, folder: Path) -> None:
    model = load(manager, folder / "plain.gguf", pooling="none")
    texts = [model.tokenize(text) for text in ("w1 w2 w3", "w4")]
    vectors = model.embedder.submit(texts, dimensions=16).result(PATIENCE_S)
    assert [vector.shape for vector in vectors] == [(5, 16), (3, 16)]
    for tokens, vector in zip(texts, vectors, strict=True):
        expected = BertReference(folder / "plain.gguf", n_head=4).rows(tokens)[:, :16]
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.abs(vector - expected).max() < TOLERANCE


def test_truncated_text_still_ends_with_its_separator(manager: ModelManager, folder: Path) -> None:
    model = load(manager, folder / "plain.gguf", pooling="last")
    begin, end = model.tokenize("")
    long = model.tokenize(" ".join(["w7"] * 300))
    (vector,) = model.embedder.submit([long], normalize=False, truncate=True).result(PATIENCE_S)
    expected = BertReference(folder / "plain.gguf", n_head=4).pooled([begin, *long[1:255], end], "last")
    assert np.abs(vector - expected).max() < TOLERANCE


def test_pooling_defaults_to_mean_when_the_file_does_not_specify_it(manager: ModelManager, folder: Path) -> None:
    model = load(manager, folder / "silent.gguf")
    tokens = model.tokenize("w1 w2 w3")
    (vector,) = model.embedder.submit([tokens], normalize=False).result(PATIENCE_S)
    expected = BertReference(folder / "silent.gguf", n_head=4).pooled(tokens, "mean")
    assert np.abs(vector - expected).max() < TOLERANCE


def test_scores_of_a_reranker_equal_the_reference(manager: ModelManager, folder: Path) -> None:
    model = load(manager, folder / "ranks.gguf")
    assert model.capabilities == {"rerank"}
    rng = random.Random(4)
    query, documents = "w1 w2", [words(rng, rng.randrange(1, 60)) for _ in range(20)]
    reference = BertReference(folder / "ranks.gguf", n_head=4)
    begin, end = model.tokenize("")
    expected = [
        reference.score([begin, *model.tokenize(query)[1:-1], end, *model.tokenize(document)[1:-1], end])
        for document in documents
    ]
    assert model.reranker.scores(query, documents) == pytest.approx(expected, abs=TOLERANCE)
    assert np.ptp(expected) > 100 * TOLERANCE


def test_one_model_file_embeds_and_ranks_with_the_same_weights(manager: ModelManager, folder: Path) -> None:
    model = load(manager, folder / "head.gguf")
    assert model.capabilities == {"embed", "rerank"}
    tokens = model.tokenize("w1 w2")
    embedding = model.embedder.submit([tokens], normalize=False)
    assert len(scores_of(model.reranker.submit("w1", ["w2", "w3"]), PATIENCE_S)) == 2
    expected = BertReference(folder / "head.gguf", n_head=4).pooled(tokens, "mean")
    assert np.abs(embedding.result(PATIENCE_S)[0] - expected).max() < TOLERANCE


def test_pair_that_is_too_long_is_rejected_or_truncated(manager: ModelManager, folder: Path) -> None:
    reranker = load(manager, folder / "ranks.gguf").reranker
    long = " ".join(["w7"] * 300)
    with pytest.raises(
        PromptTooLong, match=r"documents\.1: query and document have 304 tokens, .* limit is 256; .*set truncate"
    ):
        reranker.submit("w1", ["w2", long])
    cut = " ".join(["w7"] * (256 - 4))
    assert reranker.scores("w1", [long], truncate=True) == pytest.approx(reranker.scores("w1", [cut]), abs=TOLERANCE)
    with pytest.raises(PromptTooLong, match="the query leaves no room for documents within 256 tokens"):
        reranker.submit(long, ["w1"], truncate=True)
    with pytest.raises(InvalidRequest, match="documents: the list is empty"):
        reranker.submit("w1", [])


def test_reranker_joins_pairs_with_its_own_template(manager: ModelManager, tmp_path: Path) -> None:
    template = "[CLS] {query} w100 {document} w101 [SEP]"
    write_model(tmp_path / "m.gguf", BertShape(**SMALL, n_ctx=64, head=True, rerank_template=template), file_type="F32")
    model = load(manager, tmp_path / "m.gguf", ["rerank"])
    reference = BertReference(tmp_path / "m.gguf", n_head=4)

    def expected(query: str, document: str) -> float:
        text = f"[CLS] {query} w100 {document} w101 [SEP]"
        return reference.score(model.tokenize(text, add_special=False, parse_special=True))

    documents = ["w2 w3", "{query}"]
    scores = model.reranker.scores("{document}", documents)
    assert scores == pytest.approx([expected("{document}", document) for document in documents], abs=TOLERANCE)
    (score,) = model.reranker.scores("w1", [" ".join(["w7"] * 99)], truncate=True)
    assert score == pytest.approx(expected("w1", " ".join(["w7"] * (64 - 5))), abs=TOLERANCE)


def test_query_and_document_never_become_control_tokens_in_a_template(tmp_path: Path) -> None:
    template = "[CLS] {query} w100 {document} w101 [SEP]"
    write_model(tmp_path / "m.gguf", BertShape(**SMALL, n_ctx=64, head=True, rerank_template=template), file_type="F32")
    weights = LlamaModel(tmp_path / "m.gguf")
    try:
        separator = weights.tokenize("")[-1]
        pairs, trusting = PairFormat(weights), PairFormat(weights, control_tokens_in_text=True)
        assert pairs.join("w1 [SEP] w2", "[SEP] w3").count(separator) == 1
        assert pairs.join_cut("[SEP]", "[SEP] w3", 60).count(separator) == 1
        assert trusting.join("w1 [SEP] w2", "[SEP] w3").count(separator) == 3
    finally:
        weights.close()


@pytest.mark.parametrize(
    ("file", "capabilities", "options", "message"),
    [
        ("plain", ["generate"], {}, r"'m' \(bert.*can't generate; .*capabilities = \['embed'\]"),
        ("plain", ["embed", "chat"], {}, "can't generate"),
        ("plain", ["rerank"], {}, "can't rerank: its file has no classification head"),
        ("plain", None, {"pooling": "rank"}, "can't rerank"),
        ("ranks", ["embed"], {}, r"has pooling 'rank', .* set pooling to mean, cls, last or none"),
        ("decoder", ["generate", "rerank"], {}, "can't rerank"),
    ],
)
def test_load_rejects_capabilities_that_the_model_does_not_support(
    manager: ModelManager, folder: Path, file: str, capabilities: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongCapability, match=message):
        load(manager, folder / f"{file}.gguf", capabilities, **options)
    assert manager.entries() == []


def test_model_gets_the_capabilities_of_its_file_by_default(manager: ModelManager, folder: Path) -> None:
    able = {
        path.stem: manager.load(path.stem, str(path), options=EngineOptions(**OPTIONS)).capabilities
        for path in sorted(folder.glob("*.gguf"))
    }
    assert able == {
        "decoder": {"generate", "embed"},  # because it has no chat template
        "head": {"embed", "rerank"},
        "plain": {"embed"},
        "ranks": {"rerank"},
        "silent": {"embed"},
    }
    with pytest.raises(WrongCapability, match="'plain' is loaded for embed, not for rerank; its file has no class"):
        manager.get("plain").reranker  # noqa: B018
    with pytest.raises(WrongCapability, match="not for chat; its file has no chat template; use `generate`"):
        manager.get("decoder").require("chat")
    with pytest.raises(WrongCapability, match="not for generate; it is an encoder"):
        manager.get("plain").engine  # noqa: B018
    with pytest.raises(InvalidRequest, match="capabilities: 'embd' is unknown; did you mean 'embed'"):
        manager.load("x", "bundled://tiny", capabilities=["embd"])  # type: ignore[list-item]
