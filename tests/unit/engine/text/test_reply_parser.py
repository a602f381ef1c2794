"""A reply is read the same however its text is split, and nothing of it is lost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellama.engine import InvalidRequest, ReplyFormat
from cellama.engine.text.reply_parser import ReplyReader
from cellama.engine.text.tool_calls import HERMES, LLAMA3, MISTRAL, MISTRAL2, forced_call_grammar, tool_format_of

THINKS = ReplyFormat(think_open="<think>", think_close="</think>")
IN_THOUGHT = replace(THINKS, starts_thinking=True)
Read = tuple[str | None, str, list[tuple[str, str]]]


def read(format_: ReplyFormat, pieces: list[str]) -> Read:
    """Reasoning with its end marker, text, and calls."""
    reader = ReplyReader(format_)
    parts = [part for piece in pieces for part in reader.push(piece)]
    rest, calls = reader.finish()
    parts += rest
    marks = {"reasoning_end": "|"}
    reasoning = "".join(marks.get(p.kind, p.text) for p in parts if p.kind != "text")
    return reasoning, "".join(p.text for p in parts if p.kind == "text"), [(c.name, c.arguments) for c in calls]


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CASES: list[tuple[ReplyFormat, str, Read]] = [
    (ReplyFormat(), " <think>a</think> b ", ("", " <think>a</think> b ", [])),
    (THINKS, "<think>\nI see.\n</think>\n\nYes.", ("I see.|", "Yes.", [])),
    (THINKS, " \n<think></think>Yes ", ("|", "Yes ", [])),
    (THINKS, " <thin air", ("", " <thin air", [])),
    (THINKS, "No thought, <think>so what</think>", ("", "No thought, <think>so what</think>", [])),
    (THINKS, "<think>never\nclosed </thi", ("never\nclosed </thi", "", [])),
    (THINKS, "<think> a < b </think> c </think>", ("a < b|", "c </think>", [])),
    (THINKS, "   ", ("", "   ", [])),
    (IN_THOUGHT, "\nI see.\n</think>\nYes.", ("I see.|", "Yes.", [])),
    (IN_THOUGHT, "", ("", "", [])),
    (replace(THINKS, tools=HERMES), f"<think>a</think>\n\n{CALL}", ("a|", "", [("f", '{"x": 1}')])),
    (replace(THINKS, tools=HERMES), f"I ask.\n{CALL}\n{CALL}", ("", "I ask.", [("f", '{"x": 1}')] * 2)),
    (ReplyFormat(tools=HERMES), f"{CALL[:-12]}", ("", "", [("f", '{"x": 1}')])),
    (ReplyFormat(tools=HERMES), f"a {CALL} b", ("", "a  b", [("f", '{"x": 1}')])),
    (ReplyFormat(tools=HERMES), "see <tool_call> {broken", ("", "see <tool_call> {broken", [])),
    (ReplyFormat(tools=HERMES), "a <tool_call>[1]</tool_call>", ("", "a <tool_call>[1]</tool_call>", [])),
    (ReplyFormat(tools=HERMES), "1 <tool 2 ", ("", "1 <tool 2 ", [])),
    (ReplyFormat(tools=LLAMA3), '{"name": "f", "parameters": {"x": 1}}', ("", "", [("f", '{"x": 1}')])),
    (
        ReplyFormat(tools=LLAMA3),
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", "{}"), ("g", "{}")]),
    ),
    (ReplyFormat(tools=LLAMA3), '{"json": "answer"}', ("", '{"json": "answer"}', [])),
    (ReplyFormat(tools=LLAMA3), 'Like {"name": "f"}', ("", 'Like {"name": "f"}', [])),
    (ReplyFormat(tools=MISTRAL), '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', ("", "", [("f", '{"x": 1}')])),
    (
        ReplyFormat(tools=MISTRAL2),
        'Well.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}',
        ("", "Well.", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    (ReplyFormat(tools=MISTRAL2), "[TOOL_CALLS] what?", ("", "[TOOL_CALLS] what?", [])),
]


@pytest.mark.parametrize(("format_", "text", "expected"), CASES, ids=[repr(case[1]) for case in CASES])
def test_reply_is_told_apart_however_its_text_is_split(format_: ReplyFormat, text: str, expected: Read) -> None:
    assert read(format_, [text]) == expected
    assert read(format_, list(text)) == expected
    for at in range(len(text)):
        assert read(format_, [text[:at], text[at:]]) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "{", '"', " ", "\n", "a", "<", "</th", "}"])),
    st.sampled_from([THINKS, IN_THOUGHT, replace(THINKS, tools=HERMES), replace(IN_THOUGHT, tools=LLAMA3)]),
)
def test_reply_reads_the_same_whole_and_in_pieces(pieces: list[str], format_: ReplyFormat) -> None:
    assert read(format_, pieces) == read(format_, ["".join(pieces)])


def test_thinking_over_its_budget_is_closed_token_by_token() -> None:
    reader = ReplyReader(replace(IN_THOUGHT, thinking_budget=2, close_tokens=(7, 8)))
    forced = []
    for text in ("a", "b", "</thi", "nk>", "c"):
        forced.append(reader.forced_token)
        reader.note_token()
        reader.push(text)
    assert forced == [None, None, 7, 8, None]
    assert reader.num_unbound == 4


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (r'{"name": "f\ud83d", "arguments": {"a\udfff": "\ud800"}}', [("f\ufffd", '{"a\ufffd": "\ufffd"}')]),
        (r'{"name": "f", "arguments": {"x": "\ud83d\ude00"}}', [("f", '{"x": "😀"}')]),
        (r'{"name": "f", "arguments": "{\"x\": \"\\udc00\"}"}', [("f", '{"x": "\ufffd"}')]),
        ('{"name": "f", "arguments": {"x": NaN}}', []),
        ('{"name": "f", "arguments": {"x": -1e999}}', []),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", []),
        ('{"name": "f", "arguments": {"x": ' + "[" * 200_000, []),
    ],
)
def test_arguments_of_a_call_can_be_written_as_json_and_utf8_whatever_the_model_wrote(
    written: str, expected: list[tuple[str, str]]
) -> None:
    calls, rest = HERMES.parse(f"<tool_call>{written}</tool_call>")
    assert [(call.name, call.arguments) for call in calls] == expected
    for call in calls:
        json.dumps([call.name, json.loads(call.arguments)], allow_nan=False).encode()
        (call.name + call.arguments).encode()
    assert bool(rest) == (not expected)


def test_tool_format_is_known_by_the_template() -> None:
    assert tool_format_of("… <tool_call> … tools …") is HERMES
    assert tool_format_of("… <tool_call>\n<function=name> … tools …") is None
    assert tool_format_of("… [TOOL_CALLS] …") is MISTRAL
    assert tool_format_of("… [TOOL_CALLS]name[ARGS] …") is MISTRAL2
    assert tool_format_of('<|start_header_id|> … {"name": …, "parameters": …}') is LLAMA3
    assert tool_format_of("<|im_start|>") is None


def test_forced_call_needs_a_named_tool_where_the_format_has_one_rule_for_each() -> None:
    tools = {"f": {"type": "object"}, "g": {}}
    with pytest.raises(InvalidRequest, match="name one of them"):
        forced_call_grammar(MISTRAL2, tools, lambda schema: "root ::= object")
    grammar = forced_call_grammar(MISTRAL2, {"f": {}}, lambda schema: "root ::= object")
    assert grammar == 'root ::= "[TOOL_CALLS]f[ARGS]" call\ncall ::= object'
