"""The types of fields in payloads: checked, bounded, and made into one form."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, StrictFloat, StrictInt, StrictStr, Tag

from cellama.config import MODEL_ID, MODEL_ID_RULE, limits

from .json_values import check_text, json_text, shorten
from .names import DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class TypedAs:
    """The type of a parameter for callers, as source text: `.ci/typed_tasks.py` writes it into `tasks/typed_tasks.py`.

    Without it, callers give what the payload has. Payloads convert other forms, for instance one text for a list."""

    text: str


def _check_text(text: str) -> str:
    _check_length(text, limits.MAX_TEXT_CHARS)
    return check_text(text)


def _check_length(text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(f"it has {len(text)} characters, and the limit is {limit}; make it shorter")


def at_most(limit: int) -> AfterValidator:
    """Text of so many characters."""

    def check(text: str) -> str:
        _check_length(text, limit)
        return text

    return AfterValidator(check)


def no_more_than(limit: int, what: str) -> BeforeValidator:
    """A list, or an object, with so many entries; looked at before its entries are."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple | dict) and len(value) > limit:
            raise ValueError(f"these are {len(value)} {what}, and the limit is {limit}; leave some out")
        return value

    return BeforeValidator(check)


def _check_filled(text: str) -> str:
    if not text:
        raise ValueError("it is empty; give it some text")
    return text


def check_model_id(text: str) -> str:
    if text != DEFAULT_MODEL and not re.fullmatch(MODEL_ID, text):
        raise ValueError(f"{MODEL_ID_RULE}; name one that is served")
    return text


