"""Pieces of enforced calls are final when they are sent, and add up to the finished calls, in every style."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from cellama.engine.text.formats.arguments_stream import JsonRewriter
from cellama.engine.text.formats.call_reader import ToolReader
from cellama.engine.text.formats.calls import encodable
from cellama.engine.text.reply_reader import ReplyFormat, ReplyPart, ReplyReader, open_reply

from ....conftest import EXAMPLES
from .styles import CALLS, CHANNELS, STYLES, reply_of, template
from .test_derived_markup import PARAMETERS, TOOLS, arguments, calls_for_template, cut, markup_of, values


def reader_of(style: str, *, only_one: bool = False) -> ReplyReader:
    """Return a reader of a reply whose calls a grammar enforces."""
    calls = markup_of(CHANNELS if style == "channels" else template(CALLS[style])).calls
    assert calls is not None
    is_channels = style == "channels"
    return open_reply(
        ReplyFormat(
            tools=ToolReader(calls, PARAMETERS, only_one=only_one),
            has_bound_calls=True,
            channels=is_channels,
            bound_at_start=True,
        )
    )


def pieces_of(parts: list[ReplyPart]) -> list[tuple[str, str]]:
    """Return the names and arguments that the pieces add up to."""
    calls: list[tuple[str, str]] = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.name:
            assert delta.number == len(calls)
            calls.append((delta.name, ""))
        assert delta.number == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls


def reply_with(style: str, calls: list[tuple[str, Any]], text: str = "") -> str:
    if style == "channels":
        (name, given_) = calls[0]
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given_)}<|call|>"
    source = template(CALLS[style])
    return reply_of(source, markup_of(source), {"content": text, "tool_calls": calls_for_template(calls)}, TOOLS)


@pytest.mark.parametrize("style", [*STYLES, "channels"])
@settings(max_examples=10 * EXAMPLES)
@given(data=st.data())
def test_pieces_add_up_to_the_calls_however_the_reply_is_split(style: str, data: st.DataObject) -> None:
    count = 1 if style in ("llama3", "channels") else data.draw(st.integers(1, 3))
    calls = [("look", data.draw(arguments)) if data.draw(st.booleans()) else ("mcp.list-all", {}) for _ in range(count)]
    text = "" if style in ("llama3", "channels") else data.draw(st.sampled_from(["", "It is [1] < 2:\n"]))
    reply = reply_with(style, calls, text)
    for split in ([reply], list(reply), cut(reply, data.draw(st.lists(st.integers(0))))):
        reader = reader_of(style)
        parts = [part for piece in split for part in reader.push(piece)]
        rest, found = reader.finish()
        assert pieces_of([*parts, *rest]) == [(call.name, call.arguments) for call in found]
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls
        assert "".join(part.text for part in [*parts, *rest]) == text.rstrip()


ANSWER = {"text": 'é "Hi"\n\\ 🙂' + " and more" * 5, "count": 31, "deep": {"a": [True, 1.5]}, "sure": False}


@pytest.mark.parametrize("style", [*STYLES, "channels"])
def test_streamed_pieces_are_final_wherever_the_reply_is_truncated(style: str) -> None:
    reply = reply_with(style, [("look", ANSWER)])
    whole = json.dumps(ANSWER, ensure_ascii=False)
    seen = set()
    for length in range(len(reply)):
        reader = reader_of(style)
        parts = [part for char in reply[:length] for part in reader.push(char)]
        sent = pieces_of(parts)
        assert all(name == "look" and whole.startswith(given_) for name, given_ in sent), sent
        seen |= {given_ for _, given_ in sent}
        rest, found = reader.finish(cut=True)
        assert pieces_of([*parts, *rest]) == [(call.name, call.arguments) for call in found]
    assert len(seen) > len(ANSWER["text"])  # type: ignore[arg-type]


def test_call_is_partial_when_a_stop_string_ends_it() -> None:
    reply = reply_with("hermes", [("look", ANSWER)])
    reader = reader_of("hermes")
    parts = reader.push(reply[: reply.index("more")])
    rest, (call,) = reader.finish(cut=False)
    assert call.is_partial
    assert pieces_of([*parts, *rest]) == [("look", call.arguments)]


def test_only_the_first_call_is_read_if_calls_are_not_parallel() -> None:
    reply = reply_with("qwen coder", [("look", ANSWER), ("mcp.list-all", {})])
    reader = reader_of("qwen coder", only_one=True)
    parts = reader.push(reply)
    rest, (call,) = reader.finish()
    assert (call.name, call.is_partial) == ("look", False)
    assert pieces_of([*parts, *rest]) == [("look", call.arguments)]


def test_text_that_is_incomplete_json_is_not_dropped() -> None:
    reader = reader_of("llama3")
    parts = reader.push('{"answer": 1')
    rest, calls = reader.finish(cut=True)
    assert ("".join(part.text for part in [*parts, *rest]), calls) == ('{"answer": 1', ())


def test_unenforced_calls_are_parsed_when_the_reply_ends() -> None:
    reply = reply_with("hermes", [("look", ANSWER)])
    tools = ToolReader(markup_of(template(CALLS["hermes"])).calls, PARAMETERS)  # type: ignore[arg-type]
    reader = open_reply(ReplyFormat(tools=tools))
    assert [part for char in reply for part in reader.push(char)] == []
    assert reader.finish()[1][0].name == "look"


@given(values, st.booleans(), st.sampled_from([None, 2]))
def test_rewritten_json_equals_the_output_of_json_dumps(value: Any, is_ascii: bool, indent: int | None) -> None:
    half = ["\ud83d", "\udc00x"] if is_ascii else []  # halves of surrogate pairs, which only escapes can contain
    given_ = json.dumps([value, 1e22, -0.0, "\x00", *half], ensure_ascii=is_ascii, indent=indent) + " "
    whole = encodable(json.dumps(json.loads(given_), ensure_ascii=False))
    rewriter, rest, out = JsonRewriter(), "", ""
    for char in given_:
        rest += char
        rest = rest[rewriter.write(rest) :]
        out += rewriter.take()
        assert whole.startswith(out)
    assert (out, rest.strip()) == (whole, "")
