"""A JSON Schema as callers write it → one that llguidance compiles and that never allows more. Pure.

text ─ Document ─→ schemas by path, checked
     ─ Reader ───→ shapes: alternatives of one type each; schemas within them are goals
     ─ Former ───→ forms: what a grammar has no place for became alternatives
     ─ Writer ───→ JSON Schema in which no keyword looks at the same value as another one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from cellama.engine.errors import InvalidRequest

from .document import Document
from .forms import Former
from .patterns import LAYOUT, UNSATISFIABLE, Patterns, problem_of, validated
from .policy import Policy
from .reader import Reader
from .shapes import String
from .writer import Writer, string_of

_MAX_MENDED = 32  # strings whose patterns are compiled one by one, to find those that can't be


class Prepared(NamedTuple):
    """A schema for llguidance, and what of the caller's schema is not enforced."""

    schema: dict[str, Any]
    warnings: tuple[str, ...]


def prepare_schema(
    text: str, *, strict: bool, where: str = "json_schema", compiled: Callable[[str], str] = validated
) -> Prepared:
    """Return the schema for llguidance, with the layout of the JSON text in `x-guidance`.

    Every text that it allows conforms to the schema, except for what the warnings list. `strict` refuses what can't be
    enforced. `compiled` compiles a grammar and returns llguidance's message, empty on success; the last call is for the
    schema that is returned. Raises InvalidRequest, which calls the schema `where` and names the path within it.
    """
    try:
        return _prepared(text, strict, where, compiled)
    except RecursionError:
        raise InvalidRequest(f"{where} is nested too deeply; flatten it") from None


def _prepared(text: str, strict: bool, where: str, compiled: Callable[[str], str]) -> Prepared:
    document = Document(text, where)
    policy = Policy(document, where, strict)
    patterns = Patterns(policy)
    reader = Reader(document, policy, patterns.matches)
    writer = Writer(Former(reader, policy, patterns), document, policy, where)
    root = reader.goal(Document.ROOT)
    schema = writer.write(root)
    problem = problem_of(schema, compiled)
    if problem and _mend(writer, policy):
        schema = writer.write(root)
        problem = problem_of(schema, compiled)
    if "too big" in problem and writer.shorten_arrays():
        schema = writer.write(root)
        problem = problem_of(schema, compiled)
    if problem:
        raise InvalidRequest(f"{where} can't be compiled: {problem}; simplify it")
    return Prepared({**schema, "x-guidance": LAYOUT}, policy.warnings)


def _mend(writer: Writer, policy: Policy) -> bool:
    """Find the patterns that can't be compiled, and leave them out. Returns whether there were some.

    Raises InvalidRequest in strict use.
    """
    for form in writer.strings_with_patterns()[:_MAX_MENDED]:
        problem = problem_of(writer.string(form) or {})
        if problem:
            writer.instead[form] = _without_some(form, problem, policy)
    for pattern, path in writer.patterns_of_names()[:_MAX_MENDED]:
        problem = problem_of({"type": "object", "patternProperties": {pattern: True}})
        if problem:
            policy.cannot(path, "patternProperties", problem)
            writer.without.add(pattern)
    return bool(writer.instead or writer.without)


def _without_some(form: String, problem: str, policy: Policy) -> dict[str, Any] | None:
    """A string with as many of its patterns and formats as can be compiled together; None if no text has them all."""
    paths = {path for _, path in form.patterns}
    own = tuple(each for each in form.formats if each[1] not in paths)  # in one schema, a format gives way to a pattern
    if own != form.formats:
        form = replace(form, formats=own)
        problem = problem_of(string_of(form))
        if not problem:
            return string_of(form)
    if problem == UNSATISFIABLE:
        return None
    kept = replace(form, patterns=())
    for pattern in form.patterns:
        more = replace(kept, patterns=(*kept.patterns, pattern))
        reason = problem_of(string_of(more))
        if reason and reason != UNSATISFIABLE:
            policy.cannot(pattern[1], "pattern", reason)
        else:
            kept = more
    return None if problem_of(string_of(kept)) else string_of(kept)
