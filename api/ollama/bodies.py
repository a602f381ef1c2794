"""Convert Ollama request bodies into job parameters, using the tables in `parameters`.

The functions in this module raise InvalidJob for invalid bodies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cellama.api.openai.bodies import set_parameters, unmapped_parameters
from cellama.api.openai.other_servers import put, seed_of_job, set_effort
from cellama.config import limits
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

from .conversation import messages_of
from .parameters import CHAT, EMBED, GENERATE, OPTIONS, PARAMETERS

MAX_TOP_LOGPROBS = 20  # as in Ollama's API
LEVELS = ("low", "medium", "high", "max")
_DURATION = re.compile(
    r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h)?", re.ASCII
)  # one part of a duration such as 1h30m
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)?", re.ASCII)
UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class ParsedOllamaBody:
    """A job parsed from a body.

    `params` excludes the model and the content, which is a prompt or messages. A request with empty content checks
    whether the model is loaded, which doesn't require a job. `names` maps job parameters to the caller's names.
    """

    kind: Literal["chat", "generate"]
    content: Any
    params: dict[str, Any]
    names: dict[str, str]


def parse_chat(body: Mapping[str, Any]) -> ParsedOllamaBody:
    """Parse the body of a request to /api/chat."""
    given = set_parameters(body, PARAMETERS[CHAT])
    params, names = _params(given, CHAT)
    messages = given.get("messages", [])
    if not isinstance(messages, list):
        raise InvalidJob(f"messages is {shorten(messages)}; it must be a list of messages")
    return ParsedOllamaBody(kind="chat", content=messages_of(messages), params=params, names=names)


def parse_generate(body: Mapping[str, Any], *, has_template: bool) -> ParsedOllamaBody:
    """Parse the body of a request to /api/generate. Set `has_template` if the model has a chat template."""
    given = set_parameters(body, PARAMETERS[GENERATE])
    params, names = _params(given, GENERATE)
    prompt, system, suffix = _text(given, "prompt"), _text(given, "system"), _text(given, "suffix")
    raw = given.get("raw", False)
    if not isinstance(raw, bool):
        raise InvalidJob(f"raw is {shorten(raw)}; it must be true or false")
    params.pop("suffix", None)
    if has_template and not raw and not suffix:
        turns = [{"role": "system", "content": system}] if system else []
        messages = [*turns, {"role": "user", "content": prompt}] if prompt else []
        return ParsedOllamaBody(kind="chat", content=messages, params=params, names=names)
    reason = "suffix is given" if suffix else "raw is true" if raw else "the model has no chat template"
    if system:
        raise InvalidJob(f"system is {shorten(system)}, but {reason}; put it into the prompt")
    if params.get("enable_thinking"):
        raise InvalidJob(f"think is {shorten(given['think'])}, but {reason}; leave it out")
    for name in ("enable_thinking", "template_args"):
        params.pop(name, None)
    if suffix:
        params["suffix"] = suffix
    return ParsedOllamaBody(kind="generate", content=prompt, params=params, names=names)


def parse_texts(body: Mapping[str, Any], url: str) -> tuple[Any, dict[str, Any]]:
    """Return the inputs and parameters of an embedding job.

    A request with an empty string checks whether the model is loaded.
    """
    given = set_parameters(body, PARAMETERS[url])
    params = unmapped_parameters(given, PARAMETERS[url])
    _take_keep_alive(params, given)
    texts = params.pop("texts", [])
    name = "input" if url == EMBED else "prompt"
    if not isinstance(texts, str) and (
        url != EMBED or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts)
    ):
        kinds = "a string or a list of strings" if url == EMBED else "a string"
        raise InvalidJob(f"{name} is {shorten(texts)}; it must be {kinds}")
    return texts, {"truncate": True, **params} if url == EMBED else params


def _take_keep_alive(params: dict[str, Any], given: Mapping[str, Any]) -> None:
    value = given.get("keep_alive")
    if value is not None:
        check_keep_alive(value)
        put(params, "keep_alive_s", seconds_of(value), "keep_alive")


def seconds_of(keep_alive: Any) -> float:
    """Return a valid `keep_alive` in seconds, or -1 if it is negative."""
    if isinstance(keep_alive, int | float):
        seconds = float(keep_alive)
    else:
        sign = -1 if keep_alive.startswith("-") else 1
        seconds = sign * sum(float(number) * UNIT_S[unit] for number, unit in _PART.findall(keep_alive))
    return seconds if seconds >= 0 else -1.0


def check_keep_alive(value: Any) -> None:
    """Check a duration, which is a number of seconds or a string such as 5m."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (value is None or is_number or (isinstance(value, str) and _is_duration(value))):
        raise InvalidJob(f"keep_alive is {shorten(value)}; it must be a number of seconds, or a duration such as 5m")


