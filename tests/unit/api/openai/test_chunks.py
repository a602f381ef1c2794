"""Test the conversion of events into chunks of OpenAI's streams, and the formats of logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from cellama.api.openai.answers import body_of, bytes_of, chat_logprobs, text_logprobs
from cellama.api.openai.chunks import Chunks
from cellama.tasks.contract.shapes.results import usage_of

STARTED = {"type": "started", "model": "tiny", "prompt_tokens": 3, "worker": "w", "seed": 1}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PROBS = [
    {"token": 1, "logprob": -0.5, "top": [[1, -0.5], [2, -1.0]], "text": "a", "top_texts": ["a", "b"]},
    {"token": 3, "logprob": -0.1, "top": [], "text": "bytes:\\xe2\\x82", "top_texts": []},
]


def token(text: str, kind: str = "token", **details: Any) -> dict[str, Any]:
    return {"type": kind, "text": text, "tokens": [1], **details}


def done(reason: str = "stop", **details: Any) -> dict[str, Any]:
    return {"type": "done", "finish_reason": reason, "usage": usage_of(prompt_tokens=3, completion_tokens=4), **details}


def test_chat_stream_contains_role_reasoning_text_calls_and_usage() -> None:
    chunks = Chunks("chat", "id", "m", include_usage=True, common={"service_tier": "flex"})
    received = chunks.of(0, STARTED)
    received += chunks.of(0, token("Hm", "reasoning")) + chunks.of(
        0, {"type": "reasoning_end", "signature": "", "tokens": [2]}
    )
    received += chunks.of(0, token("Hi")) + chunks.of(0, token(""))
    received += chunks.ends(0, done(tool_calls=[CALL, {**CALL, "id": "b"}]), ())
    read = [ChatCompletionChunk.model_validate(chunk) for chunk in [*received, *chunks.usage()]]
    deltas = [chunk.choices[0].delta for chunk in read[:-1]]
    assert (deltas[0].role, deltas[0].content, read[0].model, read[0].service_tier) == ("assistant", "", "tiny", "flex")
    assert [d.model_extra.get("reasoning_content") for d in deltas] == [None, "Hm", None, None, None]  # type: ignore[union-attr]
    assert received[0]["choices"][0]["delta"]["refusal"] is None
    assert deltas[2].content == "Hi"
    assert [call.id for call in deltas[3].tool_calls or ()] == ["a", "b"]
    assert read[-2].choices[0].finish_reason == "tool_calls"
    assert read[-1].choices == []
    assert (usage := read[-1].usage) is not None
    assert usage.completion_tokens_details is not None
    assert (usage.total_tokens, usage.completion_tokens_details.reasoning_tokens) == (7, 2)


def test_calls_are_streamed_in_pieces_and_completed_at_the_end() -> None:
    chunks = Chunks("chat", "id", "m")
    pieces = [{"index": 0, "id": "a", "name": "f", "arguments": '{"x'}, {"index": 0, "arguments": '": '}]
    received = chunks.of(0, STARTED) + chunks.of(0, token("Hi", tool_call_deltas=pieces[:1]))
    received += chunks.of(0, token("", tool_call_deltas=pieces[1:]))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    received += chunks.ends(0, done(tool_calls=[call, {**call, "id": "b"}]), ())  # an older worker has ended the job
    state: Any = ChatCompletionStreamState()
    for chunk in received:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    (choice,) = state.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == ("Hi", "tool_calls")
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("a", "f", '{"x": 1}'),
        ("b", "f", '{"x": 1}'),
    ]
    fragments = [c["function"] for r in received for c in r["choices"][0]["delta"].get("tool_calls", ())]
    assert [f["arguments"] for f in fragments] == ['{"x', '": ', "1}", '{"x": 1}']


def test_choices_of_several_prompts_have_consecutive_indices() -> None:
    chunks = Chunks("generate", "id", "m", n=2)
    received = chunks.of(1, token("a")) + chunks.of(0, token("b", index=1))
    received += chunks.ends(0, done(), [{"finish_reason": "stop"}, {"finish_reason": "timeout"}])
    read = [
        Completion.construct(**chunk).choices[0] for chunk in received
    ]  # like the client, whose model allows no null
    assert [(choice.index, choice.text, choice.finish_reason) for choice in read] == [
        (2, "a", None),
        (1, "b", None),
        (0, "", "stop"),
        (1, "", "length"),
    ]


def test_logprobs_contain_the_text_and_bytes_of_each_token() -> None:
    content = chat_logprobs(PROBS)["content"]
    assert content[0] == {
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "a", "bytes": [97], "logprob": -0.5},
            {"token": "b", "bytes": [98], "logprob": -1.0},
        ],
    }
    assert content[1]["bytes"] == [0xE2, 0x82]
    assert text_logprobs(PROBS, 5) == {
        "tokens": ["a", "bytes:\\xe2\\x82"],
        "token_logprobs": [-0.5, -0.1],
        "top_logprobs": [{"a": -0.5, "b": -1.0}, {"bytes:\\xe2\\x82": -0.1}],
        "text_offset": [5, 6],
    }
    assert bytes_of("bytes:") == b"bytes:"


def test_body_is_complete_when_job_timed_out_in_queue() -> None:
    result = {"text": "", "finish_reason": "timeout", "usage": usage_of()}
    assert body_of("generate", "id", [result])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("kind", ["chat", "generate"])
def test_last_chunk_and_answer_contain_the_warnings(kind: str) -> None:
    chunks = Chunks(kind, "id", "m", include_usage=True)
    received = [*chunks.of(0, STARTED), *chunks.of(0, token("Hi")), *chunks.ends(0, done(warnings=["a", "b"]), ())]
    assert [chunk.get("warnings") for chunk in received] == [*[None] * (len(received) - 1), ["a", "b"]]
    assert received[-1]["choices"][0]["finish_reason"] == "stop"
    message = {"message": {"role": "assistant", "content": "Hi"}}
    results = [{**done(), "text": "Hi", **message, "warnings": warnings} for warnings in (["a"], ["a", "b"])]
    assert body_of(kind, "id", results)["warnings"] == ["a", "b"]
    assert "warnings" not in body_of(kind, "id", [{**done(), "text": "Hi", **message}])
