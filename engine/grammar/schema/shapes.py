"""What values of one type may be, and what is left when two such shapes both have to hold. Pure.

A goal is the schemas that a value within a shape has to match, or not to match: all of them at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

Goal = tuple[tuple[int, bool], ...]  # index of a schema in its document, and whether a value has to match it; sorted
ANYTHING: Goal = ()
NOTHING: Goal = ((0, True),)


def both(one: Goal, other: Goal) -> Goal:
    """The goal that demands both."""
    if not one or not other or one == other:
        return one or other
    merged = tuple(sorted({*one, *other}))
    impossible = merged[0] == NOTHING[0] or len({index for index, _ in merged}) < len(merged)
    return NOTHING if impossible else merged


MAX_NUMBER = 10**18  # llguidance's bounds are 64-bit integers
_MAX_STEP = 10**9  # a multipleOf without its point; llguidance has 32 bits
_MAX_STEP_DECIMALS = 10


@dataclass(frozen=True, slots=True)
class Null:
    said: bool = False  # a schema names the type, or says something of its values

    type = "null"


@dataclass(frozen=True, slots=True)
class Boolean:
    said: bool = False
    values: tuple[bool, ...] = (False, True)

    type = "boolean"


@dataclass(frozen=True, slots=True)
class Number:
    said: bool = False
    low: float | None = None
    low_open: bool = False  # the bound itself is not allowed
    high: float | None = None
    high_open: bool = False
    integer: bool = False
    step: Fraction | None = None  # values are multiples of it
    step_path: str = ""
    values: tuple[float, ...] | None = None

    type = "number"

    def has(self, value: float) -> bool:
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        if self.integer and value != int(value):
            return False
        return self.step is None or (exact(value) / self.step).denominator == 1


@dataclass(frozen=True, slots=True)
class String:
    said: bool = False
    low: int = 0
    high: int | None = None
    patterns: tuple[tuple[str, str], ...] = ()  # pattern, path
    formats: tuple[tuple[str, str], ...] = ()  # name, path
    values: tuple[str, ...] | None = None

    type = "string"


@dataclass(frozen=True, slots=True)
class Contains:
    item: Goal
    low: int
    path: str


@dataclass(frozen=True, slots=True)
class Array:
    said: bool = False
    prefix: tuple[Goal, ...] = ()
    rest: Goal | None = None  # None: no schema says what follows
    low: int | None = None
    low_path: str = ""
    high: int | None = None
    unique: str = ""  # path of uniqueItems
    contains: tuple[Contains, ...] = ()
    seen: int | None = 0  # items that unevaluatedItems of the same schema leaves alone; None: all

    type = "array"

    def at(self, index: int) -> Goal:
        return self.prefix[index] if index < len(self.prefix) else self.rest or ANYTHING


@dataclass(frozen=True, slots=True)
class Object:
    said: bool = False
    named: bool = False  # a schema has `properties` or `patternProperties`
    properties: tuple[tuple[str, Goal], ...] = ()
    patterns: tuple[tuple[str, Goal, str], ...] = ()  # pattern, goal, path
    additional: Goal | None = None  # None: no schema says anything of other properties
    required: tuple[str, ...] = ()
    low: int = 0
    low_path: str = ""
    high: int | None = None
    high_path: str = ""
    names: tuple[tuple[Goal, str], ...] = ()  # what names have to match, and the path of each
    seen: frozenset[str] | None = frozenset()  # names that unevaluatedProperties leaves alone; None: all
    seen_patterns: frozenset[str] = frozenset()

    type = "object"

    def fixed(self) -> dict[str, Goal]:
        return dict(self.properties)


Shape = Null | Boolean | Number | String | Array | Object
ANY: tuple[Shape, ...] = (Object(), Array(), String(), Number(), Boolean(), Null())
Matches = Callable[[str, str, str], bool]  # pattern, text, path of the pattern


def exact(value: float) -> Fraction:
    """The number that the JSON text says, 0.1 for instance."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def is_known_step(step: Fraction) -> bool:
    """Whether llguidance finds the decimals of a multipleOf: it multiplies a double by ten until that is whole."""
    value, decimals = float(step), 0
    while value % 1 and value < _MAX_STEP:
        value, decimals = value * 10, decimals + 1
    return value <= _MAX_STEP and decimals <= _MAX_STEP_DECIMALS and Fraction(int(value), 10**decimals) == step


def goal_of(shape: Object, name: str, matches: Matches) -> Goal:
    """What the value of a property has to match."""
    for known, goal in shape.properties:
        if known == name:
            return goal
    found = [goal for pattern, goal, path in shape.patterns if matches(pattern, name, path)]
    if not found:
        return shape.additional or ANYTHING
    goal = ANYTHING
    for each in found:
        goal = both(goal, each)
    return goal


