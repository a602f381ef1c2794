"""Test the conversion of Ollama's bodies into job parameters, and errors that name the field."""

from __future__ import annotations

from typing import Any

import pytest
from ollama import Options
from ollama._types import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest

from cellama.api.ollama.bodies import ParsedOllamaBody, parse_chat, parse_generate, parse_texts, unloads
from cellama.api.ollama.parameters import CHAT, EMBED, EMBEDDINGS, GENERATE, OPTIONS, PARAMETERS
from cellama.api.openai.parameters import with_callers_names
from cellama.config import limits
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.embed import EmbedJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.payloads import parse_job

HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
EMPTY = {  # what Ollama's Python client sends for arguments that are not given
    GENERATE: {"prompt": "Hi", "suffix": "", "system": "", "template": "", "raw": False, "stream": False},
    CHAT: {"messages": HELLO, "tools": [], "stream": False},
}


def chat(**body: Any) -> ParsedOllamaBody:
    return parse_chat({"model": "m", "messages": HELLO, **body})


def generate(has_template: bool = True, **body: Any) -> ParsedOllamaBody:
    return parse_generate({"model": "m", "prompt": "Hi", **body}, has_template=has_template)


@pytest.mark.parametrize(
    ("url", "request_type"),
    [(CHAT, ChatRequest), (GENERATE, GenerateRequest), (EMBED, EmbedRequest), (EMBEDDINGS, EmbeddingsRequest)],
)
def test_every_parameter_of_ollamas_client_has_a_rule(url: str, request_type: Any) -> None:
    assert request_type.model_fields.keys() <= PARAMETERS[url].keys()
    assert Options.model_fields.keys() <= OPTIONS.keys()


@pytest.mark.parametrize(
    ("rules", "job"),
    [
        (PARAMETERS[CHAT], ChatJob), (PARAMETERS[GENERATE], ChatJob), (OPTIONS, GenerateJob),
        (PARAMETERS[EMBED], EmbedJob), (PARAMETERS[EMBEDDINGS], EmbedJob),
    ],
)  # fmt: skip
def test_every_rule_maps_to_a_parameter_of_the_job(rules: Any, job: Any) -> None:
    for name, rule in rules.items():
        if rule.handling == "unchanged" or rule.to:
            assert (rule.to or name) in job.model_fields


def test_chat_is_converted_to_job_parameters() -> None:
    made = chat(
        keep_alive="1h30m", format=SCHEMA, think="low", logprobs=True, top_logprobs=3, min_p=0.1,
        options={"num_predict": 5, "temperature": 0, "stop": ["END"], "num_ctx": 32768, "num_gpu": 99, "seed": 7},
    )  # fmt: skip
    assert (made.kind, made.content) == ("chat", HELLO)
    assert made.params == {
        "max_tokens": 5, "temperature": 0, "stop": ["END"], "seed": 7, "min_p": 0.1, "logprobs": 3,
        "keep_alive_s": 5400.0, "json_schema": SCHEMA, "strict_schema": False, "enable_thinking": True,
        "template_args": {"reasoning_effort": "low"},
    }  # fmt: skip
    parse_job(ChatJob, (), (), {"model": "m", "messages": made.content, **made.params})


@pytest.mark.parametrize("url", [CHAT, GENERATE])
def test_empty_arguments_from_ollamas_client_have_no_effect(url: str) -> None:
    body = {"model": "m", "format": "", "options": {"temperature": None}, **EMPTY[url], "think": None}
    del body["stream"]  # the gateway reads it
    made = parse_chat(body) if url == CHAT else parse_generate(body, has_template=True)
    assert made.content == HELLO
    assert made.params.keys() <= {"tools"}


def test_special_option_values_are_converted() -> None:
    made = chat(options={"num_predict": -1, "seed": -1, "top_k": -1, "repeat_last_n": -1})
    assert made.params == {"top_k": 0, "repeat_last_n": limits.MAX_LOOK_BACK}
    assert chat(options={"seed": 2**32 - 1}).params == {}
    assert chat(options={"seed": -7}).params == {"seed": -7 % (limits.MAX_SEED + 1)}
    assert chat(format="json").params["json_schema"] == {"type": "object"}
    assert chat(think=False).params == {"enable_thinking": False}


