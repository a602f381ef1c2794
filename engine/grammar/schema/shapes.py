"""Define and combine shapes, which are the conditions that schemas set on values of one type."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

# The schemas that a value within a shape must match, or must not match, all at the same time. Each item has the index
# of a schema in its document, and whether a value must match it. The items are sorted.
Condition = tuple[tuple[int, bool], ...]
ANYTHING: Condition = ()
NOTHING: Condition = ((0, True),)


def both(one: Condition, other: Condition) -> Condition:
    """Return a condition that requires both conditions."""
    if not one or not other or one == other:
        return one or other
    combined = tuple(sorted({*one, *other}))
    is_contradiction = len({index for index, _ in combined}) < len(combined)
    return NOTHING if combined[0] == NOTHING[0] or is_contradiction else combined


MAX_NUMBER = 10**18  # llguidance's bounds are 64-bit integers
_MAX_STEP = 10**9  # a multipleOf without its decimal point; llguidance stores 32 bits
_MAX_STEP_DECIMALS = 10


@dataclass(frozen=True, slots=True)
class Null:
    is_explicit: bool = False  # a schema names the type, or has keywords for its values

    type = "null"


@dataclass(frozen=True, slots=True)
class Boolean:
    is_explicit: bool = False
    values: tuple[bool, ...] = (False, True)

    type = "boolean"


@dataclass(frozen=True, slots=True)
class Number:
    is_explicit: bool = False
    minimum: float | None = None
    is_above_minimum: bool = False  # the minimum itself is not allowed
    maximum: float | None = None
    is_below_maximum: bool = False  # the maximum itself is not allowed
    is_integer: bool = False
    step: Fraction | None = None  # multipleOf
    values: tuple[float, ...] | None = None

    type = "number"

    def has(self, value: float) -> bool:
        """Return whether a number matches this shape, ignoring `values`."""
        if self.minimum is not None and (value < self.minimum or (self.is_above_minimum and value == self.minimum)):
            return False
        if self.maximum is not None and (value > self.maximum or (self.is_below_maximum and value == self.maximum)):
            return False
        if self.is_integer and value != int(value):
            return False
        return self.step is None or (exact(value) / self.step).denominator == 1


@dataclass(frozen=True, slots=True)
class String:
    is_explicit: bool = False
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[tuple[str, str], ...] = ()  # pattern, path
    formats: tuple[tuple[str, str], ...] = ()  # name, path
    values: tuple[str, ...] | None = None

    type = "string"


@dataclass(frozen=True, slots=True)
class Contains:
    item: Condition
    min_count: int
    path: str


@dataclass(frozen=True, slots=True)
class Array:
    is_explicit: bool = False
    prefix: tuple[Condition, ...] = ()
    rest: Condition | None = None  # condition of the items after the prefix; None: no schema has one
    min_items: int | None = None
    min_items_path: str = ""
    max_items: int | None = None
    unique_path: str = ""  # the path of uniqueItems, or empty
    contains: tuple[Contains, ...] = ()
    num_evaluated: int | None = 0  # items that unevaluatedItems of the same schema skips; None: all

    type = "array"

    def item(self, index: int) -> Condition:
        """Return the condition that the item at this index must meet."""
        return self.prefix[index] if index < len(self.prefix) else self.rest or ANYTHING


@dataclass(frozen=True, slots=True)
class Object:
    is_explicit: bool = False
    has_properties: bool = False  # a schema has `properties` or `patternProperties`
    properties: tuple[tuple[str, Condition], ...] = ()
    patterns: tuple[tuple[str, Condition, str], ...] = ()  # pattern, condition, path
    additional: Condition | None = None  # condition of other properties; None: no schema has one
    required: tuple[str, ...] = ()
    min_properties: int = 0
    min_properties_path: str = ""
    max_properties: int | None = None
    max_properties_path: str = ""
    names: tuple[tuple[Condition, str], ...] = ()  # conditions of the names, with their paths
    evaluated: frozenset[str] | None = frozenset()  # names that unevaluatedProperties skips; None: all
    evaluated_patterns: frozenset[str] = frozenset()

    type = "object"


Shape = Null | Boolean | Number | String | Array | Object
ANY: tuple[Shape, ...] = (Object(), Array(), String(), Number(), Boolean(), Null())
Matches = Callable[[str, str, str], bool]  # pattern, text, path of the pattern


def exact(value: float) -> Fraction:
    """Return the exact value of a number as written in the JSON text, such as 0.1."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def is_known_step(step: Fraction) -> bool:
    """Return whether llguidance correctly determines the decimal places of a multipleOf.

    llguidance multiplies a double by ten until the result is whole.
    """
    value, decimals = float(step), 0
    while value % 1 and value < _MAX_STEP:
        value, decimals = value * 10, decimals + 1
    return value <= _MAX_STEP and decimals <= _MAX_STEP_DECIMALS and Fraction(int(value), 10**decimals) == step


