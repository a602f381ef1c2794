"""What `metrics_proof` compares with, and which expressions it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cellama.bench.benchmarks.metrics.metrics_proof import _expressions, quantile


@pytest.mark.parametrize(
    ("values", "part", "expected"),
    [
        ([0.5, 1.5, 1.5, 3.0], 0.5, 1.5),  # half of the way through the two between 1 and 2
        ([0.5, 1.5, 1.5, 3.0], 0.25, 1.0),
        ([3.0], 0.5, 3.0),
        ([9.0], 0.5, 4.0),  # beyond the last bound
    ],
)
def test_quantile_is_that_of_a_histogram(values: list[float], part: float, expected: float) -> None:
    assert quantile(values, (1.0, 2.0, 4.0), part) == expected


def test_expressions_are_those_of_all_panels_with_values_for_variables(tmp_path: Path) -> None:
    inner = {"targets": [{"expr": 'b{model=~"${model}",le="$limit"}'}]}
    outer = {"targets": [{"expr": 'sum(rate(a{job=~"$job"}[$__rate_interval]))'}]}
    known = [
        {"name": "limit", "current": {"value": "1.0"}},
        {"name": "model", "current": {"value": "$__all"}},
        {"name": "job"},
    ]
    board = {"panels": [outer, {"type": "row", "panels": [inner]}], "templating": {"list": known}}
    (tmp_path / "board.json").write_text(json.dumps(board))
    found = list(_expressions(tmp_path / "board.json"))
    assert found == ['sum(rate(a{job=~".*"}[1m]))', 'b{model=~".*",le="1.0"}']
