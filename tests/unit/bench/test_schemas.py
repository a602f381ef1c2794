"""The benchmark `schemas` with a suite of a few schemas."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from cellama.bench.benchmarks.structured import schemas
from cellama.bench.benchmarks.structured.schema_judge import SchemaJudge
from cellama.bench.harness.report import Report

CASES: list[dict[str, Any]] = [
    {
        "description": "bounds",
        "schema": {"type": "integer", "minimum": 3, "maximum": 9},
        "tests": [{"data": 3, "valid": True}, {"data": 3.0, "valid": True}, {"data": 10, "valid": False}],
    },
    {"description": "elsewhere", "schema": {"$ref": "http://localhost:1234/a.json"}, "tests": []},
    {
        "description": "look-around",
        "schema": {"pattern": "^(?!a)"},
        "tests": [{"data": "a", "valid": False}],
    },
]


def report_of(suite: Path | None) -> Report:
    parser = argparse.ArgumentParser()
    schemas.add_arguments(parser)
    args = parser.parse_args(["--outputs", "5", *(["--suite", str(suite)] if suite else [])])
    args.model = None
    return schemas.run(args)


def written(path: Path, cases: list[dict[str, Any]]) -> Path:
    directory = path / "tests" / "draft2020-12"
    directory.mkdir(parents=True)
    (directory / "one.json").write_text(json.dumps(cases))
    return path


def test_schemas_benchmark_counts_outputs_and_instances_of_accepted_schemas(tmp_path: Path) -> None:
    report = report_of(written(tmp_path, CASES))
    row = dict(report.rows[1])
    assert report.wrong == []
    assert row["file"] == "one"
    assert (row["schemas"], row["strict"], row["lenient"]) == (3, 1, 2)
    assert row["outputs"] == row["finished"] == row["judged"] == row["conform"] == 5
    assert (row["valid"], row["valid accepted"], row["invalid"], row["invalid accepted"]) == (2, 1, 1, 0)


def test_schemas_benchmark_reports_an_invalid_instance_that_is_accepted(tmp_path: Path) -> None:
    case = {"description": "d", "schema": {"type": "null"}, "tests": [{"data": None, "valid": False}]}
    report = report_of(written(tmp_path, [case]))
    assert report.ratios["invalid instances that are accepted"] == 1
    assert [line.endswith("accepts null") for line in report.wrong] == [True]


def test_schemas_benchmark_reports_a_missing_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"does not contain tests/draft2020-12; clone"):
        report_of(tmp_path)
    monkeypatch.delenv(schemas.SUITE, raising=False)
    assert "--suite or" in report_of(None).caveats[0]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"multipleOf": 0.01}, "330085.10", "0.011"),
        ({"type": "integer"}, "7", "7.5"),
        ({"format": "date-time"}, '"2024-02-29T12:00:00Z"', '"2023-02-29T12:00:00Z"'),
        ({"format": "duration"}, '"P1DT2H"', '"PT"'),
        ({"format": "hostname"}, '"a-b.c"', '"-a.c"'),
        ({"format": "uri"}, '"https://a.b:80/c?d#e"', '"a b"'),
        ({"format": "email"}, '"a.b@c.de"', '"a..b@c.de"'),
    ],
)
def test_judge_accepts_valid_and_rejects_invalid_instances(schema: dict[str, Any], good: str, bad: str) -> None:
    judge = SchemaJudge(schema)
    assert judge.problem(good) is None
    assert judge.problem(bad)