def property_condition(shape: Object, name: str, matches: Matches) -> Condition:
    """Return the condition that a property's value must meet."""
    for known, condition in shape.properties:
        if known == name:
            return condition
    found = [condition for pattern, condition, path in shape.patterns if matches(pattern, name, path)]
    if not found:
        return shape.additional or ANYTHING
    combined = ANYTHING
    for condition in found:
        combined = both(combined, condition)
    return combined


def intersection(one: Shape, other: Shape, matches: Matches) -> Shape | None:
    """Return the shape of the values that match both shapes, or None if no value matches both.

    If patterns for property names overlap, the result may be too narrow.
    """
    is_explicit = one.is_explicit or other.is_explicit
    match one, other:
        case Null(), Null():
            return Null(is_explicit)
        case Boolean(), Boolean():
            values = tuple(value for value in one.values if value in other.values)
            return Boolean(is_explicit, values) if values else None
        case Number(), Number():
            return _numbers(one, other, is_explicit)
        case String(), String():
            return _strings(one, other, is_explicit)
        case Array(), Array():
            return _arrays(one, other, is_explicit)
        case Object(), Object():
            return _objects(one, other, is_explicit, matches)
    return None


def _numbers(one: Number, other: Number, is_explicit: bool) -> Number | None:
    minimum, is_above = _stricter(
        (one.minimum, one.is_above_minimum), (other.minimum, other.is_above_minimum), choose=max
    )
    maximum, is_below = _stricter(
        (one.maximum, one.is_below_maximum), (other.maximum, other.is_below_maximum), choose=min
    )
    steps = [step for step in (one.step, other.step) if step is not None]
    number = Number(
        is_explicit,
        minimum=minimum,
        is_above_minimum=is_above,
        maximum=maximum,
        is_below_maximum=is_below,
        is_integer=one.is_integer or other.is_integer,
        step=functools.reduce(_common_multiple, steps) if steps else None,
    )
    if one.values is not None or other.values is not None:
        values = other.values if one.values is None else one.values
        assert values is not None
        allowed = values if other.values is None else other.values
        values = tuple(value for value in values if value in allowed and number.has(value))
        return replace(number, values=values) if values else None
    if minimum is None or maximum is None:
        return number
    is_empty = minimum > maximum or (minimum == maximum and (is_above or is_below))
    return None if is_empty else number


def _stricter(
    one: tuple[float | None, bool], other: tuple[float | None, bool], choose: Callable[..., float]
) -> tuple[float | None, bool]:
    """Return the stricter of two bounds.

    Each bound consists of a limit, and of a flag that is true if the limit itself is excluded.
    """
    if one[0] is None or other[0] is None:
        return other if one[0] is None else one
    bound = choose(one[0], other[0])
    return bound, any(is_excluded for value, is_excluded in (one, other) if value == bound)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    """Return the smallest number that is a multiple of both numbers."""
    denominator = math.lcm(one.denominator, other.denominator)
    return Fraction(math.lcm(int(one * denominator), int(other * denominator)), denominator)


