"""What a row of the table of metrics says, and the buckets of histograms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["engine", "step", "request", "attempt", "worker", "redis", "gateway"]

# vLLM's (vllm/v1/metrics/loggers.py), so that its boards show ours.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
REQUEST_TOKENS = tuple(float(step * power) for power in (1, 10, 100, 1000, 10_000, 100_000) for step in (1, 2, 5))
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)
# Ours: from a millisecond to an hour, about threefold each.
FINE_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1800.0, 3600.0),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One metric: its whole name (of a counter with `_total`), what it counts, its labels, and who counts it."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    source: Source
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, but the last one's
    field: str = ""  # of a snapshot, if it is read off there
