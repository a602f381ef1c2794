"""The markup of replies is derived from chat templates, and replies in that markup are parsed without loss."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from cellama.engine import ChatOptions, InvalidRequest
from cellama.engine.grammar.schema import prepare_schema
from cellama.engine.text import chat_template
from cellama.engine.text.chat_options import grammar_of_calls
from cellama.engine.text.chat_template import ChatTemplate
from cellama.engine.text.derivation.reply_markup import ReplyMarkup
from cellama.engine.text.formats.call_format import CallFormat
from cellama.engine.text.formats.call_reader import ToolReader
from cellama.engine.text.formats.literals import pieces_of
from cellama.engine.text.reply_reader import ReplyFormat, open_reply

from ....conftest import EXAMPLES
from .styles import CALLS, CHANNELS, STYLES, THINK, derived, reply_of, template

_PROPERTIES = {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {}, "sure": {"type": "boolean"}}
PARAMETERS = {"look": {"type": "object", "properties": _PROPERTIES}, "mcp.list-all": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in PARAMETERS.items()]
TRICKY = [
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    "<",
    "</",
    ">",
    "\n",
    " ",
    ",",
    ";",
    "é",
    "🙂",
    "a",
    "true",
    "7",
    "\u2028",
    "'",
]
markup_of = functools.cache(derived)

texts = st.lists(st.sampled_from(TRICKY), max_size=8).map("".join)
values = st.recursive(
    texts | st.integers() | st.booleans() | st.none(), lambda v: st.lists(v) | st.dictionaries(texts, v)
)
objects = values.filter(lambda v: isinstance(v, list | dict | int))  # bare text that is JSON is read as JSON
arguments = st.fixed_dictionaries(
    {}, optional={"text": texts, "count": st.integers(), "deep": objects, "sure": st.booleans()}
)


def read(format_: ReplyFormat, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the reasoning, text and calls of a reply."""
    reader = open_reply(format_)
    parts = [part for piece in pieces for part in reader.push(piece)]
    rest, calls = reader.finish()
    joined = {kind: "".join(p.text for p in [*parts, *rest] if p.kind == kind) for kind in ("reasoning", "text")}
    return joined["reasoning"], joined["text"], [(call.name, json.loads(call.arguments)) for call in calls]


def format_of(markup: ReplyMarkup) -> ReplyFormat:
    assert markup.calls is not None
    return ReplyFormat(markup.think_open, markup.think_close, tools=ToolReader(markup.calls, PARAMETERS))


def cut(text: str, positions: list[int]) -> list[str]:
    """Return the text, cut at these positions."""
    borders = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(borders)]


def calls_for_template(calls: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"functions.{name}:{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(values_)},
        }
        for i, (name, values_) in enumerate(calls)
    ]


@pytest.mark.parametrize("style", STYLES)
def test_call_style_is_derived_from_the_template(style: str) -> None:
    markup = markup_of(template(CALLS[style], THINK))
    assert markup.calls is not None
    assert markup.calls.style == STYLES[style]
    assert (markup.think_open, markup.think_close) == ("<think>", "</think>")
    assert markup.calls.middle is not None or style in ("llama3", "openai")
    assert markup.calls.can_be_forced
    assert markup.arguments_as_text == (style == "deepseek r1")


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=10 * EXAMPLES)
@given(data=st.data())
def test_replies_are_parsed_the_same_however_they_are_split(style: str, data: st.DataObject) -> None:
    source = template(CALLS[style], THINK)
    markup = markup_of(source)
    count = 1 if style == "llama3" else data.draw(st.integers(1, 3))
    calls = [("look", data.draw(arguments)) if data.draw(st.booleans()) else ("mcp.list-all", {}) for _ in range(count)]
    text = "" if style == "llama3" else data.draw(st.sampled_from(["", "Let me see.", "It is [1] < 2:\n"]))
    reasoning = data.draw(st.sampled_from(["", 'Hm, "why"?\n{1} <tool']))
    turn = {"content": text, "tool_calls": calls_for_template(calls), **({"reasoning": reasoning} if reasoning else {})}
    reply = reply_of(source, markup, turn, TOOLS)
    whole = read(format_of(markup), [reply])
    assert whole == (reasoning, text.rstrip(), calls)
    assert read(format_of(markup), cut(reply, data.draw(st.lists(st.integers(0))))) == whole
    assert read(format_of(markup), list(reply)) == whole


def words_of(format_: CallFormat) -> list[str]:
    inside = (format_.tags.open, format_.tags.sep, format_.tags.close) if format_.tags else ()
    return [
        *format_.literals,
        *inside,
        *pieces_of(" ".join(format_.literals)),
        format_.lead,
        format_.prefix,
        format_.between,
        format_.tail,
    ]


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=10 * EXAMPLES)
@given(data=st.data())
def test_reader_loses_no_text_when_markup_is_malformed(style: str, data: st.DataObject) -> None:
    format_ = format_of(markup_of(template(CALLS[style])))
    assert format_.tools is not None
    words = [word for word in words_of(format_.tools.format) if word]
    pieces = data.draw(
        st.lists(st.sampled_from([*words, "look", '{"name": "look"}', '{"a": 1}', " b", "\n", "{", '"']))
    )
    reasoning, text, calls = read(format_, pieces)
    assert read(format_, ["".join(pieces)]) == (reasoning, text, calls)
    assert read(format_, list("".join(pieces))) == (reasoning, text, calls)
    if not calls:
        assert (reasoning + text).split() == "".join(pieces).split()


