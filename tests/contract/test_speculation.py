"""Tests that texts are the same with and without draft tokens, with the real llama.cpp and all sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
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
from cellama.engine.backend import Chunk
from cellama.engine.bundled import TINY_PATH
from cellama.engine.llama import LlamaBackend, LlamaModel
from cellama.engine.options import KvLayout
from cellama.engine.snapshots import SourceDrafts

from ..eager_gate import Eager
from .holding import Hold
from .small_models import EXACT

PATIENCE_S = 120
SLOTS = 3
NEW = 60
STORY = "Once upon a time, there was a little fox. The fox liked to play in the park. One day, the fox found a ball. "
PEOPLE = """{"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "object", "required": ["name", "age"],
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}}}"""
GRAMMAR = 'root ::= ("The fox said: " [a-z ]{3,9} ". "){3}'
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "schema": {"json_schema": PEOPLE, "ignore_eos": False},
    "sampled schema": {"json_schema": PEOPLE, "ignore_eos": False, **SAMPLED},
    "grammar": {"grammar": GRAMMAR, "ignore_eos": False},
    "penalties": {"repeat_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2, **SAMPLED},
    "dry and xtc": {"dry_multiplier": 0.8, "xtc_probability": 0.4, **SAMPLED},
    "stop": {"stop": (" park", "ball. O")},
    "logprobs": {"logprobs": 3},
    "three": {"n": 3, **SAMPLED},
    "sampled": SAMPLED,
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0, **SAMPLED},
    "biased": {"logit_bias": ((70, 2.0), (80, -3.0)), "temperature": 0.7, "seed": 5},
}


def case_of(model: Model, name: str, prompt: Sequence[int], **params: Any) -> Request:
    own = {key: params.pop(key) for key in ("n", "stop", "reply") if key in params}
    own["ignore_eos"] = params.pop("ignore_eos", True)
    sampling = SamplingParams(**{"temperature": 0, **params})
    return Request(name, tuple(prompt), sampling, max_tokens=NEW, priority=9, **own)


def requests_of(model: Model) -> list[Request]:
    """Return one request per case, with stories of different lengths, and a chat with reasoning and a tool call."""
    prompts = [model.tokenize(STORY * (1 + at % 3)) for at in range(len(CASES))]
    requests = [case_of(model, name, prompt, **CASES[name]) for name, prompt in zip(CASES, prompts, strict=True)]
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    options = ChatOptions(tools=[WEATHER_TOOL], enable_thinking=True, thinking_budget=3)
    chat = model.prepare_chat(messages, options)
    return [*requests, case_of(model, "chat", chat.tokens, reply=chat.reply, ignore_eos=False, **chat.sampling)]


def wrong_here_and_there(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(token + (at % 9 == 8) for at, token in enumerate(tokens))


class Side:
    """A plain engine, an engine with speculation, and the texts of the plain engine for each request alone."""

    def __init__(self, manager: ModelManager, layout: str) -> None:
        options = {"threads": 1, "ctx_per_slot": 512, "n_parallel": SLOTS, "kv_layout": layout, **EXACT}
        self.plain, self.guessing = (
            manager.load(None, "bundled://tiny", options=EngineOptions(speculation=mode, **options))
            for mode in ("off", "auto")
        )
        self.core = self.guessing.engine._core
        self.core.drafting.gate = Eager(3)  # type: ignore[assignment]
        plain = requests_of(self.plain)
        self.expected = [self.plain.engine.submit(request).result(PATIENCE_S) for request in plain]
        guesses = [wrong_here_and_there(completion.tokens) for completion in self.expected]
        self.requests = [replace(request, prediction=guess) for request, guess in zip(plain, guesses, strict=True)]


@pytest.fixture(scope="module", params=["partitioned", "unified"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    manager = ModelManager()
    yield Side(manager, request.param)
    manager.close()


def alone(side: Side) -> list[Completion]:
    return [side.guessing.engine.submit(request).result(PATIENCE_S) for request in side.requests]


def together(side: Side) -> list[Completion]:
    handles = [side.guessing.engine.submit(request) for request in side.requests]
    return [handle.result(PATIENCE_S) for handle in handles]


def preempted(side: Side) -> list[Completion]:
    """Let urgent requests preempt the running ones while these have draft tokens."""
    before, hold = side.core.scheduler.num_preemptions, Hold(8)
    first, *others = side.requests
    handles = [side.guessing.engine.submit(first, hold), *(side.guessing.engine.submit(r) for r in others)]
    assert hold.reached.wait(PATIENCE_S)
    urgent = [replace(first, id=f"urgent {i}", priority=0, max_tokens=20) for i in range(SLOTS)]
    handles += [side.guessing.engine.submit(request) for request in urgent]
    hold.opened.set()
    done = [handle.result(PATIENCE_S) for handle in handles]
    assert side.core.scheduler.num_preemptions > before
    return done[: len(side.requests)]


def resumed(side: Side) -> list[Completion]:
    """Let the plain engine compute half of each text first, as another worker would."""
    halves = []
    for request, whole in zip(side.requests, side.expected, strict=True):
        every = [(each.tokens, each.logprobs or ()) for each in (whole, *whole.alternatives)]
        half = [Resumed(tokens[: len(tokens) // 2], logprobs[: len(tokens) // 2]) for tokens, logprobs in every]
        halves.append(replace(request, resume=() if request.sampling.mirostat else tuple(half)))
    handles = [side.guessing.engine.submit(request) for request in halves]
    return [handle.result(PATIENCE_S) for handle in handles]


@pytest.mark.parametrize("way", [alone, together, preempted, resumed])
def test_texts_are_identical_with_and_without_drafts(side: Side, way: Callable[[Side], list[Completion]]) -> None:
    before = side.core.drafting.counts
    for request, plain, drafted in zip(side.requests, side.expected, way(side), strict=True):
        for left, right in zip((plain, *plain.alternatives), (drafted, *drafted.alternatives), strict=True):
            assert (right.text, right.tokens) == (left.text, left.tokens), request.id
            assert (right.finish_reason, right.stop_sequence) == (left.finish_reason, left.stop_sequence), request.id
            assert (right.reasoning, right.tool_calls) == (left.reasoning, left.tool_calls), request.id
            assert_same_logprobs(left, right)
    accepted = {
        name
        for name, count in side.core.drafting.counts.items()
        if count.accepted > before.get(name, SourceDrafts(0, 0, 0)).accepted
    }
    assert len(accepted) >= 2, "drafts of several sources were accepted"


def assert_same_logprobs(left: Completion, right: Completion) -> None:
    for one, other in zip(left.logprobs or (), right.logprobs or (), strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_mirostat_resumes_from_its_state_when_there_are_drafts(side: Side) -> None:
    at = list(CASES).index("mirostat")
    told: list[Event] = []
    whole = side.guessing.engine.submit(side.requests[at], told.append).result(PATIENCE_S)
    count, mu = 0, None
    for event in told:
        if isinstance(event, Text) and count < NEW // 2:
            count, mu = count + len(event.tokens), event.mirostat_mu
    rest = replace(side.requests[at], resume=(Resumed(whole.tokens[:count], mirostat_mu=mu),))
    assert side.plain.engine.submit(rest).result(PATIENCE_S).tokens == side.expected[at].tokens


@pytest.mark.parametrize("layout", ["partitioned", "unified"])
def test_decode_raises_when_a_batch_requests_too_many_rows(layout: KvLayout) -> None:
    options = EngineOptions(n_parallel=4, ctx_per_slot=64, threads=1, speculation="auto", kv_layout=layout)
    model = LlamaModel(TINY_PATH)
    backend = LlamaBackend(model, options)
    try:
        assert options.logit_rows == 20
        tokens = model.tokenize("Once upon a time")[:4]
        backend.decode([Chunk(slot, 0, tokens, samples=True) for slot in range(4)])
        full = [Chunk(slot, 4, [tokens[0]] * 5, samples=True, decode=True, num_drafts=4) for slot in range(4)]
        backend.decode(full)
        assert all(np.isfinite(backend.logits(slot, row)).all() for slot in range(4) for row in range(5))
        over = [full[0]._replace(position=9, tokens=[tokens[0]] * 6, num_drafts=5), *full[1:]]
        with pytest.raises(ValueError, match="the batch has 21 rows of logits"):  # llama.cpp would abort
            backend.decode(over)
    finally:
        backend.close()
        model.close()
