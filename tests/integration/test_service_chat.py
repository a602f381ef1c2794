"""Chats with a real worker, with reasoning and tool calls, with and without streaming."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cellama.api import Client
from cellama.bench.tiny_model.corpus import WEATHER_TOOL
from cellama.tasks import apply_chat_template, chat
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.worker.signing import Signer

from ..conftest import PATIENCE_S
from .conftest import GREEDY

EventsOf = Callable[..., list[dict[str, Any]]]
pytestmark = pytest.mark.usefixtures("worker")

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
THOUGHT, ANSWER = "I know this one. The capital of France is Paris.", "The capital of France is Paris."


def told(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(event["text"] for event in events if event["type"] == kind)


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_turn_is_the_same_with_and_without_streaming(events_of: EventsOf, stream: bool) -> None:
    job = chat.delay("tiny", FRANCE, enable_thinking=True, stream=stream, **GREEDY)
    result, events = job.get(timeout=PATIENCE_S), events_of(job.id)
    signature = Signer("a secret").after(FRANCE).sign(THOUGHT)
    message = {"role": "assistant", "content": ANSWER, "reasoning": THOUGHT, "signature": signature}
    assert result["message"] == message
    assert result["text"] == told(events, "token") == ANSWER
    assert told(events, "reasoning") == THOUGHT
    ends = [event for event in events if event["type"] == "reasoning_end"]
    assert [end["signature"] for end in ends] == [signature]
    assert [event["seq"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("stream", [True, False])
def test_tool_turn_calls_the_tool_and_uses_its_result(events_of: EventsOf, stream: bool) -> None:
    job = chat.delay("tiny", WEATHER, tools=[WEATHER_TOOL], stream=stream, **GREEDY)
    result = job.get(timeout=PATIENCE_S)
    done = events_of(job.id)[-1]
    (call,) = result["message"]["tool_calls"]
    assert done["tool_calls"] == [call]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert result["text"] == told(events_of(job.id), "token") == ""
    answer = {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "sunny", "degrees": 21}'}
    turns = [*WEATHER, result["message"], answer]
    final = chat.delay("tiny", turns, tools=[WEATHER_TOOL], stream=stream, **GREEDY).get(timeout=PATIENCE_S)
    assert "21" in final["text"]
    assert "tool_calls" not in final["message"]


def test_signed_reasoning_can_be_sent_back_unless_it_was_changed(client: Client) -> None:
    message = client.chat("tiny", FRANCE, enable_thinking=True, **GREEDY).result(PATIENCE_S)["message"]
    turns = [*FRANCE, message, {"role": "user", "content": "What does a cat say?"}]
    assert "meow" in client.chat("tiny", turns, **GREEDY).result(PATIENCE_S)["text"]
    changed = [*FRANCE, {**message, "reasoning": "Nothing."}]
    elsewhere = [{"role": "user", "content": "What is the capital of Norway?"}, message]
    for turns in (changed, elsewhere, [{"role": "system", "content": "Be brief."}, *FRANCE, message]):
        with pytest.raises(JobFailed, match="does not match the reasoning, the messages before it"):
            client.chat("tiny", turns, **GREEDY).result(PATIENCE_S)


def test_signature_is_valid_for_either_format_of_a_system_message(client: Client) -> None:
    thinks: dict[str, Any] = {"enable_thinking": True, **GREEDY}
    message = client.chat("tiny", FRANCE, system="Be brief.", **thinks).result(PATIENCE_S)["message"]
    told = [{"role": "system", "content": "Be brief."}, *FRANCE]
    same = client.chat("tiny", told, **thinks).result(PATIENCE_S)["message"]
    assert message == same
    turns = [*FRANCE, message, {"role": "user", "content": "What does a cat say?"}]
    assert client.chat("tiny", turns, system="Be brief.", **GREEDY).result(PATIENCE_S)["text"]


def test_thinking_stops_at_its_budget(client: Client) -> None:
    result = client.chat("tiny", FRANCE, enable_thinking=True, thinking_budget=3, **GREEDY).result(PATIENCE_S)
    assert result["message"]["reasoning"] == "I know this"
    assert result["text"] == ANSWER


def test_each_completion_has_its_own_message(client: Client) -> None:
    result = client.chat("tiny", FRANCE, enable_thinking=True, n=3, **GREEDY).result(PATIENCE_S)
    messages = [choice["message"] for choice in result["choices"]]
    assert [(m["content"], m["reasoning"]) for m in messages] == [(ANSWER, THOUGHT)] * 3


def test_apply_template_renders_the_prompt_of_a_chat(client: Client) -> None:
    job = apply_chat_template.delay("tiny", WEATHER, tools=[WEATHER_TOOL], enable_thinking=True)
    rendered = job.get(timeout=PATIENCE_S)
    assert rendered["prompt"].endswith("<|im_start|>assistant\n<think>\n")
    assert '"name": "get_weather"' in rendered["prompt"]
    usage = client.chat("tiny", WEATHER, tools=[WEATHER_TOOL], enable_thinking=True).result(PATIENCE_S)["usage"]
    assert usage["prompt_tokens"] == len(rendered["tokens"])
    told = [{"role": "system", "content": "Be brief."}, *FRANCE]
    with_system = apply_chat_template.delay("tiny", FRANCE, system="Be brief.").get(timeout=PATIENCE_S)
    assert with_system == apply_chat_template.delay("tiny", told).get(timeout=PATIENCE_S)
    with pytest.raises(InvalidJob, match="system: messages already start with a system message"):
        chat.delay("tiny", told, system="Be kind.")
