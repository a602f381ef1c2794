"""Pairs from the compliance suite of Open Responses (openresponses.org), with the schemas that it validates.

The suite lets the model choose whether to call a tool. Our requests force the call, because the bundled model is small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from . import Ask, Difference, Expected, Pair, Table
from .asks import PIXEL

MODEL = {"model": "tiny"}
GREEDY = {**MODEL, "temperature": 0}
NUMBER, COUNT, TEXT, FLAG, LIST, OBJECT = (int, float), (int,), (str,), (bool,), (list,), (dict,)
NULL = type(None)
# Required members of a response, with their types. JSON's true and false are not numbers.
RESPONSE: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "object", "status", "model", "service_tier", "truncation"), TEXT),
    **dict.fromkeys(("created_at", "top_logprobs"), COUNT),
    **dict.fromkeys(("top_p", "temperature", "presence_penalty", "frequency_penalty"), NUMBER),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), FLAG),
    **dict.fromkeys(("output", "tools"), LIST),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), (int, NULL)),
    **dict.fromkeys(("previous_response_id", "instructions", "user"), (str, NULL)),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key"), (str, NULL)),
    **dict.fromkeys(("incomplete_details", "error", "reasoning", "usage"), (dict, NULL)),
    "tool_choice": (str, dict),
    "text": OBJECT,
    "metadata": OBJECT,
}
USAGE = dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), COUNT)
DETAILS = {"input_tokens_details": {"cached_tokens": COUNT}, "output_tokens_details": {"reasoning_tokens": COUNT}}
TOOL = {"type": TEXT, "name": TEXT, "description": (str, NULL), "parameters": (dict, NULL), "strict": (bool, NULL)}
ITEMS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "message": {"id": TEXT, "status": TEXT, "role": TEXT, "content": LIST},
    "function_call": {"id": TEXT, "call_id": TEXT, "name": TEXT, "arguments": TEXT, "status": TEXT},
    "reasoning": {"id": TEXT, "summary": LIST, "content": LIST},
}
PARTS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "output_text": {"text": TEXT, "annotations": LIST, "logprobs": LIST},
    "reasoning_text": {"text": TEXT},
}
_ITEM = {"output_index": COUNT, "item": OBJECT}
_PART = {"item_id": TEXT, "output_index": COUNT, "content_index": COUNT}
EVENTS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    **{
        f"response.{name}": {"response": OBJECT}
        for name in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
    },
    "response.output_item.added": _ITEM,
    "response.output_item.done": _ITEM,
    "response.content_part.added": {**_PART, "part": OBJECT},
    "response.content_part.done": {**_PART, "part": OBJECT},
    "response.output_text.delta": {**_PART, "delta": TEXT, "logprobs": LIST},
    "response.output_text.done": {**_PART, "text": TEXT, "logprobs": LIST},
    "response.reasoning_text.delta": {**_PART, "delta": TEXT},
    "response.reasoning_text.done": {**_PART, "text": TEXT},
    "response.function_call_arguments.delta": {"item_id": TEXT, "output_index": COUNT, "delta": TEXT},
    "response.function_call_arguments.done": {
        "item_id": TEXT,
        "output_index": COUNT,
        "name": TEXT,
        "arguments": TEXT,
    },
}


def wrong(value: Mapping[str, Any], schema: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the members that are absent or have a wrong type."""
    found = []
    for name, kinds in schema.items():
        if isinstance(kinds, Mapping):
            found += wrong(value.get(name) or {}, kinds, f"{path}{name}.")
        elif name not in value or type(value[name]) not in kinds:
            found.append(f"{path}{name} is {value.get(name, 'absent')!r:.80}")
    return found


def wrong_in_response(response: Mapping[str, Any]) -> list[str]:
    found = wrong(response, RESPONSE)
    if response.get("usage") is not None:
        found += wrong(response["usage"], {**USAGE, **DETAILS}, "usage.")
    for index, item in enumerate(response.get("output", ())):
        found += wrong(item, ITEMS[item["type"]], f"output.{index}.")
        for part in item.get("content") or ():
            found += wrong(part, PARTS[part["type"]], f"output.{index}.content.")
    for index, tool in enumerate(response.get("tools", ())):
        found += wrong(tool, TOOL, f"tools.{index}.")
    return found


def wrong_in_events(events: list[Any]) -> list[str]:
    found = []
    for number, event in enumerate(events):
        path = f"{number} {event['type']} "
        found += wrong(event, {"sequence_number": COUNT, **EVENTS[event["type"]]}, path)
        if "response" in event:
            found += [path + one for one in wrong_in_response(event["response"])]
        if "item" in event:
            found += wrong(event["item"], ITEMS[event["item"]["type"]], path)
    return found


class Conforms:
    """Whether a value has no wrong members. `repr` shows the members that are wrong."""

    def __init__(self, check: Callable[[Any], list[str]]) -> None:
        self._check = check
        self._found: list[str] = []

    def __call__(self, value: Any) -> bool:
        self._found = self._check(value)
        return not self._found

    def __repr__(self) -> str:
        return f"a value without these problems: {'; '.join(self._found[:8])}"


