"""Compose grammars in llguidance's Lark dialect from literals, texts and schemas.

The lexer takes the longest match and never backtracks. Therefore, all text between two control tokens becomes one
terminal. With several terminals, the lexer could choose the wrong one, because one terminal may match the start of
another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .literals import ID, INDEX, KEY, NAME

ANYTHING = r"/(?s:.*)/"
_CLASSES = {ID: "/[a-zA-Z0-9]{9}/", INDEX: "/[0-9]{1,3}/"}


class ControlToken(NamedTuple):
    """A control token of the vocabulary."""

    token: int


class LarkText(NamedTuple):
    """Text that matches an expression composed of terminals."""

    expression: str
    may_be_empty: bool = False


class LarkRule(NamedTuple):
    """A reference to another grammar rule."""

    expression: str


LarkPart = str | ControlToken | LarkText | LarkRule  # a str is literal text


def quoted(text: str) -> str:
    """Return the text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a regular expression that matches this text, without slashes around it."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def containing(texts: Iterable[str]) -> str:
    """Return an expression that matches every string that contains at least one of the given texts."""
    return f"/(?s:.*)({'|'.join(escaped(text) for text in texts)})(?s:.*)/"


def text_without(texts: Iterable[str], *others: str) -> LarkText:
    """Return an expression for strings that contain none of `texts` and match none of the other expressions."""
    markers = [text for text in texts if text]
    excluded = [*([containing(markers)] if markers else []), *others]
    return LarkText("(" + " & ".join([ANYTHING, *(f"~({each})" for each in excluded)]) + ")", may_be_empty=True)


@dataclass
class LarkGrammar:
    """The terminals and rules of a grammar. `controls` maps the texts of the markup's control tokens to their ids."""

    controls: Mapping[str, int]
    rules: dict[str, str] = field(default_factory=dict)  # by name
    _terminals: dict[str, str] = field(default_factory=dict)

    def parts(self, literal: str, name: str = "", key: str = "") -> list[LarkPart]:
        """Split a literal at its control tokens, and fill its slots."""
        found: list[LarkPart] = []
        at = 0
        by_length = sorted(self.controls, key=len, reverse=True)
        while at < len(literal):
            control = next((text for text in by_length if text and literal.startswith(text, at)), None)
            if control is not None:
                found.append(ControlToken(self.controls[control]))
                at += len(control)
                continue
            char = literal[at]
            found.append(LarkText(_CLASSES[char]) if char in _CLASSES else {NAME: name, KEY: key}.get(char, char))
            at += 1
        return found

    def expression(self, parts: Sequence[LarkPart]) -> str:
        """Return a sequence in which all text between control tokens and rules is a single terminal."""
        items: list[str] = []
        run: list[str | LarkText] = []
        for part in [*parts, None]:
            if isinstance(part, str | LarkText):
                run.append(part)
                continue
            if run:
                items.append(self._terminal(run))
                run = []
            if isinstance(part, ControlToken):
                items.append(f"<[{part.token}]>")
            elif part is not None and part.expression:
                items.append(part.expression)
        return " ".join(item for item in items if item)

    def rule(self, name: str, *alternatives: str) -> LarkRule:
        """Add a rule with these alternatives, and return a reference to it."""
        self.rules[name] = " | ".join(alternatives)
        return LarkRule(name)

    def json(self, name: str, schema: Mapping[str, Any] | bool) -> LarkRule:
        """Add a rule for JSON that conforms to a schema."""
        return self.rule(name, "%json " + json.dumps(schema, ensure_ascii=False))

    def text(self, start: str) -> str:
        """Return the whole grammar with `start` as its start rule."""
        terminals = {name: expression for expression, name in self._terminals.items()}
        return "\n".join(
            f"{name}: {expression}" for name, expression in {"start": start, **self.rules, **terminals}.items()
        )

    def _terminal(self, run: Sequence[str | LarkText]) -> str:
        pieces: list[str] = []
        literal = ""
        for part in run:
            if isinstance(part, str):
                literal += part
                continue
            if literal:
                pieces.append(quoted(literal))
                literal = ""
            pieces.append(part.expression)
        if literal:
            pieces.append(quoted(literal))
        if not pieces:
            return ""
        if all(isinstance(part, LarkText) and part.may_be_empty for part in run):
            return self._named(f"({' '.join(pieces)}) & /(?s:.+)/") + "?"
        return self._named(" ".join(pieces))

    def _named(self, expression: str) -> str:
        return self._terminals.setdefault(expression, f"T{len(self._terminals)}")
