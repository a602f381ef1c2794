"""JSON Schemas drawn by seed: every keyword that is enforced or rewritten, nested, combined and referred to.

Most of them can be satisfied and some can't, as with schemas that people write.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
NAMES = ("a", "b", "ab", "kind", "é", 'q"', "back\\slash", "new\nline", "", "a/b")
TEXTS = ("a", "ab", "", "é", 'say "hi"', "a\tb", "\\", "2020-01-01", "12", "null")
NUMBERS = (0, 1, -1, 2, 3, 10, 12, 1.0, 0.5, -0.25, 1.5, 100, 1000)
PATTERNS = (
    *("^a|b$", "^.$", "a", "^[^a-c]{2,3}$", "^(ab|\\d+)*$", '^"\\\\$', "^\\w+@\\w+\\.[a-z]{2}$", "b{2}|^$", "^a"),
    *("^[\\]\\-\\\\]$", "^(?:x|(y)?)z$", "^[a-]$", "\\/", "^\\d{3}$", "^x-", "^(?!a)", "^[a-z]+$", "(a)\\1", "^é?$"),
)
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
DEFS: dict[str, Any] = {
    "whole": {"type": "integer", "minimum": 0, "maximum": 99},
    "a/b": {"enum": ["x", 1, None]},
    "node": {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "named": {"$anchor": "named", "type": "string", "maxLength": 3},
}
REFERENCES = ("#/$defs/whole", "#/$defs/a~1b", "#/$defs/node", "#named", "#/$defs/node/properties/value", "#")


def generated_schema(seed: int) -> Schema:
    """Return the schema of a seed."""
    draw = _Draw(Random(seed))
    schema = draw.schema(draw.random.choice([1, 2, 2, 3]))
    return {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), "$defs": DEFS}


class _Draw:
    def __init__(self, random: Random) -> None:
        self.random = random
        self._inside = False  # an array or an object: a reference to the whole schema ends there
        leaves = (self._type, self._number, self._string, self._enum, self._const, self._format, self._reference)
        nests = (self._array, self._object, self._object, self._union, self._combination, self._condition)
        self._leaves: tuple[Callable[[int], Schema], ...] = leaves
        self._nests: tuple[Callable[[int], Schema], ...] = nests

    def schema(self, depth: int) -> Schema | bool:
        if self.random.random() < 0.04:
            return self.random.random() < 0.7
        drawn = self._part(depth)
        if self.random.random() < 0.12:  # keywords that say something of the same value
            drawn = {**self._part(depth), **drawn}
        if self.random.random() < 0.1:
            drawn |= self.random.choice([{"title": "A"}, {"x-order": 3}, {"default": 5}, {"description": "d"}])
        return drawn

    def _part(self, depth: int) -> Schema:
        kinds = self._leaves if depth <= 0 or self.random.random() < 0.25 else self._nests
        return self.random.choice(kinds)(depth - 1)

    def _some(self, **values: Callable[[], Any]) -> Schema:
        """Each of these keywords, or not."""
        return {name: value() for name, value in values.items() if self.random.random() < 0.4}

    def _type(self, _: int) -> Schema:
        if self.random.random() < 0.7:
            return {"type": self.random.choice(TYPES)}
        return {"type": self.random.sample(TYPES, self.random.randint(1, 3))}

    def _number(self, _: int) -> Schema:
        limit = self._bound
        drawn = self._some(minimum=limit, maximum=limit, exclusiveMinimum=limit, exclusiveMaximum=limit)
        if self.random.random() < 0.3:
            drawn["multipleOf"] = self.random.choice([1, 2, 3, 0.5, 0.01, 2.5, 7, 1e-3])
        return drawn | self.random.choice([{"type": "number"}, {"type": "integer"}, {}, {"type": ["integer", "null"]}])

    def _bound(self) -> float:
        return self.random.choice([-1000, -10, -1.5, 0, 0.25, 1, 5, 9.99, 10, 255, 1000, 1e6])

    def _string(self, _: int) -> Schema:
        drawn = self._some(minLength=lambda: self.random.randint(0, 4), maxLength=lambda: self.random.randint(0, 8))
        if self.random.random() < 0.5:
            drawn["pattern"] = self.random.choice(PATTERNS)
        return drawn | self.random.choice([{"type": "string"}, {"type": ["string", "null"]}, {}])

    def _format(self, _: int) -> Schema:
        return {"type": "string", "format": self.random.choice(FORMATS)}

    def _value(self, depth: int = 1) -> Any:
        kind = self.random.randrange(6 if depth else 4)
        if kind == 4:
            return [self._value(depth - 1) for _ in range(self.random.randrange(3))]
        if kind == 5:
            return {self.random.choice(NAMES): self._value(depth - 1) for _ in range(self.random.randrange(3))}
        return self.random.choice([None, self.random.random() < 0.5, *NUMBERS, *TEXTS, *TEXTS])

    def _enum(self, _: int) -> Schema:
        drawn: Schema = {"enum": [self._value() for _ in range(self.random.randint(1, 5))]}
        return drawn | ({"type": self.random.choice(TYPES)} if self.random.random() < 0.2 else {})

    def _const(self, _: int) -> Schema:
        return {"const": self._value()}

    def _reference(self, _: int) -> Schema:
        name = self.random.choice(REFERENCES if self._inside else REFERENCES[:-1])
        return {"$dynamicRef" if self.random.random() < 0.05 else "$ref": name}

    def _within(self, depth: int) -> Schema | bool:
        before, self._inside = self._inside, True
        drawn = self.schema(depth)
        self._inside = before
        return drawn

    def _array(self, depth: int) -> Schema:
        drawn = self._some(minItems=lambda: self.random.randint(0, 3), maxItems=lambda: self.random.randint(0, 4))
        if self.random.random() < 0.7:
            drawn["items"] = self._within(depth)
        if self.random.random() < 0.25:
            drawn["prefixItems"] = [self._within(depth) for _ in range(self.random.randint(1, 3))]
        if self.random.random() < 0.15:
            drawn["uniqueItems"] = self.random.random() < 0.9
        if self.random.random() < 0.15:
            drawn["contains"] = self._within(depth)
            drawn |= self._some(minContains=lambda: self.random.randint(0, 2), maxContains=lambda: 2)
        if self.random.random() < 0.1:
            drawn["unevaluatedItems"] = self._within(depth)
        return drawn | self.random.choice([{"type": "array"}, {"type": "array"}, {}])

    def _object(self, depth: int) -> Schema:
        names = self.random.sample(NAMES, self.random.randint(0, 4))
        drawn: Schema = {}
        if names:
            drawn["properties"] = {name: self._within(depth) for name in names}
        required = [name for name in names if self.random.random() < 0.5]
        if self.random.random() < 0.1:
            required.append("more")
        if required:
            drawn["required"] = required
        if self.random.random() < 0.35:
            drawn["additionalProperties"] = self.random.choice([False, True, self._within(depth)])
        if self.random.random() < 0.2:
            patterns = self.random.sample(PATTERNS, self.random.randint(1, 2))
            drawn["patternProperties"] = {pattern: self._within(depth) for pattern in patterns}
        if self.random.random() < 0.2:
            drawn |= self._some(
                minProperties=lambda: self.random.randint(0, 3), maxProperties=lambda: self.random.randint(0, 4)
            )
        if self.random.random() < 0.15:
            drawn["propertyNames"] = self.random.choice(
                [{"pattern": "^[a-z]*$"}, {"maxLength": 2}, {"enum": ["a", "b", "more"]}, self.schema(0)]
            )
        if names and self.random.random() < 0.15:
            drawn["dependentRequired"] = {names[0]: [self.random.choice(NAMES)]}
        if names and self.random.random() < 0.1:
            drawn["dependentSchemas"] = {names[-1]: self.schema(0)}
        if self.random.random() < 0.1:
            drawn["unevaluatedProperties"] = self.random.choice([False, self._within(depth)])
        return drawn | self.random.choice([{"type": "object"}, {"type": "object"}, {}, {"type": ["object", "null"]}])

    def _several(self, depth: int) -> list[Schema | bool]:
        return [self.schema(depth) for _ in range(self.random.randint(1, 3))]

    def _union(self, depth: int) -> Schema:
        if self.random.random() < 0.25:
            kinds = self.random.sample(TEXTS, 2)
            return {
                self.random.choice(["oneOf", "anyOf"]): [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": kind}, "b": self.schema(depth)},
                        "required": ["kind"],
                    }
                    for kind in kinds
                ]
            }
        return {self.random.choice(["anyOf", "anyOf", "oneOf"]): self._several(depth)}

    def _combination(self, depth: int) -> Schema:
        if self.random.random() < 0.5:
            return {"allOf": self._several(depth)}
        return {"not": self.schema(depth), **self._part(0)}

    def _condition(self, depth: int) -> Schema:
        drawn: Schema = {"if": self.schema(depth)}
        drawn |= self._some(then=lambda: self.schema(depth))
        return drawn | {"else": self.schema(depth)} | (self._part(0) if self.random.random() < 0.3 else {})
