"""KV states outlive slots, workers and crashes. The two workers of these tests share a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from cellama.api import Client
from cellama.api.cli import app
from cellama.tasks import generate

from ..conftest import PATIENCE_S, wait_until
from .conftest import GREEDY, STORY, StartWorker, check_whole, read

# Long enough that on any machine, reading its file takes less time than computing its state.
PROMPT = "The little fox lived in a green forest, and every day it went to the river to talk to the frogs. " * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


def run(model: str, prompt: str, **params: Any) -> Any:
    return generate.delay(model, prompt, **{**GREEDY, **params}).get(timeout=PATIENCE_S)


def on_disk(model: str, scope: str) -> int:
    """Return how many tokens of the prompt the first listed worker has on disk."""
    with Client() as client:
        return client.cached_prefix(model, PROMPT, cache_scope=scope)[0]["tiers"]["disk"]


def test_job_of_a_killed_worker_resumes_from_the_state_on_disk(
    start_worker: StartWorker, model: str, redis_client: Redis, folder: Path
) -> None:
    first = start_worker(lease_s=3, cache_dir=folder)
    short = run(model, STORY, max_tokens=5)
    params: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, **GREEDY}
    undisturbed = run(model, PROMPT, cache_prompt=False, **params)["text"]
    with first.slowed(0.25):  # the job takes most of a minute
        job = generate.delay(model, PROMPT, cache_scope="a", **params)
        wait_until(lambda: on_disk(model, "a") > 0, "the running job's state on disk")
        first.process.kill()
    second = start_worker(slots=2, lease_s=3, cache_dir=folder)  # a different number of slots
    result = job.get(timeout=PATIENCE_S)
    assert result["text"] == undisturbed
    check_whole(read(redis_client, job.id), undisturbed)
    usage = result["usage"]
    assert (usage["cache_tier"], second.engine_now()["disk_loads"]) == ("disk", 1)
    assert usage["cached_tokens"] >= usage["prompt_tokens"] - 1
    more = run(model, " Then", parent_key=short["finish_key"], max_tokens=5)  # the other worker's context, from Redis
    whole = run(model, STORY, max_tokens=5, return_tokens=True)
    assert more["usage"]["prompt_tokens"] == len(whole["context_tokens"]) + 1


def test_states_survive_eviction_and_a_restart(start_worker: StartWorker, model: str, folder: Path) -> None:
    first = start_worker(cache_dir=folder)
    turn = run(model, PROMPT, max_tokens=20)
    told = CliRunner().invoke(app, ["models", "evict", model, "--json"])
    assert json.loads(told.stdout) == {"model": model, "status": "evicted"}
    engine = first.engine_now()
    assert (engine["kv_cached_tokens"], engine["ram_states"], engine["disk_saves"] > 0) == (0, 0, True)
    assert engine["disk_quota_bytes"] == 8 << 30
    more: dict[str, Any] = {"parent_key": turn["finish_key"], "max_tokens": 20}
    after_evict = run(model, " Then", **more)
    assert after_evict["usage"]["cache_tier"] == "disk"
    read_before = generate.delay(model, PROMPT, cache_scope="b", max_tokens=1).get(timeout=PATIENCE_S)
    assert first.stop() == 0, first.log()
    second = start_worker(cache_dir=folder)
    again, other = run(model, " Then", **more), run(model, PROMPT, cache_scope="b", max_tokens=1)
    assert [each["usage"]["cache_tier"] for each in (again, other)] == ["disk", "disk"]
    assert (again["text"], other["text"]) == (after_evict["text"], read_before["text"])
    assert again["finish_key"] == after_evict["finish_key"]
    engine = second.engine_now()
    assert (engine["disk_misses"], 0 < engine["disk_used_bytes"] < engine["disk_quota_bytes"]) == (0, True)
    with Client() as client:
        (hit,) = client.last_cache_hit(model).values()
    assert hit is not None
    assert (hit["tier"], hit["num_tokens"]) == ("disk", other["usage"]["cached_tokens"])
