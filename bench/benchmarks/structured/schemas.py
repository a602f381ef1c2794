"""Sample texts for each schema in the JSON-Schema-Test-Suite without a model, and check that every text conforms."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cellama.bench.harness.report import Report
from cellama.engine.bundled import TINY_PATH
from cellama.engine.errors import GrammarFailed, InvalidRequest
from cellama.engine.grammar.grammars import GrammarSpec

from .sampled_texts import DeadEnd, SampledTexts
from .schema_judge import SchemaJudge, Unjudgeable

MODEL = "bundled://tiny"
SUITE = "BENCH_JSON_SCHEMA_TEST_SUITE"
_DRAFT = "draft2020-12"
_MAX_SHOWN = 200  # characters of a schema or a text in a message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite",
        type=Path,
        default=os.environ.get(SUITE) or None,
        help=f"directory of the JSON-Schema-Test-Suite (default: the environment variable {SUITE})",
    )
    parser.add_argument("--outputs", type=int, default=20, help="number of texts to sample per accepted schema")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    if args.suite is None:
        return Report([], caveats=[f"Not run: --suite or {SUITE} must name the JSON-Schema-Test-Suite's directory."])
    check = _SuiteCheck(SampledTexts(args.model or TINY_PATH), args.outputs, args.seed)
    rows = [check.row(path) for path in _files(args.suite)]
    total: Counter[str] = Counter()
    for row in rows:
        total.update({key: value for key, value in row.items() if key != "file"})
    ratios = {
        "schemas accepted in strict use": total["strict"] / (total["schemas"] or 1),
        "schemas accepted in lenient use": total["lenient"] / (total["schemas"] or 1),
        "outputs that finished": total["finished"] / (total["outputs"] or 1),
        "outputs that conform": total["conform"] / (total["judged"] or 1),
        "valid instances that are accepted": total["valid accepted"] / (total["valid"] or 1),
        "invalid instances that are accepted": float(total["invalid accepted"]),
    }
    targets = {"outputs that conform": "1", "invalid instances that are accepted": "0"}
    caveats = [
        "Only required tests run. Schemas that refer to other documents are refused on purpose.",
        "Some valid instances are refused, because some schemas are enforced more strictly than they are written.",
        "Patterns with \\p{…} are not judged, because Python's regular expressions don't support them.",
        "The judge (the jsonschema library) reads numbers as decimals, and checks the formats that cellama enforces.",
    ]
    return Report([{"file": "all", **total}, *rows], ratios, targets, caveats, check.wrong)


def _files(suite: Path) -> list[Path]:
    for directory in (suite / "tests" / _DRAFT, suite / _DRAFT, suite):
        found = sorted(directory.glob("*.json"))
        if directory.name == _DRAFT and found:
            return found
    raise SystemExit(
        f"--suite: {str(suite)!r} does not contain tests/{_DRAFT}; clone json-schema-org/JSON-Schema-Test-Suite"
    )


class _SuiteCheck:
    def __init__(self, texts: SampledTexts, num_outputs: int, seed: int) -> None:
        self._texts = texts
        self._num_outputs = num_outputs
        self._seed = seed
        self.wrong: list[str] = []

    def row(self, path: Path) -> dict[str, Any]:
        count: Counter[str] = Counter()
        for case in json.loads(path.read_text(encoding="utf-8")):
            count["schemas"] += 1
            text = json.dumps(case["schema"])
            count["lenient"] += self._accepts(GrammarSpec("json_schema", text, strict=False))
            form = GrammarSpec("json_schema", text)
            if self._accepts(form):
                count["strict"] += 1
                name = f"{path.stem}, {case['description']}: {text[:_MAX_SHOWN]}"
                count.update(self._outputs(form, case["schema"], name))
                count.update(self._instances(form, case["tests"], name))
        columns = ("schemas", "strict", "lenient", "outputs", "finished", "judged", "conform")
        instances = ("valid", "valid accepted", "invalid", "invalid accepted")
        return {"file": path.stem, **{name: count[name] for name in (*columns, *instances)}}

    def _accepts(self, form: GrammarSpec) -> bool:
        try:
            self._texts.grammars.compile(form)
        except InvalidRequest:
            return False
        return True

    def _outputs(self, form: GrammarSpec, schema: Mapping[str, Any] | bool, name: str) -> Iterator[str]:
        judge = SchemaJudge(schema)
        for at in range(self._num_outputs):
            yield "outputs"
            try:
                (text,) = self._texts.texts(form, 1, seed=self._seed + at)
            except (GrammarFailed, DeadEnd) as error:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if text is None:
                continue
            yield "finished"
            try:
                problem = judge.problem(text)
            except Unjudgeable:
                continue
            yield "judged"
            if problem is None:
                yield "conform"
            else:
                self.wrong.append(f"{name}: {text[:_MAX_SHOWN]}: {problem[:_MAX_SHOWN]}")

    def _instances(self, form: GrammarSpec, tests: list[dict[str, Any]], name: str) -> Iterator[str]:
        for test in tests:
            kind = "valid" if test["valid"] else "invalid"
            yield kind
            text = json.dumps(test["data"], ensure_ascii=False)
            if self._texts.accepts(form, text):
                yield f"{kind} accepted"
                if kind == "invalid":
                    self.wrong.append(f"{name}: accepts {text[:_MAX_SHOWN]}")