def merged(one: Shape, other: Shape, matches: Matches) -> Shape | None:
    """What both shapes allow, or None if that is nothing. Narrower only where patterns of names overlap."""
    said = one.said or other.said
    match one, other:
        case Null(), Null():
            return Null(said)
        case Boolean(), Boolean():
            values = tuple(value for value in one.values if value in other.values)
            return Boolean(said, values) if values else None
        case Number(), Number():
            return _numbers(one, other, said)
        case String(), String():
            return _strings(one, other, said)
        case Array(), Array():
            return _arrays(one, other, said)
        case Object(), Object():
            return _objects(one, other, said, matches)
    return None


def _numbers(one: Number, other: Number, said: bool) -> Number | None:
    low, low_open = _stricter((one.low, one.low_open), (other.low, other.low_open), max)
    high, high_open = _stricter((one.high, one.high_open), (other.high, other.high_open), min)
    step = other.step if one.step is None else one.step if other.step is None else _common(one.step, other.step)
    number = Number(
        said,
        low,
        low_open,
        high,
        high_open,
        one.integer or other.integer,
        step,
        one.step_path or other.step_path,
    )
    if one.values is not None or other.values is not None:
        values = other.values if one.values is None else one.values
        assert values is not None
        allowed = values if other.values is None else other.values
        values = tuple(value for value in values if value in allowed and number.has(value))
        return replace(number, values=values) if values else None
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        return None
    return number


def _stricter(
    one: tuple[float | None, bool], other: tuple[float | None, bool], choose: Callable[..., float]
) -> tuple[float | None, bool]:
    if one[0] is None or other[0] is None:
        return other if one[0] is None else one
    bound = choose(one[0], other[0])
    return bound, any(is_open for value, is_open in (one, other) if value == bound)


def _common(one: Fraction, other: Fraction) -> Fraction:
    """The smallest number that is a multiple of both."""
    denominator = math.lcm(one.denominator, other.denominator)
    return Fraction(math.lcm(int(one * denominator), int(other * denominator)), denominator)


def _strings(one: String, other: String, said: bool) -> String | None:
    low, high = max(one.low, other.low), _least(one.high, other.high)
    values = other.values if one.values is None else one.values
    if values is not None:
        allowed = values if other.values is None else other.values
        if len(allowed) < len(values):
            values, allowed = allowed, values
        values = tuple(
            text for text in values if text in allowed and low <= len(text) and (high is None or len(text) <= high)
        )
    if values == () or (high is not None and low > high):
        return None
    patterns = tuple(dict.fromkeys((*one.patterns, *other.patterns)))
    return String(said, low, high, patterns, tuple(dict.fromkeys((*one.formats, *other.formats))), values)


def _arrays(one: Array, other: Array, said: bool) -> Array | None:
    size = max(len(one.prefix), len(other.prefix))
    prefix = tuple(both(one.at(index), other.at(index)) for index in range(size))
    rest = None if one.rest is None and other.rest is None else both(one.rest or ANYTHING, other.rest or ANYTHING)
    lows = [low for low in (one.low, other.low) if low is not None]
    low, high = max(lows, default=None), _least(one.high, other.high)
    if low is not None and high is not None and low > high:
        return None
    seen = None if one.seen is None or other.seen is None else max(one.seen, other.seen)
    contains = (*one.contains, *other.contains)
    path = one.low_path or other.low_path
    return Array(said, prefix, rest, low, path, high, one.unique or other.unique, contains, seen)


def _objects(one: Object, other: Object, said: bool, matches: Matches) -> Object | None:
    ones, others = one.fixed(), other.fixed()
    properties = {name: both(goal, goal_of(other, name, matches)) for name, goal in ones.items()}
    for name, goal in others.items():
        if name not in ones:
            properties[name] = both(goal_of(one, name, matches), goal)
    low, high = max(one.low, other.low), _least(one.high, other.high)
    required = tuple(dict.fromkeys((*one.required, *other.required)))
    if high is not None and max(low, len(required)) > high:
        return None
    if any(properties.get(name) == NOTHING for name in required):
        return None
    none = one.additional is None and other.additional is None
    return Object(
        said,
        one.named or other.named,
        tuple(properties.items()),
        _patterns(one, other),
        None if none else both(one.additional or ANYTHING, other.additional or ANYTHING),
        required,
        low,
        one.low_path if one.low >= other.low else other.low_path,
        high,
        one.high_path or other.high_path,
        (*one.names, *(each for each in other.names if each not in one.names)),
        None if one.seen is None or other.seen is None else one.seen | other.seen,
        one.seen_patterns | other.seen_patterns,
    )


def _patterns(one: Object, other: Object) -> tuple[tuple[str, Goal, str], ...]:
    """The patterns of both; one that only one of them has is among the additional properties of the other."""
    found: dict[str, tuple[Goal, str]] = {}
    for this, that in ((one, other), (other, one)):
        theirs = {pattern: goal for pattern, goal, _ in that.patterns}
        for pattern, goal, path in this.patterns:
            found.setdefault(pattern, (both(goal, theirs.get(pattern, that.additional or ANYTHING)), path))
    return tuple((pattern, goal, path) for pattern, (goal, path) in found.items())


def _least(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
