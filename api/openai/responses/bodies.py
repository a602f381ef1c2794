"""Convert request bodies of `/v1/responses` into chat parameters and response fields.

The functions in this module raise InvalidJob for invalid bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellama.api.openai.bodies import (
    allow,
    num_alternatives,
    schema_of_format,
    set_parameters,
    unmapped_parameters,
)
from cellama.api.openai.other_servers import set_effort
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import check_json, shorten, valid_text
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.payloads import CONSTRAINTS

from .parameters import INCLUDABLE, RULES
from .tools import functions_of, named_function, shown_tools, warnings_of_tools

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's limits: members, characters, characters
_LOGPROBS, _ENCRYPTED = INCLUDABLE
_OUTER_LEVELS = 8  # more than a body has around a schema
_ECHOED = ("user", "safety_identifier", "prompt_cache_key")  # ignored, but repeated in the response
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


def params_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat's parameters, except the messages, the model, and parameters that only the gateway uses."""
    for name, value in body.items():
        if name != "input":
            _check_json(name, value)
    given = set_parameters(body, RULES)
    params = unmapped_parameters(given, RULES)
    params.pop("model", None)
    _take_text(params, given)
    _take_reasoning(params, given)
    _take_tools(params, given)
    _take_logprobs(params, given)
    return params


def response_fields(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response fields that repeat values from the body, or their defaults if the body omits them.

    `defaults` contains the model's default sampling parameters.
    """
    reasoning, text = _object(body, "reasoning"), _object(body, "text")
    parallel, warnings = body.get("parallel_tool_calls"), warnings_of_tools(body)
    return {
        **({"warnings": warnings} if warnings else {}),
        "instructions": instructions_of(body),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": _count(body, "max_tool_calls"),
        "metadata": metadata_of(body.get("metadata")),
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": shown_tools(body),
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": "disabled",
        **{name: _text(body, name) for name in _ECHOED},
        **{name: _first(body.get(name), defaults.get(name), _field_default(name)) for name in _SAMPLING},
    }


def _field_default(name: str) -> Any:
    return ChatJob.model_fields[name].default


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def instructions_of(body: Mapping[str, Any]) -> str | None:
    """Return the request's system message."""
    return _text(body, "instructions")


def includes_signatures(body: Mapping[str, Any]) -> bool:
    """Return whether reasoning is returned with its signature so that clients can send it back."""
    return _ENCRYPTED in _include(body)


def _include(body: Mapping[str, Any]) -> list[str]:
    include = body.get("include") or []
    if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
        raise InvalidJob(f"include is {shorten(include)}; it must be a list of names")
    return include


def _check_json(name: str, value: Any) -> None:
    """Raise InvalidJob if a value can't be stored and sent as JSON. The payload checks the depth of schemas."""
    try:
        check_json(value, around=_OUTER_LEVELS)
    except ValueError as error:
        raise InvalidJob(f"{name} is {shorten(value)}: {error}") from None


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidJob(f"{name} is {shorten(value)}; it must be a string")
    return value


def _count(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidJob(f"{name} is {shorten(value)}; it must be a whole number of at least 1")
    return value


def metadata_of(given: Any) -> dict[str, str]:
    """Return the metadata of a response or a batch, or {} if there is no metadata."""
    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > MAX_METADATA:
        raise InvalidJob(f"metadata is {shorten(given)}; it must be an object with at most {MAX_METADATA} strings")
    for name, value in given.items():
        if not _is_text(name, MAX_METADATA_KEY) or not _is_text(value, MAX_METADATA_VALUE):
            raise InvalidJob(
                f"metadata is {shorten({name: value})}; names may have at most {MAX_METADATA_KEY} characters, values "
                f"must be strings of at most {MAX_METADATA_VALUE} characters, and both must be valid Unicode"
            )
    return dict(given)


def _is_text(value: Any, max_chars: int) -> bool:
    """Return whether the value is a valid Unicode string that is not too long.

    JSON can contain a lone surrogate, but responses can't.
    """
    return isinstance(value, str) and len(value) <= max_chars and valid_text(value) == value


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidJob(f"{name} is {shorten(value)}; it must be an object")
    return value or {}


def _take_text(params: dict[str, Any], given: Mapping[str, Any]) -> None:
    text_format = _object(given, "text").get("format") or {}
    if not isinstance(text_format, dict):
        raise InvalidJob(f"text.format is {shorten(text_format)}; it must be an object with a type")
    kind = text_format.get("type")
    if kind in (None, "text"):
        return
    if other := [name for name in CONSTRAINTS if name in params]:
        raise InvalidJob(f"text is {shorten(given['text'])}, but {other[0]} is also given; remove one of them")
    if kind == "json_object" or (kind == "json_schema" and "schema" in text_format):
        params["json_schema"], strict = schema_of_format(text_format, "text")
        params.setdefault("strict_schema", strict)
    else:
        raise InvalidJob(
            f"text is {shorten(given['text'])}; the type of its format must be text, json_object, or json_schema with "
            "a schema"
        )


def _take_reasoning(params: dict[str, Any], given: Mapping[str, Any]) -> None:
    effort = _object(given, "reasoning").get("effort")
    if effort is None:
        return
    if not isinstance(effort, str):
        raise InvalidJob(
            f"reasoning is {shorten(given['reasoning'])}; its effort must be a string such as none or high"
        )
    set_effort(params, effort)


def _take_tools(params: dict[str, Any], given: Mapping[str, Any]) -> None:
    functions, choice = functions_of(given), given.get("tool_choice")
    if functions:
        params["tools"] = functions
    if isinstance(choice, str):
        params["tool_choice"] = choice
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allow(params, choice, choice, named_function)
    elif isinstance(choice, dict) and choice.get("type") == "function":
        params["tool_choice"] = {"type": "function", "function": named_function(choice)}
    elif choice is not None:
        raise InvalidJob(
            f"tool_choice is {shorten(choice)}; it must be auto, none, required, or an object of type "
            "function (with a name) or allowed_tools"
        )
    if not functions and params.get("tool_choice") in ("auto", "none"):
        del params["tool_choice"]  # it applies to tools that were ignored


def _take_logprobs(params: dict[str, Any], given: Mapping[str, Any]) -> None:
    top = given.get("top_logprobs")
    if top is not None or _LOGPROBS in _include(given):
        params["logprobs"] = 0 if top is None else num_alternatives(top)
