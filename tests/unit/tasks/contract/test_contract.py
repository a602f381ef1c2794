"""The contract: parameters equal those of the engine, and names and keys equal the documented ones."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
from pydantic import ValidationError

from cellama.config import ModelSettings
from cellama.config.limits import MAX_SEED, MAX_TEXTS
from cellama.engine import Request, SamplingParams
from cellama.tasks.contract import keys
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.keys import stream_id
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.embed import EmbedJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.kinds.rerank import RerankJob
from cellama.tasks.contract.names import queue_keys, queue_name
from cellama.tasks.contract.payloads import parse_job


def test_payload_parameters_have_the_engines_names_and_defaults() -> None:
    engine = {n: f.default for c in (SamplingParams, Request) for n, f in c.__dataclass_fields__.items()}
    engine["timeout"] = engine.pop("timeout_s")
    for internal in (
        "id",
        "sampling",
        "submitted_at",
        "prompt",
        "reply",
        "resume",
        "mode",
        "prediction",
        "only_checks",
        "share",
        "warnings",
    ):
        del engine[internal]
    own = ("model", "prompt", "suffix", "input_extra", "parent_key", "prediction", "keep_alive_s")
    payload = {name: field.default for name, field in GenerateJob.model_fields.items() if name not in own}
    assert payload == engine


@pytest.mark.parametrize("value", [MAX_SEED, 0, None])
def test_payload_accepts_the_same_seeds_as_the_engine(value: int | None) -> None:
    assert parse_job(GenerateJob, ("model", "prompt"), ("m", "p"), {"seed": value}).seed == value
    assert SamplingParams(seed=value).seed == value


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("the old text", "the old text"),
        ([5, 6], [5, 6]),
        ({"type": "content", "content": "the old text"}, "the old text"),
        (
            {"type": "content", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "old"}]},
            "the old",
        ),
        ({"text": "of the step before", "finish_reason": "stop"}, "of the step before"),
        (None, None),
    ],
)
def test_prediction_accepts_text_tokens_and_the_openai_format(given: Any, taken: Any) -> None:
    assert parse_job(GenerateJob, ("model", "prompt"), ("m", "p"), {"prediction": given}).prediction == taken


@pytest.mark.parametrize(
    "given",
    ["", [], [-1], [2**31], 5, {"type": "content"}, {"type": "file", "content": "a"}, {"content": "a"}, "\ud800"],
)
def test_invalid_prediction_is_rejected(given: Any) -> None:
    with pytest.raises(InvalidJob, match="prediction"):
        parse_job(ChatJob, ("model", "messages"), ("m", [{"role": "user", "content": "Hi"}]), {"prediction": given})


def test_payload_is_equal_for_positional_and_keyword_arguments() -> None:
    by_position = parse_job(GenerateJob, ("model", "prompt"), ("m", "p"), {"stop": "x"})
    by_name = parse_job(GenerateJob, ("model", "prompt"), (), {"model": "m", "prompt": "p", "stop": ["x"]})
    assert by_position == by_name
    assert by_position.stop == ("x",)
    with pytest.raises(InvalidJob, match="model: passed both by position and by name"):
        parse_job(GenerateJob, ("model", "prompt"), ("m", "p"), {"model": "n"})


def test_payload_error_lists_every_problem_and_shortens_long_values() -> None:
    with pytest.raises(InvalidJob) as caught:
        parse_job(ChatJob, ("model", "messages"), ("m", "x" * 500), {"top_p": 2, "min_p": float("nan")})
    message = str(caught.value)
    assert all(name in message for name in ("messages is 'xxx", "top_p is 2", "min_p is nan"))
    assert len(message) < 400


def test_payload_accepts_one_or_several_texts() -> None:
    assert parse_job(EmbedJob, ("model", "texts"), ("m", "a"), {}).texts == ("a",)
    assert parse_job(EmbedJob, ("model", "texts"), ("m", ["a", "b"]), {}).texts == ("a", "b")


@pytest.mark.parametrize(
    ("given", "adapters"),
    [
        (None, None),
        ({}, ()),
        ({"pirate": 0.5, "q": 1}, (("pirate", 0.5), ("q", 1.0))),
        (["pirate=0.5", "q"], (("pirate", 0.5), ("q", 1.0))),
        ("pirate", (("pirate", 1.0),)),
        ([["pirate", -1]], (("pirate", -1.0),)),
    ],
)
def test_payload_accepts_adapters_in_several_formats(
    given: Any, adapters: tuple[tuple[str, float], ...] | None
) -> None:
    assert parse_job(GenerateJob, ("model", "prompt"), ("m", "p"), {"adapters": given}).adapters == adapters


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, 'the value must map adapter names to scales, for example {"pirate": 0.5}'),
        (["pirate=much"], "the scale of 'pirate=much' is not a number; write NAME, or NAME=0.5"),
        (["pirate", "pirate=2"], "an adapter is listed twice"),
        ({"pirate": float("nan")}, "adapters.0.1 is nan"),
        ({"pirate": "0.5"}, "adapters.0.1 is '0.5'"),
        ({"": 1}, "the text is empty"),
    ],
)
def test_payload_rejects_invalid_adapters(given: Any, message: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        parse_job(ChatJob, ("model", "messages"), ("m", [{"role": "user", "content": "x"}]), {"adapters": given})
    assert message in str(caught.value)


def test_too_many_texts_are_rejected_with_the_limit() -> None:
    message = rf"there are {MAX_TEXTS + 1} texts, and a job can have 1 to {MAX_TEXTS}; split them into several jobs"
    texts = ["a"] * (MAX_TEXTS + 1)
    with pytest.raises(InvalidJob, match=f"texts is .*: {message}"):
        parse_job(EmbedJob, ("model", "texts"), ("m", texts), {})
    with pytest.raises(InvalidJob, match=f"documents is .*: {message}"):
        parse_job(RerankJob, ("model", "query", "documents"), ("m", "q", texts), {})
    assert len(parse_job(EmbedJob, ("model", "texts"), ("m", texts[1:]), {}).texts) == MAX_TEXTS


def test_job_failed_exception_survives_celerys_json_serialization() -> None:
    failed = JobFailed("queue_full", "try later", True)
    again = JobFailed(*failed.args)
    assert (again.code, str(again), again.retryable) == ("queue_full", "try later", True)


def test_queues_and_journal_ids_are_as_documented() -> None:
    assert queue_name("tiny") == "cellama:queue:tiny"
    assert queue_name(":default") == "cellama:queue::default"
    assert queue_keys("tiny")[:2] == ["cellama:queue:tiny", "cellama:queue:tiny\x06\x161"]
    assert stream_id(0) == "1-0"


def test_queues_have_unique_keys_for_any_model_id() -> None:
    ours = [value for name, value in vars(keys).items() if name.endswith("_KEY")]
    makers = [make for name, make in vars(keys).items() if name.endswith("_key")]
    ours += [make(*"x" * len(signature(make).parameters)) for make in makers] + [keys.events_channel("x", 0)]
    ids = [":default", "default", "a b:c", *(key.removeprefix("cellama:").split(":")[0] for key in ours)]
    lists = [key for model_id in dict.fromkeys(ids) for key in queue_keys(model_id)]
    assert len(set(lists)) == len(lists)
    assert not set(lists) & set(ours)
    assert not any(key.startswith(queue_name("")) for key in ours)


@pytest.mark.parametrize("model_id", [":other", " a", "a ", "a\x06\x163", "a\n", "a\u2028b", ":"])
def test_model_ids_that_could_collide_with_other_queues_are_rejected(model_id: str) -> None:
    with pytest.raises(InvalidJob, match="a model id must not contain control characters"):
        parse_job(GenerateJob, ("model", "prompt"), (model_id, "p"), {})
    with pytest.raises(ValidationError, match="id"):
        ModelSettings(id=model_id, source="x")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"prompt": "Hi", "system": "Be short."},
        {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": "Hi", "tool_choice": "none"},
        {"prompt": "Hi", "enable_thinking": True},
        {"prompt": "Hi", "template_args": {"today": "Monday"}},
        {"enable_thinking": True},
    ],
)
def test_prefill_rejects_parameters_without_effect(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match="pass either prompt, or messages"):
        parse_job(PrefillJob, (), (), {"model": "m", **given})


def test_prefill_accepts_a_prompt_or_a_chat() -> None:
    assert parse_job(PrefillJob, (), (), {"model": "m", "prompt": "Hi", "tools": []}).prompt == "Hi"
    assert parse_job(PrefillJob, (), (), {"model": "m", "system": "Be short.", "enable_thinking": True}).prompt is None
