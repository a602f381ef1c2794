"""Test the conversion of journals into numbered events, which are the same for every reader."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cellama.api.openai.responses.events import ResponseEvents, journal_of_result
from cellama.api.openai.responses.record import ResponseRecord

from .journals import CALL, ID, JOURNALS, PROBS, REASONING, STARTED, TEXT, done, record

OPENAIS: TypeAdapter[Any] = TypeAdapter(get_args(ResponseStreamEvent)[0])


def fold(journal: Any, of: ResponseRecord | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folding = ResponseEvents(of or record())
    received = folding.start()
    for event in journal:
        received += folding.of(event)
    return received, folding.response()


def types(received: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in received]


def test_failed_response_hides_the_redis_address() -> None:
    _, response = fold([{"type": "error", "code": "redis_refused", "message": "Redis at 10.0.0.1 refuses"}])
    assert response["error"]["message"].startswith("redis_refused: Redis refuses a command permanently")


@pytest.mark.parametrize("name", JOURNALS)
@pytest.mark.parametrize("background", [False, True])
def test_events_are_numbered_and_valid_for_openai_client(name: str, background: bool) -> None:
    received, response = fold(JOURNALS[name], record(background=background))
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    assert received[-1]["response"] == response
    for event in received:
        if event["type"] != "response.cancelled":  # OpenAI's client has no class for it
            assert OPENAIS.validate_python(event).type == event["type"]
    Response.model_validate(response)


@pytest.mark.parametrize("name", ["calls", "call in pieces"])
def test_calls_to_namespaced_functions_have_both_names(name: str) -> None:
    tools = [{"type": "namespace", "name": "n", "description": "N", "tools": [{"type": "function", "name": "f"}]}]
    journal = json.loads(json.dumps(JOURNALS[name]).replace('"name": "f"', '"name": "n__f"'))
    received, response = fold(journal, record(body={"tools": tools}))
    (first, *_) = [item for item in response["output"] if item["type"] == "function_call"]
    assert (first["name"], first["namespace"]) == ("f", "n")
    assert response["tools"][0]["tools"][0]["name"] == "f"
    for event in received:
        assert OPENAIS.validate_python(event).type == event["type"]


def test_warnings_about_skipped_tools_precede_the_warnings_of_the_job() -> None:
    _, response = fold(JOURNALS["warned"], record(body={"tools": [{"type": "web_search"}]}))
    assert response["warnings"][0].startswith("tools: 1 of type 'web_search' skipped")
    assert response["warnings"][1:] == ["a"]


@pytest.mark.parametrize("name", JOURNALS)
def test_deltas_and_items_add_up_to_the_response(name: str) -> None:
    received, response = fold(JOURNALS[name], record(background=True))
    items = [event["item"] for event in received if event["type"] == "response.output_item.done"]
    assert items == response["output"]
    for place, item in enumerate(items):
        deltas = "".join(e["delta"] for e in received if e["type"].endswith(".delta") and e["output_index"] == place)
        said = item["arguments"] if item["type"] == "function_call" else "".join(p["text"] for p in item["content"])
        assert deltas == said
    assert len({item["id"] for item in items}) == len(items)


@given(st.sampled_from(sorted(JOURNALS)), st.integers(-1, 40), st.integers(0, 12))
def test_stream_resumes_after_the_last_sequence_number(name: str, after: int, cut: int) -> None:
    """A reader that has read events up to `after` from one gateway continues with another one."""
    part, _ = fold(JOURNALS[name][:cut])
    whole, _ = fold(JOURNALS[name], ResponseRecord.of_json(record().to_json()))
    read = [event for event in part if event["sequence_number"] <= after]
    last = read[-1]["sequence_number"] if read else -1
    assert read + [event for event in whole if event["sequence_number"] > last] == whole


def test_events_are_sent_in_openais_order() -> None:
    received, _ = fold((STARTED, *REASONING, *TEXT, done(tool_calls=[CALL])))
    reasoning = ["reasoning_text.delta"] * 2 + ["reasoning_text.done", "content_part.done", "output_item.done"]
    text = ["output_text.delta"] * 2 + ["output_text.done", "content_part.done", "output_item.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    begins = ["output_item.added", "content_part.added"]
    expected = ["created", "in_progress", *begins, *reasoning, *begins, *text, "output_item.added", *call, "completed"]
    assert types(received) == expected


@pytest.mark.parametrize(
    ("name", "status", "details"),
    [
        ("text", "completed", None),
        ("cut off", "incomplete", {"reason": "max_output_tokens"}),
        ("out of time", "incomplete", {"reason": "max_output_tokens"}),
        ("cancelled", "cancelled", None),
        ("failed", "failed", None),
    ],
)
def test_status_depends_on_the_finish_reason(name: str, status: str, details: Any) -> None:
    received, response = fold(JOURNALS[name])
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert types(received)[-1] == status
    assert response["completed_at"] == (1002 if status == "completed" else None)
    assert (response["error"] is None) == (status != "failed")
    cut = [item["status"] for item in response["output"]]
    assert cut == ([] if name == "out of time" else ["completed" if status == "completed" else "incomplete"])


@pytest.mark.parametrize("name", ["call in pieces", "call that an older worker ends"])
def test_call_is_streamed_in_pieces(name: str) -> None:
    received, response = fold(JOURNALS[name])
    of_call = [event for event in received if event.get("output_index") == 1]
    kinds = ["output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done"]
    assert types(of_call) == [*kinds, "output_item.done"]
    assert (of_call[0]["item"]["call_id"], of_call[0]["item"]["arguments"]) == ("c1", "")
    assert response["output"][1]["arguments"] == '{"a": 1}'


def test_call_without_streamed_pieces_is_sent_at_the_end() -> None:
    received, response = fold(JOURNALS["call that an older worker starts"])
    deltas = [event["delta"] for event in received if event["type"] == "response.function_call_arguments.delta"]
    assert deltas == [response["output"][1]["arguments"]] == ['{"a": 1}']


@pytest.mark.parametrize("name", ["call that is cut off", "failed in a call"])
def test_unfinished_call_is_incomplete(name: str) -> None:
    text, call = fold(JOURNALS[name])[1]["output"]
    assert (text["status"], call["status"], call["arguments"]) == ("completed", "incomplete", '{"a')


def test_usage_counts_reasoning_tokens() -> None:
    usage = fold(JOURNALS["reasoning"])[1]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 4, 7)
    assert usage["output_tokens_details"] == {"reasoning_tokens": 4}


def test_response_contains_the_warnings_of_its_job() -> None:
    assert fold(JOURNALS["warned"])[1]["warnings"] == ["a"]
    assert "warnings" not in fold(JOURNALS["text"])[1]


RESULTS = [
    "text",
    "warned",
    "reasoning",
    "calls",
    "text and call",
    "nothing",
    "cut off",
    "cut off in thought",
    "stopped in thought",
]


@pytest.mark.parametrize("name", RESULTS)
def test_response_is_the_same_when_it_is_built_from_the_result(name: str) -> None:
    result, params = result_of(JOURNALS[name]), {} if name == "reasoning" else {"logprobs": 0}
    _, whole = fold(JOURNALS[name], record(params=params, shows_signatures=True))
    _, rest = fold(journal_of_result(result), record(params=params, shows_signatures=True))
    for response in (whole, rest):
        response["usage"].pop("output_tokens_details")
    assert rest == whole


def test_reasoning_logprobs_are_not_added_to_the_text() -> None:
    result = {**result_of(JOURNALS["reasoning"]), "logprobs": PROBS}
    _, rest = fold(journal_of_result(result), record(params={"logprobs": 0}))
    assert rest["output"][1]["content"][0]["logprobs"] == []


def test_signatures_are_included_on_request() -> None:
    for shown in (True, False):
        _, response = fold(JOURNALS["reasoning"], record(shows_signatures=shown))
        assert response["output"][0].get("encrypted_content") == ("sig" if shown else None)


def test_logprobs_match_the_text() -> None:
    received, response = fold(JOURNALS["text"], record(params={"logprobs": 0}))
    assert [entry["token"] for event in received if "delta" in event for entry in event["logprobs"]] == ["Hi"]
    assert response["output"][0]["content"][0]["logprobs"][0]["logprob"] == -0.5
    assert response["id"] == ID


def result_of(journal: Any) -> dict[str, Any]:
    """Return the result that a worker makes of the same output."""
    end, message = journal[-1], {"role": "assistant"}
    of = {kind: "".join(e["text"] for e in journal if e["type"] == kind) for kind in ("token", "reasoning")}
    message["content"] = of["token"]
    if of["reasoning"]:
        message |= {"reasoning": of["reasoning"], "signature": "sig"}
    calls = {"tool_calls": end["tool_calls"]} if "tool_calls" in end else {}
    probs = [entry for event in journal for entry in event.get("logprobs", ())]
    rest = {name: end[name] for name in ("finish_reason", "usage", "timings", "finish_key", "warnings") if name in end}
    rest["stop_sequence"] = end.get("stop_sequence")
    return {"message": {**message, **calls}, **rest, **({"logprobs": probs} if probs else {})}
