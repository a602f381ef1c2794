"""JSON Schemas as llguidance takes them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from cellama.engine.errors import InvalidRequest


class Prepared(NamedTuple):
    """A schema for llguidance, and what of the caller's is not enforced."""

    schema: dict[str, Any] | bool
    warnings: tuple[str, ...]


def prepare_schema(text: str, *, strict: bool, where: str = "json_schema") -> Prepared:
    """Raises InvalidRequest.

    Wanted: an object that names `properties` and says nothing of others (no additionalProperties, patternProperties,
    unevaluatedProperties) gets no others, as with the code before: narrower than the schema, never wider. In allOf this
    can hold for the merged object only. tests/contract/test_chat.py and test_llama_sampling.py show it.
    """
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{where} is no JSON: {error}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    layout = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": not strict}
    return Prepared({**schema, "x-guidance": layout}, ())
