"""Parsing any input yields a valid job or InvalidJob in a short time, and errors name the limits."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from cellama.config import limits
from cellama.engine import InvalidRequest, Request, SamplingParams
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.chunk import ChunkJob, job_of_line
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.payloads import BaseJob, parse_job

from ....conftest import EXAMPLES

PAYLOADS = [kind.payload for kind in KINDS.values()]
USER = {"role": "user", "content": "Hi"}
VALID: dict[str, Any] = {
    "model": "m",
    "prompt": "p",
    "messages": [USER],
    "texts": ["a"],
    "query": "q",
    "documents": ["a"],
    "text": "a",
    "tokens": [1],
    "lines": [{"kind": "generate", "params": {"prompt": "p"}}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "logit_bias": {"1": 1.5},
    "stop": ["x"],
    "json_schema": {"type": "object"},
    "template_args": {"a": 1},
    "adapters": {"a": 1},
}


def deep(depth: int) -> Any:
    value: Any = "x"
    for level in range(depth):
        value = [value] if level % 2 else {"properties": value}
    return value


HOSTILE: dict[str, Any] = {
    "large": 10**20,
    "huge": 10**5000,
    "negative": -1,
    "beyond 32 bits": 2**31,
    "large float": 1e308,
    "tiny float": 5e-324,
    "nan": float("nan"),
    "infinity": float("inf"),
    "true": True,
    "empty": "",
    "NUL": "\0",
    "surrogate": "\ud800",
    "long": "x" * (limits.MAX_GRAMMAR_CHARS + 1),
    "object": {},
    "list": [],
    "long list": [None] * 20_000,
    "surrogate name": {"\ud800": 1},
    "nan inside": {"a": float("nan")},
    "huge inside": {"a": 10**5000},
    "deep": deep(200),
    "deeper": deep(100_000),
    "pairs": "1=1=1",
    "huge pair": "9" * 5000 + "=1",
    "large bias": {"1": 1e300},
    "triple": [["a", "b", "c"]],
    "part": {"type": "text", "text": 5},
}
TEXT = st.text(st.characters(), max_size=5)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.sampled_from(sorted(HOSTILE)).map(lambda name: HOSTILE[name]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def nearly_valid(draw: st.DrawFn) -> tuple[type[BaseJob], dict[str, Any]]:
    """Return parameters of a job, some of which are invalid or nested in valid ones."""
    kind = draw(st.sampled_from(PAYLOADS))
    values = {name: VALID[name] for name in kind.model_fields if name in VALID}
    names = st.sampled_from(sorted(kind.model_fields))
    values.update(draw(st.dictionaries(names, JSON | st.sampled_from(list(VALID.values())), max_size=3)))
    wrong = draw(JSON)
    wrapped = [
        [wrong],
        {"role": "user", "content": wrong},
        [{"role": wrong}],
        [{"type": "function", "function": wrong}],
    ]
    if draw(st.booleans()):
        values[draw(names)] = draw(st.sampled_from(wrapped))
    return kind, values


@settings(max_examples=150 * EXAMPLES)
@given(nearly_valid(), st.dictionaries(TEXT, JSON, max_size=2))
def test_any_payload_yields_a_job_or_raises_invalid_job(
    case: tuple[type[BaseJob], dict[str, Any]], more: dict[str, Any]
) -> None:
    kind, values = case
    problem = ""
    try:
        job = parse_job(kind, (), (), {**values, **more})
        for line in job.lines if isinstance(job, ChunkJob) else ():
            job_of_line(line, "m", 3)
    except InvalidJob as error:
        problem = str(error)
    assert len(problem.encode()) < 4000  # the error is sent as JSON


LARGE: dict[str, Callable[[], dict[str, Any]]] = {  # built on demand, because they use hundreds of MB
    "prompt of what are no tokens": lambda: {"prompt": [True] * limits.MAX_PROMPT_TOKENS},
    "prompt of tokens": lambda: {"prompt": [1] * (limits.MAX_PROMPT_TOKENS + 1)},
    "prompt": lambda: {"prompt": "x" * 50_000_000},
    "json_schema": lambda: {"json_schema": deep(1_000_000)},
    "stop": lambda: {"stop": [1] * 1_000_000},
    "logit_bias": lambda: {"logit_bias": {str(number): 1 for number in range(1_000_000)}},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_payload_is_rejected(name: str) -> None:
    with pytest.raises(InvalidJob):
        parse_job(GenerateJob, (), (), {"model": "m", "prompt": "p", **LARGE[name]()})


LIMITED = {
    "max_tokens": limits.MAX_COUNT,
    "temperature": limits.MAX_TEMPERATURE,
    "top_k": limits.MAX_COUNT,
    "repeat_last_n": limits.MAX_LOOK_BACK,
    "repeat_penalty": limits.MAX_REPEAT_PENALTY,
    "frequency_penalty": limits.MAX_PENALTY,
    "presence_penalty": limits.MAX_PENALTY,
    "dry_multiplier": limits.MAX_PENALTY,
    "dry_base": limits.MAX_DRY_BASE,
    "dry_allowed_length": limits.MAX_COUNT,
    "dry_penalty_last_n": limits.MAX_LOOK_BACK,
    "mirostat_tau": limits.MAX_MIROSTAT_TAU,
    "mirostat_eta": limits.MAX_MIROSTAT_ETA,
    "logprobs": limits.MAX_LOGPROBS,
    "n": limits.MAX_COMPLETIONS,
    "timeout": limits.MAX_TIMEOUT_S,
    "seed": limits.MAX_SEED,
}


@pytest.mark.parametrize("name", LIMITED)
def test_limit_is_reported_and_enforced_by_both_payload_and_engine(name: str) -> None:
    def both(value: Any) -> list[str]:
        problems = []
        sampling = {name: value} if name in SamplingParams.__dataclass_fields__ else {}
        own = {} if sampling else {{"timeout": "timeout_s"}.get(name, name): value}
        for make in (
            lambda: parse_job(GenerateJob, (), (), {"model": "m", "prompt": "p", name: value}),
            lambda: Request("r", (1,), SamplingParams(**sampling), **own),
        ):
            try:
                make()
            except (InvalidJob, InvalidRequest) as error:
                problems.append(str(error))
        return problems

    limit = LIMITED[name]
    assert both(limit) == []
    beyond = both(limit + 1)
    assert len(beyond) == 2
    for message in beyond:
        assert name in message
        assert f"{limit:g}" in message or str(limit) in message


def test_payload_with_too_many_logprobs_is_rejected() -> None:
    with pytest.raises(
        InvalidJob, match=r"logprobs 100 with n 128 and max_tokens 100000 can result in .* lower one of these"
    ):
        parse_job(GenerateJob, (), (), {"model": "m", "prompt": "p", "n": 128, "max_tokens": 100_000, "logprobs": 100})


def test_error_lists_only_the_first_problems() -> None:
    messages = [{"role": "user", "content": "Hi", f"x{number}": 1} for number in range(3)]
    with pytest.raises(InvalidJob) as caught:
        parse_job(ChatJob, (), (), {"model": "m", "messages": messages, **{f"y{number}": 1 for number in range(50)}})
    assert re.search(r"; and \d+ more$", str(caught.value))


def test_documented_limits_equal_the_limits_in_the_code() -> None:
    text = (Path(__file__).parents[4] / "docs" / "limits.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE))
    held = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert documented == {
        name: f"{value:,}" if isinstance(value, int) else f"{value:g}" for name, value in held.items()
    }


class Sent:
    """An object in the frames of a caller."""


@pytest.mark.parametrize("wrong", [{"json_schema": {"const": float("nan")}}, {"stop": [""]}, {"top_k": "x"}])
def test_rejected_payload_is_freed(wrong: dict[str, Any]) -> None:
    def refuse() -> weakref.ref[Sent]:
        sent = Sent()
        try:
            parse_job(GenerateJob, ("model", "prompt"), ("m", "p"), wrong)
        except InvalidJob as error:
            stored = error  # as in Celery's tracer, this makes a cycle of error, traceback and frame
            assert stored.__context__ is None
        return weakref.ref(sent)

    seen = refuse()
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (ChatJob, {"messages": []}, "messages is []: the value is empty; provide at least one"),
        (GenerateJob, {"prompt": []}, "prompt is []: the value is empty; provide at least one"),
        (
            ChatJob,
            {"messages": [{"role": "usr", "content": "x"}]},
            "messages.0.role is 'usr': Input should be 'system', 'user', 'assistant' or 'tool'",
        ),
    ],
)
def test_error_mentions_an_empty_list_only_when_the_list_is_empty(
    kind: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_job(kind, (), (), {"model": "m", **given})
    assert str(refused.value) == message


@pytest.mark.parametrize("other", ["regex", "lark", "grammar"])
def test_job_accepts_only_one_constraint(other: str) -> None:
    with pytest.raises(InvalidJob, match=f"^json_schema and {other} can't be combined; choose one of them$"):
        parse_job(GenerateJob, (), (), {"model": "m", "prompt": "p", "json_schema": {}, other: "x"})
    parse_job(GenerateJob, (), (), {"model": "m", "prompt": "p", "json_schema": None, other: "x"})
