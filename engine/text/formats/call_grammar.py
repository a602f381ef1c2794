"""Write grammars for replies with tool calls in a model's format.

A reply with a forced call consists of one or more calls. Any other reply consists of optional reasoning, followed by
text and calls in any order. The text is unconstrained until a marker starts a call. If a JSON Schema or a regular
expression constrains the text, a reply consists of either text that meets the constraint or calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cellama.engine.errors import InvalidRequest

from .argument_values import ArgumentValues
from .call_format import IN_CHANNELS, ArgumentTags, CallFormat
from .channels import CHANNEL, END, ENDS, MESSAGE, START
from .lark import ControlToken, LarkGrammar, LarkPart, LarkRule, LarkText, escaped, text_without
from .literals import KEY, num_shared

_MAX_CALLS = 16  # calls in a row: models that repeat themselves would otherwise call until max_tokens
_SPACE = LarkText(r"/\n{0,2}/", may_be_empty=True)  # line breaks before calls: models write them after reasoning
_BLANK = LarkText(r"/\s*/", may_be_empty=True)
_VALUE_KEYWORDS = {"const", "enum", "default", "examples"}  # their values are not schemas
_KEYWORDS_OF_OBJECTS = frozenset(
    "allOf anyOf oneOf not if dependencies dependentRequired dependentSchemas maxProperties minProperties "
    "patternProperties propertyNames".split()
)


class Prepare(Protocol):
    """A function that prepares a schema for llguidance, such as grammar.schema.prepare_schema."""

    def __call__(self, text: str, /, *, strict: bool, where: str) -> tuple[dict[str, Any] | bool, tuple[str, ...]]: ...


class OfferedTool(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool  # the whole schema is enforced, even if no call is forced
    where: str  # path of its parameters in the request, for messages


class TextConstraint(NamedTuple):
    """A constraint on the text of a reply without calls."""

    kind: str  # json_schema or regex
    text: str
    strict: bool


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around reasoning that the model may start itself, or empty strings if it can't start reasoning."""

    open: str = ""
    close: str = ""


