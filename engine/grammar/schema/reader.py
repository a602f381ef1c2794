"""Schemas → the shapes of the values that match them, or that don't. Pure.

Alternatives are multiplied out until each shape is of one type. Schemas within a shape stay goals, so recursion ends.
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

from .document import Document
from .formats import FORMATS, IMPLIED, portable
from .keywords import SILENT, TYPES, is_number, show
from .policy import Inexpressible, Policy
from .scalars import constant_of, is_writable
from .shapes import (
    ANY,
    ANYTHING,
    MAX_NUMBER,
    NOTHING,
    Array,
    Boolean,
    Contains,
    Goal,
    Matches,
    Null,
    Number,
    Object,
    Shape,
    String,
    both,
    exact,
    goal_of,
    is_known_step,
    merged,
)

Shapes = tuple[Shape, ...]

_MAX_TRIED = 16  # opposites within opposites that are looked at ahead
_MAX_EXCLUDED_CHARS = 2_000  # of texts that a pattern says are not to come
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ALONE = ("anyOf", "oneOf", "allOf", *_REFERENCES)
_OF_TYPE = {
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


class Reader:
    """Reads the schemas of a document. What it found is kept: schemas that are referred to are read once."""

    def __init__(self, document: Document, policy: Policy, matches: Matches) -> None:
        self._document = document
        self._policy = policy
        self.matches = matches
        self._found: dict[tuple[int, bool], Shapes] = {}
        self._of_goal: dict[Goal, Shapes] = {}
        self._reading: list[tuple[int, bool]] = []
        # Shapes may be narrower than their schema. Those say nothing about whether two schemas exclude each other.
        self._num_narrowed = 0
        self._narrower: set[tuple[int, bool] | Goal] = set()
        self._tried: list[tuple[int, bool]] = []  # opposites that are looked at ahead
        self._constants: dict[str, int] = {}  # JSON → the schema that was made for it

    # Goals

    def goal(self, node: int, wanted: bool = True) -> Goal:
        """The simplest goal that a schema stands for."""
        for _ in range(limits.MAX_SCHEMA_DEPTH):
            schema = self._document.nodes[node].schema
            if isinstance(schema, bool):
                return ANYTHING if schema is wanted else NOTHING
            said = [name for name in schema if name not in SILENT]
            known = [name for name in said if name in _KNOWN]
            if not known:
                return ANYTHING if wanted else NOTHING
            if len(known) > 1:
                break
            if known[0] == "$dynamicRef" and self._document.is_dynamic(node):
                break
            if known[0] in _REFERENCES:
                node = self._document.target(node, known[0])
            elif known[0] in _ALONE and len(schema[known[0]]) == 1:
                node = self._document.child(node, known[0], 0)
            elif known[0] == "not":
                node, wanted = self._document.child(node, "not"), not wanted
            else:
                break
        return ((node, wanted),)

    def alternatives(self, goal: Goal) -> list[Goal] | None:
        """Goals of which any will do, if the goal says nothing else."""
        if len(goal) != 1 or not goal[0][1]:
            return None
        node = goal[0][0]
        schema = self._document.nodes[node].schema
        known = [name for name in schema if name in _KNOWN] if isinstance(schema, Mapping) else []
        if known == ["anyOf"]:
            return [self.goal(each) for each in self._children(node, "anyOf")]
        if known == ["oneOf"]:
            children = self._children(node, "oneOf")
            before = self._num_narrowed
            branches = [self._read(each, True) for each in children]
            if self._num_narrowed == before and self._all_apart(branches):
                return [self.goal(each) for each in children]
        return None

    def shapes(self, goal: Goal) -> Shapes:
        """The shapes of what matches all of a goal."""
        if goal not in self._of_goal:
            before = self._num_narrowed
            found: Shapes = ANY
            for node, wanted in goal:
                try:
                    found = self._both(found, self._read(node, wanted))
                except Inexpressible as error:
                    self._policy.cannot(self._document.nodes[node].path.removesuffix("/not"), "not", str(error))
            self._of_goal[goal] = found
            if self._num_narrowed > before:
                self._narrower.add(goal)
        elif goal in self._narrower:
            self._num_narrowed += 1
        return self._of_goal[goal]

    def opposites(self, goal: Goal) -> list[Goal]:
        """Goals of which one at least holds where the goal does not. Raises Inexpressible."""
        if goal == ANYTHING:
            return [NOTHING]
        found = [self.goal(node, not wanted) for node, wanted in goal]
        for key in itertools.chain(*found):
            if not key[1] and key not in self._tried and len(self._tried) < _MAX_TRIED:
                reading, self._reading = self._reading, []  # within a property or an item a schema may come again
                self._tried.append(key)
                try:
                    self._read(*key)
                finally:
                    self._reading = reading
                    self._tried.pop()
        return found

    def constant(self, value: Any, like: int) -> Goal:
        """The goal of this very value."""
        key = json.dumps(value, sort_keys=True)
        if key not in self._constants:
            self._constants[key] = self._document.add({"const": value}, like)
        return ((self._constants[key], True),)

    def hollow(self, goal: Goal, steps: int = 4) -> bool:
        """True if it is certain that nothing matches; a few steps into it are looked at."""
        if goal == NOTHING:
            return True
        if steps == 0 or goal == ANYTHING:
            return False
        return all(self._hollow(shape, steps - 1) for shape in self.shapes(goal))

    def _hollow(self, shape: Shape, steps: int) -> bool:
        if isinstance(shape, Object):
            return any(self.hollow(goal_of(shape, name, self.matches), steps) for name in shape.required)
        if isinstance(shape, Array):
            return any(self.hollow(shape.at(index), steps) for index in range(min(shape.low or 0, 16)))
        return False

    def domain(self, goal: Goal, size: int) -> list[Any] | None:
        """All values that match, if they are few."""
        values: list[Any] = []
        for shape in self.shapes(goal):
            match shape:
                case Null():
                    values.append(None)
                case Boolean():
                    values += shape.values
                case String() if shape.values is not None and not shape.patterns and not shape.formats:
                    values += shape.values
                case Number() if shape.values is not None:
                    values += shape.values
                case Number() if shape.integer and shape.low is not None and shape.high is not None:
                    if shape.high - shape.low > 2 * size:
                        return None
                    values += [n for n in range(int(shape.low) - 1, int(shape.high) + 2) if shape.has(n)]
                case _:
                    return None
        unique = {json.dumps(value): value for value in values}
        return list(unique.values()) if len(unique) <= size else None

    # Reading

    def _read(self, node: int, wanted: bool) -> Shapes:
        key = (node, wanted)
        if key in self._found:
            self._num_narrowed += key in self._narrower
            return self._found[key]
        schema, path, _ = self._document.nodes[node]
        if key in self._reading:
            raise self._document.refused(path, " refers to itself without anything in between; take the reference out")
        if len(self._reading) > limits.MAX_SCHEMA_DEPTH:
            raise self._document.refused(path, " is reached by too many references; use fewer")
        self._policy.spend()
        self._reading.append(key)
        before = self._num_narrowed
        try:
            if isinstance(schema, bool):
                found = ANY if schema is wanted else ()
            elif wanted:
                found = self._matching(node, schema, path)
            else:
                found = tuple(map(_unseen, self._differing(node, schema, path)))
        finally:
            self._reading.pop()
        self._found[key] = found
        if self._num_narrowed > before:
            self._narrower.add(key)
        return found

    def _both(self, ones: Shapes, others: Shapes) -> Shapes:
        if ones is ANY or others is ANY:
            return others if ones is ANY else ones
        found = []
        for one, other in itertools.product(ones, others):
            self._policy.spend()
            if one.type == other.type:
                shape = merged(one, other, self.matches)
                if shape is not None:
                    found.append(shape)
                if isinstance(shape, Object) and shape.patterns:
                    self._num_narrowed += 1
        return tuple(found)

    def _matching(self, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        parts: list[tuple[int, Callable[[int, Mapping[str, Any], str], Shapes]]] = []
        names = list(schema)
        if any(name in _TYPED for name in names):
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
                self._num_narrowed += 1
                goal = self.goal(self._document.child(node, name))
                found = tuple(self._closed(shape, goal) if shape.type == kind else shape for shape in found)
        return found

    def _referred(self, name: str, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        if name == "$dynamicRef" and self._document.is_dynamic(node):
            self._policy.cannot(path, name, "several $dynamicAnchor have its name; use $ref")
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
        except Inexpressible as error:
            self._policy.cannot(path, "not", str(error))
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
        except Inexpressible as error:
            either_way = self._both(then, other)  # what matches both conforms, whatever the test says
            if either_way:
                self._num_narrowed += 1
                return self._either([yes, either_way])
            self._policy.cannot(path, "if", str(error))
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

    # One of several

    def _one_of(self, node: int, base: Shapes, path: str) -> Shapes:
        children = self._children(node, "oneOf")
        before = self._num_narrowed
        branches = [self._both(base, self._read(child, True)) for child in children]
        is_exact = self._num_narrowed == before
        if is_exact and self._all_apart(branches):
            return self._either(branches)
        closed = [tuple(self._without_others(shape) for shape in shapes) for shapes in branches]
        if is_exact and all(
            self._apart(closed[a], branches[b]) for a, b in itertools.permutations(range(len(branches)), 2)
        ):
            return self._either(closed)
        exclusive = []
        try:
            for at, shapes in enumerate(branches):
                for other, child in enumerate(children):
                    if other != at and not (is_exact and self._apart(branches[at], branches[other])):
                        shapes = self._both(shapes, self._read(child, False))
                exclusive.append(shapes)
        except Inexpressible as error:
            self._policy.cannot(
                path,
                "oneOf",
                f"a value may match several of its schemas ({error}); use anyOf, or tell them apart by a required "
                "property with different values of const",
            )
            return self._either(branches)
        found = self._either(exclusive)
        if not found and base:
            raise self._document.refused(
                path, "/oneOf: every value matches several of these schemas or none; use anyOf"
            )
        return found

    def _without_others(self, shape: Shape) -> Shape:
        """The shape as it is written: an object with `properties` has no others unless a keyword allows them."""
        if not isinstance(shape, Object) or not shape.named or shape.additional is not None:
            return shape
        known = shape.fixed()
        more = tuple((name, goal_of(shape, name, self.matches)) for name in shape.required if name not in known)
        return replace(shape, properties=(*shape.properties, *more), additional=NOTHING)

    def _all_apart(self, branches: list[Shapes]) -> bool:
        return all(self._apart(one, other) for one, other in itertools.combinations(branches, 2))

    def _apart(self, ones: Shapes, others: Shapes) -> bool:
        """True if it is certain that no value matches both."""
        before = self._num_narrowed
        for one, other in itertools.product(ones, others):
            self._policy.spend()
            if one.type == other.type:
                shape = merged(one, other, self.matches)
                if shape is not None and not self._hollow(shape, 3):
                    return False
        return self._num_narrowed == before

    # Types and values

    def _typed(self, node: int, schema: Mapping[str, Any], path: str) -> Shapes:
        given = schema.get("type", TYPES)
        types = {given} if isinstance(given, str) else set(given)
        if schema.get("nullable") is True and "type" in schema:
            types.add("null")
        said = "type" in schema
        makers: dict[str, Callable[[int, Mapping[str, Any], str, bool], Shape | None]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
        }
        found: list[Shape] = []
        for shape in ANY:
            kind = shape.type
            if kind in types or (kind == "number" and "integer" in types):
                has = any(name in schema for name in _OF_TYPE.get(kind, ()))
                made = makers[kind](node, schema, path, said or has) if has else replace(shape, said=said)
                if isinstance(made, Number) and "number" not in types:
                    made = replace(made, integer=True)
                if made is not None:
                    found.append(made)
        return tuple(found)

    def _number(self, node: int, schema: Mapping[str, Any], path: str, said: bool) -> Shape | None:
        low, low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
        if low is not None and low > MAX_NUMBER:
            self._policy.cannot(path, "minimum", "numbers are written up to ±10^18")
            low, low_open = None, False
        if high is not None and high < -MAX_NUMBER:
            self._policy.cannot(path, "maximum", "numbers are written up to ±10^18")
            high, high_open = None, False
        step = exact(schema["multipleOf"]) if "multipleOf" in schema else None
        if step is not None and not is_known_step(step):
            self._policy.cannot(path, "multipleOf", "it has too many digits")
            step = None
        number = Number(said, low, low_open, high, high_open, False, step, path)
        return merged(number, Number(), self.matches)

    def _string(self, node: int, schema: Mapping[str, Any], path: str, said: bool) -> Shape | None:
        pattern, form = schema.get("pattern"), schema.get("format")
        return merged(
            String(
                said,
                int(schema.get("minLength", 0)),
                int(schema["maxLength"]) if "maxLength" in schema else None,
                ((portable(pattern), path),) if pattern is not None and (form, pattern) not in IMPLIED else (),
                ((form, path),) if form in FORMATS else (),
            ),
            String(),
            self.matches,
        )

    def _array(self, node: int, schema: Mapping[str, Any], path: str, said: bool) -> Shape | None:
        listed = "items" if isinstance(schema.get("items"), list) else "prefixItems"
        after = "additionalItems" if listed == "items" else "items"
        prefix = tuple(self.goal(child) for child in self._children(node, listed)) if listed in schema else ()
        rest = self.goal(self._document.child(node, after)) if after in schema else None
        contains: tuple[Contains, ...] = ()
        low = int(schema.get("minContains", 1))
        if "contains" in schema:
            if "maxContains" in schema:
                self._policy.cannot(path, "maxContains", "the items that don't match would have to be known")
            if low:
                contains = (Contains(self.goal(self._document.child(node, "contains")), low, path),)
        return merged(
            Array(
                said,
                prefix,
                rest,
                int(schema["minItems"]) if "minItems" in schema else None,
                path,
                int(schema["maxItems"]) if "maxItems" in schema else None,
                path if schema.get("uniqueItems") else "",
                contains,
                None if after in schema else len(prefix),
            ),
            Array(),
            self.matches,
        )

    def _object(self, node: int, schema: Mapping[str, Any], path: str, said: bool) -> Shape | None:
        patterns = tuple(
            (portable(pattern), self.goal(self._document.child(node, "patternProperties", pattern)), path)
            for pattern in schema.get("patternProperties", ())
        )
        properties = {}
        for name in schema.get("properties", ()):
            goal = self.goal(self._document.child(node, "properties", name))
            for pattern, other, _ in patterns:
                if self.matches(pattern, name, path):
                    goal = both(goal, other)
            properties[name] = goal
        more = "additionalProperties"
        return merged(
            Object(
                said,
                "properties" in schema or bool(patterns),
                tuple(properties.items()),
                patterns,
                self.goal(self._document.child(node, more)) if more in schema else None,
                tuple(dict.fromkeys(schema.get("required", ()))),
                int(schema.get("minProperties", 0)),
                path,
                int(schema["maxProperties"]) if "maxProperties" in schema else None,
                path,
                ((self.goal(self._document.child(node, "propertyNames")), path),) if "propertyNames" in schema else (),
                None if more in schema else frozenset(properties),
                frozenset(pattern for pattern, _, _ in patterns),
            ),
            Object(),
            self.matches,
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
        found = (*scalars, *(self._composed(each, node) for each in values if isinstance(each, dict | list)))
        if not found:
            raise self._document.refused(
                path,
                f"/{name} is {show(schema[name])}, which can't be written: control characters other than "
                "line breaks and tabs, numbers beyond ±10^18 or with too many digits; give other values",
            )
        return found

    def _composed(self, value: Any, node: int) -> Shape:
        self._policy.spend(len(value) + 1)
        if isinstance(value, list):
            prefix = tuple(self.constant(each, node) for each in value)
            return Array(True, prefix, NOTHING, len(value), "", len(value))
        properties = tuple((name, self.constant(each, node)) for name, each in value.items())
        return Object(True, True, properties, (), NOTHING, tuple(value))

    # What does not match

    def _differing(self, node: int, schema: Mapping[str, Any], path: str) -> Iterator[Shape]:
        """Shapes of all values that do not match the schema. Raises Inexpressible."""
        child = self._document.child
        if "type" in schema:
            given = schema["type"]
            types = {given} if isinstance(given, str) else set(given)
            if "integer" in types and "number" not in types:  # other numbers than whole ones can't be asked for
                types.add("number")
                self._num_narrowed += 1
            yield from (replace(shape, said=True) for shape in ANY if shape.type not in types)
        if any(name in _TYPED for name in schema if name not in ("type", "nullable")):
            for shape in self._typed(node, {**schema, "type": list(TYPES)}, path):
                yield from self._opposites_of(shape)
        for name in ("enum", "const"):
            if name in schema:
                yield from self._other_values(schema["enum"] if name == "enum" else [schema["const"]])
        for name in _REFERENCES:
            if name in schema:
                if name == "$dynamicRef" and self._document.is_dynamic(node):
                    raise Inexpressible("several $dynamicAnchor have the name of a $dynamicRef")
                yield from self._read(self._document.target(node, name), False)
        for inner in self._children(node, "allOf") if "allOf" in schema else ():
            yield from self._read(inner, False)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                children = self._children(node, name)
                before = self._num_narrowed
                apart = name == "anyOf" or self._all_apart([self._read(inner, True) for inner in children])
                if not apart or self._num_narrowed > before:
                    raise Inexpressible("there is no opposite of 'oneOf' with schemas that overlap")
                found: Shapes = ANY
                for inner in children:
                    found = self._both(found, self._read(inner, False))
                yield from found
        if "not" in schema:
            yield from self._read(child(node, "not"), True)
        if "if" in schema:
            for name, wanted in (("then", True), ("else", False)):
                if name in schema:
                    yield from self._both(self._read(child(node, "if"), wanted), self._read(child(node, name), False))
        for name in ("dependentRequired", "dependentSchemas", "dependencies"):
            for key, needed in schema.get(name, {}).items():
                if isinstance(needed, list):
                    yield from (Object(True, properties=((other, NOTHING),), required=(key,)) for other in needed)
                else:
                    violating = self._read(child(node, name, key), False)
                    yield from self._both((Object(True, required=(key,)),), violating)
        for name in ("unevaluatedProperties", "unevaluatedItems"):
            if name in schema:
                raise Inexpressible(f"there is no opposite of {name!r}")

    def _opposites_of(self, shape: Shape) -> Iterator[Shape]:
        """Shapes of the same type that violate at least one condition of a shape."""
        match shape:
            case Number():
                yield from self._opposite_numbers(shape)
            case String():
                if shape.patterns or shape.formats:
                    raise Inexpressible(f"there is no opposite of {'pattern' if shape.patterns else 'format'!r}")
                if shape.low:
                    yield String(True, high=shape.low - 1)
                if shape.high is not None:
                    yield String(True, low=shape.high + 1)
            case Array():
                yield from self._opposite_arrays(shape)
            case Object():
                yield from self._opposite_objects(shape)

    def _opposite_numbers(self, shape: Number) -> Iterator[Shape]:
        if shape.step is not None:
            raise Inexpressible("there is no opposite of 'multipleOf'")
        if shape.low is not None:
            yield Number(True, high=shape.low, high_open=not shape.low_open)
        if shape.high is not None:
            yield Number(True, low=shape.high, low_open=not shape.high_open)

    def _opposite_arrays(self, shape: Array) -> Iterator[Shape]:
        if shape.unique:
            raise Inexpressible("there is no opposite of 'uniqueItems'")
        if shape.rest not in (None, ANYTHING, NOTHING):
            if shape.prefix:
                raise Inexpressible("there is no opposite of 'items' after 'prefixItems'")
            for other in self.opposites(shape.rest or ANYTHING):
                yield Array(True, rest=ANYTHING, contains=(Contains(other, 1, shape.low_path),))
        if shape.low:
            yield Array(True, rest=ANYTHING, low=0, high=shape.low - 1)
        high = len(shape.prefix) if shape.rest == NOTHING and shape.high is None else shape.high
        if high is not None:
            yield Array(True, rest=ANYTHING, low=high + 1)
        for at, goal in enumerate(shape.prefix):
            for other in self.opposites(goal):
                yield Array(True, (*(ANYTHING,) * at, other), ANYTHING, at + 1)
        for contains in shape.contains:
            others = self.opposites(contains.item)
            if contains.low != 1 or len(others) != 1:
                raise Inexpressible("there is no opposite of 'contains'")
            yield Array(True, rest=others[0], low=0)

    def _opposite_objects(self, shape: Object) -> Iterator[Shape]:
        if shape.patterns or shape.additional not in (None, ANYTHING) or shape.names:
            raise Inexpressible("there is no opposite of patternProperties, additionalProperties and propertyNames")
        for name, goal in shape.properties:
            for other in self.opposites(goal) if goal != ANYTHING else ():
                yield Object(True, properties=((name, other),), required=(name,))
        for name in shape.required:
            yield Object(True, properties=((name, NOTHING),))
        if shape.low:
            yield Object(True, high=shape.low - 1, high_path=shape.low_path)
        if shape.high is not None:
            yield Object(True, low=shape.high + 1, low_path=shape.high_path)

    def _other_values(self, values: list[Any]) -> Iterator[Shape]:
        if any(isinstance(each, dict | list) for each in values):
            raise Inexpressible("an enum or const with arrays or objects has no opposite")
        yield from ANY[:2]  # objects, arrays
        texts = [each for each in values if isinstance(each, str)]
        yield String(patterns=((_other_than(texts), ""),)) if texts else String()
        numbers = sorted({each for each in values if is_number(each)})
        for low, high in itertools.pairwise([None, *numbers, None]):
            yield Number(False, low, low is not None, high, high is not None)
        flags = tuple(flag for flag in (False, True) if not any(flag is each for each in values))
        if flags:
            yield Boolean(False, flags)
        if None not in values:
            yield Null()

    def _closed(self, shape: Shape, goal: Goal) -> Shape:
        """A shape whose properties or items must match a goal if no other keyword of the schema looks at them."""
        if not isinstance(shape, Array | Object) or shape.seen is None:
            return shape
        if isinstance(shape, Array):
            size = max(len(shape.prefix), shape.seen)
            prefix = tuple(
                shape.at(index) if index < shape.seen else both(shape.at(index), goal) for index in range(size)
            )
            return replace(shape, prefix=prefix, rest=both(shape.rest or ANYTHING, goal), seen=None)
        properties = tuple(
            (name, each if self._is_seen(shape, name) else both(each, goal)) for name, each in shape.properties
        )
        patterns = tuple(
            (pattern, each if pattern in shape.seen_patterns else both(each, goal), path)
            for pattern, each, path in shape.patterns
        )
        additional = both(shape.additional or ANYTHING, goal)
        return replace(shape, properties=properties, patterns=patterns, additional=additional, seen=None)

    def _is_seen(self, shape: Object, name: str) -> bool:
        assert shape.seen is not None
        return name in shape.seen or any(self.matches(pattern, name, "") for pattern in shape.seen_patterns)

    def _children(self, node: int, name: str) -> list[int]:
        schema = self._document.nodes[node].schema
        assert isinstance(schema, Mapping)
        return [self._document.child(node, name, at) for at in range(len(schema[name]))]


_TYPED = frozenset({"type", "nullable", *itertools.chain(*_OF_TYPE.values())})
_KNOWN = _TYPED | {
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


def _unseen(shape: Shape) -> Shape:
    """The shape as unevaluatedProperties and unevaluatedItems see it below a `not`."""
    if isinstance(shape, Object):
        return replace(shape, seen=frozenset(), seen_patterns=frozenset())
    return replace(shape, seen=0) if isinstance(shape, Array) else shape


def _other_than(texts: list[str]) -> str:
    """A pattern of all texts but these."""
    if sum(map(len, texts)) > _MAX_EXCLUDED_CHARS or max(map(len, texts)) > limits.MAX_SCHEMA_DEPTH:
        raise Inexpressible("the values are too long")
    return f"^{_after(sorted(set(texts)), 0)}$"


def _after(texts: list[str], at: int) -> str:
    """A pattern of what follows at this place, where all of these texts begin alike."""
    inner = {
        char: [text for text in texts if len(text) > at and text[at] == char]
        for char in {t[at] for t in texts if len(t) > at}
    }
    listed = "".join(f"\\{char}" if char in r"\]^-[&~" else char for char in sorted(inner))
    other = rf"[^{listed}][\s\S]*" if inner else r"[\s\S]+"
    parts = [other, *(f"{re.escape(char)}{_after(inner[char], at + 1)}" for char in sorted(inner))]
    return f"(?:{'|'.join(parts)})" + ("" if any(len(text) == at for text in texts) else "?")
