"""All benchmarks in turn: bench/harness/suite.py."""

from __future__ import annotations

from cellama.bench.__main__ import NAMES
from cellama.bench.harness.suite import SHORT


def test_every_benchmark_has_a_short_form() -> None:
    assert set(SHORT) == set(NAMES)
