"""Questions about regular expressions that llguidance answers, by its own reading of them. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from ..matcher import LIMITS
from .policy import Policy

UNSATISFIABLE = "nothing conforms to it"
# How JSON is written: as json.dumps does, and without \u escapes, by which one key could be written in two ways.
LAYOUT = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}


def validated(grammar: str) -> str:
    """llguidance's message about a grammar that can't be compiled; empty if it can. Needs no vocabulary."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return messages[0] if failed else ""


def problem_of(schema: Mapping[str, Any], compiled: Callable[[str], str] = validated) -> str:
    """Why llguidance can't compile a schema; empty if it can. `compiled` returns its message about a grammar."""
    text = compiled(LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": LAYOUT})))
    if "Unsatisfiable schema" in text:
        return UNSATISFIABLE
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


class Patterns:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[tuple[str, str], bool] = {}

    def matches(self, pattern: str, text: str, path: str) -> bool:
        """Whether a pattern of property names at this path matches one."""
        if (pattern, text) not in self._known:
            self._policy.spend(16)
            problem = problem_of({"type": "string", "enum": [text], "pattern": pattern})
            if problem and problem != UNSATISFIABLE:
                self._policy.cannot(path, "patternProperties", problem)
            self._known[pattern, text] = not problem
        return self._known[pattern, text]

    def disjoint(self, patterns: Sequence[str]) -> bool:
        """True if no text matches two of them."""
        self._policy.spend(16 * len(patterns))
        return not problem_of({"type": "object", "patternProperties": dict.fromkeys(patterns, True)})
