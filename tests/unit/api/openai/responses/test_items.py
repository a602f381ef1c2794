"""Test the conversion of items into messages, and of bodies into parameters."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from cellama.api.openai.responses.bodies import includes_signatures, params_of, response_fields
from cellama.api.openai.responses.items import items_of, messages_of
from cellama.api.openai.responses.tools import function_name
from cellama.config import limits
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.payloads import parse_job

from .journals import ID

FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def messages(given: Any) -> list[dict[str, Any]]:
    return messages_of(items_of(given, ID))


def test_text_input_becomes_a_user_message() -> None:
    assert messages("Hi") == [{"role": "user", "content": "Hi"}]
    assert items_of("Hi", ID)[0]["id"] == f"msg_{'0' * 32}_0"


def test_tool_round_trip_becomes_assistant_turn_and_results() -> None:
    given = [
        {"role": "developer", "content": "Be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
        | {"encrypted_content": "sig"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    expected = messages(given)
    assert [message["role"] for message in expected] == ["system", "user", "assistant", "tool", "tool"]
    assert {name: expected[2][name] for name in ("content", "reasoning")} == {
        "content": "I look",
        "reasoning": "Hm",
    }
    assert [call["id"] for call in expected[2]["tool_calls"]] == ["c1", "c2"]
    assert [(m["tool_call_id"], m["content"]) for m in expected[3:]] == [("c1", "sun"), ("c2", "rain")]


def test_reasoning_without_answer_is_dropped() -> None:
    hidden = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"}
    assert messages([hidden, {"role": "user", "content": "Hi"}]) == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (7, "input is 7"),
        ([], "input is a list without messages"),
        ([7], "input[0] is 7"),
        ([{"type": 7}], "input[0].type is 7"),
        ([{"type": ["message"]}], "input[0].type is"),
        ([{"type": "web_search_call"}], "input is a list without messages"),
        ([{"role": "robot", "content": ""}], "input[0].role is 'robot'"),
        ([{"role": ["user"], "content": ""}], "input[0].role is"),
        ([{"role": "user"}], "input[0].content is None"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "models can only process text"),
        ([{"role": "user", "content": [{"type": ["x"]}]}], "input[0].content[0] is"),
        ([{"role": "user", "content": [{"type": "input_text", "text": 1}]}], "input[0].content[0].text is 1"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "input[0].arguments is None"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output is None"),
        ([{"type": "reasoning", "encrypted_content": 7}], "input[0].encrypted_content is 7"),
        ([{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_1"}], "send the item itself"),
        ([{"role": "user", "content": "Hi"}, {"role": "user", "content": "\ud800"}], "input[1].content is '\\ud800'"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "\0"}]}], "input[0].content[0].text is"),
        ([{"role": "user", "content": "Hi", "id": "\ud800"}], "input[0].id is '\\ud800'"),
        (
            [{"role": "user", "content": "Hi", "id": "a"}, {"role": "user", "content": "Ho", "id": "a"}],
            "ids must be unique",
        ),
    ],
)
def test_invalid_items_are_rejected_with_the_field_name(given: Any, expected: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        items_of(given, ID)
    assert expected in str(raised.value)


def test_body_is_converted_to_chat_parameters() -> None:
    params = params_of(
        {
            "model": "tiny",
            "input": "Hi",
            "max_output_tokens": 5,
            "top_k": 3,
            "temperature": 0,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
            "reasoning": {"effort": "none", "summary": "auto"},
            "tools": [FUNCTION, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}],
            "tool_choice": {"type": "function", "name": "f"},
            "include": ["message.output_text.logprobs", "file_search_call.results"],
            "truncation": "disabled",
        }
    )
    assert params.pop("tools")[0]["function"] == {name: FUNCTION[name] for name in ("name", "parameters", "strict")}
    assert params == {
        "max_tokens": 5,
        "top_k": 3,
        "temperature": 0,
        "json_schema": {"type": "object"},
        "strict_schema": False,
        "template_args": {"reasoning_effort": "none"},
        "enable_thinking": False,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "logprobs": 0,
    }
    kind = next(kind for kind in KINDS.values() if kind.payload.__name__ == "ChatJob")
    assert set(params) <= set(kind.payload.model_fields)


def test_text_format_sets_schema_and_strictness() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for form, strict in (
        ({"type": "json_schema", "name": "x", "schema": schema, "strict": True}, True),
        ({"type": "json_schema", "name": "x", "schema": schema, "strict": None}, False),
        ({"type": "json_object", "schema": schema}, False),
    ):
        assert params_of({"text": {"format": form}}) == {"json_schema": schema, "strict_schema": strict}
    plain = {"json_schema": {"type": "object"}, "strict_schema": False}
    assert params_of({"text": {"format": {"type": "json_object"}}}) == plain
    assert params_of({"regex": "[a-z]+"}) == {"regex": "[a-z]+"}


def test_schema_may_be_nested_as_deeply_as_in_other_jobs() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(limits.MAX_JSON_DEPTH // 2 - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "schema": schema}
    made = params_of({"tools": [{**FUNCTION, "parameters": schema}], "text": {"format": form}})
    parse_job(ChatJob, (), (), {"model": "m", "messages": messages("Hi"), **made})
    deeper = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidJob, match="nested more than"):
        parse_job(ChatJob, (), (), {"model": "m", "messages": messages("Hi"), **made, "json_schema": deeper})


NAMESPACE: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents",
    "tools": [{**FUNCTION, "name": "close"}, {"type": "custom", "name": "c"}],
}


def test_functions_in_namespaces_are_offered_under_joined_names() -> None:
    body = {"tools": [FUNCTION, NAMESPACE, {"type": "web_search"}, {"type": "web_search"}]}
    assert [tool["function"]["name"] for tool in params_of(body)["tools"]] == ["f", "agents__close"]
    fields = response_fields(body, {})
    assert [tool["name"] for tool in fields["tools"]] == ["f", "agents"]
    assert [tool["name"] for tool in fields["tools"][1]["tools"]] == ["close"]
    assert [warning[:30] for warning in fields["warnings"]] == [
        "tools: 2 of type 'web_search' ",
        "tools: 1 of type 'custom' skip",
    ]
    assert "warnings" not in response_fields({"tools": [FUNCTION, {**NAMESPACE, "tools": []}]}, {})


def test_allowed_tools_may_name_functions_in_namespaces() -> None:
    named = [{"type": "function", "name": "f"}, {"type": "function", "namespace": "agents", "name": "close"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": named}
    params = params_of({"tools": [FUNCTION, NAMESPACE], "tool_choice": choice})
    assert (params["tool_choice"], params["allowed_tools"]) == ("required", ["f", "agents__close"])


def test_deferred_functions_are_offered_immediately() -> None:
    deferred = {**FUNCTION, "defer_loading": True}
    tools = [deferred, {**NAMESPACE, "tools": [{**deferred, "name": "close"}]}, {"type": "tool_search"}]
    body = {"tools": tools}
    assert [tool["function"]["name"] for tool in params_of(body)["tools"]] == ["f", "agents__close"]
    assert [warning[:30] for warning in response_fields(body, {})["warnings"]] == ["tools: 1 of type 'tool_search'"]


def test_calls_to_namespaced_functions_are_sent_back_under_joined_names() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "close", "namespace": "agents", "arguments": "{}"}
    question = {"role": "user", "content": "Close it"}
    assert items_of([question, call], ID)[1]["namespace"] == "agents"
    assert messages([question, call])[1]["tool_calls"][0]["function"]["name"] == "agents__close"


def test_long_names_of_namespaced_functions_are_shortened() -> None:
    first, second = (function_name("n" * 40, f"{'f' * 40}{i}") for i in range(2))
    assert len(first) == len(second) == 64
    assert first != second
    tools = [{**NAMESPACE, "tools": [{**FUNCTION, "name": "f" * 60}]}]
    parse_job(ChatJob, (), (), {"model": "m", "messages": messages("Hi"), **params_of({"tools": tools})})


def test_tool_choice_is_dropped_when_all_tools_are_ignored() -> None:
    assert params_of({"tools": [{"type": "web_search"}], "tool_choice": "auto"}) == {}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"truncation": "auto"}, "truncation is 'auto'"),
        ({"conversation": "c"}, "use `previous_response_id`"),
        ({"n": 2}, "n is 2"),
        ({"n": True}, "n is True"),
        ({"priority": 0}, "use `service_tier`"),
        ({"text": 7}, "text is 7"),
        ({"text": {"format": {"type": "xml"}}}, "its format must be"),
        ({"text": {"format": {"type": "json_schema", "schema": 123}}}, "text is"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}, "regex": "a"}, "regex is also given"),
        ({"text": {"format": "json"}}, "text.format is 'json'"),
        ({"text": {"format": "json_schema"}}, "text.format is 'json_schema'"),
        ({"text": {"format": {"type": "text", "name": "\ud800"}}}, "text is"),
        ({"text": {"format": {"type": "text", "name": math.nan}}}, "JSON can't represent nan"),
        ({"user": ["x"]}, "user is ['x']"),
        ({"prompt_cache_key": "\ud800"}, "prompt_cache_key is '\\ud800'"),
        ({"metadata": {"a": "\ud800"}}, "not valid UTF-8"),
        ({"colour": json.loads("[" * 500 + "]" * 500)}, "nested more than"),
        ({"text": {"format": {"type": "json_object"}}, "grammar": "root ::= x"}, "remove one of them"),
        ({"reasoning": {"effort": 3}}, "its effort must be"),
        ({"tools": [7]}, "tools is [7]"),
        ({"tools": [{**NAMESPACE, "name": ""}]}, "tools[0].name is ''"),
        ({"tools": [FUNCTION, {**NAMESPACE, "tools": [7]}]}, "tools[1].tools is [7]"),
        ({"tools": [{**NAMESPACE, "tools": [NAMESPACE]}]}, "tools[0].tools contains a namespace"),
        ({"tool_choice": {"type": "custom"}}, "or allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "allowed_tools must have a mode (auto or required), and a list of tools",
        ),
        ({"include": "x"}, "include is 'x'"),
        ({"include": [7]}, "include is [7]"),
        ({"metadata": {"a": 1}}, "metadata is"),
        ({"metadata": {str(n): "" for n in range(17)}}, "at most 16"),
        ({"instructions": ["x"]}, "instructions is"),
        ({"top_logprobs": 21}, "top_logprobs is 21; it must be a whole number from 0 to 20"),
        ({"max_tool_calls": 0}, "max_tool_calls is 0"),
    ],
)
def test_invalid_bodies_are_rejected_with_the_field_name(body: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        (params_of(body), response_fields(body, {}))
    assert expected in str(raised.value)


def test_response_fields_equal_the_body_with_defaults() -> None:
    body = {"model": "m", "tools": [FUNCTION], "metadata": {"a": "b"}, "parallel_tool_calls": False, "top_p": 0.5}
    shown = response_fields(body, {"temperature": 0.1, "top_p": 0.2})
    assert (shown["temperature"], shown["top_p"], shown["frequency_penalty"]) == (0.1, 0.5, 0.0)
    assert shown["tools"] == [{**FUNCTION, "description": None}]
    assert (shown["metadata"], shown["parallel_tool_calls"], shown["tool_choice"]) == ({"a": "b"}, False, "auto")
    assert shown["text"] == {"format": {"type": "text"}}
    assert includes_signatures({"include": ["reasoning.encrypted_content"]})
