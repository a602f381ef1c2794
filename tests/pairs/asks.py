"""Requests and expectations that the tables of pairs have in common."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from typing import Any

from . import ABSENT, Ask, Expected

TINY = {"model": "tiny", "temperature": 0}
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="


def complete(prompt: Any = "I believe the meaning of life is", **more: Any) -> Ask:
    """Ask for 8 tokens, even if the model would stop before."""
    return Ask("/v1/completions", {**TINY, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more})


def chat(messages: Any = BOOK, **more: Any) -> Ask:
    return Ask("/v1/chat/completions", {**TINY, "messages": messages, "max_tokens": 8, **more})


def native(path: str, **body: Any) -> Ask:
    return Ask(path, {"model": "tiny", **body})


def message(content: Any = "Say hello", **more: Any) -> Ask:
    given = content if isinstance(content, list) and "role" in content[0] else [{"role": "user", "content": content}]
    return Ask("/v1/messages", {**TINY, "max_tokens": 12, "messages": given, **more})


def respond(**more: Any) -> Ask:
    return Ask("/v1/responses", {**TINY, "input": "Write an example", "max_output_tokens": 10, **more})


def embed(texts: Any, **more: Any) -> Ask:
    return Ask("/v1/embeddings", {"model": "tiny", "input": texts, **more})


def rank(path: str = "/rerank", **more: Any) -> Ask:
    return Ask(path, {"model": "ranks", "query": "w1 w2", **more})


def tool(name: str, argument: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def anthropic_tool(name: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string", "maxLength": 12}}, "required": [argument]}
    return {"name": name, "description": "A tool", "input_schema": schema}


def rejected(*words: str, param: str | None = None) -> Expected:
    """Expect an error that contains these words."""
    more = {} if param is None else {"error.param": param}
    return {"message": lambda text: all(word in text for word in words), "error.type": "invalid_request_error", **more}


def is_unit(vector: list[float]) -> bool:
    return abs(sum(x * x for x in vector) - 1) < 1e-3


def are_vectors(number: int) -> Expected:
    return {"data.#": number, "data.*.embedding": lambda found: all(len(vector) > 1 for vector in found)}


def unpacked(text: str) -> tuple[float, ...]:
    raw = base64.b64decode(text)
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def near(expected: list[float]) -> Any:
    return lambda found: all(abs(a - b) < 1e-3 for a, b in zip(found, expected, strict=True))


def in_order(texts: list[Any]) -> bool:
    return list(texts) == sorted(texts)


BOTH = {"with a stream": True, "without a stream": False}


def called(name: str, argument: str, is_stream: bool) -> Expected:
    """Expect one call of this tool with this argument."""

    def of_body(calls: list[Any]) -> bool:
        [call] = calls
        return call["function"]["name"] == name and argument in json.loads(call["function"]["arguments"])

    def of_events(events: list[Any]) -> bool:
        parts = [
            part for event in events for choice in event["choices"] for part in choice["delta"].get("tool_calls") or ()
        ]
        text = "".join(part["function"].get("arguments") or "" for part in parts)
        return (
            parts[0]["function"]["name"] == name
            and {part["index"] for part in parts} == {0}
            and argument in json.loads(text)
        )

    if is_stream:
        return {"events": of_events, "events.-1.choices.0.finish_reason": "tool_calls"}
    return {
        "choices.0.message.tool_calls": of_body,
        "choices.0.message.content": lambda content: not content,
        "choices.0.finish_reason": "tool_calls",
    }


def no_calls(is_stream: bool) -> Expected:
    if is_stream:
        return {
            "events": lambda events: (
                not any(choice["delta"].get("tool_calls") for event in events for choice in event["choices"])
            )
        }
    return {"choices.0.message.tool_calls": lambda calls: calls in (ABSENT, None)}
