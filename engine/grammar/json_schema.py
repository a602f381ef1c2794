"""JSON Schema → GBNF. Every text of the grammar fits the schema; what can't be kept is refused, with its path. Pure."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from cellama.config import limits
from cellama.engine.errors import InvalidRequest

from .json_pattern import UnknownPattern, characters, literal, pattern_to_gbnf
from .json_values import FORMATS, JSON_RULES, VALUE_OF_TYPE, characters_but, is_plain, listed, times, type_of
from .schema_checks import (
    ANNOTATIONS,
    KINDS,
    OF_TYPE,
    TYPES,
    bounds,
    check_one_of,
    exclude_each_other,
    must_be,
    refused,
    show,
    types_of,
)

Schema = Mapping[str, Any]


def schema_to_gbnf(schema: str) -> str:
    """A grammar for the JSON that a schema (JSON text) describes; its first rule is `root`.

    Raises InvalidRequest with the path of the first keyword that can't be turned into a grammar.
    """
    return schemas_to_gbnf((("root", schema, "#"),))


@functools.lru_cache(maxsize=64)
def schemas_to_gbnf(wanted: tuple[tuple[str, str, str], ...]) -> str:
    """Rules of these names, each for a schema (JSON text), or for the one within it that a reference (`#/…`) names.

    What several of them refer to in the same schema is made once. Raises InvalidRequest, as schema_to_gbnf does.
    """
    schemas = dict.fromkeys(schema for _, schema, _ in wanted)
    made = {schema: _Converter(_parsed(schema), f"of{i}-") for i, schema in enumerate(schemas)}
    first = [f"{name} ::= {made[schema].rule_at(at)}" for name, schema, at in wanted]
    return "\n".join([*first, *(rule for each in made.values() for rule in each.rules), *JSON_RULES]) + "\n"


def _parsed(schema: str) -> Any:
    try:
        parsed = json.loads(schema, parse_constant=_finite, parse_float=_finite)
        json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequest("json_schema is nested too deeply; flatten it") from None
    except ValueError as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}") from None
    return parsed


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is too large, or no number")
    return float(text)


class _Converter:
    """Makes a rule of every schema within a schema, and of what is referred to only once."""

    def __init__(self, root: Any, prefix: str = "") -> None:
        """`prefix` of the names of the rules that it makes."""
        self._root = root
        self._prefix = prefix
        self.rules: list[str] = []
        self._depth = 0
        self._referred: dict[str, str] = {}  # reference → rule

    def rule_at(self, reference: str) -> str:
        """The name of a rule, or a text of GBNF, for the schema that is there."""
        return self._schema(self._root if reference == "#" else {"$ref": reference}, "#")

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}s{len(self.rules)}"
        self.rules.append(f"{name} ::= {body}")
        return name

    def _schema(self, schema: Any, path: str) -> str:
        """The name of a rule, or a text of GBNF that needs no parentheses."""
        self._depth += 1
        if self._depth > limits.MAX_SCHEMA_DEPTH:
            raise refused(path, f" is nested more than {limits.MAX_SCHEMA_DEPTH} schemas deep; flatten it")
        made = self._maker_of(schema, path)(schema, path)
        self._depth -= 1
        return made

    def _maker_of(self, schema: Any, path: str) -> Callable[[Schema, str], str]:
        """What makes a rule of the schema, whose keywords go together. Raises InvalidRequest."""
        if not isinstance(schema, Mapping):
            raise refused(path, f" is {show(schema)}; it must be a schema (an object)")
        given = [keyword for keyword in schema if keyword not in ANNOTATIONS]
        if not given:
            raise refused(path, " allows anything; give it a type")
        kind = next((kind for kind in KINDS if kind in given), None)
        beside = KINDS[kind] if kind is not None else OF_TYPE.keys() | {"type"}
        for keyword in given:
            if keyword != kind and keyword not in beside:
                raise refused(
                    f"{path}/{keyword}",
                    f": {show(keyword)} can't be turned into a grammar"
                    f"{f' beside {kind!r}' if kind else ''}; leave it out",
                )
        makers: dict[str | None, Callable[[Schema, str], str]] = {
            "$ref": self._reference,
            "oneOf": self._one_of,
            "anyOf": self._any_of,
            "allOf": self._all_of,
            "const": self._values,
            "enum": self._values,
            None: self._typed,
        }
        return makers[kind]

    # References and choices

    def _reference(self, schema: Schema, path: str) -> str:
        reference = schema["$ref"]
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise refused(path, f"/$ref is {show(reference)}; only references within it (#/…) are followed")
        if reference not in self._referred:
            name = f"{self._prefix}r{len(self._referred)}"
            self._referred[reference] = name
            self.rules.append(f"{name} ::= {self._schema(self._target(reference, path), reference)}")
        return self._referred[reference]

    def _target(self, reference: str, path: str) -> Any:
        found = self._root
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isascii() and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise refused(
                    path, f"/$ref is {show(reference)}, which it does not hold; it can't be turned into a grammar"
                )
        return found

    def _any_of(self, schema: Schema, path: str) -> str:
        return self._choices(schema["anyOf"], f"{path}/anyOf")

    def _one_of(self, schema: Schema, path: str) -> str:
        choices = self._choices(schema["oneOf"], f"{path}/oneOf")
        if not exclude_each_other(schema["oneOf"], lambda reference: self._target(reference, path)):
            raise refused(
                path,
                "/oneOf: a value may fit more than one of these; use anyOf, or tell them apart by "
                "their types, or by a required property with different values of const",
            )
        return choices

    def _all_of(self, schema: Schema, path: str) -> str:
        schemas = must_be(list, schema["allOf"], f"{path}/allOf")
        if len(schemas) != 1:
            raise refused(path, "/allOf: only a list of one can be turned into a grammar; join them")
        return self._schema(schemas[0], f"{path}/allOf/0")

    def _choices(self, schemas: Any, path: str) -> str:
        parts = [self._schema(inner, f"{path}/{at}") for at, inner in enumerate(must_be(list, schemas, path))]
        if not parts:
            raise refused(path, " is empty; name at least one")
        return self._rule(" | ".join(parts))

    def _values(self, schema: Schema, path: str) -> str:
        kind = "const" if "const" in schema else "enum"
        values = [schema["const"]] if kind == "const" else must_be(list, schema["enum"], f"{path}/enum")
        types = types_of(schema, path)
        fitting = [value for value in values if not types or types & type_of(value)]
        if not fitting:
            raise refused(path, f"/{kind}: there is no value of its type; correct one of them")
        return self._rule(" | ".join(literal(json.dumps(value, ensure_ascii=False)) for value in fitting))

    # What has a type

    def _typed(self, schema: Schema, path: str) -> str:
        types = types_of(schema, path) or {OF_TYPE[keyword] for keyword in schema if keyword in OF_TYPE}
        makers = {"object": self._object, "array": self._array, "string": self._string}
        parts = []
        for name in TYPES:  # always in the same order
            if name in types and not (name == "integer" and "number" in types):
                maker = makers.get(name)
                parts.append(VALUE_OF_TYPE[name] if maker is None else maker(schema, path))
        return parts[0] if len(parts) == 1 else self._rule(" | ".join(parts))

    def _string(self, schema: Schema, path: str) -> str:
        shaped = [keyword for keyword in ("pattern", "format") if keyword in schema]
        sized = [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
        if len(shaped) + bool(sized) > 1:
            raise refused(
                path,
                f"/{shaped[0]}: {shaped[0]!r} can't be turned into a grammar beside "
                f"{[*shaped[1:], *sized][0]!r}; leave one out",
            )
        if shaped == ["pattern"]:
            return self._pattern(schema["pattern"], f"{path}/pattern")
        if shaped:
            known = sorted(rule.removeprefix("format-") for rule in FORMATS)
            check_one_of(schema["format"], known, f"{path}/format")
            return f"format-{schema['format']}"
        least, most = bounds(schema, path, "minLength", "maxLength")
        return "string" if least == 0 and most is None else self._rule(f'"\\"" char{times(least, most)} "\\""')

    def _pattern(self, pattern: Any, path: str) -> str:
        try:
            inner = pattern_to_gbnf(must_be(str, pattern, path))
        except UnknownPattern as error:
            raise refused(path, f" can't be turned into a grammar: {error}") from None
        return self._rule(f'"\\"" {inner} "\\""')

    def _array(self, schema: Schema, path: str) -> str:
        least, most = bounds(schema, path, "minItems", "maxItems")
        prefix = must_be(list, schema.get("prefixItems", []), f"{path}/prefixItems")[:most]
        first = [self._schema(inner, f"{path}/prefixItems/{at}") for at, inner in enumerate(prefix)]
        item = self._item(schema, path)
        least = max(0, least - len(first))
        if item is None or ("items" not in schema and prefix):
            most = least  # the others may be anything, and need not be
        elif most is not None:
            most -= len(first)
        if item is None and least:
            raise refused(path, "/minItems: items is false, so there are not so many; correct one")
        return self._rule(f'"[" ws {listed(first, item or "value", least, most)} "]"')

    def _item(self, schema: Schema, path: str) -> str | None:
        """The rule of an item after the prefix; None: there is none."""
        items = schema.get("items", True)
        if isinstance(items, bool):
            return "value" if items else None
        return self._schema(items, f"{path}/items")

    def _object(self, schema: Schema, path: str) -> str:
        properties = must_be(Mapping, schema.get("properties", {}), f"{path}/properties")
        required = must_be(list, schema.get("required", []), f"{path}/required")
        for name in required:
            if name not in properties:
                raise refused(path, f"/required names {show(name)}, which is not among the properties")
        more = schema.get("additionalProperties", "properties" not in schema)
        if not properties and more is True:
            return "object"
        pairs = [
            (
                self._pair(literal(json.dumps(name, ensure_ascii=False)), inner, f"{path}/properties/{name}"),
                name in required,
            )
            for name, inner in properties.items()
        ]
        extra = self._extra(more, list(properties), f"{path}/additionalProperties") if more is not False else None
        return self._rule(f'"{{" ws {self._members(pairs, extra)} "}}"')

    def _pair(self, key: str, schema: Any, path: str) -> str:
        return self._rule(f'{key} ws ":" ws {self._schema(schema, path)} ws')

    def _extra(self, schema: Any, names: list[str], path: str) -> str:
        """A pair whose name is none of these. It has no escapes, so that no name can be written in another way."""
        value = "value" if schema is True else self._schema(schema, path)
        return self._rule(f'"\\"" {self._other_than(names)} "\\"" ws ":" ws {value} ws')

    def _other_than(self, names: list[str]) -> str:
        """A rule of texts other than these: along their beginnings, and elsewhere from each of them."""
        following: list[dict[str, int]] = [{}]  # of a tree of the names: character → node
        ends = set()
        for name in names:
            at = 0
            for char in name:
                if char not in following[at]:
                    following.append({})
                    following[at][char] = len(following) - 1
                at = following[at][char]
            ends.add(at)
        rules: dict[int, str] = {}
        for at in range(len(following) - 1, -1, -1):  # a node's number is below those of the nodes after it
            inner = [f"{characters([(ord(c), ord(c))])} {rules[to]}" for c, to in following[at].items() if is_plain(c)]
            other = f"{characters_but(following[at])} plain*" if following[at] else "plain+"
            rules[at] = self._rule(" | ".join([other, *inner, *([] if at in ends else ['""'])]))
        return rules[0]

    def _members(self, pairs: list[tuple[str, bool]], extra: str | None) -> str:
        """Pairs in their order, with those that must be there: `head` before the first of them, `tail` after one."""
        head = tail = '""'
        if extra is not None:
            tail = self._rule(f'("," ws {extra})*')
            head = self._rule(f'({extra} ("," ws {extra})*)?')
        for pair, is_required in reversed(pairs):
            head = self._rule(f"{pair} {tail}" if is_required else f"{pair} {tail} | {head}")
            tail = self._rule(f'"," ws {pair} {tail}' if is_required else f'("," ws {pair})? {tail}')
        return head