@dataclass
class CallGrammar:
    """Writes the grammar for one reply."""

    format: CallFormat
    tools: Sequence[OfferedTool]
    prepare: Prepare
    controls: Mapping[str, int]
    several: bool
    forced: bool
    reasoning: ReasoningTags = ReasoningTags()
    constraint: TextConstraint | None = None
    warnings: list[str] = field(default_factory=list)  # keywords that are not enforced; set by `write`

    def __post_init__(self) -> None:
        self._closing_space = _space_after_arguments(self.format)
        # A call without arguments has no such space after `inner`, so the space belongs to the first argument.
        moves_space = bool(self._closing_space) and self.format.inner.endswith(self._closing_space)
        self._inner = self.format.inner.removesuffix(self._closing_space) if moves_space else self.format.inner
        self.before_first = self._closing_space if moves_space else ""

    def write(self) -> str:
        """Return the grammar in Lark. Raises InvalidRequest if a schema can't be compiled or enforced."""
        self.grammar, self.warnings = LarkGrammar(self.controls), []
        self._tools = [ToolRules(self, f"t{i}", tool) for i, tool in enumerate(self.tools)]
        if self.format is IN_CHANNELS:
            return self._in_channels()
        if self.forced:
            return self.grammar.text(self._calls([_SPACE], self.format.open, with_middle=self.several))
        if self.constraint is not None:
            return self.grammar.text(self._constrained(self.constraint))
        return self.grammar.text(self._auto())

    # Replies

    def _auto(self) -> str:
        """Return an expression for free text that may contain calls after a marker."""
        grammar, markers = self.grammar, self.format.markers
        reserved = self._reserved_starts()
        text = text_without(markers, *reserved)
        heads = []
        for marker in markers:
            at = self.format.open.find(marker)
            rest = self.format.open[at + len(marker) :] if at >= 0 else self.format.open
            head = grammar.expression([text, *grammar.parts(marker)])
            heads.append(f"{head} {self._calls([], rest, with_middle=self.several)}")
        free = grammar.expression([text])
        if heads:
            group = grammar.rule("group", *heads).expression
            free = f"{group}* {free}" if self.several else f"{group}? {free}"
        replies = [grammar.rule("free", free).expression]
        if self.format.bare_json:
            replies.append(grammar.rule("bare", *(self._bare(tool) for tool in self._tools)).expression)
        return self._after_reasoning(grammar.rule("reply", *replies), may_stay_open=True)

    def _constrained(self, constraint: TextConstraint) -> str:
        """Return an expression that matches either calls or text that meets the constraint."""
        grammar = self.grammar
        if constraint.kind == "json_schema":
            text = self.json_rule("text", constraint.text, constraint.strict, "json_schema").expression
        else:
            opening = grammar.parts(self.format.open)
            first = next((part.token for part in opening[:1] if isinstance(part, ControlToken)), None)
            calls_start = [] if first is not None else [f"/\\n{{0,2}}{escaped(self.format.open[:20])}(?s:.*)/"]
            regex = " & ".join([f"(/{_escape_slashes(constraint.text)}/)", *(f"~({each})" for each in calls_start)])
            text = grammar.expression([LarkText(f"({regex})", may_be_empty=True)])
        if self.format.bare_json and constraint.kind == "json_schema" and not self.format.name_is_key:
            calls = " | ".join(tool.as_object().expression for tool in self._tools)
        else:
            calls = self._calls([_SPACE], self.format.open, with_middle=self.several)
        return self._after_reasoning(grammar.rule("reply", text, grammar.rule("calls", calls).expression))

    def _after_reasoning(self, reply: LarkRule, *, may_stay_open: bool = False) -> str:
        if not self.reasoning.open:
            return reply.expression
        grammar, reasoning = self.grammar, text_without([self.reasoning.close])
        opening = [_BLANK, *grammar.parts(self.reasoning.open), reasoning]
        closed = grammar.expression([*opening, *grammar.parts(self.reasoning.close)])
        replies = [reply.expression, f"{closed} {reply.expression}"]
        if may_stay_open:
            replies.append(grammar.expression(opening))
        return " | ".join(replies)

    def _reserved_starts(self) -> list[str]:
        """Return expressions for text that starts reasoning or a JSON call.

        Free text must not match these expressions.
        """
        reserved = []
        if self.reasoning.open:
            reserved.append(f"/\\s*{escaped(self.reasoning.open)}(?s:.*)/")
        if self.format.bare_json:
            names = [f"{_with_any_space(self._bare_head(tool))}(?s:.*)" for tool in self._tools]
            reserved.append("/" + "|".join(names) + "/")
        return reserved

    def _bare_head(self, tool: ToolRules) -> str:
        return self.format.open_without_markers + tool.name + self.format.inner

    def _bare(self, tool: ToolRules) -> str:
        head = self.grammar.expression([LarkText(f"/{_with_any_space(self._bare_head(tool))}/")])
        return f"{head} {tool.arguments} {self.grammar.expression(self.grammar.parts(self.format.close.rstrip()))}"

    def _in_channels(self) -> str:
        """Return the grammar for reasoning messages that are followed by a text message or a call."""
        grammar, text = self.grammar, text_without([*ENDS, START, CHANNEL])
        parts = grammar.parts
        channels = ["analysis"] if self.forced else ["analysis", "commentary"]
        head = [*parts(CHANNEL), LarkText(f"/{'|'.join(channels)}/"), *parts(MESSAGE), text]
        message = grammar.expression([*head, *parts(END + START + "assistant")])
        before = f"({message})?" if self.forced else f"({message})*"
        calls = [self._call_in_channel(tool) for tool in self._tools]
        if self.forced:
            return grammar.text(f"{before} {grammar.rule('call', *calls).expression}")
        final = grammar.expression([*parts(f"{CHANNEL}final{MESSAGE}"), *([] if self.constraint else [text])])
        calls += [self._call_in_channel(tool, recipient_first=True) for tool in self._tools]
        if self.constraint is None:
            plain = text_without([*ENDS, START, CHANNEL], r"/\s*(to=|assistant)(?s:.*)/")
            ends = [final, grammar.expression(head), grammar.expression([plain])]
        elif self.constraint.kind == "json_schema":
            schema = self.json_rule("text", self.constraint.text, self.constraint.strict, "json_schema").expression
            ends = [f"{final} {schema}"]
        else:
            regex = LarkText(f"(/{_escape_slashes(self.constraint.text)}/)", may_be_empty=True)
            ends = [grammar.expression([*parts(f"{CHANNEL}final{MESSAGE}"), regex])]
        return grammar.text(f"{before} {grammar.rule('last', *(end for end in ends if end), *calls).expression}")

    def _call_in_channel(self, tool: ToolRules, *, recipient_first: bool = False) -> str:
        parts = self.grammar.parts
        if recipient_first:
            head = parts(f" to=functions.{tool.name}{CHANNEL}commentary json{MESSAGE}")
        else:
            head = [*parts(self.format.open), tool.name, *parts(self.format.inner)]
        return f"{self.grammar.expression(head)} {tool.arguments}"

    # Calls

    def _calls(self, before: Sequence[LarkPart], opening: str, *, with_middle: bool) -> str:
        """Return an expression for a call and any calls that directly follow it.

        `before` is the text before the call, and `opening` is the remaining part of the format's `open`.
        """
        parts, format_ = self.grammar.parts, self.format
        first = self._either([*before, *parts(opening)])
        close = parts(self._closing_space + format_.close.removeprefix(self._closing_space).rstrip())
        if not with_middle or format_.middle is None:
            return f"{first} {self.grammar.expression(close)}".rstrip()
        middle = parts(self._closing_space + format_.middle.removeprefix(self._closing_space))
        shared = num_shared(close, middle)
        end = self.grammar.expression(close[:shared])
        more = f"({self._either(middle[shared:])} {end}){{0,{_MAX_CALLS - 1}}}"
        return " ".join(part for part in (first, end, more, self.grammar.expression(close[shared:])) if part)

    def _either(self, before: Sequence[LarkPart]) -> str:
        """Return an expression for a call to one of the tools, including its arguments."""
        calls = []
        for tool in self._tools:
            head = [*before, tool.name, *self.grammar.parts(self._inner, tool.name)]
            calls.append(f"{self.grammar.expression(head)} {tool.arguments}".rstrip())
        return f"({' | '.join(calls)})"

    def any_object(self) -> str:
        if "any" not in self.grammar.rules:
            self.json_rule("any", '{"type": "object"}', False, "tools")
        return "any"

    def json_rule(self, rule: str, schema: str, strict: bool, where: str) -> LarkRule:
        prepared, warnings = self.prepare(schema, strict=strict, where=where)
        self.warnings += warnings
        return self.grammar.json(rule, prepared)


