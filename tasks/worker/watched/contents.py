"""Prompts and what was generated, as OpenTelemetry's conventions write messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cellama.engine import Completion

Part = dict[str, Any]


def asked_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """The messages of a chat, or the prompt."""
    told = {}
    if parameters.get("system") is not None:
        told["gen_ai.system_instructions"] = json.dumps(_texts(parameters["system"]))
    messages = parameters.get("messages")
    if messages is None and parameters.get("prompt") is not None:
        messages = [{"role": "user", "content": parameters["prompt"]}]
    if messages is not None:
        told["gen_ai.input.messages"] = json.dumps([_message(message) for message in messages])
    return told


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts: list[Part] = []
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif content is not None:
        parts += _texts(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        parts.append({"type": "tool_call", "id": call.get("id"), **function})
    return {"role": message.get("role"), "parts": parts}


def _texts(content: Any) -> list[Part]:
    """A text; OpenAI's parts, which have their text under another name; or token ids."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return [{"type": "text", "content": part.get("text")} for part in content]
    return [{"type": "text" if isinstance(content, str) else "tokens", "content": content}]


def told_of(completion: Completion) -> dict[str, str]:
    """What was generated."""
    messages = [_reply(part) for part in (completion, *completion.alternatives)]
    return {"gen_ai.output.messages": json.dumps(messages)}


def _reply(completion: Completion) -> dict[str, Any]:
    parts: list[Part] = []
    if completion.reasoning is not None:
        parts.append({"type": "reasoning", "content": completion.reasoning})
    if completion.text:
        parts.append({"type": "text", "content": completion.text})
    for call in completion.tool_calls:
        parts.append({"type": "tool_call", "name": call.name, "arguments": call.arguments})
    return {"role": "assistant", "parts": parts, "finish_reason": completion.finish_reason}
