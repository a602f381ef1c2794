"""Figures in pages match the kept results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cellama.bench.harness.kept import Results, figures, refreshed

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "performance.md"
SCHEMAS = PAGE.parents[1] / "reference" / "json-schema.md"
MEASURED = re.compile(r"\d ?(?:ms|s|%|×|MB|GB|jobs/s|tokens/s|lines/s)(?![\w/])")  # such a figure must name its source
SKIPPED = re.compile(r"^```.*?^```$|`[^`\n]*`|<!--.*?-->", re.MULTILINE | re.DOTALL)


def test_performance_guide_matches_the_measurements() -> None:
    text, results = PAGE.read_text(encoding="utf-8"), Results()
    found = list(figures(text))
    assert len(found) == len(re.findall(r"<!-- (?!generated: |end of generated|not run: )", text)) >= 20
    wrong = [(figure.shown, figure.measured(results), figure) for figure in found]
    assert [told for told in wrong if told[0] != told[1]] == [], f"python -m cellama.bench.harness.kept {PAGE}"


def test_json_schema_page_matches_the_measurements() -> None:
    text = SCHEMAS.read_text(encoding="utf-8")
    assert len(list(figures(text))) == text.count("<!-- schemas: ") > 0
    assert refreshed(text, Results()) == text, f"python -m cellama.bench.harness.kept {SCHEMAS}"


def test_every_figure_in_the_performance_guide_has_a_source() -> None:
    text = re.sub(r"\d[\d.,]*<!-- \w+.*?-->", "", PAGE.read_text(encoding="utf-8"))
    assert MEASURED.findall(SKIPPED.sub("", text)) == []


@pytest.fixture
def results(tmp_path: Path) -> Results:
    lines = [
        {"model": "small", "rows": [{"who": "a", "n": 4, "ms": 12.4}, {"who": "b", "ms": 3}], "ratios": {"rate": 1.25}},
        {"model": "padded-1", "rows": [{"who": "a", "ms": 22262.3}], "ratios": {"other": 2.0}},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Results(tmp_path)


@pytest.mark.parametrize(
    ("text", "measured"),
    [
        ("1.00<!-- x: rate -->", "1.25"),
        ("1.0<!-- x[small]: rate -->", "1.2"),
        ("9<!-- x: ms where who=a -->", "22,300"),
        ("9<!-- x[padded]: ms where who=a * 0.001 -->", "22"),
        ("9.9<!-- x[small]: ms where who=a and n=4 -->", "12.4"),
        ("9<!-- x: ms where who=b -->", "3"),
        ("9<!-- x: other -->", "2"),
    ],
)
def test_figure_keeps_its_number_of_digits_when_updated(results: Results, text: str, measured: str) -> None:
    (figure,) = figures(text)
    assert figure.measured(results) == measured
    assert refreshed(f"It is {text} here", results) == f"It is {measured}{text[text.index('<') :]} here"


def test_figure_without_a_saved_result_is_reported(results: Results) -> None:
    for text in ("1<!-- x: no -->", "1<!-- y: rate -->", "1<!-- x: ms where who=c -->", "1<!-- x[large]: rate -->"):
        (figure,) = figures(text)
        with pytest.raises(LookupError, match="no result of"):
            figure.value(results)
