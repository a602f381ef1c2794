"""Traces of jobs in a real collector, from the client of a gateway through a killed worker to the end."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellama.api.machine.redis_server import RedisServer

from ..collector import Collector, Told
from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until
from ..gateways import GatewayProcess

CLIENT_SPAN = "00f067aa0ba902b7"
CLI = [sys.executable, "-c", "from cellama.api.cli import main; main()"]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


class Workers:
    """Starts workers one after another, which serve their own model."""

    def __init__(self, folders: Any, redis_url: str, collector: Collector) -> None:
        self.model = f"t{uuid.uuid4().hex[:8]}"
        self._started: list[WorkerProcess] = []
        self._folders, self._redis_url, self._collector = folders, redis_url, collector

    def start(self) -> WorkerProcess:
        settings = {"id": self.model, "source": "bundled://tiny", "n_parallel": 4, "threads": 1}
        told = {"CELLAMA_MODELS": json.dumps([settings]), "CELLAMA_LEASE_S": "3", **self._collector.environment}
        name = f"{self.model}-{len(self._started)}"
        self._started.append(WorkerProcess(self._folders.mktemp("worker"), self._redis_url, name=name, **told))
        return self._started[-1].wait_ready()

    def ensure(self) -> None:
        if not any(worker.process.poll() is None for worker in self._started):
            self.start()

    def stop(self) -> None:
        for worker in self._started:
            worker.stop()


@pytest.fixture(scope="module")
def workers(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Workers]:
    started = Workers(tmp_path_factory, redis_server.url, collector)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def traced_gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(tmp_path_factory.mktemp("gateway"), redis_server.url, **collector.environment)
    yield gateway.wait_ready("/health")
    gateway.stop()


def only(spans: list[Told], name: str, **attributes: Any) -> Told:
    (found,) = (s for s in spans if s.name == name and attributes.items() <= s.attributes.items())
    return found


def stream_through_a_death(gateway: GatewayProcess, workers: Workers, traceparent: str) -> None:
    """Stream a request, kill its worker after the first token, and let another worker finish the request."""
    first = workers.start()
    body = {"model": workers.model, "prompt": PROMPT, "max_tokens": 12, "stream": True, "ignore_eos": True}
    headers = {"traceparent": traceparent}
    with first.slowed(1.0), gateway.stream("/v1/completions", json=body, headers=headers) as answer:
        frames = answer.iter_lines()
        assert next(frames).startswith("data: ")
        first.process.kill()
        first.process.wait()
        workers.start()
        assert [line for line in frames if line][-1] == "data: [DONE]"


def test_trace_contains_all_spans_of_a_job_whose_worker_was_killed(
    collector: Collector, workers: Workers, traced_gateway: GatewayProcess
) -> None:
    trace_id = uuid.uuid4().hex
    stream_through_a_death(traced_gateway, workers, f"00-{trace_id}-{CLIENT_SPAN}-01")
    model, queue = workers.model, f"cellama:queue:{workers.model}"
    wait_until(lambda: len(collector.trace(trace_id)) >= 11, "all spans")
    spans = collector.trace(trace_id)
    request, sent = only(spans, "POST /v1/completions"), only(spans, f"send {queue}")
    lost, ended = (only(spans, f"process {queue}", **{"cellama.attempt.number": number}) for number in (1, 2))
    computed = only(spans, f"text_completion {model}")
    assert (request.parent_id, sent.parent_id) == (CLIENT_SPAN, request.span_id)
    assert (lost.parent_id, ended.parent_id, ended.links) == (sent.span_id, sent.span_id, (lost.span_id,))
    assert (lost.is_error, lost.attributes["cellama.attempt.end"]) == (True, "lost")
    assert (ended.is_error, ended.attributes["cellama.attempt.end"]) == (False, "success")
    assert lost.attributes["cellama.worker"] != ended.attributes["cellama.worker"]
    assert computed.parent_id == ended.span_id
    parts = [only(spans, name) for name in ("admission", "prefill", "decode")]
    assert [part.parent_id for part in parts] == [computed.span_id] * 3
    assert only(spans, "result").parent_id == ended.span_id
    waits = [span for span in spans if span.name == "queue"]
    assert [wait.parent_id for wait in waits] == [sent.span_id] * 2
    assert len(spans) == 11
    assert sent.start_ns <= lost.start_ns < lost.end_ns <= waits[1].end_ns <= ended.start_ns
    assert parts[0].end_ns == parts[1].start_ns <= parts[1].end_ns == parts[2].start_ns <= ended.end_ns
    told = computed.attributes
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("text_completion", model)
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.request.max_tokens"]) == (12, 12)
    assert PROMPT not in str([span.attributes for span in spans])


def test_bulk_run_creates_one_trace_with_a_span_per_line(
    collector: Collector, workers: Workers, redis_server: RedisServer, tmp_path: Path
) -> None:
    workers.ensure()
    source, num_lines = tmp_path / "in.jsonl", 6
    source.write_text(
        "".join(json.dumps({"prompt": f"{n} {PROMPT}", "max_tokens": 4}) + "\n" for n in range(num_lines))
    )
    argv = [*CLI, "batch", "run", str(source), "--output", str(tmp_path / "out.jsonl"), "--model", workers.model]
    environment = clean_environment(CELLAMA_REDIS_URL=redis_server.url, **collector.environment)
    ended = subprocess.run(argv, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    (run,) = wait_until(lambda: collector.named("batch run"), "the span of the run")

    def lines() -> set[tuple[str, int]]:
        spans = [s for s in collector.trace(run.trace_id) if s.name == f"text_completion {workers.model}"]
        return {(span.parent_id, span.attributes["cellama.line"]) for span in spans}

    def attempts() -> dict[str, Told]:
        return {s.span_id: s for s in collector.trace(run.trace_id) if s.name.startswith("process")}

    def is_whole() -> bool:
        return len(lines()) == num_lines and {parent for parent, _ in lines()} == attempts().keys()

    wait_until(is_whole, "the spans of all lines and their parents")
    sent = {
        s.span_id for s in collector.trace(run.trace_id) if s.name.startswith("send") and s.parent_id == run.span_id
    }
    assert {attempt.parent_id for attempt in attempts().values()} == sent
