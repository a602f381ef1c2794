"""Schemas that people commonly send are accepted, and outputs conform to them."""

from __future__ import annotations

import json

import pytest

from cellama.bench.benchmarks.structured.everyday_schemas import MODELS, SCHEMAS, ZOD
from cellama.engine.errors import InvalidRequest
from cellama.engine.grammar.schema import prepare_schema

from .samples import check_samples

UNENFORCEABLE = {"SetOfText"}  # uniqueItems of arbitrary strings


def test_corpus_has_sixty_schemas() -> None:
    assert len(SCHEMAS) >= 60
    assert len(ZOD) == 20
    assert len(MODELS) == len(SCHEMAS) - 20


@pytest.mark.parametrize("name", SCHEMAS)
def test_everyday_schema_is_accepted_without_strict(name: str) -> None:
    warnings = prepare_schema(json.dumps(SCHEMAS[name]), strict=False).warnings
    assert len(warnings) == (name in UNENFORCEABLE)


def test_strict_mode_accepts_nineteen_of_twenty_everyday_schemas() -> None:
    refused = set()
    for name, schema in SCHEMAS.items():
        try:
            prepare_schema(json.dumps(schema), strict=True)
        except InvalidRequest:
            refused.add(name)
    assert refused == UNENFORCEABLE
    assert len(refused) <= 0.05 * len(SCHEMAS)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in UNENFORCEABLE])
def test_outputs_of_an_everyday_schema_conform_to_it(name: str) -> None:
    assert check_samples(SCHEMAS[name])
