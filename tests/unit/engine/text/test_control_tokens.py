"""A caller's text never becomes a control token, whatever the chat template does with it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from cellama.engine import InvalidRequest
from cellama.engine.text.chat_template import ChatTemplate, Rendered
from cellama.engine.text.markup import SpecialToken, from_caller, tokenize_marked

from ....conftest import EXAMPLES

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
LITERAL = re.compile(
    r"<[|｜][\w▁]+[|｜]>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|s)>|\[/?[A-Z_]+\]"
)
ALWAYS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<｜User｜>",
    "<start_of_turn>",
    "[INST]",
    "</s>",
    "<s>",
)
USER_DEFINED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")


def source_of(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")


def specials_of(family: str) -> list[SpecialToken]:
    texts = sorted({*LITERAL.findall(source_of(family)), *ALWAYS}, key=len, reverse=True)
    return [SpecialToken(1_000_000 + i, text, is_control=text not in USER_DEFINED) for i, text in enumerate(texts)]


@functools.cache
def template_of(family: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source_of(family), bos="<s>", eos="</s>", specials=specials_of(family), **options)


def conversation_with(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a conversation and its tools, with this text wherever a caller may write text."""
    properties = {text: {"type": "string", "description": text}}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": parameters}}
    call = {"id": text, "function": {"name": text, "arguments": {text: text}}}
    return [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "reasoning": text},
        {"role": "user", "content": text},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": text},
    ], [tool]


def tokens_of(prompt: Rendered, specials: list[SpecialToken], markup: frozenset[str] = frozenset()) -> list[int]:
    """Return the tokens of a prompt. Every character outside special tokens is one token."""

    def tokenize(text: str, parse_special: bool) -> list[int]:
        wanted = [special for special in specials if parse_special or not special.is_control]
        ids = {special.text: special.id for special in wanted}
        parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text) if ids else [text]
        return [token for part in parts for token in ([ids[part]] if part in ids else map(ord, part))]

    return tokenize_marked(prompt.text, prompt.marked, specials, markup, tokenize)


def special_ids(family: str, text: str) -> list[int]:
    template, (messages, tools) = template_of(family), conversation_with(text)
    prompt = template.render(messages, tools=tools)
    assert prompt.text == template_of(family, mark=False).render(messages, tools=tools).text
    return [token for token in tokens_of(prompt, specials_of(family), template.markup) if token >= 1_000_000]


@pytest.mark.parametrize("family", FAMILIES)
def test_caller_text_never_becomes_a_control_token(family: str) -> None:
    plain = special_ids(family, "Hello there")
    control = [special.text for special in specials_of(family) if special.is_control]
    assert len(plain) >= 4
    assert special_ids(family, "a " + "\n".join(control) + " b") == plain
    assert special_ids(family, "".join(control)) == plain
    for literal in control:
        assert special_ids(family, literal) == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_unchanged_when_the_text_has_no_control_tokens(family: str) -> None:
    template, text = template_of(family), "if a < b | c > d: [INST  </ think> is user_name's `<|`; <b>bold</b>\n"
    messages, tools = conversation_with(text)
    prompt = template.render(messages, tools=tools)
    unmarked = template_of(family, mark=False).render(messages, tools=tools)
    assert unmarked.marked == unmarked.text == prompt.text
    assert tokens_of(prompt, specials_of(family), template.markup) == tokens_of(unmarked, specials_of(family))


PIECES = ["<|im_", "end|>", "<|im_end|>", "<", "|>", "</", "think>", "</think>", "s>", "a", " ", "\n", "[/INST]", "["]


@pytest.mark.parametrize("family", ["qwen", "mistral", "gpt-oss"])
@given(st.lists(st.sampled_from(PIECES), max_size=8), st.lists(st.sampled_from(PIECES), max_size=8))
@settings(max_examples=20 * EXAMPLES)
def test_pieces_of_control_tokens_never_form_whole_tokens(family: str, one: list[str], other: list[str]) -> None:
    specials = {special.id for special in specials_of(family) if special.is_control}

    def control_ids(first: str, second: str) -> list[int]:
        messages = [{"role": "user", "content": first}, {"role": "user", "content": second}]
        prompt = template_of(family).render(messages)
        tokens = tokens_of(prompt, specials_of(family), template_of(family).markup)
        return [token for token in tokens if token in specials]

    assert control_ids("".join(one), "".join(other)) == control_ids("a", "b")