@dataclass
class ToolRules:
    """The grammar rules for one tool's arguments. Each rule is written when it is first used."""

    owner: CallGrammar
    rule: str
    offered: OfferedTool
    _arguments: str | None = None

    @property
    def name(self) -> str:
        """The tool's name as the model writes it."""
        name = self.offered.name
        return json.dumps(name, ensure_ascii=False)[1:-1] if self.owner.format.style == "json" else name

    @property
    def follows_schema(self) -> bool:
        return self.owner.forced or self.offered.strict

    @property
    def arguments(self) -> str:
        """An expression for the arguments. Raises InvalidRequest if the schema can't be compiled or enforced."""
        if self._arguments is None:
            tags = self.owner.format.tags
            if tags is None:
                self._arguments = self._object()
            else:
                self._arguments = self._tagged(tags) if self.follows_schema else self._unconstrained_tagged(tags)
        return self._arguments

    def as_object(self) -> LarkRule:
        """Return a rule for the whole call, written as a JSON object.

        Raises InvalidRequest if the schema can't be compiled.
        """
        format_, schema = self.owner.format, self._schema() if self.follows_schema else {"type": "object"}
        call = {
            "type": "object",
            "properties": {
                format_.name_key: {"const": self.offered.name},
                format_.arguments_key: {"$ref": "#/$defs/arguments"},
            },
            "required": [format_.name_key, format_.arguments_key],
            "additionalProperties": False,
            "$defs": {"arguments": _moved(schema, "#/$defs/arguments")},
        }
        return self.owner.json_rule(f"{self.rule}c", json.dumps(call), self.offered.strict, self.offered.where)

    def _schema(self) -> dict[str, Any]:
        """Return the schema of the arguments. If the schema doesn't state a single type, its type becomes `object`."""
        schema = dict(self.offered.parameters)
        if not isinstance(schema.get("type"), str):
            schema["type"] = "object"
        return schema

    def _object(self) -> str:
        if not self.follows_schema:
            return self.owner.any_object()
        schema = json.dumps(self._schema())
        return self.owner.json_rule(f"{self.rule}a", schema, self.offered.strict, self.offered.where).expression

    def _tagged(self, tags: ArgumentTags) -> str:
        """Return an expression for arguments in the order of the schema.

        Rule m1 matches the arguments from index 1 onwards if no argument precedes them. Rule n1 matches these arguments
        if another argument precedes them. There are two such rules for every index. For example, these are the rules
        for a required argument a, an optional argument b and a gap between arguments:

            m0 = A n1
            n1 = GAP B | ""
        """
        grammar, rule, schema = self.owner.grammar, self.rule, self._schema()
        values = ArgumentValues(schema)
        required = values.schema.get("required") or ()
        for keyword in sorted(_KEYWORDS_OF_OBJECTS & values.schema.keys()):
            self._not_enforced(keyword)
        if self.offered.strict:
            self.owner.prepare(json.dumps(schema), strict=True, where=self.offered.where)
        keys = list(values.properties)
        for i, key in reversed(list(enumerate(keys))):
            after, others = (f"{rule}n{i + 1}", f"{rule}m{i + 1}") if i + 1 < len(keys) else ("", '""')
            first = self._argument(tags, values, i, key, self.owner.before_first)
            later = self._argument(tags, values, i, key, tags.gap)
            is_required = key in required
            grammar.rule(f"{rule}m{i}", f"{first} {after}".rstrip(), *([] if is_required else [others]))
            grammar.rule(f"{rule}n{i}", f"{later} {after}".rstrip(), *([] if is_required else [after or '""']))
        return f"{rule}m0" if keys else ""

    def _argument(self, tags: ArgumentTags, values: ArgumentValues, i: int, key: str, before: str) -> str:
        grammar, parts = self.owner.grammar, self.owner.grammar.parts
        types = values.types_of(key)
        is_text = not types or "string" in types
        opening = parts(f"{before}{tags.open}{key}{tags.sep if is_text else tags.sep_of_json}", key=key)
        close = parts(tags.close, key=key)
        if is_text:
            ends = [tags.close.replace(KEY, key).strip()]
            text = [*_allowed_texts(values.resolved(key), ends, key, self._not_enforced)]
            choices = [grammar.expression([*opening, part, *close]) for part in text]
            return f"({' | '.join(choices)})" if len(choices) > 1 else choices[0]
        rule = f"{self.rule}v{i}"
        if rule not in grammar.rules:
            where = f"{self.offered.where}.properties.{key}"
            schema = json.dumps(_standalone(self._schema(), values.properties[key]))
            self.owner.json_rule(rule, schema, self.offered.strict, where)
        return f"{grammar.expression(opening)} {rule} {grammar.expression(close)}"

    def _not_enforced(self, path: str) -> None:
        """Warn that a keyword of the schema is not enforced. Raises InvalidRequest if the tool is strict."""
        full_path = f"{self.offered.where}.{path}"
        reason = "this model writes arguments as bare text in tags, where the keyword can't be enforced"
        if self.offered.strict:
            raise InvalidRequest(f"{full_path}: {reason}; remove it, or send the tool without strict")
        warning = f"{full_path} is not enforced: {reason}"
        if warning not in self.owner.warnings:
            self.owner.warnings.append(warning)

    def _unconstrained_tagged(self, tags: ArgumentTags) -> str:
        """Return an expression for arguments with any names and values."""
        grammar, parts = self.owner.grammar, self.owner.grammar.parts
        keys = list(ArgumentValues(self._schema()).properties) if KEY in tags.close else [None]
        choices: dict[str, list[str]] = {"first": [], "later": []}
        for position, before in (("first", self.owner.before_first), ("later", tags.gap)):
            for key in keys:
                excluded = escaped('<>"\n' + tags.sep[:1])
                name: LarkPart = LarkText(f"/[^{excluded}\\s\\/][^{excluded}]{{0,63}}/")
                named = name if key is None else key
                close = parts(tags.close, key=key or "")
                ends = [tags.close.replace(KEY, key or "").strip()]
                opening = [*parts(before + tags.open), named]
                text = grammar.expression([*opening, *parts(tags.sep), text_without(ends), *close])
                choices[position].append(text)
                if tags.sep_of_json != tags.sep:
                    value = f"{self.rule}v"
                    if value not in grammar.rules:
                        self.owner.json_rule(value, "{}", False, self.offered.where)
                    head = grammar.expression([*opening, *parts(tags.sep_of_json)])
                    choices[position].append(f"{head} {value} {grammar.expression(close)}")
        if not keys:
            return ""
        first, later = (" | ".join(each) for each in choices.values())
        return f"(({first}) ({later})*)?"


