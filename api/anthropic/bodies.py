"""Convert Anthropic request bodies and tools into job parameters.

The functions in this module raise InvalidJob for invalid bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cellama.api.openai.bodies import set_parameters, unmapped_parameters
from cellama.api.openai.parameters import names_of_other_servers
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

from .conversation import messages_of
from .parameters import COUNTED, PARAMETERS

_HIDING = ("omitted", "updates")  # values of thinking.display that hide reasoning; models here write no updates
_ANTHROPIC_NAMES = {  # parameter of the job → Anthropic's name
    "stop": "stop_sequences",
    "json_schema": "output_config.format.schema",
    "template_args": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
    "enable_thinking": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """The chat parameters parsed from a body. `params` excludes the model and the messages."""

    messages: list[dict[str, Any]]
    params: dict[str, Any]
    shows_reasoning: bool


def parse_body(body: Mapping[str, Any]) -> ParsedBody:
    """Parse the body of a message request."""
    given = set_parameters(body, PARAMETERS)
    max_tokens = given.get("max_tokens")
    if type(max_tokens) is not int or max_tokens < 1:
        problem = "missing" if max_tokens is None else shorten(max_tokens)
        raise InvalidJob(f"max_tokens is {problem}; it must be an integer of at least 1")
    _check_stops(given.get("stop_sequences", []))
    unmapped = unmapped_parameters(given, PARAMETERS)
    unmapped.pop("model", None)
    mapped = _of_conversation(given) | _of_format(given)
    thinking = given.get("thinking", {})
    if thinking.get("type") == "enabled":
        mapped["thinking_budget"] = _budget(thinking, max_tokens)
    if not thinking and "enable_thinking" in unmapped:
        del mapped["enable_thinking"]  # the explicit parameter overrides the default
    if "json_schema" in mapped:
        unmapped.setdefault("strict_schema", False)
    _check_duplicates(unmapped, mapped)
    return ParsedBody(_messages(given), unmapped | mapped, thinking.get("display") not in _HIDING)


def parse_counted_body(body: Mapping[str, Any]) -> ParsedBody:
    """Parse the body of a token counting request. Only the parameters for the chat template are used."""
    for name in body:
        if name not in COUNTED:
            raise InvalidJob(f"unknown parameter {shorten(name)}; known parameters: {', '.join(COUNTED)}")
    given = set_parameters(body, PARAMETERS)
    params = _of_conversation(given)
    params.pop("parallel_tool_calls", None)
    return ParsedBody(_messages(given), params, True)


def callers_names(body: Mapping[str, Any]) -> dict[str, str]:
    """Return Anthropic's names for all job parameters that the body does not specify under the job's name."""
    names = {name: anthropic_name for name, anthropic_name in _ANTHROPIC_NAMES.items() if name not in body}
    return names | names_of_other_servers(PARAMETERS, body)


def _check_duplicates(unmapped: Mapping[str, Any], mapped: Mapping[str, Any]) -> None:
    """Raise InvalidJob if a parameter is given under both of its names.

    Template arguments that are given under both names are merged.
    """
    for name in unmapped.keys() & mapped.keys() - {"template_args"}:
        raise InvalidJob(
            f"{name} is {shorten(unmapped[name])}, but {_ANTHROPIC_NAMES[name]} is also given; remove one of them"
        )


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    return messages_of(given.get("system"), given.get("messages"))


def _check_stops(value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidJob(f"stop_sequences is {shorten(value)}; it must be a list of strings")


def _of_conversation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for the chat template, without the messages."""
    params: dict[str, Any] = {"enable_thinking": _thinks(given.get("thinking"))}
    tools = tools_of(given.get("tools", []))
    if tools:
        params["tools"] = tools
    if "tool_choice" in given:
        params |= choice_of(given["tool_choice"], tools)
    effort = _config(given).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidJob(f"output_config.effort is {shorten(effort)}; it must be a string such as low, medium or high")
    arguments = given.get("template_args", {})
    if effort is not None and isinstance(arguments, dict):
        params["template_args"] = {"reasoning_effort": effort, **arguments}
    return params


def _thinks(thinking: Any) -> bool:
    """Return whether the model should reason.

    By default, the model does not reason, because Anthropic clients read the text from the first block.
    """
    if thinking is None:
        return False
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidJob(f"thinking is {shorten(thinking)}; its type must be enabled, adaptive or disabled")
    if thinking.get("display") not in (None, "summarized", *_HIDING):
        raise InvalidJob(
            f"thinking.display is {shorten(thinking['display'])}; it must be summarized, omitted or updates"
        )
    return bool(kind != "disabled")


def _budget(thinking: Mapping[str, Any], max_tokens: int) -> int:
    budget = thinking.get("budget_tokens")
    if type(budget) is not int or not 0 < budget < max_tokens:
        raise InvalidJob(
            f"thinking.budget_tokens is {shorten(budget)}; it must be a positive number below max_tokens, "
            f"which is {max_tokens}"
        )
    return budget


def _config(given: Mapping[str, Any]) -> Mapping[str, Any]:
    config = given.get("output_config", {})
    if not isinstance(config, dict) or config.keys() - {"effort", "format"}:
        raise InvalidJob(f"output_config is {shorten(config)}; it may only contain effort and format")
    return config


def _of_format(given: Mapping[str, Any]) -> dict[str, Any]:
    output_format = _config(given).get("format")
    if output_format is None:
        return {}
    if (
        not isinstance(output_format, dict)
        or output_format.get("type") != "json_schema"
        or not isinstance(output_format.get("schema"), dict)
    ):
        raise InvalidJob(
            f"output_config.format is {shorten(output_format)}; it must have type json_schema and a schema"
        )
    return {"json_schema": output_format["schema"]}


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_IGNORED_MEMBERS = ("cache_control", "eager_input_streaming", "input_examples", "type")
_USED_MEMBERS = ("name", "description", "input_schema", "strict")
_ONLY_DIRECT = ["direct"]


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Convert Anthropic tools into job tools of type `function`."""
    if not isinstance(tools, list):
        raise InvalidJob(f"tools is {shorten(tools)}; it must be a list")
    return [_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidJob(f"{where} is {shorten(tool)}; it must be an object")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidJob(
            f"{where}.type is {shorten(kind)}, but only tools of type custom, which you run yourself, are supported; "
            "define the tool with an input_schema"
        )
    for name, value in tool.items():
        harmless = value is None or name in (*_USED_MEMBERS, *_IGNORED_MEMBERS)
        if name == "allowed_callers":
            harmless = value == _ONLY_DIRECT
        elif name == "defer_loading":
            harmless = value is False
        if not harmless:
            raise InvalidJob(f"{where}.{name} is {shorten(value)}, but it is not supported; leave it out")
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidJob(f"{where}.input_schema is {shorten(tool.get('input_schema'))}; it must be a JSON Schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def choice_of(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the job's `tool_choice` and `parallel_tool_calls`."""
    if not isinstance(choice, dict):
        raise InvalidJob(f"tool_choice is {shorten(choice)}; it must be an object with a type")
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    if alone not in (None, True, False):
        raise InvalidJob(f"tool_choice.disable_parallel_tool_use is {shorten(alone)}; it must be true or false")
    params: dict[str, Any] = {"parallel_tool_calls": False} if alone else {}
    if kind == "tool":
        name = choice.get("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise InvalidJob(f"tool_choice.name is {shorten(name)}; it must be the name of one of the tools")
        return {**params, "tool_choice": {"type": "function", "function": {"name": name}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidJob(f"tool_choice.type is {shorten(kind)}; it must be auto, any, tool or none")
    if kind == "any" and not tools:
        raise InvalidJob("tool_choice.type is any, but no tools are given; add at least one")
    return {**params, "tool_choice": _CHOICES[kind]}
