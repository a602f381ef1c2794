"""The text between a prefix and a suffix, at /infill, in completions and from plain jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ollama import Client as OllamaClient, ResponseError

from cellama.api.client.client import Client
from cellama.tasks.contract.errors import InvalidJob

from ...conftest import PATIENCE_S
from ...fim_model import write_fim_model
from ...gateways import GatewayProcess

GAP: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
FILES = [{"filename": "a.txt", "text": "The fox is red."}]


@pytest.fixture(scope="module")
def filler(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the id of a model with tokens to fill in the middle of a text."""
    path = tmp_path_factory.mktemp("model") / "filler.gguf"
    write_fim_model(path)
    options: dict[str, Any] = {"n_parallel": 1, "ctx_per_slot": 512, "threads": 1}
    with Client() as client:
        yield client.load_model("filler", str(path), worker="worker", timeout=PATIENCE_S, **options)
        client.unload_model("filler", worker="worker", timeout=PATIENCE_S)


def test_infill_generates_the_same_text_as_a_completion_and_a_job(
    gateway: GatewayProcess, filler: str, queue: Client
) -> None:
    body = {"model": filler, "input_prefix": "Once upon", "input_suffix": "the end.", "n_predict": 6, **GAP}
    answer = gateway.post("/infill", json={**body, "prompt": " a time"}).raise_for_status().json()
    assert (answer["stop_type"], answer["tokens_predicted"], answer["model"]) == ("limit", 6, filler)
    sent = {"model": filler, "prompt": "Once upon a time", "suffix": "the end.", "max_tokens": 6, **GAP}
    completion = gateway.post("/v1/completions", json=sent).raise_for_status().json()
    assert completion["choices"][0]["text"] == answer["content"]
    assert completion["usage"]["prompt_tokens"] == answer["tokens_evaluated"]
    job = queue.generate(filler, "Once upon a time", suffix="the end.", max_tokens=6, **GAP)
    assert job.result(PATIENCE_S)["text"] == answer["content"]
    longer = gateway.post("/infill", json={**body, "input_extra": FILES}).raise_for_status().json()
    assert longer["tokens_evaluated"] > answer["tokens_evaluated"]


def test_streamed_infill_has_the_same_text(gateway: GatewayProcess, filler: str) -> None:
    body = {"model": filler, "input_prefix": "", "input_suffix": " there was a fox", "n_predict": 6, **GAP}
    whole = gateway.post("/infill", json=body).raise_for_status().json()
    with gateway.stream("/infill", json={**body, "stream": True}) as answer:
        frames = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data")]
    assert "".join(frame["content"] for frame in frames) == whole["content"]
    assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert {**frames[-1], "content": whole["content"], "tokens_cached": 0} == {**whole, "tokens_cached": 0}


def test_ollamas_client_fills_a_gap(gateway: GatewayProcess, filler: str) -> None:
    options = {"temperature": 0, "num_predict": 6}
    for prefix in ("Once upon", ""):
        body = {"model": filler, "input_prefix": prefix, "input_suffix": "the end.", "n_predict": 6, "temperature": 0}
        answer = gateway.post("/infill", json=body).raise_for_status().json()
        with OllamaClient(host=gateway.url, timeout=PATIENCE_S) as client:
            filled = client.generate(filler, prefix, suffix="the end.", options=options)
            parts = client.generate(filler, prefix, suffix="the end.", options=options, stream=True)
            assert (filled.response, filled.prompt_eval_count) == (answer["content"], answer["tokens_evaluated"])
            assert "".join(part.response or "" for part in parts) == answer["content"]
            with pytest.raises(ResponseError, match="has no fill-in-the-middle tokens"):
                client.generate("tiny", prefix, suffix="the end.")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "has no fill-in-the-middle tokens"),
        ("/infill", {"input_prefix": "a"}, "input_suffix is None; it must be a string"),
        ("/infill", {"input_prefix": 3, "input_suffix": "b"}, "input_prefix is 3; it must be a string"),
        ("/infill", {"input_prefix": "", "input_suffix": "", "input_extra": [{"name": "x"}]}, "input_extra.0"),
        ("/infill", {"input_prefix": "", "input_suffix": "", "xyzzy": 1}, "unknown parameter 'xyzzy'"),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "suffix": "b"}, "has no fill-in-the-middle tokens"),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, "prompt is '': the text is empty; provide some text"),
    ],
)
def test_gap_that_cannot_be_filled_is_rejected(
    gateway: GatewayProcess, path: str, body: dict[str, Any], expected: str
) -> None:
    answer = gateway.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert expected in answer.json()["error"]["message"]


def test_additional_files_require_a_suffix(queue: Client) -> None:
    with pytest.raises(InvalidJob, match="input_extra requires a suffix"):
        queue.generate("tiny", "a", input_extra=[{"text": "b"}])
    with pytest.raises(InvalidJob, match="suffix can't be combined with parent_key"):
        queue.generate("tiny", "a", suffix="b", parent_key="0" * 64)
