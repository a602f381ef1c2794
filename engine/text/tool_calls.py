"""How models write tool calls, and what they mean. Pure.

| format   | how a call looks                                                  | models            |
|----------|-------------------------------------------------------------------|-------------------|
| hermes   | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`              | Qwen, Hermes, ours |
| llama3   | `{"name": …, "parameters": {…}}`, alone, or after `<|python_tag|>`  | Llama 3.x         |
| mistral  | `[TOOL_CALLS][{"name": …, "arguments": {…}}]`                       | Mistral to 2024   |
| mistral2 | `[TOOL_CALLS]name[ARGS]{…}`                                        | Mistral from 2025 |

A reader takes what either form of Mistral's writes; only a forced call has to know which one it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cellama.engine.errors import InvalidRequest

from .detokenizer import possible_marker

_DECODER = json.JSONDecoder()
_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_OPEN, _MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
_MISTRAL_NAMED = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class NoCalls(ValueError):
    """The text holds no well-formed tool call."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing tool calls."""

    name: str
    markers: tuple[str, ...]  # that open the calls, anywhere in the reply
    markup: tuple[str, ...]  # all that a model may write with control tokens
    read: Callable[[str], tuple[list[ToolCall], str]]  # calls, and the text after them; raises NoCalls
    forced: str  # GBNF of a reply that is one call, with a rule `call`
    arguments_key: str = "arguments"
    bare_json: bool = False  # a reply that is one JSON object may be a call, too

    def find(self, text: str, *, at_start: bool) -> int | None:
        """Where the tool calls begin; `at_start` if nothing of the reply came before this text."""
        if self.bare_json and at_start and text.lstrip().startswith("{"):
            return 0
        return min((at for marker in self.markers if (at := text.find(marker)) >= 0), default=None)

    def possible(self, text: str) -> int:
        """How many characters at the end of the text may be the beginning of a marker."""
        return possible_marker(text, self.markers)

    def parse(self, text: str) -> tuple[tuple[ToolCall, ...], str]:
        """The calls, and the text that is none; all of it if one of them is not well-formed."""
        try:
            calls, rest = self.read(text)
        except (NoCalls, RecursionError):
            return (), text
        return tuple(calls), rest.rstrip()


def _call(value: Any, arguments_key: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NoCalls
    arguments = value.get(arguments_key, value.get("arguments", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments, _ = _object_at(arguments, 0)
    if not isinstance(arguments, dict):
        raise NoCalls
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN, or 1e999
        raise NoCalls from None
    return ToolCall(_encodable(value["name"]), _encodable(written))


def _encodable(text: str) -> str:
    """The text, with U+FFFD for halves of a surrogate pair: a model may write `\\ud83d` alone, which UTF-8 has not."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _object_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins here or after space, and where it ends."""
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        return _DECODER.raw_decode(text, at)
    except ValueError:
        raise NoCalls from None


def _read_hermes(text: str) -> tuple[list[ToolCall], str]:
    calls = []
    while (at := text.find(_HERMES_OPEN)) >= 0:
        value, end = _object_at(text, at + len(_HERMES_OPEN))
        calls.append(_call(value, "arguments"))
        text = text[:at] + text[end:].lstrip().removeprefix(_HERMES_CLOSE)
    return calls, text


def _read_llama3(text: str) -> tuple[list[ToolCall], str]:
    calls, rest = [], text.replace(_PYTHON_TAG, "").strip()
    while rest:
        value, end = _object_at(rest, 0)
        calls.append(_call(value, "parameters"))
        rest = rest[end:].lstrip(" \n;")
    return calls, rest


def _read_mistral(text: str) -> tuple[list[ToolCall], str]:
    rest = text.strip().removeprefix(_MISTRAL_OPEN)
    if rest.lstrip().startswith("["):
        values, end = _object_at(rest, 0)
        return [_call(value, "arguments") for value in values], rest[end:]
    return list(_named_calls(rest)), ""


def _named_calls(text: str) -> Iterator[ToolCall]:
    while text.strip():
        match = _MISTRAL_NAMED.match(text)
        if match is None:
            raise NoCalls
        arguments, end = _object_at(text, match.end())
        yield _call({"name": match.group(1), "arguments": arguments}, "arguments")
        text = text[end:]


_TAGS = (_HERMES_OPEN, _HERMES_CLOSE)
_MISTRAL_MARKUP = (_MISTRAL_OPEN, "[CALL_ID]", _MISTRAL_ARGS)
HERMES = ToolFormat("hermes", _TAGS[:1], _TAGS, _read_hermes, 'root ::= "<tool_call>\\n" call "\\n</tool_call>"')
LLAMA3 = ToolFormat(
    "llama3", (_PYTHON_TAG,), (_PYTHON_TAG,), _read_llama3, "root ::= call", "parameters", bare_json=True
)
MISTRAL = ToolFormat("mistral", (_MISTRAL_OPEN,), _MISTRAL_MARKUP, _read_mistral, 'root ::= "[TOOL_CALLS][" call "]"')
MISTRAL2 = ToolFormat(
    "mistral2", (_MISTRAL_OPEN,), _MISTRAL_MARKUP, _read_mistral, 'root ::= "[TOOL_CALLS]{name}[ARGS]" call'
)


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model; None if it is none of these."""
    if _HERMES_OPEN in template:
        return None if "<function=" in template or "<arg_key>" in template else HERMES  # the same tags around XML
    if _MISTRAL_OPEN in template:
        return MISTRAL2 if _MISTRAL_ARGS in template else MISTRAL
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None


def forced_call_grammar(
    format_: ToolFormat, tools: Mapping[str, Mapping[str, Any]], to_gbnf: Callable[[str], str]
) -> str:
    """GBNF of a reply that is one call of one of the tools (name → JSON Schema of its arguments).

    `to_gbnf` turns a schema (JSON text) into GBNF. Raises InvalidRequest.
    """
    if format_ is MISTRAL2 and len(tools) > 1:
        raise InvalidRequest("tool_choice is 'required', but this model's format needs a named tool; name one of them")
    if format_ is MISTRAL2:
        ((name, schema),) = tools.items()
        return _with_rules(format_.forced.format(name=name), dict(schema) or {"type": "object"}, to_gbnf)
    key = format_.arguments_key
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: dict(schema) or {"type": "object"}},
            "required": ["name", key],
        }
        for name, schema in tools.items()
    ]
    return _with_rules(format_.forced, calls[0] if len(calls) == 1 else {"anyOf": calls}, to_gbnf)


def _with_rules(root: str, schema: Mapping[str, Any], to_gbnf: Callable[[str], str]) -> str:
    return root + "\n" + to_gbnf(json.dumps(schema)).replace("root ::=", "call ::=", 1)