def unloads(keep_alive: Any) -> bool:
    """Return whether a valid `keep_alive` requests immediate unloading of the model."""
    if isinstance(keep_alive, str):
        return not any(digit in keep_alive for digit in "123456789")
    return keep_alive is not None and keep_alive == 0


def _is_duration(text: str) -> bool:
    at = 0
    while (found := _DURATION.match(text, at)) is not None:
        at = found.end()
    return at == len(text) > 0


def _params(given: Mapping[str, Any], url: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parameters of a generation job, and the caller's names for them."""
    params = unmapped_parameters(given, PARAMETERS[url])
    _take_keep_alive(params, given)
    names = _take_options(params, given.get("options", {}))
    _take_format(params, given)
    _take_think(params, given)
    _take_logprobs(params, given)
    called = {"json_schema": "format", "enable_thinking": "think", "template_args": "think", "logprobs": "top_logprobs"}
    return params, {**{name: to for name, to in called.items() if name not in given}, **names}


def _take_options(params: dict[str, Any], options: Any) -> dict[str, str]:
    """Add the options to the parameters. Return the caller's names for parameters set by options."""
    if not isinstance(options, dict):
        raise InvalidJob(f"options is {shorten(options)}; it must be an object")
    names = {}
    for option, value in options.items():
        if option not in OPTIONS:
            raise InvalidJob(
                f"unknown option {shorten(option)}; known options: {', '.join(sorted(OPTIONS))}; job parameters "
                "belong outside of options"
            )
        rule = OPTIONS[option]
        if value is None or rule.handling == "ignored" or _is_default(option, value):
            continue
        name = rule.to or option
        converted = _converted(option, value)
        if converted is None:  # a random seed
            continue
        put(params, name, converted, f"options.{option}")
        names[name] = f"options.{option}"
    return names


def _is_default(option: str, value: Any) -> bool:
    """Return whether an option's value leaves the job parameter unset."""
    return type(value) is int and option == "num_predict" and value < 0


def _converted(option: str, value: Any) -> Any:
    """Return the value of the job parameter, or None if the parameter must not be set."""
    if type(value) is int and option == "seed":
        return seed_of_job(value)
    if type(value) is int and value < 0:
        if option == "top_k":
            return 0
        if option == "repeat_last_n" and value == -1:
            return limits.MAX_LOOK_BACK
    return value


def _take_format(params: dict[str, Any], given: Mapping[str, Any]) -> None:
    value = given.get("format", "")
    if value == "":
        return
    schema = {"type": "object"} if value == "json" else value
    if not isinstance(schema, dict):
        raise InvalidJob(f"format is {shorten(value)}; it must be json or a JSON Schema object")
    put(params, "json_schema", schema, "format")
    params.setdefault("strict_schema", False)


def _take_think(params: dict[str, Any], given: Mapping[str, Any]) -> None:
    think = given.get("think")
    if think is None:
        return
    if not isinstance(think, bool) and think not in LEVELS:
        raise InvalidJob(f"think is {shorten(think)}; it must be true, false, or one of {', '.join(LEVELS)}")
    put(params, "enable_thinking", think is not False, "think")
    if isinstance(think, str):
        set_effort(params, think)


def _take_logprobs(params: dict[str, Any], given: Mapping[str, Any]) -> None:
    enabled, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if not isinstance(enabled, bool):
        raise InvalidJob(f"logprobs is {shorten(enabled)}; use true or false, and set the number with top_logprobs")
    if type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidJob(f"top_logprobs is {shorten(top)}; it must be a number from 0 to {MAX_TOP_LOGPROBS}")
    if top and not enabled:
        raise InvalidJob(f"top_logprobs is {shorten(top)}, but logprobs is not true; set logprobs: true")
    if enabled:
        params["logprobs"] = top


def _text(given: Mapping[str, Any], name: str) -> str:
    text = given.get(name, "")
    if not isinstance(text, str):
        raise InvalidJob(f"{name} is {shorten(text)}; it must be a string")
    return text
