"""Send what `parse()` and `stream()` of OpenAI's client return back to the gateway, as its users do.

`python openai_client.py URL` prints one line per check. The same script runs with all major versions of the client.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import checks
from checks import MODEL, QUESTION, RESULT, TIMEOUT_S
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=12)
    is_large: bool


class Weather(BaseModel):
    city: str = Field(max_length=12)


CLIENT: Any = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
CHAT: Any = {"model": MODEL, "temperature": 0, "max_tokens": 80}
RESPONSE: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 80}
TOOLS: Any = [pydantic_function_tool(Weather, name="get_weather")]
ASKED: Any = {"role": "user", "content": QUESTION}
MORE: Any = {"role": "user", "content": "And in Rome?"}
client = OpenAI(**CLIENT)


def results_of(message: Any) -> list[Any]:
    """Return the results of a message's tool calls."""
    assert message.tool_calls, message
    for call in message.tool_calls:
        assert call.function.name == "get_weather", call
        assert isinstance(call.function.parsed_arguments, Weather), call
    return [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls]


def outputs_of(response: Any) -> list[Any]:
    """Return the results of a response's function calls."""
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls, response.output
    for call in calls:
        assert isinstance(call.parsed_arguments, Weather), call
    return [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]


def parsed_object() -> None:
    turns = [ASKED]
    for _ in range(2):
        message = client.chat.completions.parse(messages=turns, response_format=City, **CHAT).choices[0].message
        assert isinstance(message.parsed, City), message
        turns += [message, MORE]


def parsed_tool_call() -> None:
    message = client.chat.completions.parse(messages=[ASKED], tools=TOOLS, **CHAT).choices[0].message
    turns = [ASKED, message, *results_of(message)]
    answer = client.chat.completions.parse(messages=turns, tools=TOOLS, **CHAT).choices[0].message
    assert answer.content, answer
    again = client.chat.completions.parse(
        messages=[*turns, answer, MORE], tools=TOOLS, tool_choice="required", **CHAT
    ).choices[0]
    assert results_of(again.message)


def streamed_tool_call() -> None:
    with client.chat.completions.stream(messages=[ASKED], tools=TOOLS, **CHAT) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds, kinds
    turns = [ASKED, message, *results_of(message)]
    with client.chat.completions.stream(messages=turns, tools=TOOLS, **CHAT) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        answer = stream.get_final_completion().choices[0].message
    assert answer.content == text != "", answer
    assert client.chat.completions.create(messages=[*turns, answer, MORE], tools=TOOLS, **CHAT).choices


def streamed_object() -> None:
    with client.chat.completions.stream(messages=[ASKED], response_format=City, **CHAT) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "content.done" in kinds, kinds
    assert isinstance(message.parsed, City), message
    assert client.chat.completions.create(messages=[ASKED, message, MORE], **CHAT).choices[0].message.content


def accumulated_deltas() -> None:
    """Programs without the helper add up deltas, and keep all fields such as `index`."""
    message: Any = {}
    for chunk in client.chat.completions.create(messages=[ASKED], tools=TOOLS, stream=True, **CHAT):
        for choice in chunk.choices:
            for key, value in choice.delta.model_dump(exclude_none=True).items():
                if key == "tool_calls":
                    _add_calls(message.setdefault(key, []), value)
                else:
                    message[key] = message.get(key, "") + value if key == "content" else value
    assert message["tool_calls"], message
    results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in message["tool_calls"]]
    answer = client.chat.completions.create(messages=[ASKED, message, *results], tools=TOOLS, **CHAT)
    assert answer.choices[0].message.content


def _add_calls(calls: list[Any], deltas: list[Any]) -> None:
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append(delta)
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


def responses_parsed_object() -> None:
    turns = [ASKED]
    for _ in range(2):
        response = client.responses.parse(input=turns, text_format=City, **RESPONSE)
        assert isinstance(response.output_parsed, City), response
        turns += [*response.output, MORE]


def responses_parsed_tool_call() -> None:
    response = client.responses.parse(input=[ASKED], tools=TOOLS, **RESPONSE)
    turns = [ASKED, *response.output, *outputs_of(response)]
    answer = client.responses.parse(input=turns, tools=TOOLS, **RESPONSE)
    assert answer.output_text, answer
    following = client.responses.parse(
        input=outputs_of(response), previous_response_id=response.id, tools=TOOLS, **RESPONSE
    )
    assert following.output_text == answer.output_text, following


def responses_streamed_tool_call() -> None:
    with client.responses.stream(input=[ASKED], tools=TOOLS, **RESPONSE) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds, kinds
    turns = [ASKED, *response.output, *outputs_of(response)]
    with client.responses.stream(input=turns, tools=TOOLS, **RESPONSE) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        answer = stream.get_final_response()
    assert answer.output_text == text != "", answer


def responses_streamed_object() -> None:
    with client.responses.stream(input=[ASKED], text_format=City, **RESPONSE) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    assert isinstance(response.output_parsed, City), response
    assert client.responses.create(input=[ASKED, *response.output, MORE], **RESPONSE).output_text


def asynchronous() -> None:
    async def ask() -> None:
        async with AsyncOpenAI(**CLIENT) as other:
            parsed = await other.chat.completions.parse(messages=[ASKED], tools=TOOLS, **CHAT)
            message = parsed.choices[0].message
            async with other.chat.completions.stream(
                messages=[ASKED, message, *results_of(message)], tools=TOOLS, **CHAT
            ) as stream:
                answer = (await stream.get_final_completion()).choices[0].message
            assert answer.content, answer
            response = await other.responses.parse(input=[ASKED], text_format=City, **RESPONSE)
            async with other.responses.stream(input=[ASKED, *response.output, MORE], **RESPONSE) as responses:
                assert (await responses.get_final_response()).output_text

    asyncio.run(ask())


if __name__ == "__main__":
    checks.run(
        [
            ("parsed object", parsed_object),
            ("parsed tool call", parsed_tool_call),
            ("streamed tool call", streamed_tool_call),
            ("streamed object", streamed_object),
            ("accumulated deltas", accumulated_deltas),
            ("responses: parsed object", responses_parsed_object),
            ("responses: parsed tool call", responses_parsed_tool_call),
            ("responses: streamed tool call", responses_streamed_tool_call),
            ("responses: streamed object", responses_streamed_object),
            ("asynchronous client", asynchronous),
        ]
    )