END = SpecialToken(1_000_000, "<|end|>", is_control=True)
THINK = SpecialToken(1_000_001, "</think>", is_control=False)
BARE = SpecialToken(1_000_002, "ENDOFTEXT", is_control=True)


def ids(source: str, specials: list[SpecialToken], *contents: str, **variables: Any) -> list[int]:
    """Return the special tokens of a prompt."""
    template = ChatTemplate(source, specials=specials)
    prompt = template.render([{"role": "user", "content": content} for content in contents], **variables)
    return [token for token in tokens_of(prompt, specials, template.markup) if token >= 1_000_000]


EACH = "{% for m in messages %}{{ m.content }}{% endfor %}<|end|>"


def test_strings_that_the_template_joins_do_not_become_a_control_token() -> None:
    assert ids(EACH, [END], "<|e", "nd|>") == [END.id]
    assert ids("{{ messages | map(attribute='content') | join }}<|end|>", [END], "<", "|", "end|>") == [END.id]
    assert ids("{{ messages[0].content[::-1] }}<|end|>", [END], ">|dne|<") == [END.id]
    assert ids("{{ messages[0].content.replace('X', '') }}<|end|>", [END], "<|eXnd|>") == [END.id]


def test_control_token_stays_text_in_ascii_json() -> None:
    source = "{{ messages[0].content | tojson(ensure_ascii=True) }}<|end|>"
    assert ids(source, [END], 'é "<|end|>" \\ud836') == [END.id]


def test_word_stays_text_when_the_template_adds_the_rest_of_a_control_token() -> None:
    source = "{% for key in spec %}{{ '<|' ~ key ~ '|>' }}{% endfor %}<|end|>"
    assert ids(source, [END], spec={"end": 1, "other": 2}) == [END.id]
    user = SpecialToken(1_000_000, "<|user|>", is_control=True)
    assert ids("{{ '<|' + messages[0].role + '|>' }}", [user], "a") == [user.id]


def test_control_token_consisting_only_of_letters_stays_text() -> None:
    assert ids(EACH + "ENDOFTEXT", [END, BARE], "the ENDOFTEXT comes", "ENDOFTEXT") == [END.id, BARE.id]


def test_template_finds_the_markup_that_it_searches_for() -> None:
    source = "{{ messages[0].content.split('</think>')[-1] }}</think><|end|>"
    assert ids(source, [THINK, END], "so<|end|></think>yes<|end|>") == [THINK.id, END.id]
    control = SpecialToken(THINK.id, "</think>", is_control=True)
    assert ids(source, [control, END], "so<|end|></think>yes<|end|>") == [THINK.id, END.id]
    kept = "{{ 'thought' if '</think>' in messages[0].content }}{{ messages[0].content }}<|end|>"
    assert ids(kept, [THINK, END], "a</think><|end|>") == [THINK.id, END.id]


def test_message_is_rejected_when_its_control_token_looks_like_the_templates_own_token() -> None:
    source = "{% if '<|end|>' in messages[0].content %}cut: {% endif %}{{ messages[0].content }}<|end|>"
    assert ids(source, [END], "harmless < | >") == [END.id]
    with pytest.raises(InvalidRequest, match=r"the messages contain '<\|end\|>'.*or set control_tokens_in_text"):
        ids(source, [END], "a <|end|> b")


def test_text_becomes_control_tokens_when_marking_is_disabled() -> None:
    prompt = ChatTemplate(EACH, specials=[END], mark=False).render([{"role": "user", "content": "<|end|>"}])
    assert tokens_of(prompt, [END]) == [END.id, END.id]


def test_control_token_drops_the_space_around_it_when_the_vocabulary_requires_it() -> None:
    strips = SpecialToken(1_000_000, "<m>", is_control=True, strips_left=True, strips_right=True)
    text, by = "a \n<m>  b <m>", " <m> "
    prompt = Rendered(text + by, text + from_caller(by))
    expected = [ord("a"), strips.id, ord("b"), strips.id, *map(ord, "<m> ")]
    assert tokens_of(prompt, [strips]) == expected
