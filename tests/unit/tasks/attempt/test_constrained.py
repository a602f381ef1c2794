"""Jobs with constrained text depend on the version of llguidance."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.engine.request import CONSTRAINTS as OF_THE_ENGINE
from cellama.tasks.attempt.bulk_slice import has_constrained_lines
from cellama.tasks.attempt.engine_request import is_constrained
from cellama.tasks.contract.kinds.chunk import ChunkJob
from cellama.tasks.contract.payloads import CONSTRAINTS

SCHEMA = {"json_schema": "{}"}


@pytest.mark.parametrize(
    ("params", "defaults", "expected"),
    [
        ({}, {}, False),
        *(({name: "x"}, {}, True) for name in CONSTRAINTS),
        ({"json_schema": None, "temperature": 0}, {}, False),
        ({}, SCHEMA, True),
        ({"json_schema": None}, SCHEMA, False),
        ({"tools": [{}]}, {}, True),
        ({"tools": [{}], "tool_choice": "required"}, {}, True),
        ({"tools": [{}], "tool_choice": "none"}, {}, False),
        ({"tools": [{}], "tool_choice": "none", **SCHEMA}, {}, True),
        ({"tools": []}, {}, False),
    ],
)
def test_job_is_constrained_by_its_format_the_models_default_or_its_tools(
    params: dict[str, Any], defaults: dict[str, Any], expected: bool
) -> None:
    assert is_constrained(params, defaults) is expected


def test_bulk_slice_is_constrained_when_a_line_is_constrained() -> None:
    def slice_of(*lines: tuple[str, dict[str, Any]]) -> ChunkJob:
        made: Any = [{"kind": kind, "params": params} for kind, params in lines]
        return ChunkJob(model="m", lines=made)

    free: tuple[str, dict[str, Any]] = ("generate", {"prompt": "a"})
    assert not has_constrained_lines(slice_of(free), {})
    assert has_constrained_lines(slice_of(free, ("generate", {"prompt": "a", "regex": "a"})), {})
    assert has_constrained_lines(slice_of(free), SCHEMA)
    assert not has_constrained_lines(slice_of(("embed", {"texts": ["a"]})), SCHEMA)


def test_job_and_engine_agree_on_constraints() -> None:
    assert CONSTRAINTS == OF_THE_ENGINE
