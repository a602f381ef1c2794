"""Convert arguments that a model wrote as plain text into the types that the tool's schema requires."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

CDATA = "<![CDATA["
_MAX_REFERENCES = 8  # maximum number of references in a row; generated schemas have one or two
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class ArgumentValues:
    """Converts the arguments of one tool. `schema` is the JSON Schema of these arguments."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        self.schema = self._resolved(parameters)
        properties = self.schema.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._types: dict[str, set[str]] = {}  # types by name of the argument
        self._types_of_reference: dict[str, set[str]] = {}

    def read(self, name: str, text: str, is_json: bool | None = None) -> Any:
        """Return an argument's value, parsed as JSON if the argument's schema allows that, or otherwise as text.

        `is_json` is None if the markup does not show whether the argument is JSON.
        """
        types = self.types_of(name)
        if text.startswith(CDATA) and text.endswith("]]>"):
            text = text[len(CDATA) : -3]
        if is_json is False or (is_json is None and types == {"string"}):
            return text
        try:
            value = _parsed(text, like_python=bool(types) and "string" not in types)
        except ValueError:
            return text
        fits = not types or any(_is_a(value, each) for each in types)
        return value if fits or "string" not in types else text

    def resolved(self, name: str) -> Mapping[str, Any]:
        """Return the schema of an argument, with references resolved."""
        return self._resolved(self.properties.get(name))

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._target(schema["$ref"])
        return schema if isinstance(schema, Mapping) else {}

    def types_of(self, name: str) -> set[str]:
        """Return the types that an argument may have, or an empty set if its schema does not state them."""
        if name not in self._types:
            self._types[name] = self._types_in(self.properties.get(name), 0)
        return self._types[name]

    def _types_in(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
            return set()
        if isinstance(schema.get("$ref"), str):
            return self._types_at(schema["$ref"], depth + 1)
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return {name for name in _TYPES for value in values if _is_a(value, name)}
        types = schema.get("type")
        if types is not None:
            return {name for name in (types if isinstance(types, list) else [types]) if isinstance(name, str)}
        combined = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
        found = [self._types_in(part, depth + 1) for parts in combined if isinstance(parts, list) for part in parts]
        return set().union(*found) if all(found) else set()

    def _types_at(self, reference: str, depth: int) -> set[str]:
        """Return the types that the schema at a reference allows.

        Each reference is resolved only once, because references may be repeated or recursive.
        """
        if reference not in self._types_of_reference:
            self._types_of_reference[reference] = set()
            self._types_of_reference[reference] = self._types_in(self._target(reference), depth)
        return self._types_of_reference[reference]

    def _target(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


def _parsed(text: str, *, like_python: bool) -> Any:
    """Parse JSON or, with `like_python`, the Python literals that some templates show to models. Raises ValueError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if not like_python:
            raise ValueError from None
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError from None
    return value


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, ()))