def test_prompt_becomes_user_message_unless_it_is_raw() -> None:
    system = {"role": "system", "content": "Be kind"}
    assert generate(system="Be kind").content == [system, *HELLO]
    for made in (generate(raw=True), generate(raw=True, think=False), generate(has_template=False)):
        assert (made.kind, made.content, made.params) == ("generate", "Hi", {})
    for options in ({"raw": True}, {"has_template": False}):
        for more in ({"system": "Be kind"}, {"think": True}):
            with pytest.raises(InvalidJob, match=rf"^{next(iter(more))} is .*(raw is true|no chat template)"):
                generate(**{**options, **more})


def test_suffix_requests_a_completion_that_fills_the_gap() -> None:
    for options in ({}, {"raw": True}, {"has_template": False}, {"prompt": ""}):
        made = generate(**{"suffix": "the end.", **options})
        assert (made.kind, made.content) == ("generate", options.get("prompt", "Hi"))
        assert made.params == {"suffix": "the end."}
    with pytest.raises(InvalidJob, match=r"^system is 'Be kind', but suffix is given"):
        generate(suffix="the end.", system="Be kind")


def test_empty_prompt_produces_no_content() -> None:
    for made in (generate(prompt=""), generate(prompt="", raw=True), generate(prompt=None), chat(messages=[])):
        assert not made.content
    assert parse_texts({"input": ""}, EMBED) == ("", {"truncate": True})
    assert [value for value in (0, "0", "0s", -1, "5m", "10", None) if unloads(value)] == [0, "0", "0s"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"options": []}, r"options is \[\]; it must be an object"),
        ({"options": {"stream": True}}, r"unknown option 'stream'; known options: .*job parameters belong outside"),
        ({"options": {"num_predict": 5}, "max_tokens": 6}, r"options\.num_predict is 5, but max_tokens is also given"),
        ({"format": "xml"}, r"format is 'xml'; it must be json or a JSON Schema"),
        ({"format": SCHEMA, "json_schema": {}}, r"format is .* but json_schema is also given"),
        ({"think": "hard"}, r"think is 'hard'; it must be true, false, or one of low, medium, high, max"),
        ({"think": 1.5}, r"think is 1\.5"),
        ({"keep_alive": "soon"}, r"keep_alive is 'soon'; it must be a number of seconds, or a duration"),
        ({"keep_alive": True}, r"keep_alive is True"),
        ({"top_logprobs": 3}, r"top_logprobs is 3, but logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 21}, r"top_logprobs is 21; it must be a number from 0 to 20"),
        ({"logprobs": 5}, r"logprobs is 5; use true or false"),
        ({"truncate": True}, r"truncate is True: a prompt that is too long"),
        ({"priority": 0}, r"priority is 0: use `service_tier`"),
        ({"n": 2}, r"n is 2"),
        ({"messages": "Hi"}, r"messages is 'Hi'; it must be a list"),
        ({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, r"messages\.0\.images is .*text"),
    ],
)  # fmt: skip
def test_invalid_chat_is_rejected_with_the_field_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=f"^{message}"):
        chat(**body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"template": "{{ .Prompt }}"}, r"template is .*set `raw`"),
        ({"context": [1, 2]}, r"context is \[1, 2\]: it is deprecated; send the conversation to `/api/chat`"),
        ({"images": ["aGk="]}, r"images is .*models can only process text"),
        ({"messages": HELLO}, r"messages is .*use `/api/chat`"),
        ({"prompt": [1]}, r"prompt is \[1\]; it must be a string"),
        ({"system": 3}, r"system is 3; it must be a string"),
        ({"raw": "yes"}, r"raw is 'yes'; it must be true or false"),
        ({"width": 64}, r"width is 64: models can only generate text"),
    ],
)
def test_invalid_completion_is_rejected_with_the_field_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=f"^{message}"):
        generate(**body)


@pytest.mark.parametrize("value", [3, {}, [1], [["a"]], True])
def test_invalid_input_to_embed_is_rejected_with_the_field_name(value: Any) -> None:
    with pytest.raises(InvalidJob, match=r"^input is .*it must be a string or a list of strings"):
        parse_texts({"input": value}, EMBED)
    with pytest.raises(InvalidJob, match=r"^prompt is .*it must be a string"):
        parse_texts({"prompt": value}, EMBEDDINGS)


def test_job_errors_name_the_ollama_option() -> None:
    made = chat(options={"temperature": "hot"}, format={"type": "objekt"})
    with pytest.raises(InvalidJob) as raised:
        parse_job(ChatJob, (), (), {"model": "m", "messages": made.content, **made.params})
    message, name = with_callers_names(str(raised.value), made.names)
    assert (message[:25], name) == ("options.temperature is 'h", "options.temperature")
    assert with_callers_names("json_schema at #: wrong", made.names)[1] == "format"
