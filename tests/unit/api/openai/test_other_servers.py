"""Test parameters and values of vLLM and llama-server, which become parameters of jobs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cellama.api.anthropic.bodies import callers_names as anthropic_names, parse_body
from cellama.api.openai.bodies import params_of_body
from cellama.api.openai.other_servers import UNLIMITED
from cellama.api.openai.parameters import CHAT, COMPLETIONS, OTHER_SERVERS, PARAMETERS, callers_names
from cellama.api.openai.responses.bodies import params_of
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.payloads import parse_job

HELLO = [{"role": "user", "content": "Hi"}]
OBJECT = {"type": "object"}
TEMPLATE = {"reasoning_effort": "low"}


def chat(**body: Any) -> dict[str, Any]:
    """Return the parameters of a chat, which its payload accepts, without the model and the messages."""
    params = params_of_body(CHAT, {"model": "m", "messages": HELLO, **body})
    parse_job(ChatJob, (), (), params)
    return {name: value for name, value in params.items() if name not in ("model", "messages")}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"typ_p": 0.5, "n_cmpl": 2}, {"typical_p": 0.5, "n": 2}),
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"n_predict": -1}, {"max_tokens": UNLIMITED}),
        ({"max_completion_tokens": -1}, {"max_tokens": UNLIMITED}),
        ({"max_tokens": 10.0, "temperature": 1.0}, {"max_tokens": 10, "temperature": 1}),
        ({"top_k": -1, "top_p": 0}, {"top_k": 0, "top_p": 0}),
        ({"repeat_last_n": -1}, {"repeat_last_n": 1 << 20}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 2**32 - 1}, {"seed": None}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -2}, {"seed": 2**32 - 3}),
        ({"seed": 2**63 - 1}, {"seed": (2**63 - 1) % (2**32 - 1)}),
        ({"logit_bias": [[3, False], [4, 1.5]]}, {"logit_bias": [[3, "-inf"], [4, 1.5]]}),
        ({"logit_bias": {"3": False}}, {"logit_bias": {"3": "-inf"}}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"a": 1, "b": 2}, "template_args": {"b": 3}}, {"template_args": {"a": 1, "b": 3}}),
        ({"reasoning_effort": "low"}, {"template_args": TEMPLATE, "enable_thinking": True}),
        ({"reasoning_effort": "minimal"}, {"template_args": {"reasoning_effort": "minimal"}}),
        ({"reasoning_effort": "none"}, {"template_args": {"reasoning_effort": "none"}, "enable_thinking": False}),
        ({"reasoning_effort": "low", "enable_thinking": False}, {"template_args": TEMPLATE, "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"template_args": TEMPLATE, "enable_thinking": False},
        ),
        ({"guided_json": OBJECT}, {"json_schema": OBJECT, "strict_schema": False}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": '{"type": "object"}', "strict_schema": False}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": OBJECT, "strict_schema": False}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"lark": 'start: "a"'}),
        ({"timings_per_token": True, "id_slot": 3, "return_progress": True}, {}),
        ({"skip_special_tokens": True, "use_beam_search": False, "bad_words": []}, {}),
    ],
)
def test_parameter_of_another_server_becomes_a_job_parameter(body: dict[str, Any], params: dict[str, Any]) -> None:
    assert chat(**body) == params


def test_choice_parameter_becomes_a_regular_expression_that_matches_only_the_choices() -> None:
    texts = ["a.b (c)", "x|y", "[1-2]+", "\\d", "~&^$#", "ü"]
    for body in ({"guided_choice": texts}, {"structured_outputs": {"choice": texts}}):
        pattern = re.compile(chat(**body)["regex"])
        assert all(pattern.fullmatch(text) for text in texts)
        assert not any(pattern.fullmatch(text) for text in ("axb (c)", "x", "y", "1", "3", ""))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be a 64-bit integer"),
        ({"structured_outputs": {"regex": "a", "json": OBJECT}}, "it must have exactly one of json, regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "it must have exactly one of json, regex"),
        ({"guided_choice": "ab"}, "guided_choice is 'ab'; a choice must be a list of non-empty strings"),
        ({"chat_template_kwargs": "{}"}, "chat_template_kwargs is '{}'; it must be an object"),
        ({"skip_special_tokens": False}, "skip_special_tokens is False: control tokens have no text; use"),
        ({"use_beam_search": True}, "use_beam_search is True: beam search is not available; leave it out"),
        ({"reasoning_format": "none"}, "reasoning_format is 'none'"),
        ({"n_predict": 3, "max_tokens": 4}, "n_predict is 3, but max_tokens is also given; remove one of them"),
        ({"guided_regex": "a", "regex": "b"}, "guided_regex is 'a', but regex is also given"),
        ({"repetition_penaltty": 1}, "did you mean 'repetition_penalty'?"),
    ],
)
def test_value_without_meaning_for_jobs_is_rejected(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        chat(**body)
    assert message in str(caught.value)


def test_job_error_uses_the_parameter_name_of_the_other_server() -> None:
    for names in (
        callers_names(PARAMETERS[CHAT], {"repetition_penalty": 500, "guided_json": {}}),
        anthropic_names({"repetition_penalty": 500, "guided_json": {}}),
    ):
        assert (names["repeat_penalty"], names["json_schema"]) == ("repetition_penalty", "guided_json")


@pytest.mark.parametrize(("url", "job"), [(CHAT, ChatJob), (COMPLETIONS, GenerateJob)])
def test_unknown_parameter_error_lists_only_accepted_parameters(url: str, job: Any) -> None:
    content = {"messages": HELLO} if url == CHAT else {"prompt": "Hi"}
    with pytest.raises(InvalidJob, match="unknown parameter 'xyzzy'; the parameters are: ") as caught:
        params_of_body(url, {"model": "m", **content, "xyzzy": 1})
    listed = str(caught.value).rpartition(": ")[2].split(", ")
    assert {"repetition_penalty", "n_predict", "top_k", "response_format", "user"} <= set(listed)
    assert not {"priority", "cache_scope", "echo", "audio", "lora", "n_probs"} & set(listed)
    for name in listed:
        rule = PARAMETERS[url].get(name) or OTHER_SERVERS.get(name)
        assert (rule is not None and rule.handling != "rejected") or name in job.model_fields


def test_rules_for_other_servers_refer_to_job_parameters() -> None:
    for name, rule in OTHER_SERVERS.items():
        assert name not in ChatJob.model_fields
        assert not rule.to or rule.to in ChatJob.model_fields
        assert rule.to or rule.handling in ("ignored", "rejected")


def test_messages_and_responses_convert_the_same_parameters() -> None:
    given = {"top_k": -1, "repetition_penalty": 1.1, "chat_template_kwargs": {"a": 1}, "guided_choice": ["a"]}
    expected = {"top_k": 0, "repeat_penalty": 1.1, "template_args": {"a": 1}, "regex": "a"}
    message = parse_body({"messages": HELLO, "max_tokens": -1, **given}).params
    assert {name: message[name] for name in expected} == expected
    assert message["max_tokens"] == UNLIMITED
    assert params_of({"input": "Hi", "max_output_tokens": -1, **given}) == expected
    assert params_of({"input": "Hi", "reasoning_effort": "low"}) == {"template_args": TEMPLATE, "enable_thinking": True}
    with pytest.raises(InvalidJob, match="n_predict is 3: use `max_output_tokens`"):
        params_of({"input": "Hi", "n_predict": 3})


def test_cache_control_of_a_tool_is_ignored() -> None:
    function = {"name": "f", "parameters": OBJECT}
    mark = {"cache_control": {"type": "ephemeral"}}
    for tool in ({"function": function, **mark}, {"function": {**function, **mark}}):
        assert chat(tools=[{"type": "function", **tool}]) == {"tools": [{"type": "function", "function": function}]}
