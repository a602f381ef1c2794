"""Shapes → forms that a grammar can be made of: what has no place in a grammar becomes alternatives. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .formats import FORMATS
from .patterns import Patterns
from .policy import Policy
from .reader import Reader
from .shapes import ANYTHING, NOTHING, Array, Boolean, Goal, Null, Number, Object, Shape, String, both, goal_of, merged

MAX_ALTERNATIVES = 256
MAX_ITEMS = 1_000  # of an array; they are written out in the grammar
_MAX_DISTINCT = 12  # values of items that have to differ
_MAX_SHUFFLED = 5  # values that may come in any order
_MAX_POSITIONS = 4  # of an item that an array has to contain


@dataclass(frozen=True, slots=True)
class Items:
    """An array: these first, then any number of others."""

    prefix: tuple[Goal, ...]
    rest: Goal
    low: int | None  # None: all of the prefix
    high: int | None


@dataclass(frozen=True, slots=True)
class Members:
    """An object. Only one whose `properties` are all required has `low` and `high`."""

    properties: tuple[tuple[str, Goal], ...]
    required: frozenset[str]
    patterns: tuple[tuple[str, Goal, str], ...]
    additional: Goal
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Same:
    """What another goal has."""

    goal: Goal


Form = Null | Boolean | Number | String | Items | Members | Same


class Former:
    def __init__(self, reader: Reader, policy: Policy, patterns: Patterns) -> None:
        self._reader = reader
        self._patterns = patterns
        self._policy = policy

    def forms(self, goal: Goal) -> list[Form]:
        """The alternatives that a goal has."""
        alternatives = self._reader.alternatives(goal)
        if alternatives is not None:
            return [Same(each) for each in alternatives]
        shapes = self._reader.shapes(goal)
        if any(shape.said for shape in shapes):
            shapes = tuple(shape for shape in shapes if shape.said)
        found: dict[Form, None] = {}
        for shape in shapes:
            for form in self._forms_of(shape):
                self._policy.spend()
                found[form] = None
        return list(found)

    def _forms_of(self, shape: Shape) -> Iterator[Form]:
        match shape:
            case Array():
                for array in self._containing(shape):
                    yield from self._distinct(array)
            case Object():
                yield from self._counted(self._named(shape))
            case Null() | Boolean() | Number() | String():
                yield replace(shape, said=True)

    # Arrays

    def _containing(self, shape: Array) -> list[Array]:
        """Alternatives in which an item at one of the first places is the one that the array has to contain."""
        found = [shape]
        for contains in shape.contains:
            size = max(contains.low - 1, 0) + max(_MAX_POSITIONS, len(shape.prefix))
            size = size if shape.high is None else min(size, shape.high)
            if math.comb(size, contains.low) * len(found) > MAX_ALTERNATIVES:
                self._policy.cannot(contains.path, "contains", "it has too many alternatives")
                continue
            found = [
                self._with(array, places, contains.item)
                for array in found
                for places in itertools.combinations(range(size), contains.low)
            ]
        return found

    def _with(self, shape: Array, places: tuple[int, ...], item: Goal) -> Array:
        size = max(places) + 1
        prefix = tuple(
            both(shape.at(index), item) if index in places else shape.at(index)
            for index in range(max(size, len(shape.prefix)))
        )
        rest = (ANYTHING if not shape.prefix else None) if shape.rest is None else shape.rest
        return replace(shape, prefix=prefix, rest=rest, low=max(size, shape.low or 0))

    def _distinct(self, shape: Array) -> Iterator[Items]:
        form = self._items(shape)
        if not shape.unique or (form.high is not None and form.high <= 1):
            yield form
            return
        if form.rest == NOTHING and form.prefix:
            pairs = itertools.combinations(form.prefix, 2)
            if all(self._reader.hollow(both(one, other)) for one, other in pairs):
                yield form
                return
        values = None if form.prefix else self._reader.domain(form.rest, _MAX_DISTINCT)
        if values is None:
            reason = "it is known for items of a few values only (enum, const, boolean, a small range of integers)"
            self._policy.cannot(shape.unique, "uniqueItems", reason)
            yield form
            return
        high = min(len(values), len(values) if form.high is None else form.high)
        low = form.low or 0
        if low > high:
            return
        if len(values) <= _MAX_SHUFFLED:
            orders = list(itertools.permutations(values, high))
        else:
            count = sum(math.comb(len(values), size) for size in range(high + 1))
            if count > 2 * MAX_ALTERNATIVES:
                self._policy.cannot(shape.unique, "uniqueItems", "it has too many alternatives; set a smaller maxItems")
                yield replace(form, high=high)
                return
            orders = [
                order
                for size in range(max(low, 1), high + 1)
                for order in itertools.combinations(values, size)
                if size == high or order[-1] == values[-1]  # others begin one of these
            ]
        for order in orders:
            prefix = tuple(self._reader.constant(value, 1) for value in order)
            yield Items(prefix, NOTHING, low, len(order))

    def _items(self, shape: Array) -> Items:
        if shape.low is not None and shape.low > MAX_ITEMS:
            self._policy.cannot(shape.low_path, "minItems", f"an array has at most {MAX_ITEMS} items")
            shape = replace(shape, low=MAX_ITEMS, high=MAX_ITEMS)
        rest = shape.rest
        if rest is None:
            more = shape.low is not None and shape.low > len(shape.prefix)
            rest = ANYTHING if more or not shape.prefix else NOTHING
        high = shape.high
        if high is not None:
            high = min(high, max(MAX_ITEMS, len(shape.prefix)))
            prefix = shape.prefix[:high]
        else:
            prefix = shape.prefix
        return Items(prefix, rest, 0 if shape.low is None and not prefix else shape.low, high)

    # Objects

    def _named(self, shape: Object) -> Object:
        """The object without a condition on names, and with a goal for other properties than the known ones."""
        known = shape.fixed()
        extra = tuple((n, goal_of(shape, n, self._patterns.matches)) for n in shape.required if n not in known)
        shape = replace(shape, properties=(*shape.properties, *extra))
        if shape.additional is None:
            closed = shape.named and shape.low <= len(shape.properties)
            shape = replace(shape, additional=NOTHING if closed else ANYTHING)
        for goal, path in shape.names:
            shape = self._with_names(shape, goal, path)
        return self._separate(shape)

    def _with_names(self, shape: Object, goal: Goal, path: str) -> Object:
        strings = [each for each in self._reader.shapes(goal) if isinstance(each, String)]
        properties = tuple(
            (name, inner if self._may_be_named(strings, name) else NOTHING) for name, inner in shape.properties
        )
        if any(each == String(each.said) for each in strings):
            return shape
        shape = replace(shape, properties=properties)
        if shape.additional == NOTHING and not shape.patterns:
            return shape
        if all(each.values is not None for each in strings):
            names = [name for each in strings for name in each.values or () if self._may_be_named([each], name)]
            known = shape.fixed()
            more = tuple(
                (name, goal_of(shape, name, self._patterns.matches))
                for name in dict.fromkeys(names)
                if name not in known
            )
            return replace(shape, properties=(*properties, *more), patterns=(), additional=NOTHING)
        patterns = [_pattern_of(each) for each in strings]
        if None in patterns or shape.patterns:
            self._policy.cannot(
                path, "propertyNames", "names are known by one of enum, pattern, format and length only"
            )
            return shape
        pattern = "|".join(f"(?:{each})" for each in patterns) if len(patterns) > 1 else patterns[0]
        assert pattern is not None
        assert shape.additional is not None
        return replace(shape, patterns=((pattern, shape.additional, path),), additional=NOTHING)

    def _may_be_named(self, strings: list[String], name: str) -> bool:
        """Whether a name fits one of these shapes."""
        for each in strings:
            fitting = merged(each, String(values=(name,)), self._patterns.matches)
            if isinstance(fitting, String):
                tests = [*fitting.patterns, *((FORMATS[known], at) for known, at in fitting.formats)]
                if all(self._patterns.matches(pattern, name, path) for pattern, path in tests):
                    return True
        return False

    def _separate(self, shape: Object) -> Object:
        """The object without overlapping names: llguidance would merge the schemas of what has them."""
        shape = self._without_overlap(shape)
        listed = [name for name, goal in shape.properties if goal != NOTHING]
        for pattern, goal, path in shape.patterns:
            if any(self._patterns.matches(pattern, name, path) for name in listed) and not self._is_scalar(goal):
                return replace(shape, patterns=(), additional=NOTHING)
        return shape

    def _is_scalar(self, goal: Goal) -> bool:
        return not any(isinstance(shape, Array | Object) for shape in self._reader.shapes(goal))

    def _without_overlap(self, shape: Object) -> Object:
        """The object with one pattern instead of several of which one name may match two."""
        if len(shape.patterns) < 2 or self._patterns.disjoint([pattern for pattern, _, _ in shape.patterns]):
            return shape
        goal = ANYTHING
        for _, each, _ in shape.patterns:
            goal = both(goal, each)
        pattern = "|".join(f"(?:{each})" for each, _, _ in shape.patterns)
        return replace(shape, patterns=((pattern, goal, shape.patterns[0][2]),))

    def _counted(self, shape: Object) -> Iterator[Members]:
        """Alternatives that have as many properties as minProperties and maxProperties demand."""
        allowed = [name for name, goal in shape.properties if goal != NOTHING]
        there, must_be = set(allowed), set(shape.required)
        needed = [name for name in shape.required if name in there]
        if len(needed) < len(must_be):
            return
        free = [name for name in allowed if name not in must_be]
        is_open = shape.additional != NOTHING or bool(shape.patterns)
        low = max(shape.low - len(needed), 0)
        high = None if shape.high is None else shape.high - len(needed)
        if not free:
            yield from self._map(shape, needed, low, high)
            return
        if high is not None and (is_open or high < len(free)):
            shape, is_open = replace(shape, additional=NOTHING, patterns=()), False
        if low == 0 and (high is None or high >= len(free)):
            yield _members(shape, needed, free, 0, None)
            return
        if is_open and low > len(free):
            yield from self._map(shape, [*needed, *free], low - len(free), None)
            return
        if low > len(free) or (high is not None and high < low):
            return
        if high is None or high >= len(free):
            count = math.comb(len(free), low)
            chosen = ((must, [name for name in free if name not in must]) for must in itertools.combinations(free, low))
        else:
            count = math.comb(len(free), high) * math.comb(high, low)
            chosen = (
                (must, [name for name in some if name not in must])
                for some in itertools.combinations(free, high)
                for must in itertools.combinations(some, low)
            )
        if count > MAX_ALTERNATIVES:
            keyword, path = ("minProperties", shape.low_path) if low else ("maxProperties", shape.high_path)
            self._policy.cannot(path, keyword, "it has too many alternatives")
            yield _members(shape, needed, free, 0, None)
            return
        for must, may in chosen:
            yield _members(shape, [*needed, *must], may, 0, None)
        if is_open and low == 1:
            yield _members(shape, needed, [], 1, None)

    def _map(self, shape: Object, needed: list[str], low: int, high: int | None) -> Iterator[Members]:
        """All known properties are required, others are counted."""
        if low > 1:
            # A key may come twice, so that two pairs can be one property.
            reason = "only one additional property can be demanded, because a key may occur twice"
            self._policy.cannot(shape.low_path, "minProperties", reason)
        yield _members(shape, needed, [], low, high)


def _members(shape: Object, needed: list[str], free: list[str], low: int, high: int | None) -> Members:
    """The object with these properties and others; what else it knows it doesn't have."""
    known = shape.fixed()
    there = {*needed, *free}
    properties = tuple((name, goal if name in there else NOTHING) for name, goal in known.items())
    assert shape.additional is not None
    count = len(needed)
    return Members(
        properties,
        frozenset(needed),
        () if high == 0 else shape.patterns,
        NOTHING if high == 0 else shape.additional,
        low + count if low else 0,
        high + count if high else None,
    )


def _pattern_of(shape: String) -> str | None:
    """A pattern of the texts, if one condition describes them."""
    formats = [FORMATS[name] for name, _ in shape.formats]
    patterns = [pattern for pattern, _ in shape.patterns]
    sized = shape.low > 0 or shape.high is not None
    if shape.values is not None:
        listed = "|".join(re.escape(text) for text in shape.values)
        return None if sized or patterns or formats else f"^(?:{listed})$"
    found = [*formats, *patterns]
    if sized:
        found.append(rf"^[\s\S]{{{shape.low},{'' if shape.high is None else shape.high}}}$")
    return found[0] if len(found) == 1 else None
