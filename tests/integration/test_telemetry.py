"""Workers send telemetry events to a hook and the log, and report totals of all models."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from celery.result import ResultSet
from typer.testing import CliRunner

from cellama.api import Client
from cellama.api.cli import app
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import chat, embed, generate

from ..conftest import PATIENCE_S, SLOTS, WorkerProcess, wait_until
from .conftest import GREEDY, LONG

HOOK = """
import dataclasses, json
from cellama.engine import RequestStats, StepStats

class Journal:
    def __init__(self):
        self.file = open("events.jsonl", "a", buffering=1)

    def __call__(self, stats: StepStats | RequestStats) -> None:
        kind = "step" if isinstance(stats, StepStats) else "request"
        print(json.dumps({"kind": kind, **dataclasses.asdict(stats)}), file=self.file)
        raise RuntimeError("a mistake in the hook")
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that are JSON objects."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


def test_telemetry_events_reach_hook_and_log(redis_server: RedisServer, tmp_path: Path) -> None:
    name = f"t{uuid.uuid4().hex[:8]}"
    (tmp_path / "mine.py").write_text(HOOK)
    model = json.dumps([{"id": name, "source": "bundled://tiny", "n_parallel": 2, "threads": 1}])
    settings = {"CELLAMA_MODELS": model, "CELLAMA_TELEMETRY_HOOK": "mine:Journal", "CELLAMA_TELEMETRY_LOG": "requests"}
    worker = WorkerProcess(tmp_path, redis_server.url, name=name, **settings)
    try:
        worker.wait_ready()
        jobs = [generate.delay(name, "Once upon a time", max_tokens=4, stream=stream) for stream in (True, False)]
        results = ResultSet(jobs).join(timeout=PATIENCE_S)
        wait_until(lambda: sum(e["kind"] == "request" for e in lines_of(tmp_path / "events.jsonl")) == 2, "two events")
    finally:
        assert worker.stop() == 0
    events, logged = lines_of(tmp_path / "events.jsonl"), lines_of(worker.log_path)
    assert {event["model"] for event in events + logged} == {name}
    assert {event["worker"].partition("@")[0] for event in events + logged} == {name}
    assert [event["event"] for event in logged] == ["request", "request"]
    for told in ([event for event in events if event["kind"] == "request"], logged):
        modes = {event["request_id"].partition("#")[0]: event["mode"] for event in told}
        assert modes == {jobs[0].id: "stream", jobs[1].id: "generate"}
    steps = [event for event in events if event["kind"] == "step"]
    assert sum(step["decode_tokens"] for step in steps) == 6
    assert all(1 <= step["active_slots"] <= 2 for step in steps)
    assert [result["mode"] for result in results] == ["stream", "generate"]
    assert worker.log().count("RuntimeError: a mistake in the hook") == 2  # one for steps and one for requests


@pytest.mark.parametrize("stream", [True, False])
def test_last_event_contains_mode_slot_and_hit_ratio(client: Client, stream: bool) -> None:
    """The second job starts like the first one, so that its prompt is in the cache."""
    said = [{"role": "user", "content": f"Tell me of {uuid.uuid4().hex}, who was a fox."}]
    for _ in range(2):
        job = client.chat("tiny", said, max_tokens=4, stream=stream, **GREEDY)
        result, done = job.result(PATIENCE_S), list(job.stream())[-1]
    mode = "stream" if stream else "generate"
    assert done["type"] == "done"
    assert (result["mode"], done["mode"], done["seq_id"]) == (mode, mode, result["seq_id"])
    for told in (result, done):
        usage, timings = told["usage"], told["timings"]
        assert timings["prefix_cache_ratio"] == round(usage["cached_tokens"] / usage["prompt_tokens"], 3) > 0.5


def told_of(client: Client) -> tuple[str, int, int]:
    totals = client.stats()["totals"]
    return totals["phase"], totals["requests_running"], totals["slots_busy"]


def test_stats_contain_totals_of_all_models_and_their_age(client: Client, worker: WorkerProcess) -> None:
    embed.delay("tiny", ["one text", "and another"]).get(timeout=PATIENCE_S)
    with worker.slowed():
        jobs = [generate.delay("tiny", f"Count {i}", **LONG) for i in range(SLOTS + 2)]
        wait_until(lambda: told_of(client) == ("generating", SLOTS, SLOTS), "busy slots")
        stats, entry = client.stats(), next(w for w in client.workers() if w.pid == worker.process.pid)
        for job in jobs:
            job.revoke(terminate=True)
    assert stats["age_s"] is not None
    assert 0 <= stats["age_s"] < 10
    model = entry.models[0]
    assert stats["totals"]["requests_waiting"] <= 2
    assert model["engine"] is not None
    assert model["embedder"] is not None
    assert entry.totals["requests_finished"] == sum(
        model[part]["requests_finished"]
        for part in ("engine", "embedder")  # type: ignore[literal-required]
    )
    assert (model["embedder"]["phase"], model["embedder"]["texts"] >= 2) == ("idle", True)
    assert model["reranker"] is None


def test_status_shows_the_totals_and_their_age(client: Client, worker: WorkerProcess) -> None:
    chat.delay("tiny", [{"role": "user", "content": "Hi"}], max_tokens=2).get(timeout=PATIENCE_S)
    worker.engine_now()  # a heartbeat has reported it
    shown = CliRunner().invoke(app, ["status"]).output
    assert "all models, " in shown
    told = json.loads(CliRunner().invoke(app, ["status", "--json"]).output)
    assert told["totals"]["requests_finished"] > 0
    assert 0 <= told["live"][0]["age_s"] < 10
