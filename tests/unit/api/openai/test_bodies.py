"""Test the conversion of OpenAI's bodies into job parameters, and errors that name the field."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import openai.types as types
import pytest

from cellama.api.openai.bodies import params_of_body
from cellama.api.openai.parameters import CHAT, COMPLETIONS, EMBEDDINGS, PARAMETERS, callers_names, with_callers_names
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.embed import EmbedJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.payloads import parse_job

HELLO = [{"role": "user", "content": "Hi"}]
OF_OPENAI = {
    CHAT: types.chat.completion_create_params.CompletionCreateParamsBase,
    COMPLETIONS: types.completion_create_params.CompletionCreateParamsBase,
    EMBEDDINGS: types.embedding_create_params.EmbeddingCreateParams,
}


def chat(**body: Any) -> dict[str, Any]:
    return params_of_body(CHAT, {"model": "m", "messages": HELLO, **body})


@pytest.mark.parametrize("url", PARAMETERS)
def test_every_parameter_of_openai_client_has_a_rule(url: str) -> None:
    tree = ast.parse(inspect.getsource(OF_OPENAI[url]))
    known = {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert known
    assert known - {"stream"} <= PARAMETERS[url].keys()


@pytest.mark.parametrize(("url", "job"), [(CHAT, ChatJob), (COMPLETIONS, GenerateJob), (EMBEDDINGS, EmbedJob)])
def test_every_rule_maps_to_a_parameter_of_the_job(url: str, job: Any) -> None:
    for name, rule in PARAMETERS[url].items():
        if rule.handling == "unchanged" or rule.to:
            assert (rule.to or name) in job.model_fields


def test_body_is_converted_to_job_parameters() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    params = chat(
        max_completion_tokens=5, response_format=schema, logprobs=True, top_logprobs=2, seed=None, user="u", store=True,
        metadata={"a": "b"}, reasoning_effort="none", tool_choice="auto", top_k=3, modalities=["text"], functions=[],
        parallel_tool_calls=False,
    )  # fmt: skip
    assert params == {
        "model": "m", "messages": HELLO, "max_tokens": 5, "json_schema": {"type": "object"}, "logprobs": 2,
        "strict_schema": True, "enable_thinking": False, "template_args": {"reasoning_effort": "none"},
        "tool_choice": "auto", "top_k": 3, "parallel_tool_calls": False,
    }  # fmt: skip
    parse_job(ChatJob, (), (), params)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}}


@pytest.mark.parametrize(
    ("form", "schema", "strict"),
    [
        ({"type": "json_object"}, {"type": "object"}, False),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA, False),
        ({"type": "json_object", "schema": None}, {"type": "object"}, False),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, SCHEMA, False),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": None}}, SCHEMA, False),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}, SCHEMA, False),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}, SCHEMA, True),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": True}}, True, False),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, {"type": "object"}, False),
    ],
)
def test_response_format_sets_schema_and_strictness(form: dict[str, Any], schema: Any, strict: bool) -> None:
    params = chat(response_format=form)
    assert (params["json_schema"], params["strict_schema"]) == (schema, strict)
    assert chat(response_format=form, strict_schema=not strict)["strict_schema"] is not strict


def test_grammar_and_regex_are_passed_to_the_job() -> None:
    for own in ({"regex": "[a-z]+"}, {"lark": "start: /[a-z]+/"}, {"json_schema": SCHEMA, "strict_schema": False}):
        assert chat(**own) == {"model": "m", "messages": HELLO, **own}
        parse_job(ChatJob, (), (), chat(**own))


def test_message_returned_by_openai_client_is_accepted() -> None:
    reply = {
        "role": "assistant", "content": "Hello", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None, "reasoning_content": "A greeting.",
    }  # fmt: skip
    turns = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *HELLO, reply, *HELLO]
    messages = chat(messages=turns)["messages"]
    assert messages[0]["role"] == "system"
    assert messages[2] == {"role": "assistant", "content": "Hello", "reasoning": "A greeting."}
    parse_job(ChatJob, (), (), {"model": "m", "messages": messages})


def test_fields_that_clients_add_to_a_reply_are_ignored() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "call_1", "type": "function", "index": 0, "function": function}
    added = {"parsed": {"x": 1}, "annotations": [{"type": "url_citation"}], "provider_specific_fields": {"x": 1}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call], **added}
    messages = chat(messages=[*HELLO, reply, {"role": "tool", "tool_call_id": "call_1", "content": "ok"}])["messages"]
    assert messages[1] == {
        "role": "assistant",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    parse_job(ChatJob, (), (), {"model": "m", "messages": messages})


def test_refusal_becomes_the_text_of_the_reply() -> None:
    part = {"type": "refusal", "refusal": "I can't."}
    replies = [{"role": "assistant", "refusal": "I can't."}, {"role": "assistant", "content": [part]}]
    for reply in replies:
        messages = chat(messages=[*HELLO, reply, *HELLO])["messages"]
        assert parse_job(ChatJob, (), (), {"model": "m", "messages": messages}).messages[1].content == "I can't."


def test_reply_with_unreadable_content_is_rejected() -> None:
    for name, value in (("audio", {"id": "a"}), ("function_call", {"name": "f"})):
        messages = chat(messages=[*HELLO, {"role": "assistant", "content": "Hi", name: value}])["messages"]
        with pytest.raises(InvalidJob, match=name):
            parse_job(ChatJob, (), (), {"model": "m", "messages": messages})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"audio": {}}, "audio is {}: answers contain only text"),
        ({"functions": [{"name": "f"}]}, "functions is"),
        ({"modalities": ["text", "audio"]}, "modalities is"),
        ({"logprobs": 3}, "logprobs is 3; use true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it must be a whole number from 0 to 20"),
        ({"top_logprobs": 3}, "top_logprobs is 3, but logprobs is not true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens is also given"),
        ({"response_format": {"type": "xml"}}, "its type must be text, json_object or json_schema"),
        ({"response_format": "json"}, "its type must be"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "its schema must be a JSON Schema"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "its schema must be a JSON Schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "its schema must be"),
        ({"response_format": {"type": "json_schema", "json_schema": {"strict": 1}}}, "its `strict` field must be"),
        ({"tool_choice": {"type": "custom"}}, "must have type function or allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "allowed_tools must have a mode (auto or required), and a list of tools",
        ),
        ({"reasoning_effort": 3}, "reasoning_effort is 3"),
        ({"messages": None}, "messages is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type is",
        ),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "models can only process text",
        ),
    ],
)
def test_unsupported_values_are_rejected_with_the_field_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        chat(**body)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "body", [{"messages": "Hi"}, {"messages": [1]}, {"messages": [{"content": 1}]}, {"tools": 1}, {"template_args": 1}]
)
def test_invalid_types_are_rejected_by_the_payload(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob):
        parse_job(ChatJob, (), (), chat(**body))


@pytest.mark.parametrize(
    ("url", "given_message", "shown", "param"),
    [
        (CHAT, "json_schema is 3: no", "response_format is 3: no", "response_format"),
        (CHAT, "json_schema at #/a: no", "response_format at #/a: no", "response_format"),
        (CHAT, "json_schema and regex are given", "response_format and regex are given", "response_format"),
        (CHAT, "regex can't be compiled: no", "regex can't be compiled: no", "regex"),
        (CHAT, "tools.f at #/a: no", "tools.f at #/a: no", "tools"),
        (EMBEDDINGS, "texts.0 is '': the text is empty", "input.0 is '': the text is empty", "input"),
        (EMBEDDINGS, "encoding is 3: no", "encoding_format is 3: no", "encoding_format"),
        (CHAT, "unknown parameter 'foo'; known", "unknown parameter 'foo'; known", "foo"),
        ("/v1/rerank", "top_n is 0: no", "top_n is 0: no", "top_n"),
        (CHAT, "the job is 9 bytes long", "the job is 9 bytes long", None),
    ],
)
def test_job_error_uses_the_openai_parameter_name(url: str, given_message: str, shown: str, param: str | None) -> None:
    assert with_callers_names(given_message, callers_names(PARAMETERS.get(url, {}), {})) == (shown, param)


def test_deeply_nested_value_is_rejected() -> None:
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(InvalidJob, match="answers contain only text"):
        params_of_body(CHAT, {"model": "m", "messages": [], "audio": deep})