def _space_after_arguments(format_: CallFormat) -> str:
    """Return the whitespace that follows the last tagged argument but is missing in calls without arguments."""
    ends = [format_.close, *([format_.middle] if format_.middle is not None else [])]
    spaces = {end[: len(end) - len(end.lstrip())] for end in ends}
    return spaces.pop() if format_.tags is not None and len(spaces) == 1 else ""


def _allowed_texts(
    schema: Mapping[str, Any], ends: list[str], key: str, not_enforced: Callable[[str], None]
) -> list[LarkPart]:
    """Return grammar parts for strings that conform to a schema and do not contain the closing tag."""
    chosen = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(chosen, list):
        return [value if isinstance(value, str) else json.dumps(value) for value in chosen]
    text = text_without(ends)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        regex = _rust_pattern(pattern)
        if regex is None:
            not_enforced(f"properties.{key}.pattern")
        else:
            text = LarkText(f"({text.expression} & {regex})", may_be_empty=True)
    if "format" in schema:
        not_enforced(f"properties.{key}.format")
    min_length, max_length = schema.get("minLength", 0), schema.get("maxLength")
    if min_length or max_length is not None:
        length = f"/(?s:.{{{int(min_length)},{'' if max_length is None else int(max_length)}}})/"
        text = LarkText(f"({text.expression} & {length})", may_be_empty=True)
    return [text]


