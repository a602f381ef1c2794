"""Convert schemas into shapes, which describe the values that match a schema or the values that don't.

Alternatives are expanded until each shape has a single type. Schemas within a shape stay conditions, so that recursive
schemas terminate.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cellama.config import limits

from .document import SchemaDocument
from .formats import FORMATS, IMPLIED, portable
from .keywords import TYPES, is_number, show
from .policy import NegationUnsupported, Policy
from .scalars import constant_of, is_writable
from .shapes import (
    ANY,
    ANYTHING,
    MAX_NUMBER,
    NOTHING,
    Array,
    Boolean,
    Condition,
    Contains,
    Matches,
    Null,
    Number,
    Object,
    Shape,
    String,
    both,
    exact,
    intersection,
    is_known_step,
    property_condition,
)

Shapes = tuple[Shape, ...]

_MAX_NESTED_NEGATIONS = 16  # maximum nesting of negations that are checked in advance for support
_MAX_EXCLUDED_CHARS = 2_000  # characters of all strings that a pattern excludes
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_COMBINING = ("anyOf", "oneOf", "allOf", *_REFERENCES)
_KEYWORDS_OF_TYPE = {
    "object": (
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("propertyNames", "unevaluatedProperties"),
    ),
    "array": (
        *("prefixItems", "items", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
        *("unevaluatedItems",),
    ),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


class SchemaReader:
    """Converts the schemas of a document. Results are cached, so each schema is converted only once."""

    def __init__(self, document: SchemaDocument, policy: Policy, matches: Matches) -> None:
        self._document = document
        self._policy = policy
        self._matches = matches
        self._found: dict[tuple[int, bool], Shapes] = {}
        self._shapes: dict[Condition, Shapes] = {}
        self._reading: list[tuple[int, bool]] = []
        # Shapes may be narrower than their schema. Such shapes do not show whether two schemas exclude each other.
        self._num_narrowings = 0
        self._too_narrow: set[tuple[int, bool] | Condition] = set()
        self._negating: list[tuple[int, bool]] = []  # negations that are being checked
        self._constants: dict[str, int] = {}  # JSON → the schema that was added for it

    # Conditions

    def condition(self, node: int, must_match: bool = True) -> Condition:
        """Return the simplest condition that is equivalent to a schema or its negation."""
        for _ in range(limits.MAX_SCHEMA_DEPTH):
            schema = self._document.nodes[node].schema
            if isinstance(schema, bool):
                return ANYTHING if schema is must_match else NOTHING
            known = [name for name in schema if name in _CONSTRAINING]
            if not known:
                return ANYTHING if must_match else NOTHING
            if len(known) > 1:
                break
            if known[0] == "$dynamicRef" and self._document.is_dynamic(node):
                break
            if known[0] in _REFERENCES:
                node = self._document.target(node, known[0])
            elif known[0] in _COMBINING and len(schema[known[0]]) == 1:
                node = self._document.child(node, known[0], 0)
            elif known[0] == "not":
                node, must_match = self._document.child(node, "not"), not must_match
            else:
                break
        return ((node, must_match),)

    def alternatives(self, condition: Condition) -> list[Condition] | None:
        """Return the alternatives if the condition is a choice between conditions, and None otherwise."""
        if len(condition) != 1 or not condition[0][1]:
            return None
        node = condition[0][0]
        schema = self._document.nodes[node].schema
        known = [name for name in schema if name in _CONSTRAINING] if isinstance(schema, Mapping) else []
        if known == ["anyOf"]:
            return [self.condition(each) for each in self._children(node, "anyOf")]
        if known == ["oneOf"]:
            children = self._children(node, "oneOf")
            before = self._num_narrowings
            branches = [self._read(each, True) for each in children]
            if self._num_narrowings == before and self._all_disjoint(branches):
                return [self.condition(each) for each in children]
        return None

    def shapes(self, condition: Condition) -> Shapes:
        """Return the shapes of the values that match a condition."""
        if condition not in self._shapes:
            before = self._num_narrowings
            found: Shapes = ANY
            for node, must_match in condition:
                try:
                    found = self._both(found, self._read(node, must_match))
                except NegationUnsupported as error:
                    self._policy.not_enforced(self._document.nodes[node].path.removesuffix("/not"), "not", str(error))
            self._shapes[condition] = found
            if self._num_narrowings > before:
                self._too_narrow.add(condition)
        elif condition in self._too_narrow:
            self._num_narrowings += 1
        return self._shapes[condition]

    def negations(self, condition: Condition) -> list[Condition]:
        """Return alternative conditions, at least one of which holds if the given condition does not.

        Raises NegationUnsupported if the negation can't be expressed.
        """
        if condition == ANYTHING:
            return [NOTHING]
        found = [self.condition(node, not must_match) for node, must_match in condition]
        for key in itertools.chain(*found):
            if not key[1] and key not in self._negating and len(self._negating) < _MAX_NESTED_NEGATIONS:
                reading, self._reading = self._reading, []  # a property or an item may refer to the schema again
                self._negating.append(key)
                try:
                    self._read(*key)
                finally:
                    self._reading = reading
                    self._negating.pop()
        return found

    def constant(self, value: Any, like: int) -> Condition:
        """Return a condition that only this value matches."""
        key = json.dumps(value, sort_keys=True)
        if key not in self._constants:
            self._constants[key] = self._document.add({"const": value}, like)
        return ((self._constants[key], True),)

    def is_unsatisfiable(self, condition: Condition, steps: int = 4) -> bool:
        """Return True only if it is certain that no value matches.

        The check follows at most `steps` levels of nested schemas.
        """
        if condition == NOTHING:
            return True
        if steps == 0 or condition == ANYTHING:
            return False
        return all(self._is_unsatisfiable(shape, steps - 1) for shape in self.shapes(condition))

    def _is_unsatisfiable(self, shape: Shape, steps: int) -> bool:
        if isinstance(shape, Object):
            return any(
                self.is_unsatisfiable(property_condition(shape, name, self._matches), steps) for name in shape.required
            )
        if isinstance(shape, Array):
            return any(
                self.is_unsatisfiable(shape.item(index), steps) for index in range(min(shape.min_items or 0, 16))
            )
        return False

    def finite_values(self, condition: Condition, size: int) -> list[Any] | None:
        """Return all matching values, or None if there are more than `size` values."""
        values: list[Any] = []
        for shape in self.shapes(condition):
            match shape:
                case Null():
                    values.append(None)
                case Boolean():
                    values += shape.values
                case String() if shape.values is not None and not shape.patterns and not shape.formats:
                    values += shape.values
                case Number() if shape.values is not None:
                    values += shape.values
                case Number() if shape.is_integer and shape.minimum is not None and shape.maximum is not None:
                    if shape.maximum - shape.minimum > 2 * size:
                        return None
                    values += [n for n in range(int(shape.minimum) - 1, int(shape.maximum) + 2) if shape.has(n)]
                case _:
                    return None
        unique = {json.dumps(value): value for value in values}
        return list(unique.values()) if len(unique) <= size else None

    # Reading

    def _read(self, node: int, must_match: bool) -> Shapes:
        key = (node, must_match)
        if key in self._found:
            self._num_narrowings += key in self._too_narrow
            return self._found[key]
        schema, path, _ = self._document.nodes[node]
        if key in self._reading:
            raise self._document.error_at(path, " refers to itself directly; remove the reference")
        if len(self._reading) > limits.MAX_SCHEMA_DEPTH:
            raise self._document.error_at(path, " is reached through too many references; use fewer references")
        self._policy.spend()
        self._reading.append(key)
        before = self._num_narrowings
        try:
            if isinstance(schema, bool):
                found = ANY if schema is must_match else ()
            elif must_match:
                found = self._matching(node, schema, path)
            else:
                found = tuple(map(_unevaluated, self._not_matching(node, schema, path)))
        finally:
            self._reading.pop()
        self._found[key] = found
        if self._num_narrowings > before:
            self._too_narrow.add(key)
        return found

    def _both(self, ones: Shapes, others: Shapes) -> Shapes:
        if ones is ANY or others is ANY:
            return others if ones is ANY else ones
        found = []
        for one, other in itertools.product(ones, others):
            self._policy.spend()
            if one.type == other.type:
                shape = intersection(one, other, self._matches)
                if shape is not None:
                    found.append(shape)
                if isinstance(shape, Object) and shape.patterns:
                    self._num_narrowings += 1
        return tuple(found)

    def _matching(self, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        parts: list[tuple[int, Callable[[int, Mapping[str, Any], str], Shapes]]] = []
        names = list(schema)
        if any(name in _TYPE_KEYWORDS for name in names):
            parts.append((names.index("properties") if "properties" in names else -1, self._typed))
        for name, read in {
            **dict.fromkeys(("enum", "const"), self._values),
            **dict.fromkeys(_REFERENCES, self._referred),
            "allOf": self._all_of,
            "anyOf": self._any_of,
            "not": self._not,
            "if": self._if,
            "dependentRequired": self._dependent,
            "dependentSchemas": self._dependent,
            "dependencies": self._dependent,
        }.items():
            if name in schema:
                reading = functools.partial(read, name)
                parts.append((names.index(name), reading))
        found: Shapes = ANY
        for _, part in sorted(parts, key=lambda part: part[0]):
            found = self._both(found, part(node, schema, path))
        if "oneOf" in schema:
            found = self._one_of(node, found, path)
        for name, kind in (("unevaluatedProperties", "object"), ("unevaluatedItems", "array")):
            if name in schema:
                self._num_narrowings += 1
                condition = self.condition(self._document.child(node, name))
                found = tuple(
                    self._with_unevaluated(shape, condition) if shape.type == kind else shape for shape in found
                )
        return found

    def _referred(self, name: str, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        if name == "$dynamicRef" and self._document.is_dynamic(node):
            self._policy.not_enforced(path, name, "several $dynamicAnchor have this name; use $ref")
            return ANY
        return self._read(self._document.target(node, name), True)

    def _all_of(self, name: str, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        found: Shapes = ANY
        for child in self._children(node, "allOf"):
            found = self._both(found, self._read(child, True))
        return found

    def _any_of(self, name: str, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        return self._either(self._read(child, True) for child in self._children(node, "anyOf"))

    def _either(self, several: Iterable[Shapes]) -> Shapes:
        found: list[Shape] = []
        for shapes in several:
            if shapes is ANY:
                return ANY
            self._policy.spend(len(shapes))
            found += [shape for shape in shapes if shape not in found]
        return tuple(found)

    def _not(self, name: str, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        try:
            return self._read(self._document.child(node, "not"), False)
        except NegationUnsupported as error:
            self._policy.not_enforced(path, "not", str(error))
            return ANY

    def _if(self, name: str, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        test = self._document.child(node, "if")
        then, other = (
            self._read(self._document.child(node, key), True) if key in schema else ANY for key in ("then", "else")
        )
        if then is ANY and other is ANY:
            return ANY
        yes = self._both(self._read(test, True), then)
        try:
            return self._either([yes, self._both(self._read(test, False), other)])
        except NegationUnsupported as error:
            either_way = self._both(then, other)  # conforms with either result of the test
            if either_way:
                self._num_narrowings += 1
                return self._either([yes, either_way])
            self._policy.not_enforced(path, "if", str(error))
            return ANY

    def _dependent(self, name: str, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        found: Shapes = ANY
        rest = tuple(shape for shape in ANY if not isinstance(shape, Object))
        for key, needed in schema[name].items():
            without = Object(True, properties=((key, NOTHING),))
            if isinstance(needed, list):
                having: Shapes = (Object(True, required=tuple(dict.fromkeys((key, *needed)))),)
            else:
                inner = self._read(self._document.child(node, name, key), True)
                having = self._both((Object(True, required=(key,)),), inner)
            found = self._both(found, (*rest, without, *having))
        return found

    # oneOf

    def _one_of(self, node: int, base: Shapes, path: str) -> Shapes:
        children = self._children(node, "oneOf")
        before = self._num_narrowings
        branches = [self._both(base, self._read(child, True)) for child in children]
        is_exact = self._num_narrowings == before
        if is_exact and self._all_disjoint(branches):
            return self._either(branches)
        closed = [tuple(self._closed_object(shape) for shape in shapes) for shapes in branches]
        if is_exact and all(
            self._disjoint(closed[a], branches[b]) for a, b in itertools.permutations(range(len(branches)), 2)
        ):
            return self._either(closed)
        exclusive = []
        try:
            for at, shapes in enumerate(branches):
                for other, child in enumerate(children):
                    if other != at and not (is_exact and self._disjoint(branches[at], branches[other])):
                        shapes = self._both(shapes, self._read(child, False))
                exclusive.append(shapes)
        except NegationUnsupported as error:
            self._policy.not_enforced(
                path,
                "oneOf",
                f"a value may match several of its schemas ({error}); use anyOf, or add a required property with a "
                "different const to each of them",
            )
            return self._either(branches)
        found = self._either(exclusive)
        if not found and base:
            raise self._document.error_at(
                path, "/oneOf: every value matches either none or several of these schemas; use anyOf"
            )
        return found

    def _closed_object(self, shape: Shape) -> Shape:
        """Exclude additional properties from an object with `properties`, unless a keyword allows them."""
        if not isinstance(shape, Object) or not shape.has_properties or shape.additional is not None:
            return shape
        known = dict(shape.properties)
        more = tuple(
            (name, property_condition(shape, name, self._matches)) for name in shape.required if name not in known
        )
        return replace(shape, properties=(*shape.properties, *more), additional=NOTHING)

    def _all_disjoint(self, branches: list[Shapes]) -> bool:
        return all(self._disjoint(one, other) for one, other in itertools.combinations(branches, 2))

    def _disjoint(self, ones: Shapes, others: Shapes) -> bool:
        """Return True only if it is certain that no value matches shapes from both groups."""
        before = self._num_narrowings
        for one, other in itertools.product(ones, others):
            self._policy.spend()
            if one.type == other.type:
                shape = intersection(one, other, self._matches)
                if shape is not None and not self._is_unsatisfiable(shape, 3):
                    return False
        return self._num_narrowings == before

    # Types and values

    def _typed(self, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        given = schema.get("type", TYPES)
        types = {given} if isinstance(given, str) else set(given)
        if schema.get("nullable") is True and "type" in schema:
            types.add("null")
        readers: dict[str, Callable[[int, Mapping[str, Any], str], Shape | None]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
        }
        found: list[Shape] = []
        for shape in ANY:
            kind = shape.type
            if kind in types or (kind == "number" and "integer" in types):
                if any(name in schema for name in _KEYWORDS_OF_TYPE.get(kind, ())):
                    typed = readers[kind](node, schema, path)
                else:
                    typed = replace(shape, is_explicit="type" in schema)
                if isinstance(typed, Number) and "number" not in types:
                    typed = replace(typed, is_integer=True)
                if typed is not None:
                    found.append(typed)
        return tuple(found)

    def _number(self, node: int, schema: Mapping[str, Any], path: str) -> Shape | None:
        low, low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
        if low is not None and low > MAX_NUMBER:
            self._policy.not_enforced(path, "minimum", "numbers beyond ±10^18 can't be written")
            low, low_open = None, False
        if high is not None and high < -MAX_NUMBER:
            self._policy.not_enforced(path, "maximum", "numbers beyond ±10^18 can't be written")
            high, high_open = None, False
        step = exact(schema["multipleOf"]) if "multipleOf" in schema else None
        if step is not None and not is_known_step(step):
            self._policy.not_enforced(path, "multipleOf", "it has too many digits")
            step = None
        number = Number(
            is_explicit=True,
            minimum=low,
            is_above_minimum=low_open,
            maximum=high,
            is_below_maximum=high_open,
            step=step,
        )
        return intersection(number, Number(), self._matches)

    def _string(self, node: int, schema: Mapping[str, Any], path: str) -> Shape | None:
        pattern, format_ = schema.get("pattern"), schema.get("format")
        return intersection(
            String(
                is_explicit=True,
                min_length=int(schema.get("minLength", 0)),
                max_length=int(schema["maxLength"]) if "maxLength" in schema else None,
                patterns=(
                    ((portable(pattern), path),) if pattern is not None and (format_, pattern) not in IMPLIED else ()
                ),
                formats=((format_, path),) if format_ in FORMATS else (),
            ),
            String(),
            self._matches,
        )

    def _array(self, node: int, schema: Mapping[str, Any], path: str) -> Shape | None:
        listed = "items" if isinstance(schema.get("items"), list) else "prefixItems"
        after = "additionalItems" if listed == "items" else "items"
        prefix = tuple(self.condition(child) for child in self._children(node, listed)) if listed in schema else ()
        rest = self.condition(self._document.child(node, after)) if after in schema else None
        contains: tuple[Contains, ...] = ()
        min_count = int(schema.get("minContains", 1))
        if "contains" in schema:
            if "maxContains" in schema:
                self._policy.not_enforced(
                    path, "maxContains", "the grammar can't require that the other items don't match"
                )
            if min_count:
                item = self.condition(self._document.child(node, "contains"))
                contains = (Contains(item, min_count=min_count, path=path),)
        return intersection(
            Array(
                is_explicit=True,
                prefix=prefix,
                rest=rest,
                min_items=int(schema["minItems"]) if "minItems" in schema else None,
                min_items_path=path,
                max_items=int(schema["maxItems"]) if "maxItems" in schema else None,
                unique_path=path if schema.get("uniqueItems") else "",
                contains=contains,
                num_evaluated=None if after in schema else len(prefix),
            ),
            Array(),
            self._matches,
        )

    def _object(self, node: int, schema: Mapping[str, Any], path: str) -> Shape | None:
        patterns = tuple(
            (portable(pattern), self.condition(self._document.child(node, "patternProperties", pattern)), path)
            for pattern in schema.get("patternProperties", ())
        )
        properties = {}
        for name in schema.get("properties", ()):
            condition = self.condition(self._document.child(node, "properties", name))
            for pattern, other, _ in patterns:
                if self._matches(pattern, name, path):
                    condition = both(condition, other)
            properties[name] = condition
        more = "additionalProperties"
        names: tuple[tuple[Condition, str], ...] = ()
        if "propertyNames" in schema:
            names = ((self.condition(self._document.child(node, "propertyNames")), path),)
        return intersection(
            Object(
                is_explicit=True,
                has_properties="properties" in schema or bool(patterns),
                properties=tuple(properties.items()),
                patterns=patterns,
                additional=self.condition(self._document.child(node, more)) if more in schema else None,
                required=tuple(dict.fromkeys(schema.get("required", ()))),
                min_properties=int(schema.get("minProperties", 0)),
                min_properties_path=path,
                max_properties=int(schema["maxProperties"]) if "maxProperties" in schema else None,
                max_properties_path=path,
                names=names,
                evaluated=None if more in schema else frozenset(properties),
                evaluated_patterns=frozenset(pattern for pattern, _, _ in patterns),
            ),
            Object(),
            self._matches,
        )

    def _values(self, name: str, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        values = schema["enum"] if name == "enum" else [schema["const"]]
        self._policy.spend(len(values) // 16)
        scalars: list[Shape] = []
        flags = tuple(value for value in (False, True) if any(value is each for each in values))
        texts = tuple(dict.fromkeys(each for each in values if isinstance(each, str) and is_writable(each)))
        numbers = tuple(dict.fromkeys(each for each in values if is_number(each) and constant_of(each) is not None))
        scalars += [String(True, values=texts)] if texts else []
        scalars += [Number(True, values=numbers)] if numbers else []
        scalars += [Boolean(True, flags)] if flags else []
        scalars += [Null(True)] if None in values else []
        found = (*scalars, *(self._container(each, node) for each in values if isinstance(each, dict | list)))
        if not found:
            raise self._document.error_at(
                path,
                f"/{name} is {show(schema[name])}, which can't be generated; avoid control characters other than "
                "line breaks and tabs, and numbers beyond ±10^18 or with too many digits",
            )
        return found

    def _container(self, value: Any, node: int) -> Shape:
        self._policy.spend(len(value) + 1)
        if isinstance(value, list):
            prefix = tuple(self.constant(each, node) for each in value)
            return Array(True, prefix=prefix, rest=NOTHING, min_items=len(value), max_items=len(value))
        properties = tuple((name, self.constant(each, node)) for name, each in value.items())
        return Object(True, has_properties=True, properties=properties, additional=NOTHING, required=tuple(value))

    # Negation

    def _not_matching(self, node: int, schema: Mapping[str, Any], path: str) -> Iterator[Shape]:
        """Yield the shapes of all values that do not match the schema. Raises NegationUnsupported."""
        child = self._document.child
        if "type" in schema:
            given = schema["type"]
            types = {given} if isinstance(given, str) else set(given)
            if "integer" in types and "number" not in types:  # llguidance can't exclude whole numbers
                types.add("number")
                self._num_narrowings += 1
            yield from (replace(shape, is_explicit=True) for shape in ANY if shape.type not in types)
        if any(name in _TYPE_KEYWORDS for name in schema if name not in ("type", "nullable")):
            for shape in self._typed(node, {**schema, "type": list(TYPES)}, path):
                yield from self._negations_of(shape)
        for name in ("enum", "const"):
            if name in schema:
                yield from self._without_values(schema["enum"] if name == "enum" else [schema["const"]])
        for name in _REFERENCES:
            if name in schema:
                if name == "$dynamicRef" and self._document.is_dynamic(node):
                    raise NegationUnsupported("several $dynamicAnchor keywords have the same name as a $dynamicRef")
                yield from self._read(self._document.target(node, name), False)
        for inner in self._children(node, "allOf") if "allOf" in schema else ():
            yield from self._read(inner, False)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                children = self._children(node, name)
                before = self._num_narrowings
                is_supported = name == "anyOf" or self._all_disjoint([self._read(inner, True) for inner in children])
                if not is_supported or self._num_narrowings > before:
                    raise NegationUnsupported("'oneOf' can't be negated if its schemas overlap")
                found: Shapes = ANY
                for inner in children:
                    found = self._both(found, self._read(inner, False))
                yield from found
        if "not" in schema:
            yield from self._read(child(node, "not"), True)
        if "if" in schema:
            for name, must_match in (("then", True), ("else", False)):
                if name in schema:
                    yield from self._both(
                        self._read(child(node, "if"), must_match), self._read(child(node, name), False)
                    )
        for name in ("dependentRequired", "dependentSchemas", "dependencies"):
            for key, needed in schema.get(name, {}).items():
                if isinstance(needed, list):
                    yield from (Object(True, properties=((other, NOTHING),), required=(key,)) for other in needed)
                else:
                    violating = self._read(child(node, name, key), False)
                    yield from self._both((Object(True, required=(key,)),), violating)
        for name in ("unevaluatedProperties", "unevaluatedItems"):
            if name in schema:
                raise NegationUnsupported(f"{name!r} can't be negated")

    def _negations_of(self, shape: Shape) -> Iterator[Shape]:
        """Yield shapes of the same type that violate at least one condition of the given shape."""
        match shape:
            case Number():
                yield from self._negated_number(shape)
            case String():
                if shape.patterns or shape.formats:
                    raise NegationUnsupported(f"{'pattern' if shape.patterns else 'format'!r} can't be negated")
                if shape.min_length:
                    yield String(True, max_length=shape.min_length - 1)
                if shape.max_length is not None:
                    yield String(True, min_length=shape.max_length + 1)
            case Array():
                yield from self._negated_array(shape)
            case Object():
                yield from self._negated_object(shape)

    def _negated_number(self, shape: Number) -> Iterator[Shape]:
        if shape.step is not None:
            raise NegationUnsupported("'multipleOf' can't be negated")
        if shape.minimum is not None:
            yield Number(True, maximum=shape.minimum, is_below_maximum=not shape.is_above_minimum)
        if shape.maximum is not None:
            yield Number(True, minimum=shape.maximum, is_above_minimum=not shape.is_below_maximum)

    def _negated_array(self, shape: Array) -> Iterator[Shape]:
        if shape.unique_path:
            raise NegationUnsupported("'uniqueItems' can't be negated")
        if shape.rest not in (None, ANYTHING, NOTHING):
            if shape.prefix:
                raise NegationUnsupported("'items' after 'prefixItems' can't be negated")
            for other in self.negations(shape.rest or ANYTHING):
                yield Array(True, rest=ANYTHING, contains=(Contains(other, min_count=1, path=shape.min_items_path),))
        if shape.min_items:
            yield Array(True, rest=ANYTHING, min_items=0, max_items=shape.min_items - 1)
        is_tuple = shape.rest == NOTHING and shape.max_items is None
        max_items = len(shape.prefix) if is_tuple else shape.max_items
        if max_items is not None:
            yield Array(True, rest=ANYTHING, min_items=max_items + 1)
        for at, condition in enumerate(shape.prefix):
            for other in self.negations(condition):
                yield Array(True, prefix=(*(ANYTHING,) * at, other), rest=ANYTHING, min_items=at + 1)
        for contains in shape.contains:
            others = self.negations(contains.item)
            if contains.min_count != 1 or len(others) != 1:
                raise NegationUnsupported("'contains' can't be negated")
            yield Array(True, rest=others[0], min_items=0)

    def _negated_object(self, shape: Object) -> Iterator[Shape]:
        if shape.patterns or shape.additional not in (None, ANYTHING) or shape.names:
            raise NegationUnsupported(
                "'patternProperties', 'additionalProperties' and 'propertyNames' can't be negated"
            )
        for name, condition in shape.properties:
            for other in self.negations(condition) if condition != ANYTHING else ():
                yield Object(True, properties=((name, other),), required=(name,))
        for name in shape.required:
            yield Object(True, properties=((name, NOTHING),))
        if shape.min_properties:
            path = shape.min_properties_path
            yield Object(True, max_properties=shape.min_properties - 1, max_properties_path=path)
        if shape.max_properties is not None:
            path = shape.max_properties_path
            yield Object(True, min_properties=shape.max_properties + 1, min_properties_path=path)

    def _without_values(self, values: list[Any]) -> Iterator[Shape]:
        if any(isinstance(each, dict | list) for each in values):
            raise NegationUnsupported("an enum or const with arrays or objects can't be negated")
        yield from ANY[:2]  # objects, arrays
        texts = [each for each in values if isinstance(each, str)]
        yield String(patterns=((_pattern_without(texts), ""),)) if texts else String()
        numbers = sorted({each for each in values if is_number(each)})
        for low, high in itertools.pairwise([None, *numbers, None]):
            yield Number(minimum=low, is_above_minimum=low is not None, maximum=high, is_below_maximum=high is not None)
        flags = tuple(flag for flag in (False, True) if not any(flag is each for each in values))
        if flags:
            yield Boolean(False, flags)
        if None not in values:
            yield Null()

    def _with_unevaluated(self, shape: Shape, condition: Condition) -> Shape:
        """Return a shape in which properties and items that no other keyword evaluates must match a condition."""
        if isinstance(shape, Array):
            if shape.num_evaluated is None:
                return shape
            prefix = tuple(
                shape.item(index) if index < shape.num_evaluated else both(shape.item(index), condition)
                for index in range(max(len(shape.prefix), shape.num_evaluated))
            )
            return replace(shape, prefix=prefix, rest=both(shape.rest or ANYTHING, condition), num_evaluated=None)
        if not isinstance(shape, Object) or shape.evaluated is None:
            return shape
        properties = tuple(
            (name, each if self._is_evaluated(shape, name) else both(each, condition))
            for name, each in shape.properties
        )
        patterns = tuple(
            (pattern, each if pattern in shape.evaluated_patterns else both(each, condition), path)
            for pattern, each, path in shape.patterns
        )
        additional = both(shape.additional or ANYTHING, condition)
        return replace(shape, properties=properties, patterns=patterns, additional=additional, evaluated=None)

    def _is_evaluated(self, shape: Object, name: str) -> bool:
        assert shape.evaluated is not None
        return name in shape.evaluated or any(self._matches(pattern, name, "") for pattern in shape.evaluated_patterns)

    def _children(self, node: int, name: str) -> list[int]:
        schema = self._document.nodes[node].schema
        assert isinstance(schema, Mapping)
        return [self._document.child(node, name, at) for at in range(len(schema[name]))]


_TYPE_KEYWORDS = frozenset({"type", "nullable", *itertools.chain(*_KEYWORDS_OF_TYPE.values())})
_CONSTRAINING = _TYPE_KEYWORDS | {
    *("enum", "const", "allOf", "anyOf", "oneOf", "not", "if", *_REFERENCES),
    *("dependentRequired", "dependentSchemas", "dependencies"),
}


def _bound(
    schema: Mapping[str, Any], name: str, exclusive: str, choose: Callable[..., float]
) -> tuple[float | None, bool]:
    bound, other = schema.get(name), schema.get(exclusive)
    if isinstance(other, bool) or other is None:
        return bound, other is True and bound is not None
    if bound is None or other == choose(bound, other):
        return other, True
    return bound, False


def _unevaluated(shape: Shape) -> Shape:
    """Return the shape without its record of evaluated properties and items, which `not` discards."""
    if isinstance(shape, Object):
        return replace(shape, evaluated=frozenset(), evaluated_patterns=frozenset())
    return replace(shape, num_evaluated=0) if isinstance(shape, Array) else shape


def _pattern_without(texts: list[str]) -> str:
    r"""Return a pattern that matches all strings except the given strings.

    The pattern for `a` is `^(?:[^a][\s\S]*|a(?:[\s\S]+))?$`. This pattern matches strings that start with another
    character, longer strings, and the empty string.
    """
    if sum(map(len, texts)) > _MAX_EXCLUDED_CHARS or max(map(len, texts)) > limits.MAX_SCHEMA_DEPTH:
        raise NegationUnsupported("the excluded values are too long")
    return f"^{_pattern_after(sorted(set(texts)), 0)}$"


def _pattern_after(texts: list[str], at: int) -> str:
    """Return a pattern for the rest of a string, starting at position `at`.

    The excluded strings are identical up to this position.
    """
    inner = {
        char: [text for text in texts if len(text) > at and text[at] == char]
        for char in {t[at] for t in texts if len(t) > at}
    }
    listed = "".join(f"\\{char}" if char in r"\]^-[&~" else char for char in sorted(inner))
    other = rf"[^{listed}][\s\S]*" if inner else r"[\s\S]+"
    parts = [other, *(f"{re.escape(char)}{_pattern_after(inner[char], at + 1)}" for char in sorted(inner))]
    return f"(?:{'|'.join(parts)})" + ("" if any(len(text) == at for text in texts) else "?")
