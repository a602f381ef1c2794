"""Figures in pages are those of kept results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cellama.bench.harness.kept import Results, figures


@pytest.fixture
def results(tmp_path: Path) -> Results:
    lines = [
        {"model": "small", "rows": [{"who": "a", "ms": 12.4}, {"who": "b", "ms": 3}], "ratios": {"rate": 1.25}},
        {"model": "padded-1", "rows": [{"who": "a", "ms": 22262.3}], "ratios": {"other": 2.0}},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Results(tmp_path)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1.25<!-- x: rate -->", True),
        ("1.2<!-- x: rate -->", True),  # half a step off, as 1.3 is
        ("1.1<!-- x: rate -->", False),
        ("22,300<!-- x: ms where who=a -->", True),
        ("22,200<!-- x: ms where who=a -->", False),
        ("22<!-- x[padded]: ms where who=a * 0.001 -->", True),
        ("12.4<!-- x[small]: ms where who=a -->", True),
        ("3<!-- x: ms where who=b -->", True),
        ("2<!-- x: other -->", True),
    ],
)
def test_figure_is_right_to_its_last_digit(results: Results, text: str, right: bool) -> None:
    (figure,) = figures(text)
    assert figure.is_right(results) is right


def test_figure_without_a_kept_line_says_so(results: Results) -> None:
    for text in ("1<!-- x: no -->", "1<!-- y: rate -->", "1<!-- x: ms where who=c -->", "1<!-- x[large]: rate -->"):
        (figure,) = figures(text)
        with pytest.raises(LookupError, match="no kept line of"):
            figure.is_right(results)
