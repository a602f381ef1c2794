"""Messages as chat templates expect them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cellama.engine.errors import InvalidRequest


def for_template(message: Any, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """A message as templates expect it: text, not nothing; arguments as an object, or as JSON; thoughts under their
    usual names. Raises InvalidRequest."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"a message is {type(message).__name__}; it must be an object with role and content")
    known = {name: value for name, value in message.items() if value is not None and name != "signature"}
    known.setdefault("content", "")
    reasoning = known.pop("reasoning", None)
    if reasoning is not None:
        known["reasoning_content"] = known["thinking"] = reasoning
    if "tool_calls" in known:
        known["tool_calls"] = [_call(call, arguments_as_text) for call in known["tool_calls"]]
    return known


def _call(call: Any, arguments_as_text: bool) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequest("a tool call has no function; give it one with a name and arguments")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(
                f"the arguments of tool call {function.get('name')!r} are not valid JSON; a call that max_tokens cut "
                "can't be sent back, so leave it out"
            ) from None
    if arguments_as_text and "arguments" in function:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    kept = {name: value for name, value in call.items() if name != "partial"}
    return {"type": "function", **kept, "function": function}
