"""Convert a body's tools into functions, including the functions in tools of type `namespace`.

Chat templates support only functions, so a function in a namespace is offered to the model as `NAMESPACE__NAME`. When
clients receive calls to this function and send them back, the two parts of the name are in the fields `namespace` and
`name`. The functions in this module raise InvalidJob for invalid tools.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

SEPARATOR = "__"
MAX_NAME_CHARS = 64  # of functions in jobs
_DIGEST_CHARS = 8  # they replace the end of a longer name
_MEMBERS = ("name", "description", "parameters", "strict")


def function_name(namespace: str | None, name: str) -> str:
    """Return the function name that the model uses."""
    if not namespace:
        return name
    joined = f"{namespace}{SEPARATOR}{name}"
    if len(joined) <= MAX_NAME_CHARS:
        return joined
    digest = hashlib.sha256(joined.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{joined[: MAX_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


def named_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name of the function in a `tool_choice`, in the format that chats expect."""
    name, namespace = tool.get("name"), tool.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        return {"name": function_name(namespace, name)}
    return {"name": name}


def functions_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions in a body's tools, in the format that chats expect."""
    return [
        {
            "type": "function",
            "function": {
                **{member: tool[member] for member in _MEMBERS if tool.get(member) is not None},
                **({"name": function_name(namespace, str(tool.get("name")))} if namespace else {}),
            },
        }
        for namespace, tool in _functions(body)
    ]


def shown_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools that a response repeats, without skipped tools."""
    return [
        {
            "type": "namespace",
            "name": tool["name"],
            "description": tool.get("description"),
            "tools": [_shown(inner) for inner in tool["tools"] if _is_function(inner)],
        }
        if _is_namespace(tool)
        else _shown(tool)
        for tool in _tools(body)
        if _is_namespace(tool) or _is_function(tool)
    ]


def warnings_of_tools(body: Mapping[str, Any]) -> list[str]:
    """Return one warning for each type of skipped tool."""
    inner = (tool for namespace in _tools(body) if _is_namespace(namespace) for tool in namespace["tools"])
    skipped = [
        str(tool.get("type")) for tool in [*_tools(body), *inner] if not (_is_function(tool) or _is_namespace(tool))
    ]
    return [
        f"tools: {skipped.count(kind)} of type {shorten(kind)} skipped, because the gateway does not run tools; the "
        "model only sees tools of type function and namespace"
        for kind in dict.fromkeys(skipped)
    ]


def names_of(shown: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the `namespace` and `name` of each function in a namespace, keyed by the name that the model uses.

    `shown` contains the tools that a response repeats.
    """
    return {
        function_name(tool["name"], inner["name"]): {"namespace": tool["name"], "name": inner["name"]}
        for tool in shown
        if _is_namespace(tool)
        for inner in tool["tools"]
    }


def _functions(body: Mapping[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield each function with its namespace."""
    for tool in _tools(body):
        if _is_namespace(tool):
            yield from ((tool["name"], inner) for inner in tool["tools"] if _is_function(inner))
        elif _is_function(tool):
            yield None, tool


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidJob(f"tools is {shorten(tools)}; it must be a list of objects")
    for index, tool in enumerate(tools):
        if _is_namespace(tool):
            _check_namespace(f"tools[{index}]", tool)
    return tools


def _check_namespace(where: str, tool: Mapping[str, Any]) -> None:
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise InvalidJob(f"{where}.name is {shorten(name)}; a namespace must have a name")
    if not isinstance(inner, list) or not all(isinstance(each, dict) and each.get("type") for each in inner):
        raise InvalidJob(f"{where}.tools is {shorten(inner)}; it must be a list of objects with a type")
    if any(_is_namespace(each) for each in inner):
        raise InvalidJob(f"{where}.tools contains a namespace; a namespace can contain only functions")


def _is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "function"


def _is_namespace(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "namespace"


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", **{member: tool.get(member) for member in _MEMBERS}}
