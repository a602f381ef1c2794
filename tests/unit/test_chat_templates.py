"""Templates render what models were trained on, in the forms of the common families; and they can do no harm.

The templates in `templates/` are our own, each with the parts of Jinja that the family's real ones rely on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cellama.engine import ChatOptions, InvalidRequest, TemplateFailed
from cellama.engine.chat import ChatTemplate, grammar_of_choice, reply_format_of

TEMPLATES = Path(__file__).parent / "templates"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "é"}'}}]}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning": "A greeting.", "signature": "00"},
    {"role": "user", "content": "Ask"},
    CALL,
    {"role": "tool", "content": "ok", "tool_call_id": "abc"},
]


FAMILIES = {
    "llama3": ["Be brief.<|eot_id|>", '"parameters": {"x": "é"}', '    "type": "function"'],
    "qwen": ["<think>\nA greeting.\n</think>\nHello", '"arguments": {"x": "é"}}\n</tool_call>'],
    "mistral": ["[INST] Be brief. \n\nHi[/INST]", '[TOOL_CALLS][{"name": "f", "arguments": {"x": "é"}}]</s>'],
    "gemma": ["<start_of_turn>user\nBe brief.\n\nHi", "<start_of_turn>model\nHello<end_of_turn>"],
    "deepseek": ["<｜Assistant｜>Hello", "functionf", "<｜Assistant｜><think>\n"],
    "gpt-oss": ["Reasoning: medium\ntype f = ", "analysis<|message|>A greeting.", 'functions.f{"x": "é"}'],
    "granite": ['<|tool_call|>[{"name":"f","arguments":{"x":"é"}}]', '[{"name": "f", "parameters"'],
    "phi": ["<|system|>\n Be brief. <|end|>", "<|assistant|>\nHello<|end|>"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_of_common_families_render(family: str) -> None:
    source = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    text = ChatTemplate(source, bos="<s>", eos="</s>").render(TALK, tools=[TOOL])
    for part in FAMILIES[family]:
        assert part in text
    assert "00" not in text.replace("2000", "")  # the signature is for us, not for the model


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 100000000000 }}",
        "{{ [0] * 100000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ ''.format.__self__ }}{{ '{0.__class__}'.format(messages).zzz() }}",
        "{% include '/etc/passwd' %}",
        "{{ undefined_thing.field }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_template_that_tries_to_escape_or_to_make_too_much_fails_alone(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(TemplateFailed, match="the model's chat template"):
        template.render([{"role": "user", "content": "Hi"}])


def test_template_that_does_not_compile_says_so() -> None:
    with pytest.raises(TemplateFailed, match="does not compile"):
        ChatTemplate("{% for m in messages %}")


def format_for(source: str, **options: Any) -> Any:
    template, asked = ChatTemplate(source), ChatOptions(**options)
    prompt = template.render([{"role": "user", "content": "Hi"}], **asked.variables)
    return reply_format_of("m", template, prompt, asked, lambda text: [len(text)])


def test_thinking_that_the_template_opens_is_known_from_the_prompt() -> None:
    source = "{{ messages[0].content }}{% if enable_thinking %}<think>\n{% endif %}"
    assert format_for(source, enable_thinking=True).starts_thinking
    assert not format_for(source).starts_thinking
    assert format_for("{{ '[THINK]' }}").think_close == "[/THINK]"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("hi", {"thinking_budget": 5}, "thinking_budget is 5, but the chat template of model 'm' has no thinking"),
        ("hi", {"tools": [TOOL]}, "model 'm' takes no tools"),
        (
            "{{ tools }}",
            {"tools": [TOOL], "tool_choice": "g"},
            "tool_choice names 'g', which is no tool of this job: f",
        ),
        ("{{ tools }}", {"tool_choice": "required"}, "there are no tools; give some"),
        ("{{ tools }}", {"tools": [TOOL], "tool_choice": "required"}, "how model 'm' writes tool calls is not known"),
        ("hi", {"template_args": {"messages": []}}, "template_args has messages"),
    ],
)
def test_what_the_template_has_no_form_for_is_refused(source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        grammar_of_choice("m", format_for(source, **options), ChatOptions(**options), lambda schema: schema)


def test_tools_that_must_not_be_called_are_not_offered() -> None:
    assert format_for("{{ tools | length if tools }}", tools=[TOOL], tool_choice="none").tools is None
