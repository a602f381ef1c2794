"""Slow down steps by the pause that a file requests, so that work lasts long enough for a test on any machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cellama.engine.scheduling.strategies import Adaptive, SlotView, TokenAllocation

STRATEGY = f"{__name__}:Paced"
PACE_FILE = "BENCH_PACE_FILE"  # environment variable of the worker: the file, there or not, holds seconds per step
LEAST_S = "BENCH_LEAST_STEP_S"  # environment variable of the worker: seconds that a step takes without that file
SLOW_S = 0.05  # per step: the longest text of the bundled model takes more than a minute


class Paced(Adaptive):
    """The Adaptive strategy with a pause at the start of each step.

    A file or an environment variable contains the pause in seconds. Requests can still be cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._path = Path(os.environ.get(PACE_FILE, "no such file"))
        self._least_s = float(os.environ.get(LEAST_S, "0"))

    def build_batch(
        self, slots: Sequence[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        seconds = self._least_s
        with contextlib.suppress(OSError):
            seconds = float(self._path.read_text())
        if seconds:
            time.sleep(seconds)
        return super().build_batch(slots, budget, chunk_size, queue_depth)


@contextlib.contextmanager
def slowed(path: Path, seconds: float = SLOW_S) -> Iterator[None]:
    """Slow down the steps of workers that read this file, until the `with` block ends."""
    writing = path.with_suffix(".new")
    writing.write_text(str(seconds))
    writing.rename(path)  # no reader finds half of it
    try:
        yield
    finally:
        path.unlink()
