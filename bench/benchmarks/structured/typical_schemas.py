"""Schemas similar to those that applications send, for the `structured` benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from cellama.bench.tiny_model.corpus import CITIES

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}


def record(**properties: Schema) -> Schema:
    """Return an object schema whose properties are all required and that allows no other properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def list_of(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def short(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


# Schemas that the converter before llguidance also accepts, so that both versions can run them.
PLAIN: dict[str, Schema] = {
    "person": record(name=short(20), age=INTEGER, city={"enum": list(CITIES)}),
    "sentiment": record(label={"enum": ["positive", "neutral", "negative"]}, score=NUMBER, reason=short(60)),
    "invoice": record(
        number={"type": "string", "pattern": "^INV-[0-9]{4,8}$"},
        paid=TRUTH,
        lines=list_of(record(article=short(30), count=INTEGER, price=NUMBER), minItems=1, maxItems=5),
    ),
    "entity": record(text=short(40), kind={"enum": ["person", "place", "company", "date", "other"]}, start=INTEGER),
    "event": record(
        title=short(40), day={"type": "string", "format": "date"}, place={"anyOf": [short(30), {"type": "null"}]}
    ),
    "recipe": record(title=short(40), minutes=INTEGER, steps=list_of(short(50), minItems=2, maxItems=8)),
    "ticket": record(
        priority={"enum": ["low", "normal", "high", "urgent"]},
        labels=list_of({"enum": ["bug", "feature", "question", "docs"]}, maxItems=3),
        summary=short(80),
    ),
    "address": record(
        street=short(30), number=INTEGER, postcode={"type": "string", "pattern": "^[0-9]{5}$"}, country={"const": "DE"}
    ),
}

_TREE: Schema = record(value=INTEGER, children=list_of({"$ref": "#/$defs/node"}, maxItems=4))
_SHAPES = [
    record(kind={"const": "circle"}, radius={"type": "number", "exclusiveMinimum": 0}),
    record(kind={"const": "square"}, side={"type": "number", "minimum": 0, "maximum": 1000}),
    record(kind={"const": "path"}, points=list_of(list_of(NUMBER, minItems=2, maxItems=2), minItems=2, maxItems=50)),
]
RICH: dict[str, Schema] = {
    "bounds": record(
        rating={"type": "integer", "minimum": 1, "maximum": 5},
        probability={"type": "number", "minimum": 0, "maximum": 1},
        dozen={"type": "integer", "multipleOf": 12},
    ),
    "formats": record(
        id={"type": "string", "format": "uuid"},
        at={"type": "string", "format": "date-time"},
        mail={"type": "string", "format": "email"},
        host={"type": "string", "format": "ipv4"},
        link={"type": "string", "format": "uri"},
    ),
    "shape": {"oneOf": _SHAPES},
    "drawing": record(title=short(100), shapes=list_of({"anyOf": _SHAPES}, minItems=1, maxItems=100)),
    "tree": {"$defs": {"node": _TREE}, "$ref": "#/$defs/node"},
    "optional": {
        "type": "object",
        "properties": {f"field_{number}": [TEXT, INTEGER, NUMBER, TRUTH][number % 4] for number in range(24)},
        "required": ["field_3", "field_17"],
        "additionalProperties": False,
    },
    "anything": {"type": "object"},
    "scores": {"type": "object", "additionalProperties": {"type": "number"}},
    "settings": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 1, "pattern": "^[a-z][a-z0-9_-]*$"}},
        "patternProperties": {"^x-": TEXT},
        "additionalProperties": False,
    },
    "article": record(title=short(200), body={"type": "string", "minLength": 100, "maxLength": 10_000}),
    "countries": record(code={"enum": [f"{a}{b}" for a in "ABCDEFGHIJKLMNOP" for b in "ABCDEFGHIJKLMNOP"]}),
    "products": list_of({"enum": [f"SKU-{number * 7919 % 100_000:05}" for number in range(5000)]}, maxItems=20),
    "table": list_of(list_of({"anyOf": [NUMBER, TEXT, {"type": "null"}]}, minItems=12, maxItems=12), maxItems=1000),
}


def realistic() -> dict[str, Schema]:
    """Return all realistic schemas, keyed by name."""
    return PLAIN | RICH


def varied(count: int, seed: int = 0) -> Iterator[Schema]:
    """Yield schemas of objects with 3 to 40 properties, drawn from a seed and nested up to three levels."""
    for number in range(count):
        random = Random(f"{seed} {number}")
        yield _object(random, random.choice((3, 5, 8, 12, 20, 40)), 0)


def large() -> dict[str, Schema]:
    """Return the largest schemas in practical use, which must compile within the limits."""
    ten_deep: Schema = INTEGER
    for number in range(10):
        ten_deep = record(name=TEXT, **{f"level_{number}": ten_deep})
    return {
        "200 properties": record(**{f"property_{number}": _leaf(Random(number)) for number in range(200)}),
        "200 optional properties": {**_object(Random(1), 200, 3), "required": []},
        "10 levels": ten_deep,
        "enum of 5,000": {"enum": [f"value {number * 7919 % 100_003}" for number in range(5000)]},
        "maxLength 10,000": record(text=short(10_000)),
        "maxItems 1,000": list_of(record(name=short(100), value=NUMBER), maxItems=1000),
        "50 patterns": record(
            **{f"p{n}": {"type": "string", "pattern": f"^[A-Z]{{2,{n + 3}}}-\\d+$"} for n in range(50)}
        ),
        "60 definitions": {
            "$defs": {f"d{n}": _object(Random(n), 12, 2) for n in range(60)},
            **record(**{f"r{n}": list_of({"$ref": f"#/$defs/d{n}"}) for n in range(60)}),
        },
    }


def _object(random: Random, count: int, depth: int) -> Schema:
    words = ("name", "count", "amount", "created", "status", "owner", "tag", "note", "total", "index")
    names = [f"{random.choice(words)}_{number}" for number in range(count)]
    inner = [_object(random, 4, depth + 1) if depth < 3 and random.random() < 0.1 else _leaf(random) for _ in names]
    required = [name for name in names if random.random() < 0.7]
    properties = dict(zip(names, inner, strict=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _leaf(random: Random) -> Schema:
    low = random.randrange(-100, 100)
    leaves: list[Schema] = [
        TEXT,
        short(random.choice((10, 50, 200, 1000))),
        INTEGER,
        NUMBER,
        TRUTH,
        {"type": "integer", "minimum": low, "maximum": low + random.randrange(1, 1000)},
        {"type": "number", "minimum": 0},
        {"enum": [f"{random.choice('abcdef')}{number}" for number in range(random.randrange(2, 12))]},
        {"anyOf": [random.choice((TEXT, INTEGER)), {"type": "null"}]},
        {"type": "string", "format": random.choice(("date", "date-time", "uuid", "email"))},
        {"type": "string", "pattern": random.choice((r"^\d{3}-\d{4}$", "^[A-Z]{2,5}$", r"^\w+@\w+\.com$"))},
        list_of(random.choice((TEXT, INTEGER)), maxItems=random.choice((3, 10, 100))),
    ]
    return random.choice(leaves)
