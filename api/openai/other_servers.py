"""Convert vLLM's and llama-server's parameters and values into job parameters.

The functions in this module raise InvalidJob for invalid values. The rules in `OTHER_SERVERS` (parameters.py) apply to
all endpoints that generate text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cellama.config import limits
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

from .parameters import OTHER_SERVERS, ParameterRule

UNLIMITED = limits.MAX_COUNT  # max_tokens for the rest of the context
_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "n_predict")
_SEED_BITS = 64  # OpenAI's seeds are signed integers of this size
_RANDOM_SEEDS = (-1, 2**32 - 1)  # vLLM and llama-server choose a random seed for these
_MAX_WHOLE = 2**63  # a larger number is a mistake, so its error shows the number as it was given
_REGEX_MARKS = frozenset(r"\.+*?()|[]{}^$#&-~")
_UNLIMITED_LOOK_BACK = ("repeat_last_n",)  # llama-server's -1 means the whole context
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
_HARMLESS_STRUCTURED = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def convert(given: Mapping[str, Any], rules: Mapping[str, ParameterRule]) -> dict[str, Any]:
    """Return a body's parameters with the names and values that jobs use.

    `rules` contains the endpoint's rules. Parameters with an endpoint rule keep their names. The caller must have
    removed null values.
    """
    converted = {name: _value(name, value) for name, value in given.items()}
    if converted.get("max_output_tokens") == -1:
        del converted["max_output_tokens"]
    # In the order of the table: the switch in `chat_template_kwargs` precedes `reasoning_effort`.
    for name in [name for name in OTHER_SERVERS if name in converted and name not in rules]:
        rule, value = OTHER_SERVERS[name], converted.pop(name)
        if rule.handling == "renamed":
            put(converted, rule.to, value, name)
        elif name in _READERS:
            _READERS[name](converted, value, name)
        elif rule.rejects(value):
            raise rejection(name, value, rule)
    return converted


def put(params: dict[str, Any], name: str, value: Any, callers_name: str) -> None:
    """Set a job parameter. Raises InvalidJob if a different value was given under another name."""
    if name in params and params[name] != value:
        raise InvalidJob(f"{callers_name} is {shorten(value)}, but {name} is also given; remove one of them")
    params[name] = value


def rejection(name: str, value: Any, rule: ParameterRule) -> InvalidJob:
    """Return the error for a value that a rule rejects."""
    remedy = "" if "; " in rule.note or rule.note.startswith("use ") else "; leave it out"
    return InvalidJob(f"{name} is {shorten(value)}: {rule.note}{remedy}")


def set_effort(params: dict[str, Any], effort: Any, name: str = "reasoning_effort") -> None:
    """Pass the reasoning effort to the chat template.

    The effort `none` disables thinking, and `low` and higher efforts enable it. For the effort `minimal`, the template
    decides whether to enable thinking.
    """
    if not isinstance(effort, str):
        raise InvalidJob(f"{name} is {shorten(effort)}; it must be a string such as none, low, medium or high")
    arguments = params.get("template_args", {})
    if isinstance(arguments, dict):  # else the payload reports the error
        params["template_args"] = {"reasoning_effort": effort, **arguments}
    if effort != "minimal":
        params.setdefault("enable_thinking", effort != "none")


def _value(name: str, value: Any) -> Any:
    """Convert a vLLM or llama-server value into the value that jobs use."""
    if type(value) is float and value.is_integer() and abs(value) < _MAX_WHOLE:
        value = int(value)  # clients in JavaScript or with dynamic types write 10.0
    if name == "logit_bias":
        return _biases(value)
    if type(value) is not int:
        return value
    if name == "seed":
        return seed_of_job(value)
    if value == -1 and name in _MAX_TOKENS:
        return UNLIMITED
    if value == -1 and name in _UNLIMITED_LOOK_BACK:
        return limits.MAX_LOOK_BACK
    return 0 if value == -1 and name == "top_k" else value


def seed_of_job(value: int) -> int | None:
    """Return the seed, converted to the range that jobs accept, or None for a random seed. Raises InvalidJob."""
    if value in _RANDOM_SEEDS:
        return None
    if not -(2 ** (_SEED_BITS - 1)) <= value < 2 ** (_SEED_BITS - 1):
        raise InvalidJob(f"seed is {shorten(value)}; it must be a {_SEED_BITS}-bit integer")
    return value % (limits.MAX_SEED + 1)


def _biases(value: Any) -> Any:
    """Return the biases with llama-server's `false`, which forbids a token, replaced by -inf."""
    if isinstance(value, dict):
        return {token: _bias(bias) for token, bias in value.items()}
    if isinstance(value, list):
        return [[pair[0], _bias(pair[1])] if isinstance(pair, list) and len(pair) == 2 else pair for pair in value]
    return value


def _bias(bias: Any) -> Any:
    return "-inf" if bias is False else bias


def _take_template_args(params: dict[str, Any], value: Any, name: str) -> None:
    """Merge vLLM's template arguments into `template_args`. `enable_thinking` becomes a job parameter."""
    explicit = params.get("template_args", {})
    if not isinstance(value, dict):
        raise InvalidJob(f"{name} is {shorten(value)}; it must be an object")
    if isinstance(value.get("enable_thinking"), bool):
        params.setdefault("enable_thinking", value["enable_thinking"])
        value = {key: argument for key, argument in value.items() if key != "enable_thinking"}
    if value and isinstance(explicit, dict):  # else the payload reports the error
        params["template_args"] = {**value, **explicit}


def _take_structured(params: dict[str, Any], value: Any, name: str) -> None:
    kinds = [kind for kind in _STRUCTURED if isinstance(value, dict) and value.get(kind) not in (None, False)]
    others = value.keys() - {*_STRUCTURED, *_HARMLESS_STRUCTURED} if isinstance(value, dict) else ()
    if len(kinds) != 1 or any(value[other] is not None for other in others):
        raise InvalidJob(f"{name} is {shorten(value)}; it must have exactly one of {', '.join(_STRUCTURED)}")
    _constrain(params, kinds[0], value[kinds[0]], name)


def _take_guided(params: dict[str, Any], value: Any, name: str) -> None:
    _constrain(params, name.removeprefix("guided_"), value, name)


def _constrain(params: dict[str, Any], kind: str, value: Any, name: str) -> None:
    """Set the job parameter that constrains the generated text."""
    if kind == "json_object":
        kind, value = "json", {"type": "object"}
    if kind == "json":
        put(params, "json_schema", value, name)
        params.setdefault("strict_schema", False)
    elif kind == "regex":
        put(params, "regex", value, name)
    elif kind == "choice":
        put(params, "regex", _choice(value, name), name)
    else:  # GBNF defines rules with `::=`, and Lark with a colon
        put(params, "grammar" if isinstance(value, str) and "::=" in value else "lark", value, name)


def _choice(texts: Any, name: str) -> str:
    """Return a regular expression that matches exactly these strings."""
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidJob(f"{name} is {shorten(texts)}; a choice must be a list of non-empty strings")
    return "|".join("".join("\\" + char if char in _REGEX_MARKS else char for char in text) for text in texts)


_READERS: Mapping[str, Callable[[dict[str, Any], Any, str], None]] = {
    "chat_template_kwargs": _take_template_args,
    "reasoning_effort": set_effort,
    "structured_outputs": _take_structured,
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _take_guided),
}
