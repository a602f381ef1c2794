"""Tests that each generated schema is rejected with a clear error, or that every finished text conforms to it.

There are 500 schemas, 5,000 with `make thorough`. `jsonschema` judges the texts, which are drawn with random weights
(bench/benchmarks/structured/sampled_texts.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cellama.bench.benchmarks.structured.sampled_texts import SampledTexts
from cellama.bench.benchmarks.structured.schema_judge import FORMATS, SchemaJudge
from cellama.engine.errors import GrammarFailed, InvalidRequest
from cellama.engine.grammar.grammars import GrammarSpec
from cellama.engine.grammar.schema.formats import FORMATS as ENFORCED_FORMATS

from ..conftest import EXAMPLES
from ..generated_schemas import generated_schema

SCHEMAS, PART = 500 * EXAMPLES, 100
TEXTS = 3  # per schema


@pytest.fixture(scope="module")
def sampled() -> Iterator[SampledTexts]:
    texts = SampledTexts()
    yield texts
    texts.close()


def test_judge_checks_every_enforced_format() -> None:
    assert set(FORMATS.checkers) == set(ENFORCED_FORMATS)


@pytest.mark.parametrize("first", range(0, SCHEMAS, PART))
def test_every_finished_text_conforms_to_its_schema(sampled: SampledTexts, first: int) -> None:
    """Check strict and lenient mode, except for the parts that a warning lists as not enforced."""
    ends: Counter[str] = Counter()
    for seed in range(first, first + PART):
        schema = generated_schema(seed)
        jsonschema.Draft202012Validator.check_schema(schema)
        ends.update(_ends_of(sampled, schema, seed))
    assert ends["strict"] > PART / 3
    assert ends["lenient"]
    assert ends["conforms"] > PART
    assert ends["too much work"] <= PART / 20


def _ends_of(sampled: SampledTexts, schema: dict[str, Any], seed: int) -> Iterator[str]:
    for use in ("strict", "lenient"):
        form = GrammarSpec("json_schema", json.dumps(schema), strict=use == "strict")
        try:
            warnings = sampled.grammars.compile(form).warnings
        except InvalidRequest as error:
            assert str(error).startswith("json_schema")  # noqa: PT017
            continue
        yield use
        assert bool(warnings) == (use == "lenient")
        try:
            texts = [text for text in sampled.texts(form, TEXTS, seed) if text is not None]
        except GrammarFailed:  # only this request fails
            yield "too much work"
            return
        judge = SchemaJudge(schema)
        for text in texts:
            problem = judge.problem(text)
            assert problem is None or warnings, (seed, schema, text, problem)
            yield "conforms" if problem is None else "differs as warned"
        return


def test_texts_are_identical_when_their_seeds_are_equal(sampled: SampledTexts) -> None:
    form = GrammarSpec("json_schema", json.dumps({"type": "object", "additionalProperties": {"type": "number"}}))
    assert sampled.texts(form, 5, seed=1) == sampled.texts(form, 5, seed=1) != sampled.texts(form, 5, seed=2)