def _check_key(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError("it is no key; a key is the `finish_key` of a result: 64 of the digits 0-9 and a-f")
    return text


def text_of_result(value: Any) -> Any:
    """The result of a job, as the step before this one in a chain, is its text."""
    is_result = isinstance(value, dict) and {"text", "finish_reason"} <= value.keys()
    return value["text"] if is_result else value


def _key_of_result(value: Any) -> Any:
    """The result of a job, as the step before this one in a chain, is its key."""
    return value.get("finish_key", "") if isinstance(value, dict) and "finish_reason" in value else value


def _to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def to_inputs(value: Any) -> Any:
    """A list of token ids is one text."""
    return _to_texts((value,) if isinstance(value, list) and value and isinstance(value[0], int) else value)


def _to_texts(value: Any) -> Any:
    value = _to_tuple(value)
    if isinstance(value, list | tuple) and not 1 <= len(value) <= limits.MAX_TEXTS:
        advice = "split them into several jobs" if value else "give at least one"
        raise ValueError(f"these are {len(value)} texts, and one job takes 1 to {limits.MAX_TEXTS}: {advice}")
    return value


def to_json(value: Any) -> Any:
    return json_text(value, limits.MAX_TEXT_CHARS) if isinstance(value, dict | bool) else value


def join_parts(value: Any) -> Any:
    """Content in parts, as in the OpenAI API, is their text."""
    if not isinstance(value, list):
        return value
    if len(value) > limits.MAX_PARTS:
        raise ValueError(f"these are {len(value)} parts, and the limit is {limits.MAX_PARTS}; join them")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        raise ValueError("of content in parts only those of type text are taken")
    texts = [part.get("text", "") for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the text of a part must be text")
    return "".join(texts)


def to_prediction(value: Any) -> Any:
    """{"type": "content", "content": …} as in the OpenAI API is the text, and so is the result of a job."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"type", "content"} and value["type"] == "content":
        return join_parts(value["content"])
    return text_of_result(value)


def to_choice(value: Any) -> Any:
    """{"type": "function", "function": {"name": …}} as in the OpenAI API is the name."""
    if not isinstance(value, dict):
        return value
    function = value.get("function")
    return function.get("name") if isinstance(function, dict) else function


def check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters; whether every keyword of it is understood only matters to a forced call.

    They may be a reference to one of their definitions, as pydantic writes recursive models.
    """
    json_text(schema, limits.MAX_JSON_CHARS)
    shape = schema if "type" in schema else _definition(schema) or schema
    if shape and shape.get("type") != "object":
        raise ValueError(f'its type is {shape.get("type")!r}; parameters must be a JSON Schema of type "object"')
    properties = shape.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(p, dict | bool) for p in properties.values()):
        raise ValueError("its properties must map names to schemas")
    required = shape.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise ValueError("required must list names of its properties")
    return schema


def _definition(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The definition that a schema refers to as a whole."""
    place, _, name = str(schema.get("$ref")).rpartition("/")
    definitions = schema.get(place.removeprefix("#/"))
    definition = definitions.get(name) if isinstance(definitions, dict) else None
    return definition if isinstance(definition, dict) else None


def _to_pairs(value: Any) -> Any:
    """{"17": -1.5} as in the OpenAI API, or ["17=-1.5"], or pairs."""
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, list | tuple):
        raise ValueError('it must map token ids to biases, for instance {"17": -1.5}')
    if len(value) > limits.MAX_BIASES:
        raise ValueError(f"these are {len(value)} tokens, and the limit is {limits.MAX_BIASES}; leave some out")
    return tuple(_to_pair(entry) for entry in value)


def _to_pair(entry: Any) -> tuple[int, float]:
    try:
        given, added = entry.split("=") if isinstance(entry, str) else entry
        token, bias = int(given), float(added)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f'{shorten(entry)} is no token id with a bias; write {{"17": -1.5}} or 17=-1.5') from None
    if isinstance(given, float) or not 0 <= token <= limits.MAX_COUNT:
        raise ValueError(f"{shorten(given)} is no token id; it must be a whole number, 0 or more")
    if not (abs(bias) <= limits.MAX_BIAS or bias == -math.inf):
        raise ValueError(f"{shorten(added)} is no bias; it must be up to {limits.MAX_BIAS:g} either way, or -inf")
    return token, bias


def _to_adapters(value: Any) -> Any:
    """{"pirate": 0.5}, or ["pirate=0.5"], or ["pirate"] for a scale of 1, or pairs."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, dict | list | tuple):
        raise ValueError('it must map names of adapters to scales, for instance {"pirate": 0.5}')
    if len(value) > limits.MAX_ADAPTERS:
        raise ValueError(f"these are {len(value)} adapters, and the limit is {limits.MAX_ADAPTERS}; leave some out")
    entries = list(value.items()) if isinstance(value, dict) else [_to_adapter(entry) for entry in value]
    names = [entry[0] for entry in entries if isinstance(entry, list | tuple) and entry]
    if len({name for name in names if isinstance(name, str)}) < sum(isinstance(name, str) for name in names):
        raise ValueError("an adapter is named twice; give one scale for each")
    return tuple(entries)


def _to_adapter(entry: Any) -> Any:
    if not isinstance(entry, str):
        return entry
    name, equals, scale = entry.rpartition("=")
    try:
        return (name, float(scale)) if equals else (entry, 1.0)
    except ValueError:
        raise ValueError(f"{shorten(entry)} has no number as scale; write NAME, or NAME=0.5") from None


def _check_breaker(text: str) -> str:
    size, limit = len(text.encode()), limits.MAX_DRY_BREAKER_BYTES
    if size > limit:
        raise ValueError(f"it has {size} bytes of UTF-8, and the limit is {limit}; make it shorter")
    return text


Text = Annotated[StrictStr, AfterValidator(_check_text)]
FilledText = Annotated[Text, AfterValidator(_check_filled)]
Name = Annotated[FilledText, at_most(limits.MAX_NAME_CHARS)]
ContextKey = Annotated[StrictStr, AfterValidator(_check_key), BeforeValidator(_key_of_result)]
Finite = Annotated[StrictFloat, Field(allow_inf_nan=False)]  # takes whole numbers, too
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_to_pairs),
    TypedAs("Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]"),
]
Scale = Annotated[Finite, Field(ge=-limits.MAX_ADAPTER_SCALE, le=limits.MAX_ADAPTER_SCALE)]
Adapters = Annotated[
    tuple[tuple[Name, Scale], ...] | None,
    BeforeValidator(_to_adapters),
    TypedAs("str | Mapping[str, float] | Sequence[str] | Sequence[tuple[str, float]] | None"),
]
Texts = Annotated[tuple[FilledText, ...], Field(fail_fast=True), BeforeValidator(_to_texts), TypedAs("Texts")]

Stops = Annotated[
    tuple[Annotated[FilledText, at_most(limits.MAX_STOP_CHARS)], ...],
    no_more_than(limits.MAX_STOPS, "texts"),
    BeforeValidator(_to_tuple),
    TypedAs("Texts"),
]

Breakers = Annotated[
    tuple[Annotated[FilledText, AfterValidator(_check_breaker)], ...],
    no_more_than(limits.MAX_DRY_BREAKERS, "texts"),
    BeforeValidator(_to_tuple),
    TypedAs("Texts"),
]

Penalty = Annotated[Finite, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
Count = Annotated[StrictInt, Field(le=limits.MAX_COUNT)]


TAGS = _TEXT, _TOKENS = "<text>", "<tokens>"  # that pydantic writes into the place of an error; not shown


def _prompt_kind(value: Any) -> str:
    return _TOKENS if isinstance(value, list | tuple) else _TEXT


TokenId = Annotated[StrictInt, Field(ge=0, le=limits.MAX_COUNT)]
TokenList = Annotated[list[TokenId], Field(fail_fast=True), no_more_than(limits.MAX_PROMPT_TOKENS, "tokens")]
TokenIds = Annotated[TokenList, Field(min_length=1)]
TextOrTokens = Annotated[
    Annotated[FilledText, Tag(_TEXT)] | Annotated[TokenIds, Tag(_TOKENS)], Discriminator(_prompt_kind)
]