def _strings(one: String, other: String, is_explicit: bool) -> String | None:
    min_length, max_length = max(one.min_length, other.min_length), _smaller(one.max_length, other.max_length)
    values = other.values if one.values is None else one.values
    if values is not None:
        allowed = values if other.values is None else other.values
        if len(allowed) < len(values):
            values, allowed = allowed, values
        values = tuple(
            text
            for text in values
            if text in allowed and min_length <= len(text) and (max_length is None or len(text) <= max_length)
        )
    if values == () or (max_length is not None and min_length > max_length):
        return None
    return String(
        is_explicit,
        min_length=min_length,
        max_length=max_length,
        patterns=tuple(dict.fromkeys((*one.patterns, *other.patterns))),
        formats=tuple(dict.fromkeys((*one.formats, *other.formats))),
        values=values,
    )


def _arrays(one: Array, other: Array, is_explicit: bool) -> Array | None:
    size = max(len(one.prefix), len(other.prefix))
    has_rest = one.rest is not None or other.rest is not None
    minima = [minimum for minimum in (one.min_items, other.min_items) if minimum is not None]
    min_items, max_items = max(minima, default=None), _smaller(one.max_items, other.max_items)
    if min_items is not None and max_items is not None and min_items > max_items:
        return None
    is_all_evaluated = one.num_evaluated is None or other.num_evaluated is None
    return Array(
        is_explicit,
        prefix=tuple(both(one.item(index), other.item(index)) for index in range(size)),
        rest=both(one.rest or ANYTHING, other.rest or ANYTHING) if has_rest else None,
        min_items=min_items,
        min_items_path=one.min_items_path or other.min_items_path,
        max_items=max_items,
        unique_path=one.unique_path or other.unique_path,
        contains=(*one.contains, *other.contains),
        num_evaluated=None if is_all_evaluated else max(one.num_evaluated or 0, other.num_evaluated or 0),
    )


def _objects(one: Object, other: Object, is_explicit: bool, matches: Matches) -> Object | None:
    ones, others = dict(one.properties), dict(other.properties)
    properties = {name: both(condition, property_condition(other, name, matches)) for name, condition in ones.items()}
    for name, condition in others.items():
        if name not in ones:
            properties[name] = both(property_condition(one, name, matches), condition)
    min_properties = max(one.min_properties, other.min_properties)
    max_properties = _smaller(one.max_properties, other.max_properties)
    required = tuple(dict.fromkeys((*one.required, *other.required)))
    if max_properties is not None and max(min_properties, len(required)) > max_properties:
        return None
    if any(properties.get(name) == NOTHING for name in required):
        return None
    has_additional = one.additional is not None or other.additional is not None
    has_larger_minimum = one.min_properties >= other.min_properties
    return Object(
        is_explicit,
        has_properties=one.has_properties or other.has_properties,
        properties=tuple(properties.items()),
        patterns=_patterns(one, other),
        additional=both(one.additional or ANYTHING, other.additional or ANYTHING) if has_additional else None,
        required=required,
        min_properties=min_properties,
        min_properties_path=one.min_properties_path if has_larger_minimum else other.min_properties_path,
        max_properties=max_properties,
        max_properties_path=one.max_properties_path or other.max_properties_path,
        names=(*one.names, *(each for each in other.names if each not in one.names)),
        evaluated=None if one.evaluated is None or other.evaluated is None else one.evaluated | other.evaluated,
        evaluated_patterns=one.evaluated_patterns | other.evaluated_patterns,
    )


def _patterns(one: Object, other: Object) -> tuple[tuple[str, Condition, str], ...]:
    """Return the patterns of both shapes.

    The names that match a pattern of only one shape are additional properties in the other shape.
    """
    found: dict[str, tuple[Condition, str]] = {}
    for shape, second in ((one, other), (other, one)):
        conditions = {pattern: condition for pattern, condition, _ in second.patterns}
        for pattern, condition, path in shape.patterns:
            of_second = conditions.get(pattern, second.additional or ANYTHING)
            found.setdefault(pattern, (both(condition, of_second), path))
    return tuple((pattern, condition, path) for pattern, (condition, path) in found.items())


def _smaller(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two maxima. None means that there is no limit."""
    return min((each for each in (one, other) if each is not None), default=None)