def _rust_pattern(pattern: str) -> str | None:
    """Return an expression for strings that match an ECMA pattern, or None if Rust's syntax can't express it."""
    if re.search(r"\(\?(?!:)|\\[bBkpPcu1-9]|\[\^?\]|\[[^\]]*\[|&&|~~|--", pattern):
        return None
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern[starts : len(pattern) - ends]
    if re.search(r"(?<!\\)\||(?<![\\\[])\^|(?<!\\)\$", inner) and (starts or ends):
        return None  # an anchor of one of several alternatives
    if re.search(r"(?<![\\\[])\^|(?<!\\)\$", inner):
        return None
    ascii_only = inner.replace(r"\d", "[0-9]") if "[" not in inner else inner
    if re.search(r"\\[dwsDWS]", ascii_only):
        ascii_only = f"(?-u:{ascii_only})" if ascii_only.isascii() and "." not in ascii_only else ascii_only
    before, after = "" if starts else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"/{before}({_escape_slashes(ascii_only)}){after}/"


def _escape_slashes(regex: str) -> str:
    """Escape a regular expression for use between slashes in Lark."""
    return re.sub(
        r"\\(.)|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found.group(), found.group()), regex, flags=re.S
    )


def _with_any_space(head: str) -> str:
    """Return a regular expression for the start of a JSON object, with any space between its tokens."""
    tokens = re.findall(r'"[^"]*"|[{}:,\[\]]', head)
    return r"\s*" + r"\s*".join(escaped(token) for token in tokens) + r"\s*"


def _standalone(schema: Mapping[str, Any], part: Any) -> Any:
    """Return a part of the schema together with the schemas that it refers to."""
    if not isinstance(part, Mapping) or '"$ref"' not in json.dumps(part):
        return part
    to = "#/$defs/arguments"
    return {"allOf": [_moved(part, to)], "$defs": {"arguments": _moved(dict(schema), to)}}


def _moved(schema: Any, to: str) -> Any:
    """Return the schema with its references adapted to the schema's new path."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: part if key in _VALUE_KEYWORDS else _moved(part, to) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved
