"""Anthropic's tools, and how they are chosen → OpenAI's form, which jobs have. Raises InvalidJob."""

from __future__ import annotations

from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NEEDLESS = ("cache_control", "eager_input_streaming", "input_examples", "type")  # what changes nothing here
_TAKEN = ("name", "description", "input_schema", "strict")
_ONLY_DIRECT = ["direct"]


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Each as a function."""
    if not isinstance(tools, list):
        raise InvalidJob(f"tools is {shorten(tools)}; it must be a list")
    return [_tool(tool, f"tools.{place}") for place, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidJob(f"{where} is {shorten(tool)}; it must be an object")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidJob(
            f"{where}.type is {shorten(kind)}: only tools of type custom are taken, which you run yourself; "
            "describe it with an input_schema"
        )
    for name, value in tool.items():
        harmless = value is None or name in (*_TAKEN, *_NEEDLESS)
        if name == "allowed_callers":
            harmless = value == _ONLY_DIRECT
        elif name == "defer_loading":
            harmless = value is False
        if not harmless:
            raise InvalidJob(f"{where}.{name} is {shorten(value)}: it is not taken; leave it out")
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidJob(f"{where}.input_schema is {shorten(tool.get('input_schema'))}; it must be a JSON Schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def choice_of(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of the job."""
    if not isinstance(choice, dict):
        raise InvalidJob(f"tool_choice is {shorten(choice)}; it must be an object with a type")
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    if alone not in (None, True, False):
        raise InvalidJob(f"tool_choice.disable_parallel_tool_use is {shorten(alone)}; it must be true or false")
    params: dict[str, Any] = {"parallel_tool_calls": False} if alone else {}
    if kind == "tool":
        name = choice.get("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise InvalidJob(f"tool_choice.name is {shorten(name)}; it must be that of one of the tools")
        return {**params, "tool_choice": {"type": "function", "function": {"name": name}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidJob(f"tool_choice.type is {shorten(kind)}; known: auto, any, tool, none")
    if kind == "any" and not tools:
        raise InvalidJob("tool_choice.type is any, and there are no tools; give some")
    return {**params, "tool_choice": _CHOICES[kind]}
