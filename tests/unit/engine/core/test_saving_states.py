"""States that `save_states` writes, on the fake backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellama.engine import Engine, EngineOptions
from cellama.engine.fake import FakeBackend

from ...conftest import PATIENCE_S

NUM_STATES = 12


def test_save_states_writes_more_states_than_the_queue_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(ctx_per_slot=4000, n_batch=512, n_slots=1)
    engine = Engine(backend, EngineOptions(cache_dir=str(tmp_path), n_parallel=1, n_batch=512, cache_ram_bytes=1 << 16))
    try:
        assert engine.store is not None
        monkeypatch.setattr(engine.store._queue, "_max_bytes", 1)  # so that at most one state waits
        for number in range(NUM_STATES):
            engine.complete(f"{number} friends of a fox told a story. " * 8, max_tokens=1)
        engine.save_states(PATIENCE_S)
        engine.store.directory.remove(file.path for file in engine.store.directory.states())
        assert engine.snapshot().ram_states == NUM_STATES
        assert engine.save_states(PATIENCE_S) == NUM_STATES
    finally:
        assert engine.close(PATIENCE_S)
