"""Test the conversion of Anthropic's turns into messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cellama.api.anthropic.answers import message_of
from cellama.api.anthropic.conversation import BILLING, messages_of
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.worker.signing import Signer

HELLO = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_blocks_are_joined_without_cache_control() -> None:
    system = [text("One", cache_control={"type": "ephemeral"}), text("Two")]
    user = {"role": "user", "content": [text("Three"), text("Four", cache_control={"type": "ephemeral"})]}
    assert messages_of(system, [user]) == [
        {"role": "system", "content": "One\n\nTwo"},
        {"role": "user", "content": "Three\n\nFour"},
    ]


@pytest.mark.parametrize("rest", ["a", "b; cch=17;"])
def test_billing_line_is_removed_from_system_prompt(rest: str) -> None:
    plain = messages_of("Be kind", [HELLO])
    assert messages_of([text(f"{BILLING} {rest}"), text("Be kind")], [HELLO]) == plain
    assert messages_of(f"{BILLING} {rest}\n\nBe kind", [HELLO]) == plain
    assert messages_of(f"{BILLING} {rest}", [HELLO]) == [HELLO]


def test_tool_results_become_separate_messages() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "3"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [text("no"), text("way")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
        text("Go on"),
    ]
    assert messages_of(None, [{"role": "user", "content": results}]) == [
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no\n\nway"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "Go on"},
    ]


def test_assistant_turn_keeps_reasoning_signature() -> None:
    signer = Signer("key")
    sent = messages_of("Be kind", [HELLO])
    message = {"content": "Well", "reasoning": "Hm", "signature": signer.after(sent).sign("Hm"), "tool_calls": [CALL]}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 2}
    result = {"model": "m", "message": message, "finish_reason": "stop", "stop_sequence": None, "usage": usage}
    answer = message_of("msg_1", result, max_tokens=9, tier="default")
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    result_block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
    turns = [HELLO, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result_block]}]
    again = messages_of("Be kind", turns)
    assert again[2]["reasoning"] == "Hm"
    assert again[2]["tool_calls"][0]["id"] == again[3]["tool_call_id"] == "toolu_1"
    assert signer.first_wrong(again) is None
    again[2]["reasoning"] = "Ho"
    assert signer.first_wrong(again) == 2


@pytest.mark.parametrize("signature", [{}, {"signature": None}, {"signature": ""}], ids=["none", "null", "empty"])
def test_thinking_block_does_not_need_a_signature(signature: dict[str, Any]) -> None:
    blocks = [{"type": "thinking", "thinking": "Hm", **signature}, text("Well")]
    assert messages_of(None, [HELLO, {"role": "assistant", "content": blocks}, HELLO])[1] == {
        "role": "assistant",
        "content": "Well",
        "reasoning": "Hm",
    }


@pytest.mark.parametrize(
    ("system", "turns", "named"),
    [
        ([text("Be kind"), text("half \ud800")], [HELLO], "system.1.text is "),
        ("Be kind", [HELLO, {"role": "user", "content": "\0"}], "messages.1.content.0.text is "),
        ("Be kind", [{"role": "user", "content": [text("Hi"), {"type": "image"}]}], "messages.0.content.1.type is "),
        ([text("Be kind"), {"type": "image"}], [HELLO], "system.1.type is "),
    ],
    ids=["half a pair", "NUL", "image", "image of the system"],
)
def test_error_contains_the_position_in_the_body(system: Any, turns: Any, named: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        messages_of(system, turns)
    assert str(refused.value).startswith(named)


def test_empty_thinking_block_is_dropped() -> None:
    blocks = [{"type": "thinking", "thinking": "", "signature": ""}, text("Well")]
    assert messages_of(None, [HELLO, {"role": "assistant", "content": blocks}, HELLO])[1] == {
        "role": "assistant",
        "content": "Well",
    }


@pytest.mark.parametrize(
    ("turns", "named"),
    [
        ([], "messages is "),
        ("Hi", "messages is "),
        (["Hi"], "messages.0 is "),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": [], "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": None}], "messages.0.content is "),
        ([{"role": "user", "content": []}], "messages.0.content is empty"),
        ([{"role": "user", "content": ["Hi"]}], "messages.0.content.0 is "),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "models can only process text"),
        ([{"role": "user", "content": [{"type": "document", "source": {}}]}], "models can only process text"),
        ([{"role": "user", "content": [{"type": {}}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], "messages.0.content.0.tool_use_id"),
        ([{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, HELLO], "leave it out"),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "n", "input": "{}"}]}],
            ".input is ",
        ),
        ([{**HELLO, "name": "x"}], "messages.0 has 'name'"),
    ],
)
def test_invalid_turn_is_rejected_with_its_position(turns: Any, named: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        messages_of(None, turns)
    assert named in str(refused.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["text", "tool_use", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "input", "id", "name"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(ANYTHING, ANYTHING)
def test_any_input_is_converted_or_rejected(system: Any, turns: Any) -> None:
    try:
        made = messages_of(system, turns)
    except InvalidJob:
        return
    assert made
    assert json.dumps(made)
