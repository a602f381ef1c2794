"""Check schemas and regular expressions with llguidance, which later enforces them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from ..matcher import LIMITS
from .policy import Policy

UNSATISFIABLE = "nothing conforms to it"
# The layout of JSON: the separators of json.dumps, and no \u escapes, so that each key has only one spelling.
LAYOUT = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}


def compile_error(grammar: str) -> str:
    """Return llguidance's message if a grammar can't be compiled, or an empty string if it can.

    This check works without a vocabulary.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return messages[0] if failed else ""


def problem_of(schema: Mapping[str, Any], try_compile: Callable[[str], str] = compile_error) -> str:
    """Return the reason why llguidance can't compile a schema, or an empty string if it can.

    `try_compile` compiles a grammar and returns llguidance's message.
    """
    text = try_compile(LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": LAYOUT})))
    if "Unsatisfiable schema" in text:
        return UNSATISFIABLE
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


class Patterns:
    """Checks which strings match which patterns, and caches the results."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._matches: dict[tuple[str, str], bool] = {}

    def matches(self, pattern: str, name: str, path: str) -> bool:
        """Return whether the pattern for property names at this path matches a name."""
        if (pattern, name) not in self._matches:
            self._policy.spend(16)
            problem = problem_of({"type": "string", "enum": [name], "pattern": pattern})
            if problem and problem != UNSATISFIABLE:
                self._policy.not_enforced(path, "patternProperties", problem)
            self._matches[pattern, name] = not problem
        return self._matches[pattern, name]

    def disjoint(self, patterns: Sequence[str]) -> bool:
        """Return True if no string matches more than one of these patterns."""
        self._policy.spend(16 * len(patterns))
        return not problem_of({"type": "object", "patternProperties": dict.fromkeys(patterns, True)})
