"""The cases of the Open Responses compliance suite, and the fields that its schema requires.

The suite runs in JavaScript and judges a capable model. Here, the bundled model is made to call the tool, and the case
with an image is left out, because models read text only. Events of reasoning have the names that OpenAI's clients know.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ...conftest import PATIENCE_S
from ...gateways import GatewayProcess

NULL = type(None)
RESPONSE: dict[str, Any] = {
    **dict.fromkeys(("id", "object", "status", "model", "truncation", "service_tier"), str),
    **dict.fromkeys(
        ("previous_response_id", "instructions", "user", "safety_identifier", "prompt_cache_key"), (str, NULL)
    ),
    **dict.fromkeys(("created_at", "top_logprobs"), int),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), (int, NULL)),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), (int, float)),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), bool),
    **dict.fromkeys(("incomplete_details", "error", "reasoning", "usage"), (dict, NULL)),
    **dict.fromkeys(("text", "metadata"), dict),
    **dict.fromkeys(("output", "tools"), list),
    "tool_choice": (str, dict),
}
USAGE = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), int),
    **dict.fromkeys(("input_tokens_details", "output_tokens_details"), dict),
}
ITEMS = {
    "message": {"id": str, "status": str, "role": str, "content": list},
    "reasoning": {"id": str, "summary": list, "content": list},
    "function_call": {"id": str, "status": str, "call_id": str, "name": str, "arguments": str},
}
PART = {"type": str, "text": str, "annotations": list, "logprobs": list}
PLACE = {"item_id": str, "output_index": int}
EVENTS: dict[str, dict[str, Any]] = {
    **{key: {"response": dict} for key in ("created", "in_progress", "completed")},
    **{key: {"output_index": int, "item": dict} for key in ("output_item.added", "output_item.done")},
    **{key: {**PLACE, "content_index": int, "part": dict} for key in ("content_part.added", "content_part.done")},
    "output_text.delta": {**PLACE, "content_index": int, "delta": str, "logprobs": list},
    "output_text.done": {**PLACE, "content_index": int, "text": str, "logprobs": list},
    "reasoning_text.delta": {**PLACE, "content_index": int, "delta": str},
    "reasoning_text.done": {**PLACE, "content_index": int, "text": str},
    "function_call_arguments.delta": {**PLACE, "delta": str},
    "function_call_arguments.done": {**PLACE, "name": str, "arguments": str},
}


def message(role: str, content: str) -> dict[str, str]:
    return {"type": "message", "role": role, "content": content}


WEATHER = {
    "input": [message("user", "What's the weather like in San Francisco?")],
    "tools": [
        {
            "type": "function",
            "name": "get_weather",
            "description": "Get the current weather for a location",
            "parameters": {
                "type": "object",
                "properties": {"location": {"type": "string", "maxLength": 30}},
                "required": ["location"],
            },
        }
    ],
    "tool_choice": "required",
}
CASES: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [message("user", "Say hello in exactly 3 words.")]},
    "streaming-response": {"input": [message("user", "Count from 1 to 5.")], "stream": True},
    "system-prompt": {"input": [message("system", "You are a pirate."), message("user", "Say hello.")]},
    "tool-calling": WEATHER,
    "tool-calling-streaming": {**WEATHER, "stream": True},
    "multi-turn": {
        "input": [
            message("user", "My name is Alice."),
            message("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
            message("user", "What is my name?"),
        ]
    },
}


def missing(value: dict[str, Any], required: dict[str, Any]) -> list[str]:
    """Return the names of required fields that are missing or have the wrong type."""
    return [name for name, kind in required.items() if name not in value or not isinstance(value[name], kind)]


def check_response(response: dict[str, Any]) -> None:
    assert missing(response, RESPONSE) == []
    for item in response["output"]:
        assert missing(item, ITEMS[item["type"]]) == []
        for part in item.get("content", ()):
            assert missing(part, PART if part["type"] == "output_text" else {"type": str, "text": str}) == []


@pytest.mark.parametrize("case", CASES)
def test_response_has_every_field_that_open_responses_requires(gateway: GatewayProcess, case: str) -> None:
    body = {"model": "tiny", "temperature": 0, "seed": 1, **CASES[case]}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line[:5] == "data:"]
        for event in events:
            kind = event["type"].removeprefix("response.")
            assert missing(event, {"sequence_number": int, **EVENTS[kind]}) == [], kind
            if "response" in event:
                check_response(event["response"])
        kinds = {event["type"].removeprefix("response.") for event in events}
        wanted = "function_call_arguments" if "tools" in body else "output_text"
        assert {f"{wanted}.delta", f"{wanted}.done", "output_item.added", "output_item.done"} <= kinds
        response = events[-1]["response"]
    else:
        response = answer.json()
    check_response(response)
    assert response["status"] == "completed"
    assert missing(response["usage"], USAGE) == []
    kinds = {item["type"] for item in response["output"]} - {"reasoning"}
    assert kinds == {"function_call" if "tools" in body else "message"}


def test_response_shows_sampling_parameters_of_the_request_and_the_model(gateway: GatewayProcess) -> None:
    body = {"model": "tiny", "input": "Hi", "max_output_tokens": 1, "top_p": 0.5, "presence_penalty": 0.25}
    body |= {"max_tool_calls": 3, "safety_identifier": "s", "prompt_cache_key": "p"}
    shown = httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=PATIENCE_S).json()
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tool_calls")
    assert [shown[name] for name in names] == [0.8, 0.5, 0.25, 0.0, 3]
    assert (shown["safety_identifier"], shown["prompt_cache_key"], shown["user"]) == ("s", "p", None)
