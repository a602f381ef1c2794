"""Grammars and JSON schemas on llama.cpp's grammar engine."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as lib
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf
from numpy.typing import NDArray

from ..errors import InvalidRequest
from ..params import SamplingParams
from . import log as llama_log

if TYPE_CHECKING:
    from .model import LlamaModel

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama.h: llama_token_data

# What the converter turns into rules, and what says nothing about the text; anything else would be ignored silently.
_CONVERTED = {
    *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems"),
    *("enum", "const", "oneOf", "anyOf", "allOf", "$ref", "$defs", "definitions", "pattern", "format"),
    *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly"}
_FORMATS = {"uuid", "date", "time", "date-time", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"}
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
_BY_NAME = {"properties", "$defs", "definitions"}  # keywords whose values are schemas by name
_SEVERAL = {"oneOf", "anyOf", "allOf", "prefixItems"}


class Grammar:
    """What may come next by a GBNF grammar. The Constraint of `sampling.py`. Engine thread only."""

    def __init__(self, model: LlamaModel, text: str, root: str) -> None:
        """Raises InvalidRequest when llama.cpp can't take the grammar."""
        llama_log.take_errors()
        self._sampler = lib.llama_sampler_init_grammar(model.vocab, text.encode(), root.encode())
        if not self._sampler:
            reason = llama_log.take_errors() or f"it is no valid GBNF with a rule {root!r}"
            raise InvalidRequest(f"the grammar can't be used: {reason}; see llama.cpp's grammars/README.md")

    def allows(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        candidates = np.zeros(len(tokens), CANDIDATE)
        candidates["id"] = tokens
        apply(self._sampler, candidates)
        allowed: NDArray[np.bool_] = candidates["logit"] > -np.inf
        return allowed

    def accept(self, token: int) -> None:
        # llama.cpp would end the process on a token that the grammar rejects: the caller has asked `allows`.
        lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        lib.llama_sampler_free(self._sampler)


def apply(sampler: Any, candidates: NDArray[Any]) -> None:
    """Runs a llama.cpp sampler over candidates, in place and in their order."""
    array = lib.llama_token_data_array(
        data=candidates.ctypes.data_as(lib.llama_token_data_p), size=len(candidates), selected=-1, sorted=False
    )
    lib.llama_sampler_apply(sampler, ctypes.byref(array))


def grammar_of(params: SamplingParams) -> tuple[str, str] | None:
    """GBNF and the name of its root rule, None if the request is free. Raises InvalidRequest."""
    if params.json_schema is not None:
        return schema_to_gbnf(params.json_schema), "root"
    return None if params.grammar is None else (params.grammar, params.grammar_root)


@functools.lru_cache(maxsize=64)
def schema_to_gbnf(schema: str) -> str:
    """A grammar for the JSON that a schema (JSON text) describes.

    Raises InvalidRequest with the path of the first keyword that can't be turned into a grammar.
    """
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}") from None
    _check_schema(parsed, "#")
    try:
        return str(json_schema_to_gbnf(schema))
    except RecursionError:
        raise InvalidRequest("json_schema is nested too deeply; flatten it") from None
    except Exception as error:  # the converter raises whatever it meets
        raise InvalidRequest(f"json_schema can't be turned into a grammar: {type(error).__name__}: {error}") from None


def _check_schema(schema: Any, path: str) -> None:
    if schema is True or (schema is False and path.endswith("/additionalProperties")):
        return
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"json_schema at {path} is {schema!r}; it must be a schema (an object)")
    for keyword, value in schema.items():
        _check_keyword(keyword, value, f"{path}/{keyword}")


def _check_keyword(keyword: str, value: Any, path: str) -> None:
    if keyword not in _CONVERTED | _ANNOTATIONS:
        raise InvalidRequest(f"json_schema at {path}: {keyword!r} can't be turned into a grammar; leave it out")
    if keyword in _BY_NAME:
        for name, inner in _must_be(Mapping, value, path).items():
            _check_schema(inner, f"{path}/{name}")
    elif keyword in _SEVERAL or (keyword == "items" and isinstance(value, list)):
        for index, inner in enumerate(_must_be(list, value, path)):
            _check_schema(inner, f"{path}/{index}")
    elif keyword in ("items", "additionalProperties"):
        _check_schema(value, path)
    elif keyword == "type":
        _check_type(value, path)
    elif keyword == "format" and value not in _FORMATS:
        raise InvalidRequest(f"json_schema at {path} is {value!r}; known formats: {', '.join(sorted(_FORMATS))}")
    elif keyword == "$ref" and not str(value).startswith("#/"):
        raise InvalidRequest(
            f"json_schema at {path} is {value!r}; only references within the schema (#/…) are followed"
        )
    elif keyword == "pattern" and not (str(value).startswith("^") and str(value).endswith("$")):
        raise InvalidRequest(f"json_schema at {path} is {value!r}; a pattern must begin with ^ and end with $")
    elif keyword in ("enum", "required"):
        _must_be(list, value, path)


def _check_type(value: Any, path: str) -> None:
    for name in value if isinstance(value, list) else [value]:
        if name not in _TYPES:
            raise InvalidRequest(f"json_schema at {path} is {name!r}; known types: {', '.join(sorted(_TYPES))}")


def _must_be(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidRequest(
            f"json_schema at {path} is {value!r}; it must be {'a list' if kind is list else 'an object'}"
        )
    return value
