"""Test the conversion of Ollama's messages, whose calls and results may have no ids."""

from __future__ import annotations

from typing import Any

from cellama.api.ollama.conversation import messages_of
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.payloads import parse_job

QUESTION = {"role": "user", "content": "The weather?"}


def reply(*names: str, **more: Any) -> dict[str, Any]:
    calls = [{"function": {"index": at, "name": name, "arguments": {"a": 1}}} for at, name in enumerate(names)]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def ids(messages: list[Any]) -> list[tuple[str, Any]]:
    """Return the ids of calls and results, in the order of the messages."""
    found = []
    for message in messages:
        found += [("call", call["id"]) for call in message.get("tool_calls", [])]
        if message["role"] == "tool":
            found.append(("result", message.get("tool_call_id")))
    return found


def converted(*messages: Any) -> list[Any]:
    made = messages_of(list(messages))
    parse_job(ChatJob, (), (), {"model": "m", "messages": made})
    return made


def test_results_are_matched_to_calls_by_name_and_then_by_position() -> None:
    made = converted(
        QUESTION, reply("one", "two", "two"),
        {"role": "tool", "tool_name": "two", "content": "b"}, {"role": "tool", "content": "a"},
        {"role": "tool", "tool_name": "other", "content": "c"}, {"role": "tool", "content": "d"},
    )  # fmt: skip
    assert ids(made) == [
        ("call", "call00001"), ("call", "call00002"), ("call", "call00003"), ("result", "call00002"),
        ("result", "call00001"), ("result", "call00003"), ("result", None),
    ]  # fmt: skip
    assert made[2] == {"role": "tool", "content": "b", "name": "two", "tool_call_id": "call00002"}


def test_call_ids_given_by_the_caller_are_kept() -> None:
    sent = reply("one", "two")
    sent["tool_calls"][0]["id"] = "mine"
    made = converted(
        QUESTION, sent, {"role": "tool", "content": "a", "tool_call_id": "mine"}, {"role": "tool", "content": "b"}
    )
    assert ids(made) == [("call", "mine"), ("call", "call00002"), ("result", "mine"), ("result", "call00002")]


def test_ids_stay_the_same_when_the_conversation_grows() -> None:
    first = [QUESTION, reply("one"), {"role": "tool", "content": "a"}]
    assert converted(*first, reply("one"), {"role": "tool", "content": "b"})[: len(first)] == converted(*first)


def test_fields_are_renamed_and_unknown_fields_are_ignored() -> None:
    received = {"role": "Assistant", "content": "Paris.", "thinking": "Hm.", "images": [], "tool_calls": None, "x": 1}
    assert converted(QUESTION, {**received, "name": None})[1] == {
        "role": "assistant",
        "content": "Paris.",
        "reasoning": "Hm.",
    }
    assert converted(QUESTION, {**received, "thinking": ""})[1] == {"role": "assistant", "content": "Paris."}


def test_messages_of_wrong_types_are_left_to_payload_validation() -> None:
    wrong: list[Any] = [3, {"role": 5, "content": 6}, {"role": "assistant", "tool_calls": "no"}]
    assert messages_of(wrong) == wrong
    assert messages_of([{"role": "assistant", "tool_calls": [3, {"function": 4}]}])[0]["tool_calls"] == [
        3,
        {"function": 4},
    ]
