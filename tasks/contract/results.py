"""The results of jobs, as JSON objects."""

from __future__ import annotations

from typing import Any


def with_messages(result: dict[str, Any]) -> dict[str, Any]:
    """A chat's result has the assistant's message, too, in the form in which it can be sent back."""
    for choice in [result, *result.get("choices", [])]:
        if "message" in choice:
            continue
        own = {name: choice.pop(name) for name in ("reasoning", "signature", "tool_calls") if name in choice}
        choice["message"] = {"role": "assistant", "content": choice["text"], **own}
    return result
