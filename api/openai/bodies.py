"""Convert OpenAI request bodies into job parameters, using the tables in `parameters`.

The functions in this module raise InvalidJob for invalid bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.embed import EmbedJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.payloads import BaseJob, GenerationJob, unknown_parameter

from .other_servers import convert, put, rejection, set_effort
from .parameters import CHAT, COMPLETIONS, CONTENT, EMBEDDINGS, OTHER_SERVERS, PARAMETERS, ParameterRule

MAX_TOP_LOGPROBS = 20  # as in OpenAI's API
_JOBS: Mapping[str, type[BaseJob]] = {CHAT: ChatJob, COMPLETIONS: GenerateJob, EMBEDDINGS: EmbedJob}
_REPLACED = frozenset({"priority", "cache_scope"})  # parameters of jobs that have other names at the gateway
_CONTENT_OF_REPLIES = frozenset({"role", "content", "reasoning", "signature", "tool_calls", "name"})
_NOT_READABLE = ("audio", "function_call")  # members of old or spoken replies, which carry content


def params_of_body(url: Any, body: Any, known: Iterable[str] = PARAMETERS) -> dict[str, Any]:
    """Convert a body into the parameters of a non-streaming job, including its model.

    The error for an unknown `url` lists the `known` URLs.
    """
    if url not in known:
        raise InvalidJob(f"url is {url!r}; it must be one of {', '.join(known)}")
    if not isinstance(body, dict):
        raise InvalidJob(f"body is {type(body).__name__}; it must be an object")
    if body.get(CONTENT[url]) is None:
        raise InvalidJob(f"{CONTENT[url]} is missing; add it")
    if body.get("stream"):
        raise InvalidJob("body.stream is true, but bulk runs do not support streaming; leave it out")
    given = set_parameters(body, PARAMETERS[url], _JOBS[url])
    params = unmapped_parameters(given, PARAMETERS[url])
    for read in _READERS:
        read(params, given, url)
    return params


def set_parameters(
    body: Mapping[str, Any], rules: Mapping[str, ParameterRule], job: type[BaseJob] = ChatJob
) -> dict[str, Any]:
    """Return a body's non-null parameters, with the names and values of vLLM and llama-server converted.

    `job` is the payload type of the endpoint's jobs. Raises InvalidJob if a parameter is unknown or rejected.
    """
    given = {str(name): value for name, value in body.items() if value is not None}
    for name in given:
        if not (name in rules or name in job.model_fields or _is_converted(name, job)):
            raise InvalidJob(unknown_parameter(name, _known(rules, job)))
    if issubclass(job, GenerationJob):
        given = convert(given, rules)
    for name, value in given.items():
        if name in rules and rules[name].rejects(value):
            raise rejection(name, value, rules[name])
    return given


def _is_converted(name: str, job: type[BaseJob]) -> bool:
    """Return whether the gateway can convert this vLLM or llama-server parameter for this type of job."""
    rule = OTHER_SERVERS.get(name) if issubclass(job, GenerationJob) else None
    return rule is not None and (not rule.to or rule.to in job.model_fields)


def _known(rules: Mapping[str, ParameterRule], job: type[BaseJob]) -> set[str]:
    """Return the supported parameter names. The error for an unknown parameter lists these names."""
    converted = {n for n, rule in OTHER_SERVERS.items() if rule.handling != "rejected" and _is_converted(n, job)}
    rejected = {name for name, rule in rules.items() if rule.handling == "rejected"}
    renamed = {rule.to for rule in rules.values() if rule.handling == "renamed"} - rules.keys()
    return {*rules, *converted, *job.model_fields} - rejected - renamed - _REPLACED


def unmapped_parameters(given: Mapping[str, Any], rules: Mapping[str, ParameterRule]) -> dict[str, Any]:
    """Return the parameters whose values don't need conversion, under their job parameter names.

    Raises InvalidJob for a parameter that is given under two names.
    """
    params = {name: value for name, value in given.items() if name not in rules or rules[name].handling == "unchanged"}
    for name, value in given.items():
        if name in rules and rules[name].handling == "renamed":
            put(params, rules[name].to, value, name)
    return params


def _take_messages(params: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    if url == CHAT:
        messages = given["messages"]
        params["messages"] = list(map(_message, range(len(messages)), messages)) if type(messages) is list else messages


def _message(index: int, message: Any) -> Any:
    """Convert a message. Values that are not objects are returned unchanged, because the payload rejects them."""
    if not isinstance(message, dict):
        return message
    members = {name: value for name, value in message.items() if value is not None}
    if members.get("role") == "developer":
        members["role"] = "system"
    if "reasoning_content" in members:
        members["reasoning"] = members.pop("reasoning_content")
    if members.get("role") == "assistant":
        members = _reply(members)
    content = members.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") != "text":
            raise InvalidJob(
                f"messages.{index}.content.{number}.type is {shorten(part.get('type'))}, but models can only process "
                "text; remove images, audio and files"
            )
    return members


def _reply(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply that a client sends back, without members that clients add, such as `parsed` and `annotations`.

    A refusal becomes the reply's text.
    """
    kept = {name: value for name, value in members.items() if name in _CONTENT_OF_REPLIES}
    kept |= {name: members[name] for name in _NOT_READABLE if members.get(name)}  # the payload rejects them
    if isinstance(content := kept.get("content"), list):
        kept["content"] = [_refusal_as_text(part) for part in content]
    refusal = members.get("refusal")
    if refusal and not content:
        kept["content"] = refusal
    calls = kept.pop("tool_calls", None)
    if calls:
        kept["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    return kept


def _refusal_as_text(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _call(call: Any) -> Any:
    """Return a tool call without `index`, `parsed_arguments` and other members that clients add."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = {name: value for name, value in call["function"].items() if name in ("name", "arguments")}
    return {name: call[name] for name in ("id", "type", "partial") if name in call} | {"function": function}


def _take_response_format(params: dict[str, Any], given: Mapping[str, Any], _: str) -> None:
    response_format = given.get("response_format")
    if response_format is None or response_format == {"type": "text"}:
        return
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        definition = response_format
    elif kind == "json_schema" and isinstance(response_format.get("json_schema"), dict):
        definition = response_format["json_schema"]
    else:
        raise InvalidJob(
            f"response_format is {shorten(response_format)}; its type must be text, json_object or json_schema"
        )
    schema, strict = schema_of_format(definition, "response_format")
    put(params, "json_schema", schema, "response_format")
    params.setdefault("strict_schema", strict)


def schema_of_format(definition: Mapping[str, Any], name: str) -> tuple[dict[str, Any] | bool, bool]:
    """Return the schema of a `response_format` or `text.format`, and whether the whole schema must be enforced.

    `name` is the parameter name used in error messages. Raises InvalidJob.
    """
    schema, strict = definition.get("schema"), definition.get("strict")
    if schema is not None and not isinstance(schema, dict | bool):
        raise InvalidJob(f"{name} is {shorten(definition)}; its schema must be a JSON Schema object")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidJob(f"{name} is {shorten(definition)}; its `strict` field must be true or false")
    return {"type": "object"} if schema is None else schema, strict is True


def num_alternatives(top: Any) -> int:
    """Return the value of `top_logprobs`. Raises InvalidJob if the value is invalid."""
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidJob(f"top_logprobs is {shorten(top)}; it must be a whole number from 0 to {MAX_TOP_LOGPROBS}")
    return top


def _take_logprobs(params: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    """Combine `logprobs`, which is a boolean in chats, with the number in `top_logprobs`."""
    if url != CHAT:
        return
    enabled, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(enabled, bool):
        raise InvalidJob(f"logprobs is {shorten(enabled)}; use true or false, and set the number with top_logprobs")
    if top is not None and not enabled:
        raise InvalidJob(f"top_logprobs is {shorten(top)}, but logprobs is not true; set logprobs: true")
    if enabled:
        params["logprobs"] = 0 if top is None else num_alternatives(top)


def _take_suffix(params: dict[str, Any], given: Mapping[str, Any], _: str) -> None:
    if given.get("suffix") == "":  # clients send it for a text without a gap
        del params["suffix"]


def _take_tools(params: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    if url != CHAT:
        return
    if "tools" in given:
        tools = given["tools"]
        params["tools"] = list(map(_tool, tools)) if isinstance(tools, list) else tools
    choice = given.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allow(params, choice.get("allowed_tools"), choice, lambda tool: tool.get("function"))
        return
    if isinstance(choice, dict) and choice.get("type", "function") != "function":
        raise InvalidJob(f"tool_choice is {shorten(choice)}; an object must have type function or allowed_tools")
    if choice is not None:
        params["tool_choice"] = choice


def _tool(tool: Any) -> Any:
    """Return a tool without `cache_control`, which clients of several APIs add to the tool or to its function."""
    if not isinstance(tool, dict):
        return tool
    members = {name: value for name, value in tool.items() if name != "cache_control"}
    if isinstance(members.get("function"), dict):
        members["function"] = {name: value for name, value in members["function"].items() if name != "cache_control"}
    return members


def allow(
    params: dict[str, Any], allowed: Any, choice: Mapping[str, Any], function_of: Callable[[dict[str, Any]], Any]
) -> None:
    """Set the parameters for a `tool_choice` of type `allowed_tools`, which contains a mode and tools.

    `function_of` returns a tool's function.
    """
    allowed = allowed if isinstance(allowed, dict) else {}
    mode, tools = allowed.get("mode"), allowed.get("tools")
    functions = [
        function_of(tool) if isinstance(tool, dict) and tool.get("type") == "function" else None
        for tool in (tools if isinstance(tools, list) else [])
    ]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    if mode not in ("auto", "required") or not names or not all(isinstance(name, str) for name in names):
        raise InvalidJob(
            f"tool_choice is {shorten(choice)}; allowed_tools must have a mode (auto or required), and a list of "
            "tools, each with type function and a name"
        )
    params["tool_choice"], params["allowed_tools"] = mode, names


def _take_reasoning_effort(params: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    if url == CHAT and "reasoning_effort" in given:
        set_effort(params, given["reasoning_effort"])


def _take_encoding(params: dict[str, Any], given: Mapping[str, Any], _: str) -> None:
    encoding = given.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise InvalidJob(f"encoding_format is {shorten(encoding)}; it must be float or base64")
    if encoding is not None:
        put(params, "encoding", "list" if encoding == "float" else encoding, "encoding_format")


_READERS: tuple[Callable[[dict[str, Any], Mapping[str, Any], str], None], ...] = (
    _take_messages,
    _take_response_format,
    _take_logprobs,
    _take_suffix,
    _take_tools,
    _take_reasoning_effort,
    _take_encoding,
)
