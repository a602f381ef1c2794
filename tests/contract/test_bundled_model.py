"""Tests that the bundled model answers correctly and with high probability, which tests of equal texts rely on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from cellama.bench.tiny_model.corpus import WEATHER_TOOL, Document, documents
from cellama.bench.tiny_model.facts import FACTS
from cellama.engine import EngineOptions, Model, ModelManager, Request, SamplingParams, Tokenizer
from cellama.engine.backend import Chunk
from cellama.engine.bundled import TINY_PATH
from cellama.engine.llama import LlamaBackend, LlamaModel

PATIENCE_S = 60
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Model]:
    manager = ModelManager()
    yield manager.load("tiny", "bundled://tiny", options=EngineOptions(n_parallel=16, threads=1))
    manager.close()


def answers(model: Model, prompts: Sequence[Sequence[int]]) -> list[str]:
    handles = [model.engine.submit(Request(str(i), tuple(p), GREEDY, max_tokens=80)) for i, p in enumerate(prompts)]
    return [handle.result(PATIENCE_S).text for handle in handles]


def test_bundled_model_is_small_and_has_a_context_of_2048(tiny: Model) -> None:
    assert TINY_PATH.stat().st_size <= 8_000_000
    assert tiny.info.n_ctx_train >= 2048
    assert tiny.info.architecture == "llama"


@pytest.mark.parametrize("enable_thinking", [False, True])
def test_bundled_model_answers_fact_questions(tiny: Model, enable_thinking: bool) -> None:
    questions = [(ask, answer) for asks, answer in FACTS for ask in asks]
    assert len(FACTS) >= 60
    prompts = [tiny.tokenize_chat([user(ask)], enable_thinking=enable_thinking) for ask, _ in questions]
    right = [got.endswith(want) for got, (_, want) in zip(answers(tiny, prompts), questions, strict=True)]
    assert sum(right) / len(right) >= 0.95


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_bundled_model_answers_after_1800_tokens_of_unrelated_text(tiny: Model) -> None:
    before = tiny.tokenize("".join(s.text for d in itertools.islice(documents(5), 60) for s in d), parse_special=True)
    questions = [(asks[0], answer) for asks, answer in FACTS[::8]]
    got = answers(tiny, [before[:1800] + tiny.tokenize_chat([user(ask)]) for ask, _ in questions])
    assert sum(a == want for a, (_, want) in zip(got, questions, strict=True)) / len(questions) >= 0.9


def test_bundled_model_is_confident_on_held_out_documents() -> None:
    """Check the mean top-1 probability of the tokens that the model is trained to write."""
    model = LlamaModel(TINY_PATH)
    backend = LlamaBackend(model, EngineOptions(n_parallel=1, threads=1))
    try:
        sure = [p for d in itertools.islice(documents(99, held_out=True), 40) for p in top_1(model, backend, d)]
    finally:
        backend.close()
        model.close()
    assert len(sure) > 1000
    assert np.mean(sure) > 0.9


def top_1(model: LlamaModel, backend: LlamaBackend, document: Document) -> Iterator[float]:
    """Return the highest probability at each position whose next token is a target, one token per step."""
    backend.trim(0, 0)
    position = 0
    for segment in document:
        for token in model.tokenize(segment.text, add_special=False, parse_special=True):
            if segment.target and position:
                logits = backend.logits(0).astype(np.float64)
                yield float(1 / np.exp(logits - logits.max()).sum())
            backend.decode([Chunk(0, position, [token], samples=True)])
            position += 1


def test_bundled_model_calls_its_tool_and_answers_from_the_tool_result(tiny: Model) -> None:
    question = user("What is the weather in Oslo?")
    call = answers(tiny, [tiny.tokenize_chat([question], tools=[WEATHER_TOOL])])[0]
    assert call == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    turns = [
        question,
        {"role": "assistant", "content": call},
        {"role": "tool", "content": '{"city": "Oslo", "weather": "snowy", "degrees": -3}'},
    ]
    assert answers(tiny, [tiny.tokenize_chat(turns, tools=[WEATHER_TOOL])]) == [
        "The weather in Oslo is snowy, -3 degrees."
    ]


def test_bundled_model_writes_characters_split_across_tokens(tiny: Model) -> None:
    text = answers(tiny, [tiny.tokenize_chat([user("What does a cat say?")])])[0]
    assert text == "A cat says meow 🐱."
    tokens = tiny.tokenize("🐱", add_special=False)
    assert len(tokens) > 1


def test_bundled_model_template_ends_with_the_start_of_the_assistants_turn(tiny: Model) -> None:
    assert tiny.render_chat([user("Hi")]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.render_chat([user("Hi")], enable_thinking=True).endswith("<|im_start|>assistant\n<think>\n")


def test_tokenizer_works_without_an_engine_and_agrees_with_the_model(tiny: Model) -> None:
    messages = [{"role": "user", "content": "Once upon a time 🦊"}]
    with Tokenizer("bundled://tiny") as tokenizer:
        assert tokenizer.tokenize("café 🦊") == tiny.tokenize("café 🦊")
        assert tokenizer.detokenize(tokenizer.tokenize("café 🦊")) == "café 🦊"
        assert tokenizer.render_chat(messages) == tiny.render_chat(messages)
        assert tokenizer.tokenize_chat(messages) == tiny.tokenize_chat(messages)
