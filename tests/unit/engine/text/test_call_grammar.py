"""Texts that a grammar of tool calls allows are parsed as calls that conform to their schemas, in every style."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from cellama.api.anthropic.answers import completed
from cellama.engine import ChatOptions, InvalidRequest
from cellama.engine.grammar.matcher import Matcher, MatcherTokens, SharedGrammar
from cellama.engine.grammar.schema import prepare_schema
from cellama.engine.text.chat_options import grammar_of_calls
from cellama.engine.text.formats.call_format import CallFormat
from cellama.engine.text.formats.call_grammar import CallGrammar, OfferedTool, ReasoningTags, TextConstraint
from cellama.engine.text.formats.call_reader import ToolReader
from cellama.engine.text.formats.literals import ID, INDEX, KEY
from cellama.engine.text.reply_reader import ReplyFormat, open_reply

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
NO_MORE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: dict[str, dict[str, Any]] = {"look": LOOK, "list-all": NO_MORE, "look-up": NO_MORE}
ALL_STYLES = [*STYLES, "channels"]
# The vocabulary has all bytes, an end token, and control tokens.
CONTROL_TEXTS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "[TOOL_CALLS]", "[ARGS]"]
CONTROL_TEXTS += ["<｜calls▁begin｜>", "<｜call▁begin｜>", "<｜sep｜>", "<|calls_begin|>", "<|call_begin|>", "<think>"]
CONTROLS = {text: 257 + i for i, text in enumerate(CONTROL_TEXTS)}
END_TOKEN = 256
PIECES = [bytes([byte]) for byte in range(256)] + [b""] * (1 + len(CONTROLS))


@functools.cache
def tokens_of_bytes() -> MatcherTokens:
    names = {token: text.encode() for text, token in CONTROLS.items()}
    return MatcherTokens(PIECES, names, frozenset([END_TOKEN]), list)


@functools.cache
def calls_of(style: str) -> CallFormat:
    source = CHANNELS if style == "channels" else template(CALLS[style])
    calls = derived(source).calls
    assert calls is not None
    return calls


def offered(tools: dict[str, dict[str, Any]], *, strict: bool = False) -> list[OfferedTool]:
    numbered = enumerate(tools.items())
    return [
        OfferedTool(name, parameters, strict, f"tools.{i}.function.parameters") for i, (name, parameters) in numbered
    ]


def grammar_of(style: str, *, strict: bool = False, tools: dict[str, Any] = TOOLS, **options: Any) -> CallGrammar:
    options = {"several": False, "forced": False, "controls": {}, **options}
    return CallGrammar(calls_of(style), offered(tools, strict=strict), prepare_schema, **options)


def matcher_of(lark: str) -> Matcher:
    return Matcher(SharedGrammar(tokens_of_bytes(), lark, "lark"))


def tokens_of(text: str, controls: dict[str, int]) -> list[int]:
    tokens: list[int] = []
    while text:
        control = next((each for each in controls if text.startswith(each)), None)
        tokens += [controls[control]] if control else list(text[0].encode())
        text = text[len(control) if control else 1 :]
    return tokens


def allows(matcher: Matcher, token: int) -> bool:
    return bool(matcher.allows(np.array([token]))[0])


def accepts(lark: str, text: str, controls: dict[str, int] | None = None) -> bool:
    matcher = matcher_of(lark)
    for token in tokens_of(text, controls or {}):
        if not allows(matcher, token):
            return False
        matcher.accept(token)
    return allows(matcher, END_TOKEN)


def random_text(lark: str, words: list[str], rng: random.Random, controls: dict[str, int], first: str = "") -> str:
    """Return a random text of the grammar, in which these words are likely."""
    matcher, written, texts = matcher_of(lark), b"", {token: text for text, token in controls.items()}
    while first or not (allows(matcher, END_TOKEN) and rng.random() < 0.3):
        word, first = first or rng.choice(words), ""
        for token in tokens_of(word, controls):
            if not allows(matcher, token):
                break
            matcher.accept(token)
            written += texts[token].encode() if token in texts else bytes([token])
        mask = matcher.allows(np.arange(len(PIECES)))
        mask[END_TOKEN] = False
        if not mask.any():
            break
        token = int(rng.choice(np.flatnonzero(mask)))
        matcher.accept(token)
        written += texts[token].encode() if token in texts else bytes([token])
        if len(written) > 3000:
            return ""
    return written.decode(errors="ignore")


def read(calls: CallFormat, text: str, tools: dict[str, Any] = TOOLS, **options: Any) -> tuple[str, str, list[Any]]:
    """Return the reasoning, text and calls of a reply."""
    channels = calls is calls_of("channels")
    format_ = ReplyFormat(tools=ToolReader(calls, tools), channels=channels, **options)
    reader = open_reply(format_)
    parts = reader.push(text)
    rest, found = reader.finish()
    joined = {kind: "".join(p.text for p in [*parts, *rest] if p.kind == kind) for kind in ("reasoning", "text")}
    return joined["reasoning"], joined["text"], [(call.name, json.loads(call.arguments)) for call in found]


def likely(style: str) -> list[str]:
    calls = calls_of(style)
    inside = [calls.tags.close.replace(KEY, key) for key in LOOK["properties"]] if calls.tags else []
    opens = [calls.open, *calls.markers, calls.open + "look" + calls.inner, calls.open + "list-all" + calls.inner]
    more = ["<|end|><|start|>assistant", '"', '"}', "}", "true", "x", "1", calls.close, calls.middle or "{}"]
    return [*inside, *inside, *opens, *more, '"text": "a", "deep": {"a": true}}']


@pytest.mark.parametrize("controls", [{}, CONTROLS], ids=["as text", "control tokens"])
@pytest.mark.parametrize("style", ALL_STYLES)
@pytest.mark.parametrize("several", [False, True])
def test_forced_calls_are_parsed_and_conform_to_their_schemas(
    style: str, several: bool, controls: dict[str, int]
) -> None:
    calls = calls_of(style)
    lark = grammar_of(style, forced=True, several=several, controls=controls).write()
    rng, max_calls, num_replies = random.Random(7), 0, 0
    for _ in range(10):
        text = random_text(lark, likely(style), rng, controls)
        if not text:
            continue
        _, free_text, found = read(calls, text)
        assert (free_text, bool(found)) == ("", True), text
        for name, arguments in found:
            jsonschema.validate(arguments, TOOLS[name])
        max_calls, num_replies = max(max_calls, len(found)), num_replies + 1
    assert num_replies > 3
    assert max_calls == 1 or (several and calls.middle is not None)


@pytest.mark.parametrize("controls", [{}, CONTROLS], ids=["as text", "control tokens"])
@pytest.mark.parametrize("style", ALL_STYLES)
@pytest.mark.parametrize("strict", [False, True])
def test_calls_in_unforced_replies_use_offered_tools(style: str, strict: bool, controls: dict[str, int]) -> None:
    calls = calls_of(style)
    lark = grammar_of(style, strict=strict, several=True, controls=controls).write()
    rng, num_calls = random.Random(3), 0
    for _ in range(16):
        first = "" if rng.random() < 0.3 else calls.open + rng.choice([*TOOLS, "other"]) + calls.inner
        text = random_text(lark, likely(style), rng, controls, first)
        _, free_text, found = read(calls, text)
        for name, arguments in found:
            assert name in TOOLS
            if strict:
                jsonschema.validate(arguments, TOOLS[name])
        assert found or not any(marker in free_text for marker in calls.markers), text
        num_calls += len(found)
    assert num_calls


@pytest.mark.parametrize("style", ALL_STYLES)
def test_unforced_replies_may_contain_any_text(style: str) -> None:
    lark = grammar_of(style, several=True, reasoning=ReasoningTags("<think>", "</think>")).write()
    texts = ["", "Hi, <b>you</b> {3}!\n\n", "[1, 2]", '{"city": "Paris"}', '{"name": "Bob", "age": 3}', "a <"]
    assert all(accepts(lark, text) for text in texts)
    if style != "channels":
        assert all(accepts(lark, f"<think>\nWell, {text}\n</think>\n\n{text}") for text in texts)
        assert accepts(lark, "<think>\nWell")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("use", ["forced", "free", "strict", "with schema"])
@pytest.mark.parametrize("several", [False, True])
def test_call_grammar_allows_the_calls_that_the_template_writes(style: str, use: str, several: bool) -> None:
    source = template(CALLS[style])
    markup = derived(source)
    assert markup.calls is not None
    constraint = TextConstraint("json_schema", '{"type": "object"}', True) if use == "with schema" else None
    lark = grammar_of(
        style, forced=use == "forced", several=several, strict=use in ("strict", "with schema"), constraint=constraint
    ).write()
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
        assert accepts(lark, reply) == (count == 1 or (several and markup.calls.middle is not None)), reply
        if use in ("free", "strict") and count == 1 and style != "llama3":
            assert accepts(lark, f"I look.{reply}")
    assert accepts(lark, "") == (use in ("free", "strict"))


def test_reasoning_before_a_forced_call_ends_at_its_first_end_mark() -> None:
    lark = grammar_of("channels", forced=True).write()
    before, end = "<|channel|>analysis<|message|>1 <", "<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.list-all <|constrain|>json<|message|>{}"
    assert accepts(lark, f"{before}{end}{call}")
    assert not accepts(lark, f"{before}{end}more{end}{call}")


def test_reply_consists_of_calls_or_of_text_that_meets_the_constraint() -> None:
    call = '<tool_call>\n{"name": "list-all", "arguments": {}}\n</tool_call>'
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    for constraint, text in (
        (TextConstraint("json_schema", schema, True), '{"n": 3}'),
        (TextConstraint("regex", "a/b+", True), "a/bb"),
    ):
        lark = grammar_of("hermes", constraint=constraint, reasoning=ReasoningTags("<think>", "</think>")).write()
        assert accepts(lark, text)
        assert accepts(lark, call)
        assert accepts(lark, f"<think>\nWell\n</think>{text}")
        assert not accepts(lark, "Hi")
        assert not accepts(lark, text + call)
    bare = grammar_of("llama3", constraint=TextConstraint("json_schema", schema, True), strict=True).write()
    assert accepts(bare, '{"n": 3}')
    assert accepts(bare, '{"name": "list-all", "parameters": {}}')
    note = '{"name": "look", "parameters": {"text": "a", "deep": {"a": true}, "note": "%s"}}'
    assert accepts(bare, note % "abc")
    assert not accepts(bare, note % "abcd")
    assert not accepts(bare, '{"name": "other", "parameters": {}}')
    channels = grammar_of("channels", constraint=TextConstraint("json_schema", schema, True), several=True).write()
    reasoning = "<|channel|>analysis<|message|>Well<|end|><|start|>assistant"
    assert accepts(channels, reasoning + '<|channel|>final<|message|>{"n": 3}')
    assert accepts(channels, reasoning + "<|channel|>commentary to=functions.list-all <|constrain|>json<|message|>{}")
    assert not accepts(channels, reasoning + "<|channel|>final<|message|>Hi")


def test_tool_choice_limits_the_calls_that_the_grammar_allows() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": of}} for name, of in TOOLS.items()]
    format_ = ReplyFormat(tools=ToolReader(calls_of("hermes")))
    one = '<tool_call>\n{"name": "list-all", "arguments": {}}\n</tool_call>'
    for choice, may in (("look", False), ("list-all", True), ("required", True)):
        for several in (None, True):
            options = ChatOptions(tools, tool_choice=choice, parallel_tool_calls=several)
            grammar = grammar_of_calls("m", format_, options, prepare_schema)
            assert grammar is not None
            lark = grammar.write()
            assert [accepts(lark, text) for text in (one, f"{one}\n{one}", "Hi")] == [may, may and bool(several), False]
    for several in (None, True, False):
        grammar = grammar_of_calls("m", format_, ChatOptions(tools, parallel_tool_calls=several), prepare_schema)
        assert grammar is not None
        assert [accepts(grammar.write(), text) for text in (one, f"{one}\n{one}", "Hi")] == [
            True,
            several is not False,
            True,
        ]
    assert grammar_of_calls("m", ReplyFormat(), ChatOptions(tools), prepare_schema) is None


def test_only_allowed_tools_can_be_called() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": of}} for name, of in TOOLS.items()]
    for choice in ("auto", "required"):
        options = ChatOptions(tools, tool_choice=choice, allowed_tools=["list-all"])
        reader = ToolReader(calls_of("hermes"), {tool.name: tool.parameters for tool in options.callable})
        grammar = grammar_of_calls("m", ReplyFormat(tools=reader), options, prepare_schema)
        assert grammar is not None
        call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
        assert [accepts(grammar.write(), call % name) for name in ("list-all", "look-up")] == [True, False]
        assert reader.parse(call % "look-up") == ((), call % "look-up")
    for allowed, choice, message in (
        (["other"], "auto", "allowed_tools: 'other' is not a tool of this request; the tools are: list-all, look"),
        ([], "auto", "allowed_tools is empty"),
        (["look"], "list-all", "tool_choice: 'list-all' is not one of allowed_tools"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            assert ChatOptions(tools, tool_choice=choice, allowed_tools=allowed).callable


def test_reader_returns_one_call_when_only_one_call_is_allowed() -> None:
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    reader = ToolReader(calls_of("hermes"), only_one=True)
    assert [call.name for call in reader.parse(one + one)[0]] == ["f"]
    assert len(ToolReader(calls_of("hermes")).parse(one + one)[0]) == 2


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("^[A-Z]{2}/?$", ["AB", "AB/"], ["ab", "ABC"]),
        ("b+", ["abc", "b"], ["a", ""]),
        (r"^\d+$", ["12"], ["x", "1x", "٣"]),
        (r"^a\.b", ["a.bc"], ["axb"]),
    ],
)
def test_pattern_for_bare_text_is_enforced(pattern: str, fitting: list[str], others: list[str]) -> None:
    text = {"type": "string", "pattern": pattern}
    tools = {"f": {"type": "object", "properties": {"a": text}, "required": ["a"]}}
    lark = grammar_of("glm", forced=True, tools=tools, strict=True).write()
    call = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
    assert all(accepts(lark, call % text) for text in fitting)
    assert not any(accepts(lark, call % text) for text in others)


@pytest.mark.parametrize("shape", [{"pattern": "(?=a)"}, {"pattern": "^a|b$"}, {"format": "date"}])
def test_unenforceable_keyword_for_bare_text_is_rejected_if_strict_or_causes_a_warning(shape: dict[str, str]) -> None:
    tools = {"f": {"type": "object", "properties": {"when": {"type": "string", **shape}}}}
    place = f"tools.0.function.parameters.properties.when.{next(iter(shape))}"
    with pytest.raises(InvalidRequest, match=rf"tools.0.function.parameters.*properties.when.{next(iter(shape))}"):
        grammar_of("glm", forced=True, tools=tools, strict=True).write()
    grammar = grammar_of("glm", forced=True, tools=tools)
    assert "start:" in grammar.write()
    assert [warning.startswith(place) for warning in grammar.warnings] == [True]


def test_unenforceable_keyword_in_tagged_arguments_is_rejected_if_strict_or_causes_a_warning() -> None:
    shape = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "minProperties": 1}
    with pytest.raises(InvalidRequest, match=r"tools\.0\.function\.parameters\.minProperties"):
        grammar_of("glm", forced=True, tools={"f": shape}, strict=True).write()
    grammar = grammar_of("glm", forced=True, tools={"f": shape})
    grammar.write()
    assert [warning.partition(" is not")[0] for warning in grammar.warnings] == [
        "tools.0.function.parameters.minProperties"
    ]
    assert grammar_of("hermes", forced=True, tools={"f": shape}, strict=True).write()


def test_schema_of_tagged_arguments_may_be_a_reference_to_an_object() -> None:
    node = {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
        "required": ["id"],
    }
    tools = {"f": {"$ref": "#/$defs/Node", "$defs": {"Node": node}}}
    lark = grammar_of("glm", forced=True, tools=tools, strict=True).write()
    call = "<tool_call>f\n<arg_key>id</arg_key>\n<arg_value>%s</arg_value>\n"
    more = "<arg_key>next</arg_key>\n<arg_value>%s</arg_value>\n"
    assert accepts(lark, call % 7 + "</tool_call>")
    assert accepts(lark, call % 7 + more % '{"id": 8, "next": null}' + "</tool_call>")
    assert not accepts(lark, call % "x" + "</tool_call>")
    assert not accepts(lark, call % 7 + more % '{"next": null}' + "</tool_call>")
    assert not accepts(lark, "<tool_call>f\n</tool_call>")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("is_call", [False, True])
def test_call_is_partial_and_releases_no_markup_wherever_it_is_truncated(style: str, is_call: bool) -> None:
    source = template(CALLS[style])
    markup = derived(source)
    assert markup.calls is not None
    values = {"text": 'é "Hi"', "count": 3, "deep": {"a": True}}
    call = {"id": "functions.look:0" if style == "kimi" else "abcdefgh0"}
    call = {**call, "function": {"name": "look", "arguments": json.dumps(values)}}  # type: ignore[dict-item]
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    reply = reply_of(source, markup, {"content": "", "tool_calls": [call]}, tools)
    marker = min((reply.index(each) + len(each) for each in markup.calls.markers if each in reply), default=1)
    seen = []
    for length in range(0 if is_call else marker, len(reply)):
        format_ = ReplyFormat(tools=ToolReader(markup.calls, TOOLS), has_bound_calls=True, is_call=is_call)
        reader = open_reply(format_)
        parts = reader.push(reply[:length])
        rest, calls = reader.finish(cut=True)
        assert "".join(part.text for part in [*parts, *rest]).strip() == "", reply[:length]
        for found in calls:
            assert found.name == "look"
            if found.is_partial:
                known = json.loads(completed(found.arguments))
                assert known.items() <= {**values, "deep": known.get("deep")}.items()
            else:
                assert json.loads(found.arguments) == values
        seen += calls
    assert any(found.is_partial and '"text": "é \\"H' in found.arguments for found in seen), seen
    assert len(seen) > 20


def test_call_in_a_channel_is_partial_when_it_is_truncated() -> None:
    tools = ToolReader(calls_of("channels"), TOOLS)
    head = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    for text, calls in ((head[:30], []), (head + '{"text": "a', [("look", '{"text": "a', True)])):
        reader = open_reply(ReplyFormat(tools=tools, channels=True, bound_at_start=True, has_bound_calls=True))
        parts = reader.push(text)
        rest, found = reader.finish(cut=True)
        assert "".join(part.text for part in [*parts, *rest]) == ""
        assert [(call.name, call.arguments, call.is_partial) for call in found] == calls


@pytest.mark.parametrize("style", ALL_STYLES)
def test_call_to_a_tool_that_is_not_offered_is_treated_as_text(style: str) -> None:
    calls = calls_of(style)
    arguments = "" if calls.tags else "{}"
    text = f"{calls.open}other{calls.inner}{arguments}{calls.close}".replace(ID, "abcdefgh0").replace(INDEX, "0")
    _, free_text, found = read(calls, text)
    assert found == []
    assert "other" in free_text
    assert read(calls, text.replace("other", "list-all"))[2] == [("list-all", {})]
