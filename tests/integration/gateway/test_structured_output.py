"""Test output formats at every endpoint: how strictly they are enforced, and where warnings appear."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai as errors
import pytest
from anthropic import Anthropic
from openai import OpenAI

from cellama.api.http.running import WARNINGS

from ...gateways import GatewayProcess
from .conftest import CHAT
from .test_batches import create_batch, ended, lines_of, request

TAGS = {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"tags": {**TAGS, "uniqueItems": True}},  # no grammar can express uniqueItems
    "required": ["tags"],
    "additionalProperties": False,
}
LENIENT: Any = {"type": "json_schema", "json_schema": {"name": "tags", "schema": SCHEMA}}
STRICT: Any = {"type": "json_schema", "json_schema": {"name": "tags", "schema": SCHEMA, "strict": True}}
JSON: Any = {**CHAT, "max_tokens": 60}
REQUEST: Any = {"model": "tiny", "input": "Hi", "temperature": 0, "max_output_tokens": 60}
MESSAGE: Any = {
    "model": "tiny",
    "max_tokens": 60,
    "messages": CHAT["messages"],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}


@pytest.fixture
def anthropic(gateway: GatewayProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as made:
        yield made


def check(warnings: Any) -> None:
    (warning,) = warnings
    assert "uniqueItems" in warning
    assert "#/properties/tags" in warning


def check_text(text: str | None) -> None:
    assert json.loads(text or "").keys() == {"tags"}


def test_non_strict_format_causes_warnings(openai: OpenAI) -> None:
    raw = openai.chat.completions.with_raw_response.create(**JSON, response_format=LENIENT)
    answer = raw.parse()
    check_text(answer.choices[0].message.content)
    check((answer.model_extra or {})["warnings"])
    check(json.loads(raw.headers[WARNINGS]))


def test_strict_format_is_rejected_when_it_cannot_be_enforced(openai: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(errors.BadRequestError, match=r"response_format at #/properties/tags") as caught:
            openai.chat.completions.create(**JSON, response_format=STRICT, stream=stream)
        assert (caught.value.param, caught.value.code) == ("response_format", "invalid_json_schema")
    with pytest.raises(errors.BadRequestError) as caught:
        openai.responses.create(**REQUEST, text={"format": {**STRICT["json_schema"], "type": "json_schema"}})
    assert (caught.value.param, caught.value.code) == ("text", "invalid_json_schema")


def test_enforceable_format_causes_no_warnings(openai: OpenAI) -> None:
    whole = {**SCHEMA, "properties": {"tags": TAGS}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "tags", "schema": whole, "strict": True}}
    raw = openai.chat.completions.with_raw_response.create(**JSON, response_format=form)
    check_text(raw.parse().choices[0].message.content)
    assert WARNINGS not in raw.headers
    assert "warnings" not in raw.http_response.json()


def test_stream_contains_warnings_in_its_last_chunk(openai: OpenAI) -> None:
    chunks = list(openai.chat.completions.create(**JSON, response_format=LENIENT, stream=True))
    check_text("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    (end,) = [chunk for chunk in chunks if chunk.choices[0].finish_reason]
    check((end.model_extra or {})["warnings"])
    assert not any("warnings" in (chunk.model_extra or {}) for chunk in chunks if chunk is not end)


def test_completions_of_several_prompts_contain_each_warning_once(openai: OpenAI) -> None:
    own = {"json_schema": SCHEMA, "strict_schema": False}
    sent: Any = {"model": "tiny", "prompt": ["A", "B"], "max_tokens": 60, "temperature": 0}
    answer = openai.completions.create(**sent, extra_body=own)
    for choice in answer.choices:
        check_text(choice.text)
    check((answer.model_extra or {})["warnings"])
    with pytest.raises(errors.BadRequestError, match=r"json_schema at #/properties/tags") as caught:
        openai.completions.create(**sent, extra_body={"json_schema": SCHEMA})
    assert (caught.value.param, caught.value.code) == ("json_schema", "invalid_json_schema")


def test_response_contains_warnings_in_every_format(openai: OpenAI, gateway: GatewayProcess) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "tags", "schema": SCHEMA}}
    raw = openai.responses.with_raw_response.create(**REQUEST, text=form)
    answer = raw.parse()
    check_text(answer.output_text)
    check((answer.model_extra or {})["warnings"])
    check(json.loads(raw.headers[WARNINGS]))
    again = gateway.get(f"/v1/responses/{answer.id}")
    check(again.json()["warnings"])
    check(json.loads(again.headers[WARNINGS]))
    last = list(openai.responses.create(**REQUEST, text=form, stream=True))[-1]
    check(last.to_dict()["response"]["warnings"])  # type: ignore[index]


def test_message_format_is_not_strict_by_default_and_causes_warnings(anthropic: Anthropic) -> None:
    raw = anthropic.messages.with_raw_response.create(**MESSAGE)
    check_text(raw.parse().to_dict()["content"][0]["text"])  # type: ignore[typeddict-item]
    check(raw.http_response.json()["warnings"])
    check(json.loads(raw.headers[WARNINGS]))
    (end,) = [e for e in anthropic.messages.create(**MESSAGE, stream=True) if e.type == "message_delta"]
    check(end.to_dict()["warnings"])
    with pytest.raises(Exception, match=r"output_config\.format\.schema at #/properties/tags"):
        anthropic.messages.create(**MESSAGE, extra_body={"strict_schema": True})


def test_batch_line_contains_warnings_in_its_body(openai: OpenAI) -> None:
    lines = [request(1, max_tokens=60, response_format=LENIENT), request(2, max_tokens=60, response_format=STRICT)]
    batch = ended(openai, create_batch(openai, lines))
    (done,) = lines_of(openai, batch.output_file_id)
    check(done["response"]["body"]["warnings"])
    (failed,) = lines_of(openai, batch.error_file_id)
    assert failed["error"]["code"] == "invalid_request"


def test_json_object_may_have_a_schema(openai: OpenAI) -> None:
    form: Any = {"type": "json_object", "schema": SCHEMA}
    answer = openai.chat.completions.create(**JSON, response_format=form)
    check_text(answer.choices[0].message.content)
    check((answer.model_extra or {})["warnings"])
    with pytest.raises(errors.BadRequestError, match="its schema must be a JSON Schema") as caught:
        openai.chat.completions.create(**JSON, response_format={**form, "schema": 123})
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("own", "whole"), [({"regex": "[a-c]{3}"}, "[a-c]{3}"), ({"lark": 'start: /[0-9]{2}/ "!"'}, "[0-9]{2}!")]
)
def test_grammar_and_regex_parameters_constrain_chats_and_responses(
    openai: OpenAI, own: dict[str, str], whole: str
) -> None:
    for answer in (
        openai.chat.completions.create(**JSON, extra_body=own).choices[0].message.content,
        openai.responses.create(**REQUEST, extra_body=own).output_text,
    ):
        assert re.fullmatch(whole, answer or "")
    (name,) = own
    with pytest.raises(errors.BadRequestError, match=f"response_format and {name} can't be combined") as caught:
        openai.chat.completions.create(**JSON, response_format=LENIENT, extra_body=own)
    assert caught.value.param == "response_format"
    with pytest.raises(errors.BadRequestError) as caught:
        openai.chat.completions.create(**JSON, extra_body={name: "(" if name == "regex" else "start: ("})
    assert caught.value.param == name


def test_unenforceable_tool_is_rejected_if_strict_but_otherwise_causes_a_warning(openai: OpenAI) -> None:
    def sent(strict: bool) -> Any:
        function = {"name": "tag", "parameters": SCHEMA, "strict": strict}
        return {**JSON, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}

    with pytest.raises(errors.BadRequestError, match=r"tools.*uniqueItems") as caught:
        openai.chat.completions.create(**sent(True))
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_function_parameters")
    raw = openai.chat.completions.with_raw_response.create(**sent(False))
    assert raw.parse().choices[0].message.tool_calls
    (warning,) = json.loads(raw.headers[WARNINGS])
    assert "uniqueItems" in warning
    assert "tools.0" in warning
