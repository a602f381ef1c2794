"""Schemas that users commonly send, generated from pydantic models and by Zod 4's `z.toJSONSchema`.

`MODELS` contains the pydantic classes. `ZOD` maps the Zod expression for the property `value` to the schema that Zod
generates. `SCHEMAS` contains the JSON Schemas of both, keyed by name.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FutureDate,
    HttpUrl,
    IPvAnyAddress,
    Json,
    NegativeFloat,
    PositiveInt,
    RootModel,
    SecretStr,
    StrictBool,
    StringConstraints,
    conlist,
)

Schema = dict[str, Any]


class Bounds(BaseModel):
    score: int = Field(ge=0, le=10)
    ratio: float = Field(gt=0, lt=1)


class Positive(BaseModel):
    count: PositiveInt
    loss: NegativeFloat


class MultipleOf(BaseModel):
    dozen: int = Field(multiple_of=12)
    half: float = Field(multiple_of=0.5, ge=0)


class Literals(BaseModel):
    size: Literal["s", "m", "l"]
    level: Literal[1, 2, 3]
    only: Literal["yes"] = "yes"


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Enums(BaseModel):
    color: Color
    others: list[Color] = []


class Unions(BaseModel):
    value: int | str | None
    many: list[bool | float]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Discriminated(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class ModelUnion(BaseModel):
    pet: Cat | Dog


class SetOfText(BaseModel):
    tags: set[str]


class SetOfLiterals(BaseModel):
    days: set[Literal["mon", "tue", "wed"]]


class SetOfEnum(BaseModel):
    colors: set[Color] = Field(min_length=1)


class Decimals(BaseModel):
    price: decimal.Decimal
    exact: decimal.Decimal = Field(max_digits=6, decimal_places=2)


class Dates(BaseModel):
    day: datetime.date
    at: datetime.datetime
    clock: datetime.time
    later: FutureDate
    aware: AwareDatetime


class Durations(BaseModel):
    wait: datetime.timedelta


class Urls(BaseModel):
    home: HttpUrl
    any: AnyUrl


class Addresses(BaseModel):
    v4: ipaddress.IPv4Address
    v6: ipaddress.IPv6Address
    either: IPvAnyAddress


class Networks(BaseModel):
    v4: ipaddress.IPv4Network


class Identifiers(BaseModel):
    id: uuid.UUID
    version: Annotated[str, Field(json_schema_extra={"format": "uuid4"})]


class Street(BaseModel):
    name: str
    number: int


class Nested(BaseModel):
    street: Street
    others: list[Street] = Field(max_length=3)
    by_name: dict[str, Street] = {}


class Tree(BaseModel):
    label: str
    children: list[Tree] = []


class Linked(BaseModel):
    value: int
    next: Linked | None = None


class Person(BaseModel):
    name: str
    friends: list[Person] = []
    employer: Company | None = None


class Company(BaseModel):
    staff: list[Person] = []


class Anything(BaseModel):
    extra: Any
    more: list[Any] = []


class Dicts(BaseModel):
    scores: dict[str, int]
    free: dict[str, Any]
    some: dict[str, str] = Field(min_length=1)


class DictByPattern(BaseModel):
    by_code: dict[Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}$")], int]


class DictByLiteral(BaseModel):
    by_side: dict[Literal["left", "right"], float]


class DictByEnum(BaseModel):
    by_color: dict[Color, int]


class BytesAndPath(BaseModel):
    data: bytes
    where: Path


class Constrained(BaseModel):
    name: Annotated[str, StringConstraints(min_length=2, max_length=20, pattern=r"^[a-z]+$")]
    short: str = Field(max_length=10)
    code: str = Field(pattern=r"^\d{3}-\d{4}$")


class Lists(BaseModel):
    two: conlist(int, min_length=2, max_length=2)  # type: ignore[valid-type]
    some: list[str] = Field(min_length=1, max_length=5)


class Tuples(BaseModel):
    point: tuple[float, float]
    mixed: tuple[int, str, bool]
    many: tuple[int, ...]


class Pair(NamedTuple):
    left: int
    right: str


class NamedTuples(BaseModel):
    pair: Pair


class Optionals(BaseModel):
    a: int | None = None
    b: str | None = Field(default=None, max_length=5)
    c: bool = True


class Described(BaseModel):
    """A model with a title, a description and examples."""

    model_config = ConfigDict(title="Anything but plain", json_schema_extra={"examples": [{"name": "x"}]})
    name: str = Field(description="Name of the item", examples=["x"], deprecated=True)
    extra: int = Field(default=1, json_schema_extra={"x-order": 2, "example": 3})


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Aliases(BaseModel):
    from_: str = Field(alias="from")
    class_name: str = Field(alias="class-name")


class Secrets(BaseModel):
    password: SecretStr
    raw: Json[list[int]]
    sure: StrictBool


class Numbers(RootModel[list[int]]):
    """A list at the top level."""


class Scalar(RootModel[int]):
    """A number at the top level."""


class Invoice(BaseModel):
    class InvoiceLine(BaseModel):
        article: str = Field(min_length=1)
        amount: int = Field(gt=0)
        price: decimal.Decimal = Field(ge=0)

    number: str = Field(pattern=r"^INV-[0-9]+$")
    day: datetime.date
    lines: list[InvoiceLine] = Field(min_length=1)
    currency: Literal["EUR", "USD"] = "EUR"
    note: str | None = None


class Answer(BaseModel):
    reasoning: str
    confidence: float = Field(ge=0, le=1)
    sources: list[HttpUrl] = []


class Base(BaseModel):
    id: int


class Derived(Base):
    name: str
    parent: Base | None = None


MODELS: Mapping[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        *(Bounds, Positive, MultipleOf, Literals, Enums, Unions, Discriminated, ModelUnion, SetOfText, SetOfLiterals),
        *(SetOfEnum, Decimals, Dates, Durations, Urls, Addresses, Networks, Identifiers, Nested, Tree, Linked, Person),
        *(Anything, Dicts, DictByPattern, DictByLiteral, DictByEnum, BytesAndPath, Constrained, Lists, Tuples),
        *(NamedTuples, Optionals, Described, Closed, Open, Aliases, Secrets, Numbers, Scalar, Invoice, Answer, Derived),
    )
}

_DAY = (
    r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
)
_ZOD: Mapping[str, Any] = {
    "z.string()": {"type": "string"},
    "z.string().min(2).max(5)": {"type": "string", "minLength": 2, "maxLength": 5},
    "z.string().startsWith('ab')": {"type": "string", "pattern": "^ab.*"},
    "z.number()": {"type": "number"},
    "z.number().int()": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    "z.number().min(0).max(10)": {"type": "number", "minimum": 0, "maximum": 10},
    "z.boolean()": {"type": "boolean"},
    "z.enum(['a', 'b'])": {"type": "string", "enum": ["a", "b"]},
    "z.literal('a')": {"type": "string", "const": "a"},
    "z.email()": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "z.uuid()": {
        "type": "string",
        "format": "uuid",
        "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
        "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
    },
    "z.iso.datetime()": {
        "type": "string",
        "format": "date-time",
        "pattern": rf"^{_DAY}T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$",
    },
    "z.iso.date()": {"type": "string", "format": "date", "pattern": f"^{_DAY}$"},
    "z.url()": {"type": "string", "format": "uri"},
    "z.array(z.string()).max(3)": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    "z.record(z.string(), z.number())": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },
    "z.any()": {},
    "z.tuple([z.string(), z.number()])": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
    "z.string().nullable()": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "z.discriminatedUnion('kind', ['a', 'b'].map(k => z.object({kind: z.literal(k), [k]: z.boolean()})))": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"type": "string", "const": kind}, kind: {"type": "boolean"}},
                "required": ["kind", kind],
                "additionalProperties": False,
            }
            for kind in ("a", "b")
        ]
    },
}
ZOD: Mapping[str, Schema] = {
    expression: {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"value": schema},
        "required": ["value"],
        "additionalProperties": False,
    }
    for expression, schema in _ZOD.items()
}
SCHEMAS: Mapping[str, Schema] = {**{name: model.model_json_schema() for name, model in MODELS.items()}, **ZOD}
