"""Test the conversion of Anthropic's bodies into job parameters, and errors that name the field."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import anthropic.types as types
import pytest

from cellama.api.anthropic.bodies import ParsedBody, callers_names, parse_body, parse_counted_body
from cellama.api.anthropic.parameters import COUNTED, PARAMETERS
from cellama.api.openai.parameters import with_callers_names
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.tokens import TemplateJob
from cellama.tasks.contract.payloads import parse_job

TOOL: dict[str, Any] = {"name": "add", "description": "Adds", "input_schema": {"type": "object", "properties": {}}}
HELLO = [{"role": "user", "content": "Hi"}]


def order(**body: Any) -> ParsedBody:
    return parse_body({"model": "m", "max_tokens": 100, "messages": HELLO, **body})


def names_of(kind: Any) -> set[str]:
    [made] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(made, ast.ClassDef)
    return {node.target.id for node in made.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]


def test_every_parameter_of_anthropic_client_has_a_rule() -> None:
    assert names_of(types.message_create_params.MessageCreateParamsBase) <= PARAMETERS.keys()
    assert names_of(types.message_count_tokens_params.MessageCountTokensParams) <= set(COUNTED)


def test_every_rule_maps_to_a_parameter_of_the_job() -> None:
    for name, rule in PARAMETERS.items():
        if rule.handling == "unchanged" or rule.to:
            assert (rule.to or name) in ChatJob.model_fields


def test_body_is_converted_to_job_parameters() -> None:
    made = order(
        system="Be kind", stop_sequences=["END"], temperature=0, top_k=3, tools=[TOOL], metadata={"user_id": "u"},
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, cache_control={"type": "ephemeral"},
        thinking={"type": "enabled", "budget_tokens": 50}, inference_geo=None, min_p=0.1,
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
    function = {"name": "add", "description": "Adds", "parameters": TOOL["input_schema"]}
    assert made.messages == [{"role": "system", "content": "Be kind"}, *HELLO]
    assert made.params == {
        "max_tokens": 100, "stop": ["END"], "temperature": 0, "top_k": 3, "min_p": 0.1, "tool_choice": "required",
        "tools": [{"type": "function", "function": function}], "parallel_tool_calls": False, "enable_thinking": True,
        "thinking_budget": 50, "template_args": {"reasoning_effort": "low"}, "json_schema": {"type": "object"},
        "strict_schema": False,
    }  # fmt: skip
    parse_job(ChatJob, (), (), {"model": "m", "messages": made.messages, **made.params})


def test_output_format_is_not_strict_by_default() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert order(output_config=form).params["strict_schema"] is False
    assert order(output_config=form, strict_schema=True).params["strict_schema"] is True
    assert "strict_schema" not in order(json_schema={}).params


def test_thinking_is_disabled_by_default() -> None:
    assert order().params["enable_thinking"] is False
    assert order(thinking={"type": "adaptive"}).params["enable_thinking"] is True
    assert order(enable_thinking=True).params["enable_thinking"] is True
    assert order(thinking={"type": "adaptive"}).shows_reasoning
    for display, is_shown in (("omitted", False), ("updates", False), ("summarized", True)):
        assert order(thinking={"type": "adaptive", "display": display}).shows_reasoning == is_shown


def test_rejected_parameters_are_accepted_with_their_default_values() -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert order(speed="standard", mcp_servers=[], context_management=keep, n=1) == order()


def test_tool_choice_must_name_an_existing_tool() -> None:
    made = order(tools=[TOOL], tool_choice={"type": "tool", "name": "add"})
    assert made.params["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert order(tools=[TOOL], tool_choice={"type": "none"}).params["tool_choice"] == "none"


def test_count_tokens_job_contains_only_template_parameters() -> None:
    made = parse_counted_body({"model": "m", "messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "auto"}})
    assert made.params.keys() == {"enable_thinking", "tools", "tool_choice"}
    parse_job(TemplateJob, (), (), {"model": "m", "messages": made.messages, **made.params})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"speed": "fast"}, "speed"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking"),
        ({"thinking_budget": 9, "thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking_budget"),
        ({"stop": ["A"], "stop_sequences": ["B"]}, "stop_sequences"),
        ({"json_schema": {}, "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "json_schema"),
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_invalid_parameter_is_rejected_with_the_field_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        order(**body)
    assert str(refused.value).startswith(f"{named} is ")


def test_missing_max_tokens_is_rejected_with_the_field_name() -> None:
    with pytest.raises(InvalidJob, match="max_tokens is missing"):
        order(max_tokens=None)


def test_count_tokens_rejects_unused_parameters() -> None:
    with pytest.raises(InvalidJob, match=r"^unknown parameter 'max_tokens'; known"):
        parse_counted_body({"model": "m", "messages": HELLO, "max_tokens": 5})


def test_payload_errors_use_anthropic_parameter_names() -> None:
    assert with_callers_names("stop is 3: …", callers_names({"stop_sequences": 3}))[0] == "stop_sequences is 3: …"
    assert with_callers_names("stop is 3: …", callers_names({"stop": 3}))[0] == "stop is 3: …"
    of_schema = with_callers_names("json_schema at #/a: …", callers_names({"output_config": {}}))[0]
    assert of_schema == "output_config.format.schema at #/a: …"
    assert with_callers_names("top_k is -1: …", callers_names({"top_k": -1}))[0] == "top_k is -1: …"
