"""Bodies of OpenAI's requests → parameters of jobs, as `parameters` says. Raises InvalidJob."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

from .parameters import CHAT, CONTENT, PARAMETERS, ParameterRule

_ASSISTANTS_EMPTY = ("annotations", "audio", "function_call", "refusal")  # OpenAI's client sends them back


def params_of_body(url: Any, body: Any) -> dict[str, Any]:
    """The parameters of a job that does not stream, with the model among them."""
    if url not in PARAMETERS:
        raise InvalidJob(f"url is {url!r}; known: {', '.join(PARAMETERS)}")
    if not isinstance(body, dict):
        raise InvalidJob(f"body is {type(body).__name__}, not an object")
    if body.get(CONTENT[url]) is None:
        raise InvalidJob(f"{CONTENT[url]} is missing")
    if body.get("stream"):
        raise InvalidJob("body.stream is true; a bulk run does not stream: leave it out")
    given = given_of(body, PARAMETERS[url])
    params = taken_of(given, PARAMETERS[url])
    for read in _READERS:
        read(params, given, url)
    return params


def given_of(body: Mapping[str, Any], rules: Mapping[str, ParameterRule]) -> dict[str, Any]:
    """Return the parameters of a body that are not null. Raises InvalidJob for one that is refused."""
    given = {str(name): value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in rules and rules[name].refuses(value):
            raise InvalidJob(f"{name} is {shorten(value)}: {rules[name].note}; leave it out")
    return given


def taken_of(given: Mapping[str, Any], rules: Mapping[str, ParameterRule]) -> dict[str, Any]:
    """Return the job's parameters that a body gives as they are, or under another name. Raises InvalidJob for one that
    it gives twice."""
    params = {name: value for name, value in given.items() if name not in rules or rules[name].fate == "as it is"}
    for name, value in given.items():
        if name in rules and rules[name].fate == "renamed":
            put(params, rules[name].to, value, name)
    return params


def put(params: dict[str, Any], name: str, value: Any, callers_name: str) -> None:
    """Set a parameter of the job. Raises InvalidJob if the body gives it another value by another name."""
    if name in params and params[name] != value:
        raise InvalidJob(f"{callers_name} is {shorten(value)}: {name} is given, too; leave one out")
    params[name] = value


def _take_messages(params: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    if url == CHAT:
        messages = given["messages"]
        params["messages"] = list(map(_message, range(len(messages)), messages)) if type(messages) is list else messages


def _message(place: int, message: Any) -> Any:
    """A message as payloads have it. What is no object they refuse."""
    if not isinstance(message, dict):
        return message
    kept = {name: value for name, value in message.items() if value is not None}
    if kept.get("role") == "developer":
        kept["role"] = "system"
    if kept.get("role") == "assistant":
        for name in _ASSISTANTS_EMPTY:
            if not kept.get(name):
                kept.pop(name, None)
    if "reasoning_content" in kept:
        kept["reasoning"] = kept.pop("reasoning_content")
    content = kept.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") != "text":
            raise InvalidJob(
                f"messages.{place}.content.{number}.type is {shorten(part.get('type'))}: models read text only; "
                "images, audio and files can't be sent"
            )
    return kept


def _take_response_format(params: dict[str, Any], given: Mapping[str, Any], _: str) -> None:
    wanted = given.get("response_format")
    if wanted is None or wanted == {"type": "text"}:
        return
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        form = wanted
    elif kind == "json_schema" and isinstance(wanted.get("json_schema"), dict):
        form = wanted["json_schema"]
    else:
        raise InvalidJob(f"response_format is {shorten(wanted)}; its type must be text, json_object or json_schema")
    schema, strict = schema_of_form(form, "response_format")
    put(params, "json_schema", schema, "response_format")
    params.setdefault("strict_schema", strict)


def schema_of_form(form: Mapping[str, Any], name: str) -> tuple[dict[str, Any] | bool, bool]:
    """Return the schema of a `response_format` or `text.format`, the parameter `name`, and whether all of it must be
    enforced. Raises InvalidJob."""
    schema, strict = form.get("schema"), form.get("strict")
    if schema is not None and not isinstance(schema, dict | bool):
        raise InvalidJob(f"{name} is {shorten(form)}: its schema must be a JSON Schema, which is an object")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidJob(f"{name} is {shorten(form)}: its strict must be true or false")
    return {"type": "object"} if schema is None else schema, strict is True


def _take_logprobs(params: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    """Of a chat `logprobs` is a switch, and `top_logprobs` the number."""
    if url != CHAT:
        return
    wanted, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise InvalidJob(f"logprobs is {shorten(wanted)}: it must be true or false; top_logprobs says how many")
    if top is not None and not wanted:
        raise InvalidJob(f"top_logprobs is {shorten(top)}, and logprobs is not true; set it")
    if wanted:
        params["logprobs"] = 0 if top is None else top


def _take_tools(params: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    if url != CHAT:
        return
    choice = given.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allow(params, choice.get("allowed_tools"), choice, lambda tool: tool.get("function"))
        return
    if isinstance(choice, dict) and choice.get("type", "function") != "function":
        raise InvalidJob(
            f"tool_choice is {shorten(choice)}: an object must be of type function or allowed_tools; use one of these"
        )
    if choice is not None:
        params["tool_choice"] = choice


def allow(
    params: dict[str, Any], allowed: Any, choice: Mapping[str, Any], function_of: Callable[[dict[str, Any]], Any]
) -> None:
    """`tool_choice` of type allowed_tools: a mode, and tools, of which `function_of` says the function."""
    allowed = allowed if isinstance(allowed, dict) else {}
    mode, tools = allowed.get("mode"), allowed.get("tools")
    functions = [
        function_of(tool) if isinstance(tool, dict) and tool.get("type") == "function" else None
        for tool in (tools if isinstance(tools, list) else [])
    ]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    if mode not in ("auto", "required") or not names or not all(isinstance(name, str) for name in names):
        raise InvalidJob(
            f"tool_choice is {shorten(choice)}: allowed_tools needs a mode (auto, required) and a list of tools, each "
            "of type function with a name"
        )
    params["tool_choice"], params["allowed_tools"] = mode, names


def _take_reasoning_effort(params: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    effort = given.get("reasoning_effort")
    if url != CHAT or effort is None:
        return
    if not isinstance(effort, str):
        raise InvalidJob(f"reasoning_effort is {shorten(effort)}; it must be a text such as none, low, medium or high")
    set_effort(params, effort)


def set_effort(params: dict[str, Any], effort: str) -> None:
    """How much a model shall think, for its chat template; `none` turns thinking off."""
    arguments = params.get("template_args", {})
    if isinstance(arguments, dict):  # else the payload says what is wrong
        params["template_args"] = {"reasoning_effort": effort, **arguments}
    if effort == "none":
        params.setdefault("enable_thinking", False)


def _take_encoding(params: dict[str, Any], given: Mapping[str, Any], _: str) -> None:
    wanted = given.get("encoding_format")
    if wanted not in (None, "float", "base64"):
        raise InvalidJob(f"encoding_format is {shorten(wanted)}; it must be float or base64")
    if wanted is not None:
        put(params, "encoding", "list" if wanted == "float" else wanted, "encoding_format")


_READERS: tuple[Callable[[dict[str, Any], Mapping[str, Any], str], None], ...] = (
    _take_messages,
    _take_response_format,
    _take_logprobs,
    _take_tools,
    _take_reasoning_effort,
    _take_encoding,
)
