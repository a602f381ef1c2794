"""The lines of a chunk in a worker: an error affects only its own line."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from cellama.engine import DecodeFailed, EmbeddingHandle
from cellama.tasks.attempt.bulk_slice import ChunkRun
from cellama.tasks.contract.kinds.chunk import ChunkJob
from cellama.tasks.state.history import Past, Provenance

from ..attempt_contexts import context


class LineStream:
    """Stores the events, and reports finished lines as Redis would."""

    def __init__(self) -> None:
        self.attempt = SimpleNamespace(run_id="job#1", fairness_key="", fairness_weights=())
        self.events: list[dict[str, Any]] = []
        self.on_line: Callable[[int], None] = lambda place: None

    def publish(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "line":
            self.on_line(event["line"])

    def codes(self) -> dict[int, str]:
        lines = [event for event in self.events if event["type"] == "line"]
        return {event["line"]: event.get("error", {}).get("code", "ok") for event in lines}


class Embedder:
    """Returns a vector, raises an error, or never finishes."""

    per_token, n_embd, max_tokens = False, 2, 8

    def submit(self, texts: list[list[int]], **_: Any) -> EmbeddingHandle:
        future: Future[Any] = Future()
        kind = texts[0][0]
        if kind == 0:
            future.set_result([np.ones(2, dtype=np.float32)])
        if kind == 1:
            future.set_exception(DecodeFailed("no luck"))
        if kind == 2:
            raise ZeroDivisionError("nobody foresaw this")
        return EmbeddingHandle([tuple(text) for text in texts], future=future)


def run_lines(*params: dict[str, Any]) -> dict[int, str]:
    stream: Any = LineStream()
    model: Any = SimpleNamespace(
        id="m",
        require=lambda ability: None,
        embedder=Embedder(),
        tokens_of=lambda texts: [[int(text)] for text in texts],
    )
    runtime: Any = SimpleNamespace(incarnation="worker 1", signer=None)
    job = ChunkJob.model_validate({"model": "m", "lines": [{"kind": "embed", "params": each} for each in params]})
    ChunkRun(
        model=model,
        job=job,
        context=context("job"),
        stream=stream,
        past=Past(),
        runtime=runtime,
        provenance=Provenance("sha"),
        retry_redis=lambda action: action(),
    ).run()
    codes: dict[int, str] = stream.codes()
    return codes


def test_failing_line_does_not_affect_other_lines() -> None:
    good, failing, unforeseen, silent = ({"texts": [str(kind)]} for kind in range(4))
    found = run_lines(good, failing, unforeseen, {"texts": []}, {**silent, "timeout": 0.05}, good)
    assert found == {
        0: "ok", 1: "decode_failed", 2: "internal_error", 3: "invalid_request", 4: "timeout", 5: "ok",
    }  # fmt: skip
