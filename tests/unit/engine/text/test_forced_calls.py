"""A forced call is one that is read back, with arguments by the tool's schema, in every way of writing calls."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from cellama.engine import ChatOptions, InvalidRequest
from cellama.engine.grammar.automaton import Automaton, Work
from cellama.engine.grammar.json_schema import schemas_to_gbnf
from cellama.engine.grammar.program import compile_grammar
from cellama.engine.text.channel_reader import ChannelReader
from cellama.engine.text.chat_template import grammar_of_choice
from cellama.engine.text.formats.call_format import CallFormat
from cellama.engine.text.formats.call_reader import ToolReader
from cellama.engine.text.formats.forcing import forced_calls, text_without
from cellama.engine.text.formats.literals import KEY
from cellama.engine.text.reply_format import ReplyFormat
from cellama.engine.text.reply_parser import ReplyReader

from .styles import CALLS, CHANNELS, STYLES, derived, reply_of, template

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["°C", "K"]},
        "count": {"type": "integer"},
        "deep": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        "note": {"$ref": "#/$defs/note"},
    },
    "required": ["text", "deep"],
    "additionalProperties": False,
    "$defs": {"note": {"type": "string", "minLength": 1, "maxLength": 3}},
}
TOOLS: dict[str, dict[str, Any]] = {"look": LOOK, "list-all": {"type": "object", "properties": {}}}


def calls_of(style: str) -> CallFormat:
    source = CHANNELS if style == "channels" else template(CALLS[style])
    calls = derived(source).calls
    assert calls is not None
    return calls


def automaton_of(gbnf: str) -> Automaton:
    return Automaton(compile_grammar(gbnf, "root"))


def accepts(automaton: Automaton, text: str) -> bool:
    work = Work()
    state = automaton.walk(automaton.start(work), text.encode(), work)
    return state >= 0 and automaton.accepting[state]


def written_by_chance(automaton: Automaton, words: list[str], rng: random.Random) -> str:
    """A text of the grammar, in which these words are likely."""
    work, made = Work(), b""
    state, parts = automaton.start(work), [word.encode() for word in words]
    while not (automaton.accepting[state] and rng.random() < 0.5):
        work.earn()
        choices = [part for part in parts if automaton.walk(state, part, work) >= 0]
        if not choices or rng.random() < 0.3:
            single = (bytes([byte]) for byte in range(256))
            choices = [byte for byte in single if automaton.walk(state, byte, work) >= 0]
        if not choices:
            break
        part = rng.choice(choices)
        made, state = made + part, automaton.walk(state, part, work)
        assert len(made) < 5000
    return made.decode()


def read(calls: CallFormat, text: str, tools: dict[str, dict[str, Any]], channels: bool) -> tuple[str, list[Any]]:
    format_ = ReplyFormat(tools=ToolReader(calls, tools), channels=channels)
    reader = ChannelReader(format_) if channels else ReplyReader(format_)
    parts = reader.push(text)
    rest, found = reader.finish()
    said = "".join(part.text for part in [*parts, *rest] if part.kind == "text")
    return said, [(call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize("style", [*STYLES, "channels"])
@pytest.mark.parametrize("several", [False, True])
def test_whatever_a_grammar_of_calls_allows_is_read_as_calls_that_fit(style: str, several: bool) -> None:
    calls = calls_of(style)
    automaton = automaton_of(forced_calls(calls, TOOLS, schemas_to_gbnf, several=several))
    inside = [calls.tags.close.replace(KEY, key) for key in LOOK["properties"]] if calls.tags else []
    words = [*inside, *inside, "<|end|><|start|>assistant<|channel|>", '"', '"}', "}", "true", "x", "1"]
    rng, most = random.Random(7), 0
    for _ in range(12):
        text = written_by_chance(automaton, words, rng)
        said, found = read(calls, text, TOOLS, style == "channels")
        assert (said, bool(found)) == ("", True), text
        for name, arguments in found:
            jsonschema.validate(arguments, TOOLS[name])
        most = max(most, len(found))
    assert most == 1 or (several and calls.middle is not None)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("several", [False, True])
def test_grammar_of_calls_allows_what_the_template_writes(style: str, several: bool) -> None:
    source = template(CALLS[style])
    markup = derived(source)
    assert markup.calls is not None
    automaton = automaton_of(forced_calls(markup.calls, TOOLS, schemas_to_gbnf, several=several))
    look = {"text": 'é "{<tool\n</', "count": 3, "deep": {"a": True}}
    calls = [
        {
            "id": f"functions.{name}:{i}" if style == "kimi" else f"abcdefgh{i}",
            "function": {"name": name, "arguments": json.dumps(of)},
        }
        for i, (name, of) in enumerate([("look", look), ("list-all", {}), ("look", look)])
    ]
    for count in (1, 2, 3):
        if style == "llama3" and count > 1:
            continue
        tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
        reply = reply_of(source, markup, {"content": "", "tool_calls": calls[:count]}, tools)
        assert accepts(automaton, reply) == (count == 1 or (several and markup.calls.middle is not None)), reply
    assert not accepts(automaton, "")


def test_thoughts_before_a_forced_call_end_where_they_are_read_to_end() -> None:
    automaton = automaton_of(forced_calls(calls_of("channels"), TOOLS, schemas_to_gbnf))
    before, end = "<|channel|>analysis<|message|>1 <", "<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.list-all <|constrain|>json<|message|>{}"
    assert accepts(automaton, f"{before}{end}{call}")
    assert not accepts(automaton, f"{before}{end}more{end}{call}")


@pytest.mark.parametrize("tag", ["<|", "</p>", "</parameter>", "<<x", "x", "]]>"])
def test_text_without_a_tag_is_any_other_text(tag: str) -> None:
    automaton = automaton_of(f"root ::= {text_without(tag)} {json.dumps(tag)}")
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(
            rng.choice([tag[0], tag[1:2], tag[:-1], tag[-1], "a", "é", "<", "/"]) for _ in range(rng.randrange(6))
        )
        may = tag not in text + tag[:-1] and (tag[0] not in tag[1:] or tag[0] not in text)
        assert accepts(automaton, text + tag) == may, text


def test_named_tool_is_the_only_one_and_other_choices_are_free() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": of}} for name, of in TOOLS.items()]
    calls = calls_of("hermes")
    for choice, allowed in (("look", [False, False]), ("list-all", [True, False]), ("required", [True, False])):
        for several in (None, True):
            options = ChatOptions(tools, tool_choice=choice, parallel_tool_calls=several)
            gbnf = grammar_of_choice("m", ReplyFormat(tools=ToolReader(calls)), options, schemas_to_gbnf)
            assert gbnf is not None
            one = '<tool_call>\n{"name": "list-all", "arguments": {}}\n</tool_call>'
            told = [accepts(automaton_of(gbnf), text) for text in (one, f"{one}\n{one}")]
            assert told == ([allowed[0], allowed[0] and several is True])
    assert grammar_of_choice("m", ReplyFormat(), ChatOptions(tools), schemas_to_gbnf) is None


def test_one_call_is_all_that_is_read_if_there_shall_be_no_more() -> None:
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    reader = ToolReader(calls_of("hermes"), only_one=True)
    assert [call.name for call in reader.parse(one + one)[0]] == ["f"]
    assert len(ToolReader(calls_of("hermes")).parse(one + one)[0]) == 2


@pytest.mark.parametrize("style", ["glm", "hermes"])
@pytest.mark.parametrize("wrong", [{"minLength": "x"}, {"maxLength": -1}, {"minimum": 5}])
def test_schema_of_a_text_is_checked_alike_in_every_style(style: str, wrong: dict[str, Any]) -> None:
    tools = {"f": {"type": "object", "properties": {"who": {"type": "string", **wrong}}}}
    with pytest.raises(InvalidRequest, match=rf"#/properties/who/{next(iter(wrong))}"):
        forced_calls(calls_of(style), tools, schemas_to_gbnf)


def test_what_arguments_share_is_made_once() -> None:
    shared = {"type": "object", "properties": {"inner": {"type": "integer"}}, "required": ["inner"]}
    properties = {f"a{i}": {"$ref": "#/$defs/shared"} for i in range(20)}
    tools = {"f": {"type": "object", "properties": properties, "$defs": {"shared": shared}}}
    assert forced_calls(calls_of("glm"), tools, schemas_to_gbnf).count("inner") == 1


@pytest.mark.parametrize("shape", [{"pattern": "a+"}, {"format": "date"}])
def test_what_can_not_be_forced_on_bare_text_is_refused_by_name(shape: dict[str, str]) -> None:
    tools = {"f": {"type": "object", "properties": {"when": {"type": "string", **shape}}}}
    with pytest.raises(InvalidRequest, match=f"argument 'when' of a tool has a {next(iter(shape))}"):
        forced_calls(calls_of("glm"), tools, schemas_to_gbnf)
    assert "root ::=" in forced_calls(calls_of("hermes"), tools, schemas_to_gbnf)
