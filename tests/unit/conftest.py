"""Engines on the fake backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cellama.engine import Completion, Engine, EngineOptions, Request, SamplingParams
from cellama.engine.fake import FakeBackend

PATIENCE_S = 30
GREEDY = SamplingParams(temperature=0)
MakeEngine = Callable[..., tuple[Engine, FakeBackend]]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(backend: FakeBackend | None = None, **options: Any) -> tuple[Engine, FakeBackend]:
        backend = backend or FakeBackend()
        engines.append(Engine(backend, EngineOptions(n_parallel=backend.n_slots, n_batch=backend.n_batch, **options)))
        return engines[-1], backend

    yield make
    for engine in engines:
        assert engine.close()


def request(prompt: str = "hello", name: str = "r", **params: Any) -> Request:
    return Request(name, tuple(prompt.encode()), params.pop("sampling", GREEDY), **{"max_tokens": 20, **params})


class Gate:
    """Holds the engine thread before its next decode, so that a test can arrange what happens meanwhile."""

    def __init__(self, backend: FakeBackend) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        decode = backend.decode

        def gated(*call: Any) -> None:
            self.reached.set()
            assert self.open.wait(PATIENCE_S)
            decode(*call)

        backend.decode = gated  # type: ignore[method-assign]


def cold(make_engine: MakeEngine, prompt: str, **params: Any) -> Completion:
    """Run requests on a separate engine and return its events."""
    engine, _ = make_engine(FakeBackend(n_slots=1), cache_prompt=False)
    return engine.submit(request(prompt, **params)).result(PATIENCE_S)
