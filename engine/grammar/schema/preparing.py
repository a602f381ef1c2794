"""Rewrite a caller's JSON Schema so that llguidance can compile it, without making it more permissive.

1. SchemaDocument parses and checks the text, and looks up subschemas by path.
2. SchemaReader converts each schema into shapes, which are alternatives with a single type each. Schemas within a shape
   stay conditions, so that recursive schemas terminate.
3. FormBuilder converts shapes into forms. Conditions that a grammar can't express become alternatives.
4. SchemaWriter writes the forms as a JSON Schema in which no two keywords apply to the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from cellama.engine.errors import InvalidRequest

from .document import SchemaDocument
from .forms import FormBuilder
from .patterns import LAYOUT, UNSATISFIABLE, Patterns, compile_error, problem_of
from .policy import Policy
from .reader import SchemaReader
from .shapes import String
from .writer import SchemaWriter, string_of

_MAX_CHECKED = 32  # strings and name patterns that are compiled one by one to find the ones that fail


class Prepared(NamedTuple):
    """A schema for llguidance, and warnings about the keywords in the caller's schema that are not enforced."""

    schema: dict[str, Any]
    warnings: tuple[str, ...]


def prepare_schema(
    text: str, *, strict: bool, where: str = "json_schema", try_compile: Callable[[str], str] = compile_error
) -> Prepared:
    """Return a schema for llguidance, with the layout of the JSON text in `x-guidance`.

    Every text that the schema allows conforms to the caller's schema, except for the keywords that the warnings list.
    With `strict`, keywords that can't be enforced are rejected instead. `try_compile` compiles a grammar and returns
    llguidance's message, which is empty on success. The last call to `try_compile` compiles the returned schema. Raises
    InvalidRequest. The error message refers to the schema as `where`, and contains the path within the schema.
    """
    try:
        return _prepared(text, strict, where, try_compile)
    except RecursionError:
        raise InvalidRequest(f"{where} is nested too deeply; flatten it") from None


def _prepared(text: str, strict: bool, where: str, try_compile: Callable[[str], str]) -> Prepared:
    document = SchemaDocument(text, where)
    policy = Policy(document, where, strict)
    patterns = Patterns(policy)
    reader = SchemaReader(document, policy, patterns.matches)
    writer = SchemaWriter(FormBuilder(reader, policy, patterns), document, policy, where)
    root = reader.condition(SchemaDocument.ROOT)
    schema = writer.write(root)
    problem = problem_of(schema, try_compile)
    if problem and _drop_unsupported_patterns(writer, policy):
        schema = writer.write(root)
        problem = problem_of(schema, try_compile)
    if "too big" in problem and writer.shorten_arrays():
        schema = writer.write(root)
        problem = problem_of(schema, try_compile)
    if problem:
        raise InvalidRequest(f"{where} can't be compiled: {problem}; simplify it")
    return Prepared({**schema, "x-guidance": LAYOUT}, policy.warnings)


def _drop_unsupported_patterns(writer: SchemaWriter, policy: Policy) -> bool:
    """Drop patterns that can't be compiled, and return whether there were any.

    Raises InvalidRequest in strict mode.
    """
    for form in writer.strings_with_patterns()[:_MAX_CHECKED]:
        problem = problem_of(writer.string(form) or {})
        if problem:
            writer.replacements[form] = _without_unsupported(form, problem, policy)
    for pattern, path in writer.name_patterns()[:_MAX_CHECKED]:
        problem = problem_of({"type": "object", "patternProperties": {pattern: True}})
        if problem:
            policy.not_enforced(path, "patternProperties", problem)
            writer.dropped_patterns.add(pattern)
    return bool(writer.replacements or writer.dropped_patterns)


def _without_unsupported(form: String, problem: str, policy: Policy) -> dict[str, Any] | None:
    """Return a string schema with only the patterns and formats that can be compiled, or None if no string matches."""
    paths = {path for _, path in form.patterns}
    formats = tuple(each for each in form.formats if each[1] not in paths)  # in one schema, `pattern` replaces `format`
    if formats != form.formats:
        form = replace(form, formats=formats)
        problem = problem_of(string_of(form))
        if not problem:
            return string_of(form)
    if problem == UNSATISFIABLE:
        return None
    supported = replace(form, patterns=())
    for pattern in form.patterns:
        attempt = replace(supported, patterns=(*supported.patterns, pattern))
        reason = problem_of(string_of(attempt))
        if reason and reason != UNSATISFIABLE:
            policy.not_enforced(pattern[1], "pattern", reason)
        else:
            supported = attempt
    return None if problem_of(string_of(supported)) else string_of(supported)
