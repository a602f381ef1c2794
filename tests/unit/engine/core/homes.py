"""Start engines on the fake backend with a directory of states, and compute the texts that they should generate."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cellama.engine import Engine, EngineOptions
from cellama.engine.fake import _ALPHABET, FakeBackend

from ...conftest import PATIENCE_S

STORY = "Once upon a time there was a fox who told a story, and this is how it began on a day in spring. "


class Home:
    """Starts and closes engines that share one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[Engine] = []

    def open(self, **how: Any) -> Engine:
        own = ("unified", "window", "partial_reuse", "n_slots", "ctx_per_slot")
        memory = {name: how.pop(name) for name in own if name in how}
        backend = FakeBackend(n_batch=512, **{"n_slots": 2, "ctx_per_slot": 4000, **memory})
        options = {"cache_dir": str(self.folder), "n_parallel": backend.n_slots, "n_batch": 512, **how}
        self.engines.append(Engine(backend, EngineOptions(**options)))
        return self.engines[-1]

    def close(self, *, save: bool = True) -> None:
        while self.engines:
            engine = self.engines.pop()
            if save:
                engine.save_states(PATIENCE_S)
            assert engine.close()


def say(engine: Engine, prompt: str, count: int = 5, **params: Any) -> Any:
    return engine.complete(prompt, max_tokens=count, temperature=0, **params)


def expected(context: Sequence[int], count: int, adapters: tuple[tuple[str, float], ...] = ()) -> str:
    """Return the text that the fake generates after these tokens, computed without an engine."""
    cells = [(token, adapters) if adapters else token for token in context]
    said = bytearray()
    for _ in range(count):
        token = _ALPHABET[zlib.crc32(repr((cells, 0)).encode()) % len(_ALPHABET)]
        said.append(token)
        cells.append((token, adapters) if adapters else token)
    return said.decode()
