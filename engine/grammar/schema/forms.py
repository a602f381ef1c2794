"""Convert shapes into forms that a grammar can express. Conditions that a grammar can't express become alternatives."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .formats import FORMATS
from .patterns import Patterns
from .policy import Policy
from .reader import SchemaReader
from .shapes import (
    ANYTHING,
    NOTHING,
    Array,
    Boolean,
    Condition,
    Null,
    Number,
    Object,
    Shape,
    String,
    both,
    intersection,
    property_condition,
)

MAX_ALTERNATIVES = 256
MAX_ITEMS = 1_000  # maximum number of items in an array, because the grammar contains each of them
_MAX_DISTINCT = 12  # maximum number of different values of unique items
_MAX_SHUFFLED = 5  # maximum number of values of unique items that may come in any order
_MAX_POSITIONS = 4  # leading positions of an array at which a contained item may be, at least


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """An array that starts with the items of `prefix`, followed by any number of other items."""

    prefix: tuple[Condition, ...]
    rest: Condition
    min_items: int | None  # None: the whole prefix
    max_items: int | None


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """An object form. `min_properties` and `max_properties` may only be set if all `properties` are required."""

    properties: tuple[tuple[str, Condition], ...]
    required: frozenset[str]
    patterns: tuple[tuple[str, Condition, str], ...]
    additional: Condition
    min_properties: int
    max_properties: int | None


@dataclass(frozen=True, slots=True)
class SameForm:
    """A form that allows the same values as another condition."""

    condition: Condition


Form = Null | Boolean | Number | String | ArrayForm | ObjectForm | SameForm


class FormBuilder:
    """Builds the forms in which a grammar can express conditions."""

    def __init__(self, reader: SchemaReader, policy: Policy, patterns: Patterns) -> None:
        self._reader = reader
        self._patterns = patterns
        self._policy = policy

    def forms(self, condition: Condition) -> list[Form]:
        """Return the alternative forms of a condition."""
        alternatives = self._reader.alternatives(condition)
        if alternatives is not None:
            return [SameForm(each) for each in alternatives]
        shapes = self._reader.shapes(condition)
        if any(shape.is_explicit for shape in shapes):
            shapes = tuple(shape for shape in shapes if shape.is_explicit)
        found: dict[Form, None] = {}
        for shape in shapes:
            for form in self._forms_of(shape):
                self._policy.spend()
                found[form] = None
        return list(found)

    def _forms_of(self, shape: Shape) -> Iterator[Form]:
        match shape:
            case Array():
                for array in self._with_contained_items(shape):
                    yield from self._with_unique_items(array)
            case Object():
                yield from self._with_counts(self._with_known_names(shape))
            case Null() | Boolean() | Number() | String():
                yield replace(shape, is_explicit=True)

    # Arrays

    def _with_contained_items(self, shape: Array) -> list[Array]:
        """Return alternatives for `contains`, in which the required items are among the first items."""
        found = [shape]
        for contains in shape.contains:
            size = max(contains.min_count - 1, 0) + max(_MAX_POSITIONS, len(shape.prefix))
            size = size if shape.max_items is None else min(size, shape.max_items)
            if math.comb(size, contains.min_count) * len(found) > MAX_ALTERNATIVES:
                self._policy.not_enforced(contains.path, "contains", "it has too many alternatives")
                continue
            found = [
                self._with_item_at(array, positions, contains.item)
                for array in found
                for positions in itertools.combinations(range(size), contains.min_count)
            ]
        return found

    def _with_item_at(self, shape: Array, positions: tuple[int, ...], item: Condition) -> Array:
        size = max(positions) + 1
        prefix = tuple(
            both(shape.item(index), item) if index in positions else shape.item(index)
            for index in range(max(size, len(shape.prefix)))
        )
        rest = (ANYTHING if not shape.prefix else None) if shape.rest is None else shape.rest
        return replace(shape, prefix=prefix, rest=rest, min_items=max(size, shape.min_items or 0))

    def _with_unique_items(self, shape: Array) -> Iterator[ArrayForm]:
        form = self._array_form(shape)
        if not shape.unique_path or (form.max_items is not None and form.max_items <= 1):
            yield form
            return
        if form.rest == NOTHING and form.prefix:
            pairs = itertools.combinations(form.prefix, 2)
            if all(self._reader.is_unsatisfiable(both(one, other)) for one, other in pairs):
                yield form
                return
        values = None if form.prefix else self._reader.finite_values(form.rest, _MAX_DISTINCT)
        if values is None:
            reason = "only items with few possible values can be unique (enum, const, boolean, a small integer range)"
            self._policy.not_enforced(shape.unique_path, "uniqueItems", reason)
            yield form
            return
        max_items = len(values) if form.max_items is None else min(len(values), form.max_items)
        min_items = form.min_items or 0
        if min_items > max_items:
            return
        if len(values) <= _MAX_SHUFFLED:
            orders = list(itertools.permutations(values, max_items))
        else:
            count = sum(math.comb(len(values), size) for size in range(max_items + 1))
            if count > 2 * MAX_ALTERNATIVES:
                reason = "it has too many alternatives; set a smaller maxItems"
                self._policy.not_enforced(shape.unique_path, "uniqueItems", reason)
                yield replace(form, max_items=max_items)
                return
            orders = [
                order
                for size in range(max(min_items, 1), max_items + 1)
                for order in itertools.combinations(values, size)
                if size == max_items or order[-1] == values[-1]  # any other order is the start of one of these
            ]
        for order in orders:
            prefix = tuple(self._reader.constant(value, 1) for value in order)
            yield ArrayForm(prefix, NOTHING, min_items=min_items, max_items=len(order))

    def _array_form(self, shape: Array) -> ArrayForm:
        if shape.min_items is not None and shape.min_items > MAX_ITEMS:
            self._policy.not_enforced(shape.min_items_path, "minItems", f"an array has at most {MAX_ITEMS} items")
            shape = replace(shape, min_items=MAX_ITEMS, max_items=MAX_ITEMS)
        rest = shape.rest
        if rest is None:
            needs_more = shape.min_items is not None and shape.min_items > len(shape.prefix)
            rest = ANYTHING if needs_more or not shape.prefix else NOTHING
        max_items, prefix = shape.max_items, shape.prefix
        if max_items is not None:
            max_items = min(max_items, max(MAX_ITEMS, len(prefix)))
            prefix = prefix[:max_items]
        min_items = 0 if shape.min_items is None and not prefix else shape.min_items
        return ArrayForm(prefix, rest, min_items=min_items, max_items=max_items)

    # Objects

    def _with_known_names(self, shape: Object) -> Object:
        """Return an equivalent object with a condition on additional properties, instead of on property names."""
        shape = replace(shape, properties=(*shape.properties, *self._missing(shape, shape.required)))
        if shape.additional is None:
            is_closed = shape.has_properties and shape.min_properties <= len(shape.properties)
            shape = replace(shape, additional=NOTHING if is_closed else ANYTHING)
        for condition, path in shape.names:
            shape = self._with_names(shape, condition, path)
        return self._without_overlaps(shape)

    def _missing(self, shape: Object, names: tuple[str, ...]) -> tuple[tuple[str, Condition], ...]:
        """Return the properties with these names that the object does not list, along with their conditions."""
        known = dict(shape.properties)
        return tuple(
            (name, property_condition(shape, name, self._patterns.matches))
            for name in dict.fromkeys(names)
            if name not in known
        )

    def _with_names(self, shape: Object, condition: Condition, path: str) -> Object:
        strings = [each for each in self._reader.shapes(condition) if isinstance(each, String)]
        if any(each == String(each.is_explicit) for each in strings):
            return shape
        properties = tuple(
            (name, inner if self._is_allowed_name(strings, name) else NOTHING) for name, inner in shape.properties
        )
        shape = replace(shape, properties=properties)
        if shape.additional == NOTHING and not shape.patterns:
            return shape
        if all(each.values is not None for each in strings):
            names = tuple(name for each in strings for name in each.values or () if self._is_allowed_name([each], name))
            properties = (*properties, *self._missing(shape, names))
            return replace(shape, properties=properties, patterns=(), additional=NOTHING)
        patterns = [_pattern_of(each) for each in strings]
        if None in patterns or shape.patterns:
            reason = "names can be limited by only one of enum, pattern, format and length"
            self._policy.not_enforced(path, "propertyNames", reason)
            return shape
        pattern = "|".join(f"(?:{each})" for each in patterns) if len(patterns) > 1 else patterns[0]
        assert pattern is not None
        assert shape.additional is not None
        return replace(shape, patterns=((pattern, shape.additional, path),), additional=NOTHING)

    def _is_allowed_name(self, strings: list[String], name: str) -> bool:
        """Return whether a property name matches one of these string shapes."""
        for each in strings:
            fitting = intersection(each, String(values=(name,)), self._patterns.matches)
            if isinstance(fitting, String):
                tests = [*fitting.patterns, *((FORMATS[known], at) for known, at in fitting.formats)]
                if all(self._patterns.matches(pattern, name, path) for pattern, path in tests):
                    return True
        return False

    def _without_overlaps(self, shape: Object) -> Object:
        """Return the object without overlapping names, because llguidance would merge the schemas of such names."""
        shape = self._with_disjoint_patterns(shape)
        listed = [name for name, condition in shape.properties if condition != NOTHING]
        for pattern, condition, path in shape.patterns:
            if any(self._patterns.matches(pattern, name, path) for name in listed) and not self._is_scalar(condition):
                return replace(shape, patterns=(), additional=NOTHING)
        return shape

    def _is_scalar(self, condition: Condition) -> bool:
        return not any(isinstance(shape, Array | Object) for shape in self._reader.shapes(condition))

    def _with_disjoint_patterns(self, shape: Object) -> Object:
        """Return the object with all patterns combined into a single pattern if a name may match several patterns."""
        if len(shape.patterns) < 2 or self._patterns.disjoint([pattern for pattern, _, _ in shape.patterns]):
            return shape
        condition = ANYTHING
        for _, each, _ in shape.patterns:
            condition = both(condition, each)
        pattern = "|".join(f"(?:{each})" for each, _, _ in shape.patterns)
        return replace(shape, patterns=((pattern, condition, shape.patterns[0][2]),))

    def _with_counts(self, shape: Object) -> Iterator[ObjectForm]:
        """Yield alternatives whose numbers of properties satisfy minProperties and maxProperties."""
        allowed = {name: None for name, condition in shape.properties if condition != NOTHING}
        needed = [name for name in shape.required if name in allowed]
        if len(needed) < len(set(shape.required)):
            return
        optional = [name for name in allowed if name not in shape.required]
        is_open = shape.additional != NOTHING or bool(shape.patterns)
        low = max(shape.min_properties - len(needed), 0)
        high = None if shape.max_properties is None else shape.max_properties - len(needed)
        if not optional:
            yield from self._map_form(shape, needed, low, high)
            return
        if high is not None and (is_open or high < len(optional)):
            shape, is_open = replace(shape, additional=NOTHING, patterns=()), False
        if low == 0 and (high is None or high >= len(optional)):
            yield _object_form(shape, needed, optional, 0, None)
            return
        if is_open and low > len(optional):
            yield from self._map_form(shape, [*needed, *optional], low - len(optional), None)
            return
        if low > len(optional) or (high is not None and high < low):
            return
        if high is None or high >= len(optional):
            high = len(optional)
        if math.comb(len(optional), high) * math.comb(high, low) > MAX_ALTERNATIVES:
            if low:
                keyword, path = "minProperties", shape.min_properties_path
            else:
                keyword, path = "maxProperties", shape.max_properties_path
            self._policy.not_enforced(path, keyword, "it has too many alternatives")
            yield _object_form(shape, needed, optional, 0, None)
            return
        for some in itertools.combinations(optional, high):
            for must in itertools.combinations(some, low):
                may = [name for name in some if name not in must]
                yield _object_form(shape, [*needed, *must], may, 0, None)
        if is_open and low == 1:
            yield _object_form(shape, needed, [], 1, None)

    def _map_form(self, shape: Object, needed: list[str], low: int, high: int | None) -> Iterator[ObjectForm]:
        """Yield an object form in which all listed properties are required and additional properties are counted."""
        if low > 1:
            # A key may occur twice, so two members may be the same property.
            reason = "only one additional property can be required, because a key may occur twice"
            self._policy.not_enforced(shape.min_properties_path, "minProperties", reason)
        yield _object_form(shape, needed, [], low, high)


def _object_form(shape: Object, needed: list[str], optional: list[str], low: int, high: int | None) -> ObjectForm:
    """Return an object form with only these listed properties and `low` to `high` additional properties.

    If `high` is None, the number of additional properties is unlimited.
    """
    present = {*needed, *optional}
    properties = tuple((name, condition if name in present else NOTHING) for name, condition in shape.properties)
    assert shape.additional is not None
    return ObjectForm(
        properties,
        required=frozenset(needed),
        patterns=() if high == 0 else shape.patterns,
        additional=NOTHING if high == 0 else shape.additional,
        min_properties=low + len(needed) if low else 0,
        max_properties=high + len(needed) if high else None,
    )


def _pattern_of(shape: String) -> str | None:
    """Return a pattern that matches the strings of this shape, or None if this would require several patterns."""
    formats = [FORMATS[name] for name, _ in shape.formats]
    patterns = [pattern for pattern, _ in shape.patterns]
    is_sized = shape.min_length > 0 or shape.max_length is not None
    if shape.values is not None:
        listed = "|".join(re.escape(text) for text in shape.values)
        return None if is_sized or patterns or formats else f"^(?:{listed})$"
    found = [*formats, *patterns]
    if is_sized:
        found.append(rf"^[\s\S]{{{shape.min_length},{'' if shape.max_length is None else shape.max_length}}}$")
    return found[0] if len(found) == 1 else None
