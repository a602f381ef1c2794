"""Replies have the same parts however their text is split, and no text is lost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from cellama.engine import ReplyFormat
from cellama.engine.text.formats.call_reader import ToolReader
from cellama.engine.text.formats.channels import MARKUP
from cellama.engine.text.reply_reader import open_reply

from .styles import CALLS, CHANNELS, derived, template


def tools_of(style: str) -> ToolReader:
    calls = derived(template(CALLS[style]) + "{# <|python_tag|> #}").calls
    assert calls is not None
    return ToolReader(calls)


HERMES, LLAMA3, MISTRAL, MISTRAL2, CODER = (
    tools_of(style) for style in ("hermes", "llama3", "mistral", "mistral with tags", "qwen coder")
)

REASONS = ReplyFormat(think_open="<think>", think_close="</think>")
IN_REASONING = replace(REASONS, starts_thinking=True)
Read = tuple[str | None, str, list[tuple[str, str]]]


def read(format_: ReplyFormat, pieces: list[str]) -> Read:
    """Return the reasoning with its end marks, the text, and the calls of a reply."""
    reader = open_reply(format_)
    parts = [part for piece in pieces for part in reader.push(piece)]
    rest, calls = reader.finish()
    parts += rest
    marks = {"reasoning_end": "|"}
    reasoning = "".join(marks.get(p.kind, p.text) for p in parts if p.kind != "text")
    return reasoning, "".join(p.text for p in parts if p.kind == "text"), [(c.name, c.arguments) for c in calls]


CHANNELED = ReplyFormat(channels=True, tools=ToolReader(derived(CHANNELS).calls or HERMES.format))
ANALYSIS, END_AND_START = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>"
TO_F = "<|channel|>commentary to=functions.f"
OFFERED = ReplyFormat(tools=ToolReader(LLAMA3.format, {"f": {}}))
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CASES: list[tuple[ReplyFormat, str, Read]] = [
    (ReplyFormat(), " <think>a</think> b ", ("", " <think>a</think> b ", [])),
    (REASONS, "<think>\nI see.\n</think>\n\nYes.", ("I see.|", "Yes.", [])),
    (REASONS, " \n<think></think>Yes ", ("|", "Yes ", [])),
    (REASONS, " <thin air", ("", " <thin air", [])),
    (REASONS, "No reasoning, <think>so what</think>", ("", "No reasoning, <think>so what</think>", [])),
    (REASONS, "<think>never\nclosed </thi", ("never\nclosed </thi", "", [])),
    (REASONS, "<think> a < b </think> c </think>", ("a < b|", "c </think>", [])),
    (REASONS, "   ", ("", "   ", [])),
    (IN_REASONING, "\nI see.\n</think>\nYes.", ("I see.|", "Yes.", [])),
    (IN_REASONING, "", ("", "", [])),
    (replace(REASONS, tools=HERMES), f"<think>a</think>\n\n{CALL}", ("a|", "", [("f", '{"x": 1}')])),
    (replace(REASONS, tools=HERMES), f"I ask.\n{CALL}\n{CALL}", ("", "I ask.", [("f", '{"x": 1}')] * 2)),
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
    (OFFERED, '{"name": "Mia", "age": 7}', ("", '{"name": "Mia", "age": 7}', [])),
    (OFFERED, '{"name": "f"}', ("", "", [("f", "{}")])),
    (ReplyFormat(tools=MISTRAL), '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', ("", "", [("f", '{"x": 1}')])),
    (
        ReplyFormat(tools=MISTRAL2),
        'Well.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}',
        ("", "Well.", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    (ReplyFormat(tools=MISTRAL2), "[TOOL_CALLS] what?", ("", "[TOOL_CALLS] what?", [])),
    (ReplyFormat(tools=MISTRAL2), "[TOOL_CALLS]f what?", ("", "[TOOL_CALLS]f what?", [])),
    (ReplyFormat(tools=CODER), "<function=f>\n</function>", ("", "", [("f", "{}")])),
    (
        ReplyFormat(tools=CODER),
        "<tool_call>\n<function=f>\n<parameter=x>\n1",
        ("", "<tool_call>\n<function=f>\n<parameter=x>\n1", []),
    ),
    (ReplyFormat(tools=CODER), "<function=f><parameter=x>a</parameter></function>", ("", "", [("f", '{"x": "a"}')])),
    (CHANNELED, f"{ANALYSIS}A.{END_AND_START}final<|message|>Yes. ", ("A.|", "Yes. ", [])),
    (CHANNELED, f"{ANALYSIS}A.<|end|>{ANALYSIS}B.", ("A.\n\nB.", "", [])),
    (CHANNELED, f'{TO_F} <|constrain|>json<|message|>{{"x": 1}}', ("", "", [("f", '{"x": 1}')])),
    (
        CHANNELED,
        f"{ANALYSIS}A.{END_AND_START}commentary<|message|>I look."
        f"{END_AND_START}commentary to=functions.f<|message|>{{}}<|call|>",
        ("A.|", "I look.", [("f", "{}")]),
    ),
    (CHANNELED, " to=functions.f<|channel|>commentary json<|message|>{}", ("", "", [("f", "{}")])),
    (CHANNELED, f"{TO_F}<|message|>{{broken", ("", f"{TO_F}<|message|>{{broken", [])),
    (CHANNELED, f"{TO_F}<|message|>{{}} {{}}<|end|>", ("", f"{TO_F}<|message|>{{}} {{}}<|end|>", [])),
    (CHANNELED, f'{TO_F}<|message|>{{"x": "<|end|>"}}<|end|>', ("", "", [("f", '{"x": "<|end|>"}')])),
    (replace(CHANNELED, tools=None), f"{TO_F}<|message|>{{}}", ("", "{}", [])),
    (CHANNELED, "<|channel|>commentary to=browser<|message|>{}", ("", "{}", [])),
    (CHANNELED, "No channel <|at all", ("", "No channel <|at all", [])),
    (CHANNELED, "<|channel|>fin", ("", "<|channel|>fin", [])),
    (CHANNELED, "<|channel|>final<|message|>a <|b|> <|en", ("", "a <|b|> <|en", [])),
]


@pytest.mark.parametrize(("format_", "text", "expected"), CASES, ids=[repr(case[1]) for case in CASES])
def test_reply_has_the_same_parts_however_it_is_split(format_: ReplyFormat, text: str, expected: Read) -> None:
    assert read(format_, [text]) == expected
    assert read(format_, list(text)) == expected
    for at in range(len(text)):
        assert read(format_, [text[:at], text[at:]]) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "{", '"', " ", "\n", "a", "<", "</th", "}"])),
    st.sampled_from([REASONS, IN_REASONING, replace(REASONS, tools=HERMES), replace(IN_REASONING, tools=LLAMA3)]),
)
def test_tag_reader_returns_the_same_parts_for_whole_and_split_replies(pieces: list[str], format_: ReplyFormat) -> None:
    assert read(format_, pieces) == read(format_, ["".join(pieces)])


def test_reasoning_is_closed_token_by_token_when_it_exceeds_its_budget() -> None:
    reader = open_reply(replace(IN_REASONING, thinking_budget=2, close_tokens=(7, 8)))
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
def test_arguments_of_a_call_are_valid_json_and_utf8(written: str, expected: list[tuple[str, str]]) -> None:
    calls, rest = HERMES.parse(f"<tool_call>{written}</tool_call>")
    assert [(call.name, call.arguments) for call in calls] == expected
    for call in calls:
        json.dumps([call.name, json.loads(call.arguments)], allow_nan=False).encode()
        (call.name + call.arguments).encode()
    assert bool(rest) == (not expected)


@given(
    st.lists(
        st.sampled_from([*MARKUP, "analysis", "final", "commentary", " to=functions.f", "{}", " a", "assistant", "<"])
    )
)
def test_channel_reader_returns_the_same_parts_for_whole_and_split_replies(pieces: list[str]) -> None:
    whole = "".join(pieces)
    found = read(CHANNELED, pieces)
    assert found == read(CHANNELED, [whole]) == read(CHANNELED, list(whole))


def test_channel_reader_ends_reasoning_at_its_budget_and_counts_tokens_before_the_text() -> None:
    reader = open_reply(replace(CHANNELED, thinking_budget=2, close_tokens=(7,)))
    found = []
    for text in (ANALYSIS, "a", "b", "<|end|>", "<|start|>assistant<|channel|>final", "<|message|>", "c"):
        found.append((reader.forced_token, reader.num_unbound))
        reader.note_token()
        reader.push(text)
    assert found == [(None, None), (None, None), (None, None), (7, None), (None, None), (None, None), (None, 6)]
    assert open_reply(replace(CHANNELED, bound_at_start=True)).num_unbound == 0


def test_channel_reader_forces_every_token_that_closes_reasoning() -> None:
    reader = open_reply(replace(CHANNELED, thinking_budget=1, close_tokens=(7, 8)))
    reader.push(ANALYSIS)
    forced = []
    for text in ("a", "<|en", "d|>", "<|start|>"):
        forced.append(reader.forced_token)
        reader.note_token()
        reader.push(text)
    assert forced == [None, 7, 8, None]
