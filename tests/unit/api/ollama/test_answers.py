"""Test Ollama's answers to results, events and models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cellama.api.http.sse import json_line
from cellama.api.ollama.answers import AnswerForm, capabilities_of, end_of, listed, running, shown, size_text
from cellama.api.ollama.parameters import CHAT, GENERATE
from cellama.tasks.contract.shapes.results import usage_of

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
DONE: dict[str, Any] = {
    "type": "done",
    "finish_reason": "stop",
    "usage": usage_of(prompt_tokens=7, completion_tokens=3),
    "timings": {"queue_ms": 1.5, "ttft_ms": 4.0, "duration_ms": 10.0},
}
EVENTS: list[dict[str, Any]] = [
    {"type": "started", "model": "m"}, {"type": "ping"}, {"type": "reasoning", "text": "Hm", "tokens": [1]},
    {"type": "reasoning_end", "signature": "s", "tokens": [2]}, {"type": "token", "text": "", "tokens": [3]},
    {"type": "token", "text": "Hi", "tokens": [4]}, {**DONE, "tool_calls": [CALL]},
]  # fmt: skip


def test_stream_consists_of_parts_and_a_single_final_part() -> None:
    parts = [part for event in EVENTS for part in AnswerForm(CHAT, "tiny:latest").parts(event)]
    messages = [{name: value for name, value in part["message"].items() if name != "role"} for part in parts]
    call = {"id": "c1", "function": {"index": 0, "name": "f", "arguments": {"city": "Paris"}}}
    assert messages == [
        {"content": ""}, {"content": "", "thinking": "Hm"}, {"content": "Hi"}, {"content": "", "tool_calls": [call]},
        {"content": ""},
    ]  # fmt: skip
    assert [part["done"] for part in parts] == [False] * 4 + [True]
    assert {(part["model"], part["message"]["role"]) for part in parts} == {("tiny:latest", "assistant")}
    assert [part["done_reason"] for part in parts if "done_reason" in part] == ["stop"]


def test_completion_returns_its_text_in_the_response_field() -> None:
    [part] = AnswerForm(GENERATE, "tiny").parts({"type": "token", "text": "Hi", "tokens": [1]})
    assert (part["response"], part["done"], "message" in part) == ("Hi", False, False)
    message = {"role": "assistant", "content": "Hi", "reasoning": "Hm"}
    whole = AnswerForm(GENERATE, "tiny").whole({**DONE, "text": "Hi", "message": message})
    assert (whole["response"], whole["thinking"], whole["done"]) == ("Hi", "Hm", True)
    raw = AnswerForm(GENERATE, "tiny").whole({**DONE, "text": "Hi"})
    assert (raw["response"], "thinking" in raw) == ("Hi", False)


def test_durations_are_job_timings_in_nanoseconds() -> None:
    assert end_of(DONE) == {
        "done": True, "done_reason": "stop", "total_duration": 10_000_000, "load_duration": 1_500_000,
        "prompt_eval_count": 7, "prompt_eval_duration": 2_500_000, "eval_count": 3, "eval_duration": 6_000_000,
    }  # fmt: skip
    late = end_of(
        {**DONE, "finish_reason": "timeout", "timings": {"queue_ms": 9.0, "ttft_ms": None, "duration_ms": 9.0}}
    )
    assert (late["done_reason"], late["prompt_eval_duration"], late["eval_duration"]) == ("length", 0, 0)
    assert end_of({**DONE, "timings": {}})["total_duration"] == 0


@pytest.mark.parametrize(
    ("arguments", "partial", "expected"),
    [
        ("{}", False, {}),
        ('{"a": [1, {"b": 2', True, {"a": [1, {}]}),
        ('{"a": 1e999}', False, {"value": '{"a": 1e999}'}),
        ("[1]", False, {"value": [1]}),
    ],
)
def test_arguments_of_calls_are_always_objects(arguments: str, partial: bool, expected: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}, "partial": partial}
    [part, _] = AnswerForm(CHAT, "m").parts({**DONE, "tool_calls": [call]})
    assert part["message"]["tool_calls"][0]["function"]["arguments"] == expected


def test_stream_line_contains_no_other_line_separators() -> None:
    text = "a\nb\x85c\u2028d\u2029e\x0bf\x1cg"
    line = json_line({"response": text}).decode()
    assert line.splitlines() == [line[:-1]]
    assert json.loads(line) == {"response": text}


def test_models_are_described_in_ollamas_format() -> None:
    use = {"weights_bytes": 5, "kv_bytes": 2, "compute_bytes": 1, "mapped_bytes": 9, "saved_bytes": 9}
    view: Any = {
        "id": "tiny", "capabilities": ["chat", "embed", "generate", "rerank"], "architecture": "llama",
        "n_params": 3_900_000, "size_bytes": 7, "fingerprint": "ab", "file_type": "Q8_0", "ready_at": 0.5,
        "ctx_per_slot": 2048, "n_ctx_train": 4096, "memory": {"CPU": use, "CUDA0": use}, "memory_bytes": 16,
        "sampling": {"top_k": 3},
    }  # fmt: skip
    entry = listed(view)
    assert (entry["name"], entry["modified_at"], entry["digest"]) == (
        "tiny:latest",
        "1970-01-01T00:00:00.500000Z",
        "ab",
    )
    assert (entry["details"]["parameter_size"], entry["details"]["quantization_level"]) == ("3.9M", "Q8_0")
    assert capabilities_of(view) == ["completion", "embedding"]
    assert capabilities_of({**view, "chat_features": ["tools"]}) == ["completion", "embedding", "tools"]
    in_memory = running(view)
    assert (in_memory["size"], in_memory["size_vram"], in_memory["context_length"]) == (16, 8, 2048)
    described = shown({**view, "id": "big:7b"})
    assert described["model_info"]["llama.context_length"] == 2048
    assert [line.split() for line in described["parameters"].splitlines()] == [["num_ctx", "2048"], ["top_k", "3"]]
    assert listed({**view, "id": "big:7b"})["name"] == "big:7b"
    bare: Any = {"id": "new", "status": "ready", "source": "s", "default": False, "capabilities": []}
    for describe in (listed, running, shown):
        json.dumps(describe(bare))


def test_parameter_count_is_shown_with_a_unit() -> None:
    assert [size_text(number) for number in (0, 999, 4_200, 7_241_000_000, 10**12)] == [
        "0", "999", "4.2K", "7.2B", "1.0T",
    ]  # fmt: skip
