"""Tests of grammars, schemas, log-probabilities and other sampling parameters with the real llama.cpp."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cellama.engine import Completion, EngineOptions, GrammarFailed, InvalidRequest, Model, ModelManager, Request
from cellama.engine.request import SamplingParams

PATIENCE_S = 60
STORY = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    manager = ModelManager()
    options = EngineOptions(n_parallel=8, threads=1)
    yield manager.load("tiny", "bundled://tiny", options=options, capabilities=["generate", "chat"])
    manager.close()


def complete(model: Model, prompt: str = STORY, n: int = 1, max_tokens: int = 60, **sampling: Any) -> Completion:
    request = Request("r", tuple(model.tokenize(prompt)), SamplingParams(**sampling), max_tokens=max_tokens, n=n)
    return model.engine.submit(request).result(PATIENCE_S)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "temperature": 2.0, "top_k": 0}])
def test_text_conforms_to_the_grammar(model: Model, sampling: dict[str, Any]) -> None:
    grammar = 'root ::= "The " animal " said: " number "." \n animal ::= "fox" | "bear" \n number ::= [0-9] [0-9]'
    done = complete(model, grammar=grammar, **sampling)
    assert done.finish_reason == "stop"
    head, tail = done.text[:-3], done.text[-3:]
    assert head in ("The fox said: ", "The bear said: ")
    assert tail[:2].isdigit()
    assert tail[2] == "."


def test_grammar_root_selects_the_start_rule(model: Model) -> None:
    grammar = 'root ::= "no" \n answer ::= "yes"'
    assert complete(model, grammar=grammar, grammar_root="answer", temperature=0).text == "yes"


EVERY_TOKEN = tuple((token, -math.inf) for token in range(1024))  # of the bundled model
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "legs": {"type": "integer"},
        "colour": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "legs", "colour", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1, "temperature": 1.5}, {"mirostat": 2, "seed": 0}])
def test_json_output_conforms_to_its_schema(model: Model, sampling: dict[str, Any]) -> None:
    found = json.loads(complete(model, json_schema=json.dumps(SCHEMA), max_tokens=400, **sampling).text)
    assert set(found) == set(SCHEMA["required"])
    assert 1 <= len(found["name"]) <= 12
    assert isinstance(found["legs"], int)
    assert found["colour"] in ("red", "green")
    assert 1 <= len(found["tags"]) <= 3


def test_unenforceable_schema_is_rejected_with_its_path(model: Model) -> None:
    with pytest.raises(InvalidRequest, match="at #/properties/a/pattern: 'pattern' can't be enforced: look-around"):
        complete(model, json_schema='{"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}')


@pytest.mark.parametrize(
    "sampling",
    [
        {"grammar": "root ::= [a-"},
        {"grammar": "root ::= missing"},
        {"grammar": 'other ::= "x"'},
        {"grammar": 'root ::= "x"', "grammar_root": "nowhere"},
        {"grammar": 'root ::= root "x" | "y"'},  # left recursion
        {"grammar": "this is no grammar"},
    ],
)
def test_invalid_grammar_is_rejected_and_the_engine_continues(model: Model, sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="the grammar can't be used"):
        complete(model, **sampling)
    assert complete(model, temperature=0, max_tokens=3).text


def test_unfinishable_grammar_fails_only_its_own_request(model: Model) -> None:
    others = [complete(model, temperature=0, max_tokens=5) for _ in range(2)]
    with pytest.raises(GrammarFailed, match="allows no token at this position"):
        complete(model, grammar='root ::= "a"', temperature=0, logit_bias=EVERY_TOKEN)
    assert others[0].text == others[1].text == complete(model, temperature=0, max_tokens=5).text


def test_completions_of_one_prompt_depend_on_their_seeds(model: Model) -> None:
    done = complete(model, n=4, seed=10, temperature=1.3, max_tokens=20)
    alone = [complete(model, seed=10 + i, temperature=1.3, max_tokens=20).text for i in range(4)]
    assert [choice.text for choice in (done, *done.alternatives)] == alone
    assert len(set(alone)) > 1


def test_logprobs_match_the_tokens_and_alternatives_are_in_order(model: Model) -> None:
    done = complete(model, temperature=0, logprobs=3, max_tokens=20)
    assert done.logprobs is not None
    assert tuple(entry.token for entry in done.logprobs) == done.tokens
    for entry in done.logprobs:
        assert entry.top[0] == (entry.token, entry.logprob)  # greedy sampling takes the most likely token
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        assert sum(np.exp(p) for _, p in entry.top) <= 1 + 1e-5
    assert np.mean([np.exp(entry.logprob) for entry in done.logprobs]) > 0.5
    assert complete(model, temperature=0, max_tokens=20).logprobs is None


def test_logit_bias_can_forbid_and_force_tokens(model: Model) -> None:
    plain = complete(model, temperature=0, max_tokens=10)
    forbidden = complete(model, temperature=0, max_tokens=10, logit_bias=((plain.tokens[2], -np.inf),))
    assert forbidden.tokens[:2] == plain.tokens[:2]
    assert plain.tokens[2] not in forbidden.tokens
    forced = complete(model, temperature=0, max_tokens=5, logit_bias=((plain.tokens[0], 1000.0),))
    assert set(forced.tokens) == {plain.tokens[0]}
    with pytest.raises(InvalidRequest, match="logit_bias: token 9999 does not exist; the model has tokens 0"):
        complete(model, logit_bias=((9999, 1.0),))


def test_dry_sampler_interrupts_a_repetition(model: Model) -> None:
    once = STORY + complete(model, temperature=0, max_tokens=30).text
    again = complete(model, f"{once} {STORY}", temperature=0, max_tokens=10)
    assert (once + "x").startswith(STORY + again.text[:10]), "the model does not repeat itself: choose another prompt"
    dry = complete(model, f"{once} {STORY}", temperature=0, max_tokens=10, dry_multiplier=50.0)
    assert dry.tokens[0] != again.tokens[0]


@pytest.mark.parametrize(
    "sampling",
    [{"mirostat": 1}, {"mirostat": 2}, {"xtc_probability": 0.5}, {"typical_p": 0.999}, {"dry_multiplier": 1}],
)
def test_every_sampler_is_deterministic_for_a_given_seed(model: Model, sampling: dict[str, Any]) -> None:
    texts = [complete(model, seed=s, temperature=2.5, max_tokens=40, **sampling).text for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_sampler_state_is_restored_after_any_number_of_draws(model: Model) -> None:
    """Give prompt and output to a new sampler, and check that it continues like the first one."""
    backend = model.engine._backend
    grammar = 'root ::= ([a-z ]+ ".")+'
    params = SamplingParams(seed=9, temperature=1.5, repeat_penalty=1.2, dry_multiplier=0.5, grammar=grammar)
    prompt = model.tokenize(STORY)
    whole = complete(model, seed=9, temperature=1.5, repeat_penalty=1.2, dry_multiplier=0.5, grammar=grammar)
    rows = iter(np.random.default_rng(0).normal(size=(200, backend.n_vocab)).astype(np.float32) * 3)
    for count in (0, 1, 7, len(whole.tokens) - 1):
        history = [*prompt, *whole.tokens[:count]]
        steps = [next(rows) for _ in range(20)]
        runs = []
        for _ in range(2):
            sampler: Any = backend.new_sampler(backend.prepare(params), 9, history, ban_end=False, num_sampled=count)
            runs.append([sampler._sampler.sample(row.copy())[0] for row in steps])
        half = runs[0][:8]
        resumed: Any = backend.new_sampler(
            backend.prepare(params), 9, [*history, *half], ban_end=False, num_sampled=count + 8
        )
        assert [resumed._sampler.sample(row.copy())[0] for row in steps[8:]] == runs[0][8:]
        assert runs[0] == runs[1]