def conforms(*item_types: str, status: str = "completed", is_stream: bool = False) -> Expected:
    """Expect a response that follows the schema, with items of exactly these types and perhaps reasoning."""
    more = {"events": Conforms(wrong_in_events)} if is_stream else {}
    types = {"final.output.*.type": lambda found: {*found} - {"reasoning"} == {*item_types}}
    return {**more, "final": Conforms(wrong_in_response), **types, "final.status": status}


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


def ask(given: Any, **more: Any) -> Ask:
    return Ask("/v1/responses", {**GREEDY, "input": given, **more})


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state", "maxLength": 20}},
        "required": ["location"],
    },
}
FRANCISCO = [user("What's the weather like in San Francisco?")]
CALL = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}
NAMES = [
    user("My name is Alice."),
    {"type": "message", "role": "assistant", "content": "Hello Alice! How can I help you today?"},
    user("What is my name?"),
]
PIRATE = {"type": "message", "role": "system", "content": "You are a pirate. Always respond in pirate speak."}


def has_all_of_call(events: list[Any]) -> bool:
    types = [event["type"].removeprefix("response.") for event in events]
    starts, ends = (
        [event["item"]["type"] for event in events if event["type"] == f"response.output_item.{when}"]
        for when in ("added", "done")
    )
    deltas = "".join(event["delta"] for event in events if event["type"].endswith("arguments.delta"))
    is_whole = "location" in json.loads(deltas) and "function_call_arguments.done" in types
    return is_whole and "function_call" in starts and "function_call" in ends


def has_all_of_text(types: list[str]) -> bool:
    parts = ("output_item.added", "output_text.delta", "output_text.done", "output_item.done")
    return {f"response.{part}" for part in parts} <= {*types}


DIFFERENCES = {
    "image-input": Difference(
        "`input_image` parts are described to the model",
        "400, because models only accept text",
        "another server for images",
    ),
    "file-input": Difference(
        "`input_file` parts are read by the model",
        "400, because models only accept text",
        "the text of the file as `input_text`",
    ),
    "file-search": Difference(
        "the optional tool `file_search` searches a vector store",
        "tools of the provider are skipped, and a `tool_choice` that forces one is rejected",
        "a function of your own, with `/v1/embeddings` and `/v1/rerank`",
    ),
    "offline-web-search": Difference(
        "the optional tool `web_search` searches the web or its cache",
        "tools of the provider are skipped, and a `tool_choice` that forces one is rejected",
        "a function of your own",
    ),
}
TABLE = Table(
    "the Open Responses compliance suite",
    [
        Pair(
            "basic-response",
            Ask("/v1/responses", {**MODEL, "seed": 1, "input": [user("Say hello in exactly 3 words.")]}),
            conforms("message"),
        ),
        Pair(
            "streaming-response",
            ask([user("Count from 1 to 5.")], stream=True),
            {**conforms("message", is_stream=True), "types": has_all_of_text},
        ),
        Pair("system-prompt", ask([PIRATE, user("Say hello.")]), conforms("message")),
        Pair("tool-calling", ask(FRANCISCO, **CALL), conforms("function_call")),
        Pair("tool-calling-streaming", ask(FRANCISCO, **CALL, stream=True), conforms("function_call", is_stream=True)),
        Pair("tool-calling-streaming, events", ask(FRANCISCO, **CALL, stream=True), {"events": has_all_of_call}),
        Pair(
            "function-call-roundtrip",
            lambda first: ask(
                [
                    {
                        "type": "function_call_output",
                        "call_id": first.body["output"][-1]["call_id"],
                        "output": "64 degrees and clear",
                    }
                ],
                previous_response_id=first.body["id"],
            ),
            lambda _: conforms("message"),
            before=[ask("Use the weather tool to get the temperature in San Francisco.", **CALL)],
        ),
        Pair("multi-turn", ask(NAMES), conforms("message")),
        Pair(
            "previous-response-id",
            lambda first: ask("What code word did I ask you to remember?", previous_response_id=first.body["id"]),
            lambda _: conforms("message"),
            before=[ask("Remember this code word: papaya. Reply with only OK.")],
        ),
        Pair(
            "image-input",
            ask(
                [
                    user(
                        [
                            {"type": "input_text", "text": "What do you see in this image?"},
                            {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
                        ]
                    )
                ]
            ),
            {"error.type": "invalid_request_error"},
            400,
            differs="image-input",
        ),
        Pair(
            "file-input",
            ask(
                [
                    user(
                        [
                            {"type": "input_text", "text": "Answer with the title of the file only."},
                            {
                                "type": "input_file",
                                "filename": "a.pdf",
                                "file_data": "data:application/pdf;base64,JVBERi0xLjEK",
                            },
                        ]
                    )
                ]
            ),
            {"error.type": "invalid_request_error"},
            400,
            differs="file-input",
        ),
        Pair(
            "file-search",
            ask(
                "Summarize one result.",
                tools=[{"type": "file_search", "vector_store_ids": ["vs_1"]}],
                tool_choice={"type": "file_search"},
                include=["file_search_call.results"],
            ),
            {"error.param": "tool_choice"},
            400,
            differs="file-search",
        ),
        Pair(
            "offline-web-search",
            ask(
                "Find the most relevant cached result.",
                tools=[{"type": "web_search", "external_web_access": False}],
                tool_choice={"type": "web_search"},
                include=["web_search_call.action.sources"],
            ),
            {"error.param": "tool_choice"},
            400,
            differs="offline-web-search",
        ),
    ],
    DIFFERENCES,
)
