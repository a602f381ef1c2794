"""An engine in a process of its own, which answers one request after another."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import GREEDY, loaded, warm_up
from cellama.engine import Request

END_S = 60.0
REST_S = 1.0  # between its start and the first request, as a worker has: the folder is looked at, memory got for states


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of a request."""

    ttft_ms: float
    tier: str | None
    num_cached: int
    tokens: tuple[int, ...]


class EngineProcess:
    """Use as a context manager: the process is up, and its model warm, inside; it ends without a last save."""

    def __init__(self, path: Path, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, path, options), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> EngineProcess:
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(END_S)
        self._process.kill()

    def ask(self, prompt: Sequence[int], num_new: int = 1) -> Asked:
        """One request, alone."""
        self._pipe.send((tuple(prompt), num_new))
        answer: Asked = self._pipe.recv()
        return answer

    def save_states(self) -> int:
        """What it keeps is on disk; how many states were written for that."""
        self._pipe.send("save")
        return int(self._pipe.recv())


def _serve(pipe: Connection, path: Path, options: dict[str, Any]) -> None:
    with loaded(path, **options) as model:
        warm_up(model)
        time.sleep(REST_S)
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            if asked == "save":
                pipe.send(model.save_states())
                continue
            prompt, num_new = asked
            request = Request("asked", prompt, GREEDY, max_tokens=num_new, ignore_eos=True)
            done = model.engine.submit(request).result()
            usage = done.usage
            pipe.send(Asked(done.timings.ttft_ms or 0.0, usage.cache_tier, usage.cached_tokens, done.tokens))
