"""Conversations whose order a chat template does not support are rearranged, and a started reply is continued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cellama.engine import InvalidRequest
from cellama.engine.text.chat_template import ChatTemplate, Rendered
from cellama.engine.text.derivation.message_order import MessageOrder, arrange

TEMPLATES = Path(__file__).parent / "templates"
BUNDLED = Path(__file__).parents[4] / "bench" / "tiny_model" / "template.jinja"
ALL = MessageOrder(first_system=True, more_systems=True, repeated_roles=True)
ONE_SYSTEM = MessageOrder(first_system=True, more_systems=False, repeated_roles=True)
ALTERNATING = MessageOrder(first_system=True, more_systems=False, repeated_roles=False)
NO_SYSTEM = MessageOrder(first_system=False, more_systems=False, repeated_roles=True)
ORDERS = {
    "deepseek": ONE_SYSTEM,
    "gemma": ALTERNATING,
    "gpt-oss": NO_SYSTEM,
    "granite": ALL,
    "llama3": ALL,
    "mistral": ALTERNATING,
    "phi": ALL,
    "qwen": ALL,
    "tiny": ONE_SYSTEM,
}
TWO_SYSTEMS_AND_TWO_USERS = ("system", "system", "user", "user")
SYSTEM_AFTER_THE_USER = ("user", "system")
SYSTEM_IN_THE_MIDDLE = ("system", "user", "assistant", "system", "user")


def conversation(roles: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"<{place}>"} for place, role in enumerate(roles)]


@pytest.fixture(params=ORDERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def template(family: str) -> Iterator[ChatTemplate]:
    path = BUNDLED if family == "tiny" else TEMPLATES / f"{family}.jinja"
    template = ChatTemplate(path.read_text(encoding="utf-8"), bos="<s>", eos="</s>")
    yield template
    template.close()


def test_supported_message_order_is_derived_from_the_template(template: ChatTemplate, family: str) -> None:
    assert template.message_order == ORDERS[family]


@pytest.mark.parametrize("roles", [TWO_SYSTEMS_AND_TWO_USERS, SYSTEM_AFTER_THE_USER, SYSTEM_IN_THE_MIDDLE])
def test_prompt_contains_each_message_once(template: ChatTemplate, roles: tuple[str, ...]) -> None:
    messages = conversation(roles)
    text = template.render(messages).text
    assert all(text.count(message["content"]) == 1 for message in messages)


def test_system_messages_are_joined_at_the_start_when_only_one_system_message_is_supported() -> None:
    arranged = arrange(conversation(SYSTEM_IN_THE_MIDDLE), ONE_SYSTEM)
    assert [(message["role"], message["content"]) for message in arranged] == [
        ("system", "<0>\n\n<3>"),
        ("user", "<1>"),
        ("assistant", "<2>"),
        ("user", "<4>"),
    ]


def test_system_message_becomes_part_of_the_user_message_when_not_supported() -> None:
    assert arrange(conversation(("system", "user")), NO_SYSTEM) == [{"role": "user", "content": "<0>\n\n<1>"}]
    assert arrange(conversation(("system",)), NO_SYSTEM) == [{"role": "user", "content": "<0>"}]


def test_joined_replies_keep_all_tool_calls() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    replies = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    arranged = arrange([{"role": "user", "content": "Hi"}, *replies], ALTERNATING)
    assert arranged[1:] == [{"role": "assistant", "content": "", "tool_calls": calls}]


@given(
    st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=8),
    st.builds(MessageOrder, st.booleans(), st.booleans(), st.booleans()),
)
def test_arranging_messages_keeps_all_content_and_the_order_of_turns(roles: list[str], order: MessageOrder) -> None:
    messages = conversation(tuple(roles))
    text = "\n\n".join(message["content"] for message in arrange(messages, order))
    contents = sorted(message["content"] for message in messages)
    assert sorted(text.split("\n\n") if text else []) == contents
    turns = [message["content"] for message in messages if message["role"] != "system"]
    assert [part for part in text.split("\n\n") if part in turns] == turns


def test_prompt_ends_with_a_started_reply(template: ChatTemplate) -> None:
    messages = [*conversation(("user",)), {"role": "assistant", "content": "The answer is"}]
    prompt = template.render(messages, add_generation_prompt=False).until("The answer is")
    assert prompt.text.endswith("The answer is")
    assert len(prompt.text) == len(prompt.marked)


def test_started_reply_keeps_the_spaces_that_the_template_keeps() -> None:
    assert Rendered("user: Hi\nA: is  <end>", "user: Hi\nA: is  <end>").until("is ").text == "user: Hi\nA: is "
    assert Rendered("A: is<end>", "A: is<end>").until("is ").text == "A: is"


def test_started_reply_is_rejected_when_the_template_changes_it() -> None:
    with pytest.raises(InvalidRequest, match="chat template changes its content"):
        Rendered("A: IS", "A: IS").until("is")
