"""Parse a JSON Schema, check its keywords, look up its subschemas by path, and resolve references."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

from cellama.config import limits
from cellama.engine.errors import InvalidRequest

from .keywords import KEYWORDS, show

_MAX_SHOWN = 200  # characters of a path in messages
_MAX_PATH_CHARS = 5_000_000  # characters of all paths, which limits memory to a few MB and time to a few ms


class SchemaNode(NamedTuple):
    """A schema within the document."""

    schema: Mapping[str, Any] | bool
    path: str  # a JSON pointer as a fragment, such as `#/properties/a`
    base: str  # the URI to which references are relative


class SchemaDocument:
    """A JSON Schema and all of its subschemas, each identified by its index in `nodes`. `NOTHING` allows no value."""

    NOTHING = 0
    ROOT = 1

    def __init__(self, text: str, where: str) -> None:
        """Parse and check the text. Raises InvalidRequest with a message that refers to the text as `where`."""
        self._where = where
        self.root = self._parse(text)
        self.nodes = [SchemaNode(False, "#", "")]
        self._by_path: dict[str, int] = {}
        self._by_uri: dict[str, str] = {}  # URI of a resource or an anchor → path
        self._path_chars = 0
        self._dynamic: Counter[str] = Counter()  # name → number of $dynamicAnchor keywords with this name
        self._add_schemas(self.root, "#", "")

    def error_at(self, path: str, reason: str) -> InvalidRequest:
        """Return an error about the schema at this path."""
        shown = path if len(path) <= _MAX_SHOWN else f"{path[:_MAX_SHOWN]}…"
        return InvalidRequest(f"{self._where} at {shown}{reason}")

    def child(self, node: int, *names: str | int) -> int:
        """Return the subschema that is reached by following these keys from a schema."""
        return self._by_path["/".join([self.nodes[node].path, *(_escaped(str(name)) for name in names)])]

    def add(self, schema: Mapping[str, Any], template: int) -> int:
        """Add a schema that is not in the document. Error messages use the path of `template` for this schema."""
        self.nodes.append(self.nodes[template]._replace(schema=schema))
        return len(self.nodes) - 1

    def target(self, node: int, keyword: str) -> int:
        """Return the schema that a reference points to.

        Raises InvalidRequest if the document does not contain this schema.
        """
        schema, path, base = self.nodes[node]
        assert isinstance(schema, Mapping)
        reference = schema[keyword]
        try:
            full = f"{base}{reference}" if reference.startswith("#") else urljoin(base, reference)
        except ValueError:
            full = reference
        uri, _, fragment = full.partition("#")
        if uri not in self._by_uri:
            raise self.error_at(
                path,
                f"/{keyword} is {show(reference)}; only references within the schema are supported; move the "
                "target into $defs",
            )
        found = self._at(self._by_uri[uri], fragment) if fragment[:1] in ("", "/") else self._by_uri.get(full)
        if found is None:
            raise self.error_at(
                path, f"/{keyword} is {show(reference)}, which the schema does not contain; correct the reference"
            )
        return self._by_path[found]

    def is_dynamic(self, node: int) -> bool:
        """Return whether the target of a schema's $dynamicRef depends on how the schema is reached.

        Raises InvalidRequest if the reference can't be resolved.
        """
        schema = self.nodes[node].schema
        if not isinstance(schema, Mapping) or "$dynamicRef" not in schema:
            return False
        name = schema["$dynamicRef"].partition("#")[2]
        target = self.nodes[self.target(node, "$dynamicRef")].schema
        return isinstance(target, Mapping) and target.get("$dynamicAnchor") == name and self._dynamic[name] > 1

    def _parse(self, text: str) -> Any:
        if len(text) > limits.MAX_SCHEMA_CHARS:
            raise InvalidRequest(
                f"{self._where} has {len(text)} characters; shorten it to {limits.MAX_SCHEMA_CHARS} or fewer"
            )
        try:
            parsed = json.loads(
                text, parse_constant=_finite_number, parse_float=_finite_number, object_pairs_hook=_unique_keys
            )
        except RecursionError:
            raise InvalidRequest(f"{self._where} is nested too deeply; flatten it") from None
        except ValueError as error:
            raise InvalidRequest(f"{self._where} is not valid JSON: {error}") from None
        self._check_values(parsed)
        if not isinstance(parsed, dict | bool):
            raise self.error_at("#", f" is {show(parsed)}; it must be a schema (an object or a boolean)")
        return parsed

    def _check_values(self, parsed: Any) -> None:
        """Raise InvalidRequest for unpaired surrogates, and for nesting that is too deep for `json` or llguidance."""
        todo = [(parsed, 0)]
        while todo:
            value, depth = todo.pop()
            if depth > 4 * limits.MAX_SCHEMA_DEPTH:
                raise InvalidRequest(f"{self._where} is nested too deeply; flatten it")
            if isinstance(value, dict):
                todo += [(each, depth + 1) for pair in value.items() for each in pair]
            elif isinstance(value, list):
                todo += [(each, depth + 1) for each in value]
            elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
                raise InvalidRequest(f"{self._where} is not valid JSON: {show(value)} contains an unpaired surrogate")

    def _add_schemas(self, schema: Any, path: str, base: str) -> None:
        """Add a schema and all of its subschemas. Raises InvalidRequest if a keyword has an invalid value."""
        todo = [(schema, path, base, 0)]
        while todo:
            schema, path, base, depth = todo.pop()
            if path in self._by_path:
                continue
            if depth > limits.MAX_SCHEMA_DEPTH:
                raise self.error_at(path, f" is nested more than {limits.MAX_SCHEMA_DEPTH} schemas deep; flatten it")
            if not isinstance(schema, Mapping | bool):
                raise self.error_at(path, f" is {show(schema)}; it must be a schema (an object or a boolean)")
            if isinstance(schema, Mapping):
                self._check(schema, path)
                base = self._base_of(schema, path, base)
                todo += [(inner, f"{path}/{at}", base, depth + 1) for at, inner in _schemas_within(schema)]
            self._path_chars += len(path)
            if self._path_chars > _MAX_PATH_CHARS:
                raise InvalidRequest(f"{self._where} has too many schemas with long paths; shorten its property names")
            self._by_path[path] = len(self.nodes)
            self.nodes.append(SchemaNode(schema, path, base))
        self._by_uri.setdefault("", "#")

    def _check(self, schema: Mapping[str, Any], path: str) -> None:
        for name, value in schema.items():
            problem = KEYWORDS[name].check(value) if name in KEYWORDS else None
            if problem:
                raise self.error_at(path, f"/{_escaped(name)} is {show(value)}; it {problem}")

    def _base_of(self, schema: Mapping[str, Any], path: str, base: str) -> str:
        """Register the URI and the anchors of a schema, and return the base URI of its references."""
        uri = schema.get("$id", "")
        if uri and not uri.startswith("#"):
            try:
                base = urljoin(base, uri).partition("#")[0]
            except ValueError:
                raise self.error_at(path, f"/$id is {show(uri)}; it must be a URI") from None
            self._by_uri.setdefault(base, path)
        elif path == "#":
            self._by_uri[base] = path
        anchors = [uri[1:]] if uri.startswith("#") else []  # how $anchor was written until draft 7
        for name in (*anchors, *(schema[key] for key in ("$anchor", "$dynamicAnchor") if key in schema)):
            self._by_uri.setdefault(f"{base}#{name}", path)
        self._dynamic.update([schema["$dynamicAnchor"]] if "$dynamicAnchor" in schema else [])
        return base

    def _at(self, path: str, pointer: str) -> str | None:
        """Resolve a JSON pointer relative to `path`, and return the target's path, or None if the target is missing."""
        found: Any = self.root
        steps = [*path.split("/")[1:], *map(unquote, pointer.split("/")[1:])]
        at = "#"
        for step in steps:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(found):
                found = found[int(key[:9])]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return None
            at = f"{at}/{_escaped(key)}"
        if at not in self._by_path:
            self._add_schemas(found, at, self.nodes[self._by_path[path]].base)
        return at


def _schemas_within(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the relative path of each subschema in a schema's keywords, and the subschema itself."""
    for name, value in schema.items():
        where = KEYWORDS[name].inner if name in KEYWORDS else ""
        if where.startswith("one") and not isinstance(value, list):
            yield name, value
        elif where in ("list", "one or list"):
            yield from ((f"{name}/{at}", each) for at, each in enumerate(value))
        elif where.startswith("map"):
            yield from ((f"{name}/{_escaped(key)}", each) for key, each in value.items() if not isinstance(each, list))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _finite_number(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is too large or is not a number")
    return float(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {show(twice)} occurs twice")
    return found
