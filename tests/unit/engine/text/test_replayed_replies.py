"""Messages after a replayed reply are rendered as in the whole conversation, also after tool calls, for any family."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.engine import TemplateFailed
from cellama.engine.text.chat_template import ChatTemplate, Rendered, after_reply

from ....agent_traces import END, FAMILIES, OPENAI_TOOL, reply_to_write, text_of_reply
from .styles import CALLS, template

ENDS = (END, "<|call|>", "<|return|>")
QUESTION = [{"role": "user", "content": "Read it."}]


@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_replies_and_following_text_equal_the_rendered_conversation(name: str) -> None:
    family = FAMILIES[name]
    chat_template = ChatTemplate(family.source, bos="<s>", eos=END, ends=ENDS)

    def render(messages: list[Any], **variables: Any) -> Rendered:
        return chat_template.render(messages, tools=[OPENAI_TOOL], **variables)

    messages: list[Any] = list(QUESTION)
    text = render(messages).text
    for i in range(4):  # without a further user message, no template omits the reasoning
        reply = reply_to_write(family, i)
        calls = reply["tool_calls"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": f"{END} {i}"} for call in calls]
        text += text_of_reply(family, i) + after_reply(results, render, calls, chat_template.ends).text
        messages += [reply, *results]
        assert text == render(messages).text
    chat_template.close()


def test_only_templates_with_tools_at_the_last_user_message_repeat_the_tools() -> None:
    repeating = [name for name, family in FAMILIES.items() if ChatTemplate(family.source, ends=ENDS).repeats_tools]
    assert repeating == ["mistral"]


def test_after_reply_fails_when_the_template_omits_the_calls() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": "ok"}
    with pytest.raises(TemplateFailed, match="does not reproduce replies"):
        after_reply([result], ChatTemplate(template()).render, [call])
    assert after_reply([result], ChatTemplate(template(CALLS["hermes"])).render, [call], [END]).text.startswith(END)
