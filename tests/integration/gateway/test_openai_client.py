"""Test OpenAI's unmodified client with a real gateway and worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from cellama.api.client.client import Client

from ...conftest import wait_until
from ...gateways import GatewayProcess
from .conftest import CHAT, TOOL

HELLO: Any = [{"role": "user", "content": "Hi"}]


class City(BaseModel):
    name: str = Field(max_length=12)
    is_large: bool


def test_chat_completion_equals_the_result_of_the_same_job(openai: OpenAI, queue: Client) -> None:
    answer = openai.chat.completions.create(**CHAT)
    job = queue.chat("tiny", CHAT["messages"], temperature=0, max_tokens=12).result(60)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (job["text"], job["finish_reason"])
    assert (answer.model, answer.service_tier) == ("tiny", "default")
    assert (usage := answer.usage) is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        job["usage"]["prompt_tokens"],
        job["usage"]["completion_tokens"],
    )
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens is not None
    assert answer.id == f"chatcmpl-{answer.id.removeprefix('chatcmpl-')}"
    assert queue.position(answer.id.removeprefix("chatcmpl-")).state == "done"


def test_streamed_chunks_add_up_to_the_answer(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**CHAT)
    chunks = list(openai.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert (received := chunks[-1].usage) is not None
    assert whole.usage is not None
    assert received.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_choices_are_streamed_concurrently(openai: OpenAI) -> None:
    sent = {**CHAT, "n": 3, "temperature": 1.0, "seed": 7, "stop": ["."]}
    whole = openai.chat.completions.create(**sent)
    texts, reasons = {}, {}
    for chunk in openai.chat.completions.create(**sent, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_completions_of_several_prompts_have_consecutive_indices(openai: OpenAI) -> None:
    sent: Any = {"model": "tiny", "prompt": ["Once upon", "The fox"], "max_tokens": 4, "n": 2, "temperature": 0}
    whole = openai.completions.create(**sent)
    texts = dict.fromkeys(range(4), "")
    for chunk in openai.completions.create(**sent, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [texts[index] for index in range(4)] == [choice.text for choice in whole.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    tokens = openai.completions.create(model="tiny", prompt=[[5, 6, 7], [8]], max_tokens=1)
    assert len(tokens.choices) == 2
    assert (
        openai.completions.create(model="tiny", prompt="Once", extra_body={"ignore_eos": True}).usage.completion_tokens
        == 16
    )  # type: ignore[union-attr]


def test_tokens_in_logprobs_add_up_to_the_answer(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    probs = answer.choices[0].logprobs
    assert probs is not None
    content = probs.content or []
    assert bytes(byte for entry in content for byte in entry.bytes or ()).decode() == answer.choices[0].message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    streamed = [c.choices[0] for c in openai.chat.completions.create(**CHAT, logprobs=True, stream=True)]
    received = [entry.token for choice in streamed if choice.logprobs for entry in choice.logprobs.content or ()]
    assert received == [entry.token for entry in content]
    text = openai.completions.create(model="tiny", prompt="Once", max_tokens=3, logprobs=1, temperature=0).choices[0]
    assert text.logprobs is not None
    assert "".join(text.logprobs.tokens or ()) == text.text
    assert (text.logprobs.text_offset or [])[0] == 0


def test_tool_is_called_and_its_result_is_used(openai: OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced = {"type": "function", "function": {"name": "get_weather"}}
    sent: Any = {"model": "tiny", "tools": [TOOL], "tool_choice": forced, "temperature": 0}
    choice = openai.chat.completions.create(messages=turns, **sent).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls"
    assert call.type == "function"
    assert call.function.name == "get_weather"
    chunks = list(openai.chat.completions.create(messages=turns, **sent, stream=True))
    received = [c.function for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert "".join((function and function.arguments) or "" for function in received) == call.function.arguments
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = openai.chat.completions.create(
        model="tiny", messages=[*turns, choice.message, answer], tools=[TOOL], temperature=0, max_tokens=8
    )
    assert after.usage is not None
    assert after.usage.prompt_tokens > len(json.dumps(TOOL)) // 10
    assert after.choices[0].message.role == "assistant"


LOOKUP: Any = {
    "type": "function",
    "function": {
        "name": "weather_lookup",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}, "unit": {"enum": ["c", "f"]}},
            "required": ["place", "unit"],
            "additionalProperties": False,
        },
    },
}
PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_unforced_call_conforms_to_the_schema_of_a_strict_tool(openai: OpenAI) -> None:
    choice = openai.chat.completions.create(model="tiny", messages=PARIS, tools=[LOOKUP], temperature=0).choices[0]
    (call,) = choice.message.tool_calls or ()  # the model was trained to call get_weather with a city
    assert call.type == "function"
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather_lookup")
    assert json.loads(call.function.arguments).keys() == {"place", "unit"}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(openai: OpenAI, mode: str) -> None:
    named = [{"type": "function", "function": {"name": "weather_lookup"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    sent: Any = {"model": "tiny", "messages": PARIS, "tools": [TOOL, LOOKUP], "temperature": 0}
    answer = openai.chat.completions.create(**sent, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather_lookup"
    free = openai.chat.completions.create(**sent)
    assert free.usage is not None
    assert answer.usage is not None
    assert free.usage.prompt_tokens == answer.usage.prompt_tokens
    named[0]["function"] = {"name": "unheard_of"}
    with pytest.raises(BadRequestError, match="'unheard_of' is not a tool of this job"):
        openai.chat.completions.create(**sent, tool_choice=choice)


def test_call_truncated_by_max_tokens_is_returned_as_call(openai: OpenAI) -> None:
    sent: Any = {"model": "tiny", "messages": PARIS, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    (whole,) = openai.chat.completions.create(**sent).choices[0].message.tool_calls or ()
    assert whole.type == "function"
    cuts = {}
    for max_tokens in range(1, 40):
        choice = openai.chat.completions.create(**sent, max_tokens=max_tokens).choices[0]
        if choice.finish_reason == "tool_calls":
            break
        assert choice.finish_reason == "length"
        assert not choice.message.content
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            assert whole.function.arguments.startswith(call.function.arguments)
            cuts[max_tokens] = call.function.arguments
    partial = [count for count, cut in cuts.items() if 0 < len(cut) < len(whole.function.arguments)]
    assert partial
    chunks = list(openai.chat.completions.create(**sent, max_tokens=partial[0], stream=True))
    received = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert "".join((call.function and call.function.arguments) or "" for call in received) == cuts[partial[0]]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_structured_output_can_be_parsed(openai: OpenAI) -> None:
    parsed = openai.chat.completions.parse(model="tiny", messages=HELLO, response_format=City, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, City)
    with openai.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=City, max_completion_tokens=60
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)
    answer = openai.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=60, temperature=0
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_embeddings_are_the_same_in_both_encodings(openai: OpenAI) -> None:
    first, second = openai.embeddings.create(model="tiny", input=["a fox", "a bear"]).data
    plain = openai.embeddings.create(model="tiny", input="a fox", encoding_format="float").data[0]
    assert first.embedding == pytest.approx(plain.embedding, abs=1e-5)
    assert second.embedding != first.embedding
    short = openai.embeddings.create(model="tiny", input=[[5, 6, 7]], dimensions=4)
    assert len(short.data[0].embedding) == 4
    assert short.usage.prompt_tokens >= 3


def test_models_are_listed_and_retrieved(openai: OpenAI) -> None:
    # Workers that other tests have killed are listed for a while.
    wait_until(lambda: [model.id for model in openai.models.list()] == ["tiny"], "the models that are served")
    assert openai.models.retrieve("tiny").model_extra["context_length"] == 2048  # type: ignore[index]


def test_async_clients_stream_concurrently(gateway: GatewayProcess) -> None:
    async def tell(client: AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(**{**CHAT, "seed": number, "temperature": 1.0}, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            received = await asyncio.gather(*(tell(client, number % 4) for number in range(24)))
        assert all(received)
        assert all(received[number] == received[number % 4] for number in range(24))

    asyncio.run(run())


def test_reasoning_is_separate_from_the_answer(openai: OpenAI) -> None:
    sent = {**CHAT, "max_tokens": 60, "extra_body": {"enable_thinking": True, "thinking_budget": 8}}
    whole = openai.chat.completions.create(**sent)
    reasoning = "".join(
        (chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
        for chunk in openai.chat.completions.create(**sent, stream=True)
    )
    assert reasoning == (whole.choices[0].message.model_extra or {}).get("reasoning_content", "")
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert bool(whole.usage.completion_tokens_details.reasoning_tokens) == bool(reasoning)
    off = openai.chat.completions.create(**CHAT, reasoning_effort="none")
    assert "reasoning_content" not in (off.choices[0].message.model_extra or {})


def test_message_with_a_parsed_tool_call_can_be_sent_back(openai: OpenAI) -> None:
    class Weather(BaseModel):
        city: str = Field(max_length=12)

    sent = {**CHAT, "max_tokens": 60, "tools": [pydantic_function_tool(Weather)]}
    message = openai.chat.completions.parse(**sent, tool_choice="required").choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    answer = openai.chat.completions.create(**{**sent, "messages": [*CHAT["messages"], message, result]})
    assert answer.choices[0].message.content


@pytest.mark.parametrize("roles", [("system", "developer", "user"), ("user", "system"), ("user", "user")])
def test_messages_of_any_role_may_be_at_any_position(openai: OpenAI, roles: tuple[str, ...]) -> None:
    messages: Any = [{"role": role, "content": f"Message {place}"} for place, role in enumerate(roles)]
    assert openai.chat.completions.create(**{**CHAT, "messages": messages}).choices[0].message.content


def test_reply_started_by_the_caller_is_continued(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**CHAT).choices[0].message.content
    assert whole is not None
    started: Any = [*CHAT["messages"], {"role": "assistant", "content": whole[:21]}]
    rest = openai.chat.completions.create(**{**CHAT, "messages": started}).choices[0].message.content
    assert rest == whole[21:]
