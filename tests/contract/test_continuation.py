"""Tests that a request with previous output continues as if it had not been interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cellama.engine import Completion, EngineOptions, Event, Model, ModelManager, Request, Resumed, SamplingParams, Text

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}'
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    manager = ModelManager()
    yield manager.load("tiny", "bundled://tiny", options=EngineOptions(n_parallel=4, threads=1))
    manager.close()


def run(model: Model, resume: tuple[Resumed, ...] = (), **params: Any) -> tuple[Completion, list[Event]]:
    """Return the completion and its events."""
    own = {name: params.pop(name) for name in ("n", "stop", "ignore_eos") if name in params}
    request = Request(
        id="r",
        prompt=tuple(model.tokenize(PROMPT)),
        sampling=SamplingParams(**params),
        max_tokens=40,
        cache_prompt=False,
        resume=resume,
        **own,
    )
    events: list[Event] = []
    return model.engine.submit(request, on_event=events.append).result(60), events


def resumed(completion: Completion, count: int) -> Resumed:
    return Resumed(completion.tokens[:count], tuple(completion.logprobs or ())[:count])


def mu_after(events: list[Event], count: int) -> float | None:
    """Return the state of mirostat after the first `count` tokens, from the events."""
    seen = 0
    for event in events:
        if isinstance(event, Text):
            seen += len(event.tokens)
            if seen == count:
                return event.mirostat_mu
    raise AssertionError(f"no event ends after {count} tokens")


@pytest.mark.parametrize("count", [1, 7, 39])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 3, "repeat_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 5, "dry_multiplier": 0.8, "xtc_probability": 0.5},
        {"temperature": 1.0, "seed": 8, "json_schema": SCHEMA},
        {"temperature": 0, "stop": (" forest",)},
        {"temperature": 0, "logprobs": 2},
    ],
    ids=["greedy", "penalties", "dry and xtc", "grammar", "stop", "logprobs"],
)
def test_continued_request_produces_the_same_text_as_an_uninterrupted_request(
    model: Model, params: dict[str, Any], count: int
) -> None:
    whole, _ = run(model, **params)
    count = min(count, len(whole.tokens) - 1)
    rest, events = run(model, (resumed(whole, count),), **params)
    assert rest.text == whole.text
    assert rest.tokens == whole.tokens
    assert (rest.finish_reason, rest.stop_sequence) == (whole.finish_reason, whole.stop_sequence)
    assert rest.usage.completion_tokens == whole.usage.completion_tokens
    assert sum(len(event.tokens) for event in events if isinstance(event, Text)) <= len(whole.tokens) - count
    assert whole.text.endswith("".join(event.text for event in events if isinstance(event, Text)))
    if whole.logprobs is not None:
        assert [entry.token for entry in rest.logprobs or ()] == [entry.token for entry in whole.logprobs]


def test_each_of_several_completions_continues_its_own_output(model: Model) -> None:
    params: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    whole, _ = run(model, **params)
    every = (whole, *whole.alternatives)
    resume = tuple(resumed(completion, 10 * completion.index) for completion in every)
    rest, _ = run(model, resume, **params)
    assert [c.tokens for c in (rest, *rest.alternatives)] == [c.tokens for c in every]


@pytest.mark.parametrize("params", [{"temperature": 0, "ignore_eos": True}, {"temperature": 0, "stop": (" fox",)}])
def test_continued_request_generates_nothing_when_its_output_is_complete(model: Model, params: dict[str, Any]) -> None:
    whole, _ = run(model, **params)
    again, events = run(model, (resumed(whole, len(whole.tokens)),), **params)
    assert (again.text, again.finish_reason) == (whole.text, whole.finish_reason)
    assert not [event for event in events if isinstance(event, Text)]


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_continues_from_its_previous_state(model: Model, version: int) -> None:
    params: dict[str, Any] = {
        "mirostat": version,
        "mirostat_tau": 3.0,
        "mirostat_eta": 0.5,
        "temperature": 4.0,
        "seed": 5,
    }
    whole, events = run(model, ignore_eos=True, **params)
    for count in (1, 13, 30):
        known = Resumed(whole.tokens[:count], mirostat_mu=mu_after(events, count))
        assert known.mirostat_mu is not None
        rest, _ = run(model, (known,), ignore_eos=True, **params)
        assert rest.tokens == whole.tokens
    fresh, _ = run(model, (Resumed(whole.tokens[:13]),), ignore_eos=True, **params)
    assert fresh.tokens != whole.tokens, "mirostat learned nothing: choose other parameters"
    assert mu_after(run(model, temperature=0)[1], 1) is None
