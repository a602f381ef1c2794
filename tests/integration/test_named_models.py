"""Names and sampling defaults of models that are loaded at run time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from cellama.api import Client
from cellama.api.cli import app
from cellama.tasks import chat, generate
from cellama.tasks.contract.errors import JobFailed

from ..conftest import PATIENCE_S
from .conftest import GREEDY

STORY = "Once upon a time"
SMALL: dict[str, Any] = {"n_parallel": 1, "ctx_per_slot": 512, "threads": 1, "worker": "worker", "timeout": PATIENCE_S}


def test_model_can_have_any_single_line_name_and_its_own_sampling_defaults(
    client: Client, events_of: Callable[..., list[dict[str, Any]]]
) -> None:
    name, sampling = "qwen2.5:7b, ü = chat", {"temperature": 0, "grammar": 'root ::= "ab" "c"'}
    assert client.load_model(name, "bundled://tiny", sampling=sampling, **SMALL) == name
    try:
        job = generate.delay(name, STORY)
        assert job.get(timeout=PATIENCE_S)["text"] == "abc"
        assert events_of(job.id)[0]["sampling"] == sampling  # another worker resumes these
        free = generate.delay(name, STORY, grammar=None, max_tokens=4).get(timeout=PATIENCE_S)
        assert free["text"] == ", there was a"
        other = chat.delay(name, [{"role": "user", "content": "Hi"}], json_schema={"const": 1}).get(timeout=PATIENCE_S)
        assert other["text"] == "1"
        assert [model["sampling"] for model in client.models() if model["id"] == name] == [sampling]
        with pytest.raises(JobFailed, match="sampling: 'temprature' can't have a default"):
            client.load_model("x", "bundled://tiny", sampling={"temprature": 0}, **SMALL)
        with pytest.raises(JobFailed, match="grammar"):
            client.load_model("x", "bundled://tiny", sampling={"grammar": "root ::= nothing"}, **SMALL)
    finally:
        client.unload_model(name, worker="worker", timeout=PATIENCE_S)


def test_model_without_a_name_gets_a_unique_name_from_its_file(client: Client) -> None:
    argv = ("models", "load", "bundled://tiny", "-w", "worker", "--set", "n_parallel=1", "--set", "threads=1", "--json")
    loaded = CliRunner().invoke(app, argv, catch_exceptions=False)
    assert json.loads(loaded.output) == {"model": "tiny-2", "status": "ready", "not_on": {}}
    assert generate.delay("tiny-2", STORY, max_tokens=4, **GREEDY).get(timeout=PATIENCE_S)["text"] == ", there was a"
    client.unload_model("tiny-2", worker="worker", timeout=PATIENCE_S)
