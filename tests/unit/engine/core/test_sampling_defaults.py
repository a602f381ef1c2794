"""Sampling defaults of a model, for requests that don't set the parameters."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from cellama.engine import EngineOptions, InvalidRequest, SamplingParams, sampling_of
from cellama.engine.fake import FakeBackend

from ...conftest import MakeEngine, request


def test_model_defaults_apply_to_parameters_that_the_caller_omits(make_engine: MakeEngine) -> None:
    plain, _ = make_engine(FakeBackend(n_slots=1))
    engine, _ = make_engine(FakeBackend(n_slots=1), sampling={"temperature": 0, "logit_bias": {"101": "-inf"}})
    free = plain.generate("Once", max_tokens=20, temperature=0)
    biased = plain.generate("Once", max_tokens=20, temperature=0, logit_bias=((101, -math.inf),))
    assert engine.generate("Once", max_tokens=20) == biased
    assert engine.generate("Once", max_tokens=20, logit_bias=()) == free
    assert engine.submit(request("Once")).result().text == free  # a Request sets all parameters itself


def test_requested_grammar_replaces_the_default_grammar() -> None:
    defaults = EngineOptions(sampling={"grammar": 'a ::= "x"', "grammar_root": "a", "top_k": 3}).sampling_defaults
    assert sampling_of({}, defaults) == SamplingParams(grammar='a ::= "x"', grammar_root="a", top_k=3)
    schema = sampling_of({"json_schema": "{}"}, defaults)
    assert (schema.grammar, schema.grammar_root, schema.json_schema, schema.top_k) == (None, "root", "{}", 3)
    assert sampling_of({"grammar": None}, defaults).grammar is None
    assert sampling_of({"grammar": 'a ::= "y"'}, {"grammar_root": "a"}).grammar_root == "a"


def test_defaults_are_unchanged_after_a_json_round_trip() -> None:
    given = {"logit_bias": {17: -math.inf}, "json_schema": {"type": "string"}, "dry_sequence_breakers": ("a", "b")}
    options = EngineOptions(sampling=given)
    again = EngineOptions(**json.loads(json.dumps(asdict(options), allow_nan=False)))
    assert again == options
    made = sampling_of({}, again.sampling_defaults)
    assert (made.logit_bias, made.dry_sequence_breakers) == (((17, -math.inf),), ("a", "b"))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temprature": 0}, "sampling: 'temprature' can't have a default; did you mean 'temperature'"),
        ({"logprobs": 1}, "sampling: 'logprobs' can't have a default"),
        ({"temperature": -1}, "temperature is -1; it must be from 0 to 1000"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"grammar": 3}, "has the wrong type"),
        ({"logit_bias": [3]}, "has the wrong type"),
        ({"grammar": "a", "json_schema": "{}"}, "json_schema and grammar can't be combined"),
    ],
)
def test_invalid_defaults_are_rejected(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineOptions(sampling=sampling)
