"""Grammars of tool calls, in a model's own way of writing them. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cellama.engine.errors import InvalidRequest

from .argument_values import Values
from .call_format import IN_CHANNELS, ArgumentTags, CallFormat
from .literals import ID, INDEX, KEY, NAME

Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by the names of tools
ToRules = Callable[[tuple[tuple[str, str, str], ...]], str]  # name of a rule, schema as JSON, and where in it → GBNF

_MOST = 16  # calls in a reply
_SPACE = '"\\n"{0,2}'  # before the calls, as models have it after thoughts


def forced_calls(format_: CallFormat, schemas: Schemas, to_rules: ToRules, *, several: bool = False) -> str:
    """GBNF of a reply that is a call of one of the tools, or with `several` up to 16.

    Raises InvalidRequest.
    """
    head = _thoughts() if format_ is IN_CHANNELS else _SPACE
    behind = _space_behind_arguments(format_)
    tools = [_Tool(f"t{i}", name, schema, format_, behind) for i, (name, schema) in enumerate(schemas.items())]
    made = to_rules(tuple(rule for tool in tools for rule in tool.wanted))  # first: it checks the schemas
    lines = [line for tool in tools for line in tool.rules]
    more = ""
    if several and format_.middle is not None:
        more = f"next{{0,{_MOST - 1}}}"
        lines.append(f"next ::= {_either(tools, format_.middle.removeprefix(behind))}")
    close = _literal(format_.close.removeprefix(behind).rstrip())
    lines = [f"root ::= {head} first {more} {close}", f"first ::= {_either(tools, format_.open)}", *lines]
    return "\n".join([*lines, made])


def _thoughts() -> str:
    """Those that may come before a call in channels."""
    return f'("<|channel|>analysis<|message|>" {text_without("<|")} "<|end|><|start|>assistant")?'


def _space_behind_arguments(format_: CallFormat) -> str:
    """The space after the last argument in a tag, which is not there if there are no arguments."""
    ends = [format_.close, *([format_.middle] if format_.middle is not None else [])]
    spaces = {end[: len(end) - len(end.lstrip())] for end in ends}
    return spaces.pop() if format_.tags is not None and len(spaces) == 1 else ""


def _either(tools: list[_Tool], before: str) -> str:
    return " | ".join(f"{_literal(before, tool.name)} {tool.rule}" for tool in tools)


class _Argument(NamedTuple):
    """An argument in tags: the rule of its value, its name, and what it may be, as far as its schema says."""

    value: str
    key: str
    types: set[str]

    @property
    def is_text(self) -> bool:
        """True if it is written as bare text."""
        return not self.types or "string" in self.types


@dataclass(frozen=True, slots=True)
class _Tool:
    """One of the tools: a rule of its name and arguments, and what has to be made of its schema."""

    rule: str
    function: str
    schema: Mapping[str, Any]
    format: CallFormat
    behind: str  # the last argument

    @property
    def name(self) -> str:
        """As it is written."""
        return json.dumps(self.function, ensure_ascii=False)[1:-1] if self.format.style == "json" else self.function

    @property
    def wanted(self) -> list[tuple[str, str, str]]:
        """Rules to be made: their names, the schema as JSON, and where in it."""
        schema = json.dumps(dict(self.schema) or {"type": "object"})
        if self.format.tags is None:
            return [(f"{self.rule}a", schema, "#")]
        typed = (argument for argument in self._arguments if argument.types)
        return [(argument.value, schema, f"#/properties/{_pointer(argument.key)}") for argument in typed]

    @property
    def rules(self) -> list[str]:
        tags = self.format.tags
        head = f"{self.rule} ::= {_literal(self.name + self.format.inner, self.name)}"
        if tags is None:
            return [f"{head} {self.rule}a"]
        written = [self._argument(tags, argument) for argument in self._arguments]
        required = self.schema.get("required") or ()
        none = "" if self.format.inner.endswith(self.behind) else self.behind
        members = _members(self.rule, _literal(tags.gap), [argument.key in required for argument in self._arguments])
        members += [
            f"{self.rule}m{len(written)} ::= {_literal(none)}",
            f"{self.rule}n{len(written)} ::= {_literal(self.behind)}",
        ]
        return [f"{head} {self.rule}m0", *members, *written]

    @property
    def _arguments(self) -> list[_Argument]:
        values = Values(self.schema)
        return [_Argument(f"{self.rule}v{i}", key, values.types_of(key)) for i, key in enumerate(values.properties)]

    def _argument(self, tags: ArgumentTags, argument: _Argument) -> str:
        """The rule of one argument."""
        value, key = argument.value, argument.key
        name, close = value.replace("v", "p"), _literal(tags.close, key=key)
        before = _literal(f"{tags.open}{key}{tags.sep if argument.is_text else tags.sep_of_json}", key=key)
        if not argument.is_text:
            return f"{name} ::= {before} {value} {close}"
        schema = Values(self.schema).resolved(key)
        return f"{name} ::= {before} {_text(schema, tags.close.replace(KEY, key).strip(), key)} {close}"


def _members(rule: str, gap: str, required: list[bool]) -> list[str]:
    """Rules of arguments in their order, but for the end: m0, m1 … before the first of them, n0, n1 … after one."""
    lines = []
    for i, is_required in enumerate(required):
        argument, after, others = f"{rule}p{i}", f"{rule}n{i + 1}", f"{rule}m{i + 1}"
        lines.append(f"{rule}m{i} ::= {argument} {after}" + ("" if is_required else f" | {others}"))
        lines.append(f"{rule}n{i} ::= {gap} {argument} {after}" + ("" if is_required else f" | {after}"))
    return lines


def _text(schema: Mapping[str, Any], close: str, key: str) -> str:
    """GBNF of bare text that holds no closing tag. Raises InvalidRequest for what can't be kept of the schema."""
    chosen = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(chosen, list):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in chosen]
        return "(" + " | ".join(_literal(text) for text in texts) + ")"
    shaped = next((name for name in ("pattern", "format") if name in schema), None)
    if shaped is not None:
        raise InvalidRequest(
            f"argument {key!r} of a tool has a {shaped}, which can't be forced on a model that writes arguments as "
            f"bare text; leave {shaped} out, or use tool_choice auto"
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        return f"{_class(close[0], but=True)}{{{int(least)},{'' if most is None else int(most)}}}"
    return text_without(close)


def text_without(tag: str) -> str:
    """GBNF of any text that does not hold this one."""
    first = tag[0]
    if first in tag[1:] or len(tag) < 2:
        return f"{_class(first, but=True)}*"
    unlike, like = _class(first + tag[-1], but=True), ""
    for char in reversed(tag[1:-1]):  # nested, from the last character to the second
        unlike = f"({_class(first + char, but=True)} | {_literal(char)} {unlike})"
        like = f"({_literal(char)} {like})?"
    begun = f"({_literal(first)} {like})*"
    return f"({_class(first, but=True)} | {begun} {_literal(first)} {unlike})* {begun}"


def _class(chars: str, *, but: bool = False) -> str:
    return f"[{'^' if but else ''}{''.join(f'{chr(92)}U{ord(char):08x}' for char in dict.fromkeys(chars))}]"


def _literal(text: str, name: str = "", key: str = "") -> str:
    """GBNF of a literal with slots."""
    parts, classes = [""], {ID: "[a-zA-Z0-9]{9}", INDEX: "[0-9]{1,3}"}
    for char in text:
        if char in classes:
            parts += [classes[char], ""]
        else:
            parts[-1] += {NAME: name, KEY: key}.get(char, char)
    quoted = [_quoted(part) if i % 2 == 0 else part for i, part in enumerate(parts) if part]
    return " ".join(quoted) or '""'


def _quoted(text: str) -> str:
    return (
        '"'
        + "".join(char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text)
        + '"'
    )


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1").replace("%", "%25")
