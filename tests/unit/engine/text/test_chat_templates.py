"""Chat templates of common model families render as their models expect, and hostile templates do no harm.

The files in `templates/` were written for these tests, with the Jinja features that real templates use.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest

from cellama.engine import ChatOptions, EngineStopped, InvalidRequest, TemplateFailed
from cellama.engine.grammar.schema import prepare_schema
from cellama.engine.text import chat_template
from cellama.engine.text.chat_options import grammar_of_calls, reply_format_of
from cellama.engine.text.chat_template import ChatTemplate, after_reply
from cellama.engine.text.markup import SpecialToken

from .styles import CALLS, CHANNELS, THINK, template

TEMPLATES = Path(__file__).parent / "templates"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "é"}'}}]}
CONVERSATION: list[dict[str, Any]] = [
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
    text = ChatTemplate(source, bos="<s>", eos="</s>").render(CONVERSATION, tools=[TOOL]).text
    for part in FAMILIES[family]:
        assert part in text
    assert "00" not in text.replace("2000", "")  # the signature is never sent to the model


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_after_a_reply_matches_the_end_of_the_whole_conversation(family: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"), bos="<s>", eos="</s>")
    for more in ([{"role": "user", "content": "Ask"}], [{"role": "user", "content": "Ask"}, CALL, CONVERSATION[-1]]):
        whole = template.render([*CONVERSATION[:2], {"role": "assistant", "content": "Hello"}, *more])
        after = after_reply(more, template.render)
        assert whole.text.endswith("Hello" + after.text)
        assert len(after.text) == len(after.marked)


def test_after_reply_fails_when_the_template_hides_or_repeats_the_reply() -> None:
    for source in ("{{ messages[-1].content }}", "{% for m in messages %}{{ m.content * 2 }}{% endfor %}"):
        with pytest.raises(TemplateFailed, match="without parent_key"):
            after_reply([{"role": "user", "content": "Ask"}], ChatTemplate(source).render)
    with pytest.raises(InvalidRequest, match="messages"):
        after_reply([], ChatTemplate("").render)


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
        "{{ '%900000000d' % 1 }}",
        "{{ 'x' | center(900000000) }}",
        "{{ messages[0].content.ljust(90000000) }}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ '%*d' % (900000000, 1) }}",
        "{{ [messages] | list | tojson(indent=900000000) }}",
    ],
)
def test_hostile_template_fails_without_causing_harm(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 0.5)
    with pytest.raises(TemplateFailed, match="the model's chat template"):
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])  # some fail at compilation


def test_template_renders_again_after_its_process_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 0.3)
    loop = "{% for i in range(99999) %}{% for i in range(99999) %}{{ i if i < 0 }}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if slow %}" + loop + "{% elif big %}{{ big ** 999999999 }}{% endif %}done")
    for variables in ({"slow": True}, {"big": 9}):
        with pytest.raises(TemplateFailed, match=r"took more than 0\.3 s or too much memory .*; shorten"):
            template.render([], **variables)
        assert template.render([]).text == "done"
    template.close()
    with pytest.raises(EngineStopped, match="has been unloaded"):
        template.render([])


def test_template_process_is_killed_when_it_gets_no_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(
        "{% for i in range(99999) %}{% for i in range(99999) %}{{ i if i < 0 }}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(chat_template, "WALL_S", 0.3)
    with pytest.raises(TemplateFailed, match=r"\(signal SIGKILL\)"):
        template.render([])


def test_template_is_rejected_when_compiling_it_never_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 0.3)
    with pytest.raises(TemplateFailed, match=r"took more than 0\.3 s"):
        ChatTemplate("{{ 9 ** 999999999 }}")


def test_template_process_exits_when_its_template_is_deleted() -> None:
    template = ChatTemplate("x")
    process = psutil.Process(template._process._process.pid)
    del template
    gc.collect()
    assert not process.is_running()


@pytest.mark.parametrize(
    ("message", "error", "match"),
    [
        ({"content": "\ud800"}, None, ""),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{" * 100_000}}]},
            InvalidRequest,
            "'f' are not valid JSON",
        ),
        ({"content": object()}, InvalidRequest, "template_args are not valid JSON"),
    ],
)
def test_message_is_rejected_when_it_is_not_valid_json(message: Any, error: Any, match: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    if error is None:
        assert template.render([message]).text == message["content"]
    else:
        with pytest.raises(error, match=match):
            template.render([message])


def test_template_is_rejected_when_it_does_not_compile() -> None:
    with pytest.raises(TemplateFailed, match="does not compile"):
        ChatTemplate("{% for m in messages %}")


def format_for(source: str, **options: Any) -> Any:
    template, chat_options = ChatTemplate(source), ChatOptions(**options)
    prompt = template.render([{"role": "user", "content": "Hi"}], **chat_options.variables)
    return reply_format_of("m", template, prompt, chat_options, lambda text: [len(text)])


def test_reply_starts_with_reasoning_when_the_prompt_opens_the_reasoning() -> None:
    source = "{{ messages[0].content }}{% if enable_thinking %}<think>\n{% endif %}"
    assert format_for(source, enable_thinking=True).starts_thinking
    assert not format_for(source).starts_thinking
    assert format_for("{{ '[THINK]' }}").think_close == "[/THINK]"
    channeled = format_for(CHANNELS, thinking_budget=3)
    assert (channeled.channels, channeled.close_tokens) == (True, (len("<|end|>"),))


def test_reply_shows_only_the_control_tokens_of_its_markup() -> None:
    texts = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|other|>"]
    specials = [SpecialToken(i, text, is_control=True) for i, text in enumerate(texts)]
    template_ = ChatTemplate(template(CALLS["hermes"], THINK), specials=specials, ends=["<|im_end|>"])
    prompt = template_.render([{"role": "user", "content": "Hi"}])
    for options, visible in ((ChatOptions(), [0, 1]), (ChatOptions(tools=[TOOL]), [0, 1, 2, 3])):
        reply = reply_format_of("m", template_, prompt, options, lambda text: [len(text)])
        assert reply.visible == tuple((i, texts[i].encode()) for i in visible)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "hi",
            {"thinking_budget": 5},
            "thinking_budget is 5, but the chat template of model 'm' does not support reasoning",
        ),
        ("hi", {"tools": [TOOL]}, "model 'm' does not support tools"),
        (
            "{{ tools }}",
            {"tools": [TOOL], "tool_choice": "g"},
            "tool_choice: 'g' is not a tool of this request; the tools are: f",
        ),
        ("{{ tools }}", {"tool_choice": "required"}, "no tools are given; add at least one"),
        (
            "{{ tools }}",
            {"tools": [TOOL], "tool_choice": "required"},
            "the tool call format of model 'm' is not fully known",
        ),
        ("hi", {"template_args": {"messages": []}}, "template_args contains messages"),
    ],
)
def test_option_is_rejected_when_the_template_does_not_support_it(
    source: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        grammar_of_calls("m", format_for(source, **options), ChatOptions(**options), prepare_schema)


def test_arguments_of_earlier_calls_have_the_format_that_the_template_expects() -> None:
    template_ = ChatTemplate(template(CALLS["deepseek r1"]))
    assert '\n{"x": "é"}\n' in template_.render([{"role": "user", "content": "?"}, CALL]).text


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_enable_thinking_is_passed_to_templates_under_either_name(switch: str) -> None:
    source = f"{{% if {switch} is defined and {switch} %}}<think>{{% endif %}}"
    assert format_for(source, enable_thinking=True).starts_thinking
    other = format_for(source, enable_thinking=True, template_args={switch: False})
    assert other.starts_thinking == (switch == "enable_thinking")  # the parameter takes precedence


def test_tools_are_not_offered_when_calls_are_disabled() -> None:
    assert format_for("{{ tools | length if tools }}", tools=[TOOL], tool_choice="none").tools is None


def test_template_args_may_use_any_names() -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ loop }} {{ __class__ }}")
    variables = ChatOptions(template_args={"self": 1, "loop": 2, "__class__": 3, "": 4, "args": 5}).variables
    assert template.render([{"role": "user", "content": "Hi"}], **variables).text == "Hi 2 3"
