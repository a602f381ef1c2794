"""Chats on the real model: thinking, its budget, tools that it calls by itself and by force."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cellama.bench.tiny_model.corpus import WEATHER_TOOL
from cellama.engine import (
    ChatOptions,
    Completion,
    EngineOptions,
    Event,
    Model,
    ModelManager,
    Request,
    Resumed,
    SamplingParams,
    Text,
)

FRANCE, CAT, WEATHER = "What is the capital of France?", "What does a cat say?", "What is the weather in Paris?"
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}'


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    manager = ModelManager()
    yield manager.load("tiny", "bundled://tiny", options=EngineOptions(n_parallel=4, threads=1))
    manager.close()


def ask(
    model: Model, question: str, resume: tuple[Resumed, ...] = (), schema: str | None = None, **options: Any
) -> tuple[Completion, list[Text]]:
    """The completion, and the texts that were told on the way."""
    prompt = model.prepare_chat([{"role": "user", "content": question}], ChatOptions(**options))
    request = Request(
        id="r",
        prompt=tuple(prompt.tokens),
        sampling=SamplingParams(temperature=0, grammar=prompt.grammar, json_schema=schema),
        max_tokens=60,
        reply=prompt.reply,
        resume=resume,
    )
    told: list[Event] = []
    completion = model.engine.submit(request, on_event=told.append).result(60)
    return completion, [event for event in told if isinstance(event, Text)]


def test_thinking_is_told_apart_from_the_answer_and_counted_with_it(model: Model) -> None:
    completion, told = ask(model, FRANCE, enable_thinking=True)
    assert completion.reasoning == "I know this one. The capital of France is Paris."
    assert completion.text == "The capital of France is Paris."
    assert completion.usage.completion_tokens == len(completion.tokens)
    assert b"".join(model.engine.vocabulary.token_bytes(t) for t in completion.tokens).count(b"</think>") == 1
    kinds = [event.kind for event in told]
    assert kinds.count("reasoning_end") == 1
    assert kinds == sorted(kinds, key=["reasoning", "reasoning_end", "text"].index)
    assert next(event.text for event in told if event.kind == "reasoning_end") == completion.reasoning
    assert [t for event in told for t in event.tokens] == list(completion.tokens)


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_thinking_ends_at_its_budget(model: Model, budget: int) -> None:
    completion, _ = ask(model, FRANCE, enable_thinking=True, thinking_budget=budget)
    thought = model.tokenize(completion.reasoning or "", add_special=False)
    assert len(thought) == budget
    assert "Paris" in completion.text


def test_grammar_binds_the_answer_and_not_the_thoughts(model: Model) -> None:
    completion, _ = ask(model, FRANCE, schema=SCHEMA, enable_thinking=True)
    assert (completion.reasoning or "").startswith("I know this one.")
    assert list(json.loads(completion.text)) == ["city"]


@pytest.mark.parametrize("count", [1, 5, 15, 16, 20])
@pytest.mark.parametrize("options", [{}, {"schema": SCHEMA}, {"thinking_budget": 3}], ids=["free", "schema", "budget"])
def test_chat_that_is_continued_ends_like_an_undisturbed_one(model: Model, options: dict[str, Any], count: int) -> None:
    whole, _ = ask(model, FRANCE, enable_thinking=True, **options)
    count = min(count, len(whole.tokens) - 1)
    rest, told = ask(model, FRANCE, (Resumed(whole.tokens[:count]),), enable_thinking=True, **options)
    assert (rest.text, rest.reasoning, rest.tokens) == (whole.text, whole.reasoning, whole.tokens)
    assert sum(event.kind == "reasoning_end" for event in told) <= 1


def test_model_calls_the_tool_that_it_needs_and_no_other(model: Model) -> None:
    completion, told = ask(model, WEATHER, tools=[WEATHER_TOOL])
    assert [(call.name, call.arguments) for call in completion.tool_calls] == [("get_weather", '{"city": "Paris"}')]
    assert completion.text == "".join(event.text for event in told) == ""
    assert ask(model, CAT, tools=[WEATHER_TOOL])[0].tool_calls == ()


@pytest.mark.parametrize("choice", ["required", "get_weather"])
@pytest.mark.parametrize("thinking", [None, True])
def test_tool_can_be_forced_after_thinking_or_at_once(model: Model, choice: str, thinking: bool | None) -> None:
    completion, _ = ask(model, CAT, tools=[WEATHER_TOOL], tool_choice=choice, enable_thinking=thinking)
    (call,) = completion.tool_calls
    assert call.name == "get_weather"
    assert list(json.loads(call.arguments)) == ["city"]
    assert bool(completion.reasoning) is bool(thinking)