@pytest.mark.parametrize(
    ("reasoning", "begin", "tags"),
    [
        ("", "", ("", "")),
        (THINK, "", ("<think>", "</think>")),
        ("", "{{ '<think>\n' }}", ("<think>", "</think>")),
        ("", "{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}", ("<think>", "</think>")),
        ("{{ '[THINK]' ~ m.reasoning_content ~ '[/THINK]' }}", "", ("[THINK]", "[/THINK]")),
        ("{{ '<seed:think>' ~ m.reasoning_content ~ '</seed:think>' }}", "", ("<seed:think>", "</seed:think>")),
        (
            "{{ '<|START_THINKING|>' ~ m.reasoning_content ~ '<|END_THINKING|>' }}",
            "{{ '<|START_THINKING|>' }}",
            ("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        ("{{ '<|channel>thought\n' ~ m.thinking ~ '\n<channel|>' }}", "", ("<|channel>thought", "<channel|>")),
        ("{{ m.reasoning_content ~ '\n[FINAL]\n' }}", "{{ 'My steps:\n' }}", ("My steps:", "[FINAL]")),
        ("{% if '</think>' in m.content %}{% endif %}", "", ("<think>", "</think>")),
    ],
)
def test_reasoning_tags_are_derived_from_the_template(reasoning: str, begin: str, tags: tuple[str, str]) -> None:
    markup = markup_of(template(CALLS["hermes"], reasoning, begin))
    assert (markup.think_open, markup.think_close) == tags


THIRD_WAY_OF_VALUES = template(
    CALLS["deepseek v3.2"].replace("'false'", "'false' if v is number else 'nested'")
)  # writes nested values in a third way
AFTER_AN_END_TOKEN = template("{{ '<|im_end|>\n<|im_start|>call\n' }}" + CALLS["hermes"])


@pytest.mark.parametrize("source", [THIRD_WAY_OF_VALUES, AFTER_AN_END_TOKEN])
def test_calls_are_parsed_but_not_forced_when_some_calls_have_an_unknown_format(source: str) -> None:
    markup = markup_of(source)
    assert markup.calls is not None
    options = ChatOptions(TOOLS, tool_choice="required")
    with pytest.raises(InvalidRequest, match="the tool call format of model 'm' is not fully known"):
        grammar_of_calls("m", format_of(markup), options, prepare_schema)
    calls = [("look", {"text": "Hi", "count": 3})]
    turn = {"content": "", "tool_calls": calls_for_template(calls)}
    assert read(format_of(markup), [reply_of(source, markup, turn, TOOLS)])[2] == calls


@pytest.mark.parametrize(
    ("source", "description"),
    [
        ("hi", "no reasoning, unknown tool calls"),
        (template(CALLS["hermes"], THINK), "reasoning between <think> and </think>, tool calls as JSON after"),
        (template(CALLS["glm"]), "no reasoning, tool calls as tags after '<tool_call>'"),
        (CHANNELS, "reasoning, text and tool calls in channels"),
        (
            "{{ tools }}{% if tools %}Write <tool_call>{…}</tool_call>{% endif %}",
            "tool calls as JSON after '<tool_call>",
        ),
        ("{{ tools }}{% if tools %}Write <|tool_call|>[{…}]{% endif %}", "tool calls as JSON after '<|tool_call|>[{"),
        (template("{{ m.tool_calls | string }}"), "no reasoning, unknown tool calls"),
        (
            template("{{ m.tool_calls | string }}") + "{% if tools %}Write <tool_call>{…}</tool_call>{% endif %}",
            "no reasoning, unknown tool calls",
        ),
        (THIRD_WAY_OF_VALUES, "can't be forced"),
        (AFTER_AN_END_TOKEN, "can't be forced"),
    ],
)
def test_str_of_markup_describes_the_markup(source: str, description: str) -> None:
    assert description in str(markup_of(source))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('never') }}",
        template("<a" + " b" * 300 + ">" + CALLS["glm"]),
        "{{ messages[0].content * 99999999 }}",
        "{% for i in range(3000) %}{{ '{\"name\": ' ~ messages[-1].content }}{% endfor %}",
        "{% for m in messages %}{{ m.content ~ '{' * 8000 ~ (m.tool_calls or '') }}{% endfor %}",
        "{% if tools %}{% for i in range(99999) %}{% for i in range(99999) %}{{ i if i < 0 }}{% endfor %}"
        "{% endfor %}{% endif %}",
    ],
)
def test_hostile_template_has_no_markup_and_takes_little_time(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_endless = "range(99999)" in source
    monkeypatch.setattr(chat_template, "CPU_S", 0.5 if is_endless else 60.0)
    markup = ChatTemplate(source).reply_markup
    assert (markup.calls, markup.think_close) == (None, "")
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warnings) == is_endless
