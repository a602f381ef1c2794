"""Write forms as a JSON Schema whose parts never overlap, so that llguidance does not have to merge schemas."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping

from cellama.engine.errors import InvalidRequest

from .document import SchemaDocument
from .formats import FORMATS
from .forms import MAX_ITEMS, ArrayForm, Form, FormBuilder, ObjectForm, SameForm
from .policy import Policy
from .scalars import MAX_BOUND, MAX_DECIMALS, Written, number_of
from .shapes import ANYTHING, NOTHING, Boolean, Condition, Null, Number, String

MAX_DEPTH = 128  # maximum chain of schemas that refer to each other; llguidance's stack overflows at about 500
_FEWER_ITEMS = 50  # maximum items per array if the grammar would otherwise be too large
_MAX_INLINE = 12  # nested schemas before one is moved to $defs
_MAX_FREE_DEPTH = 16  # maximum nesting of values without a schema
_ANY = "any"


class SchemaWriter:
    """Writes the schema of a condition, including the schemas of all nested conditions."""

    def __init__(self, builder: FormBuilder, document: SchemaDocument, policy: Policy, where: str) -> None:
        self._document = document
        self._builder = builder
        self._policy = policy
        self._where = where
        self.replacements: dict[String, Written | None] = {}  # strings to write differently, or None for no value
        self.dropped_patterns: set[str] = set()  # patterns of property names
        self._max_items = MAX_ITEMS
        self._forms: dict[Condition, list[Form]] = {}

    def write(self, root: Condition) -> Written:
        """Return the schema of a condition. Raises InvalidRequest if no value matches."""
        self._explore(root)
        self._satisfiable = self._conditions_that(self._has_value)
        self._complete = self._conditions_that(self._has_complete_value)
        if root not in self._satisfiable:
            raise self._document.error_at(
                self._contradiction(root), ": no value conforms to this schema; its conditions contradict each other"
            )
        self._check_depth(root)
        self._uses: dict[Condition, int] = {root: 1}
        for condition, forms in self._forms.items():
            for form in forms if condition in self._satisfiable else ():
                for inner in self._satisfiable_within(form):
                    self._uses[inner] = self._uses.get(inner, 0) + 1
        self._names: dict[Condition, str] = {}
        self._todo: deque[Condition] = deque()
        self._has_any = False
        written = self._condition(root, 0) if root != ANYTHING else self._any()
        definitions = {}
        while self._todo:
            condition = self._todo.popleft()
            definitions[self._names[condition]] = self._body(condition, 0)
        if self._has_any:
            definitions.update(_ANYTHING)
        return {**written, "$defs": definitions} if definitions else written

    def shorten_arrays(self) -> bool:
        """Lower large maxItems limits of arrays, and return whether the schema contains such limits."""
        self._max_items = _FEWER_ITEMS
        forms = (form for forms in self._forms.values() for form in forms if isinstance(form, ArrayForm))
        return any(form.max_items is not None and form.max_items > _FEWER_ITEMS for form in forms)

    def strings_with_patterns(self) -> list[String]:
        """Return the string forms that have a pattern or a format."""
        found = (form for forms in self._forms.values() for form in forms if isinstance(form, String))
        return list(dict.fromkeys(form for form in found if form.patterns or form.formats))

    def name_patterns(self) -> list[tuple[str, str]]:
        """Return the patterns in patternProperties, along with their paths."""
        found = (form for forms in self._forms.values() for form in forms if isinstance(form, ObjectForm))
        return list(dict.fromkeys((pattern, path) for form in found for pattern, _, path in form.patterns))

    def string(self, form: String) -> Written | None:
        """Return the schema of a string, or None if no string matches."""
        return self.replacements[form] if form in self.replacements else string_of(form)

    def _explore(self, root: Condition) -> None:
        """Build the forms of all conditions that can be reached from the root."""
        todo = deque([root])
        while todo:
            condition = todo.popleft()
            if condition in self._forms or condition in (ANYTHING, NOTHING):
                continue
            self._policy.spend()
            self._forms[condition] = self._builder.forms(condition)
            todo += [inner for form in self._forms[condition] for inner in _conditions_within(form)]

    def _conditions_that(self, has_value: Callable[[Form, Mapping[Condition, None]], bool]) -> dict[Condition, None]:
        """Return the conditions that a finite value can match.

        `has_value` returns whether any value can have the given form, assuming that the given conditions can be
        satisfied.
        """
        users: dict[Condition, set[Condition]] = {}
        for condition, forms in self._forms.items():
            for form in forms:
                for inner in _conditions_within(form):
                    users.setdefault(inner, set()).add(condition)
        found: dict[Condition, None] = {ANYTHING: None}
        todo = deque(self._forms)
        while todo:
            condition = todo.popleft()
            if condition not in found and any(has_value(form, found) for form in self._forms[condition]):
                found[condition] = None
                todo += users.get(condition, ())
        return found

    def _contradiction(self, condition: Condition) -> str:
        """Return the path of the innermost schema that alone makes a condition unsatisfiable."""
        path, seen = "#", set()
        while condition not in seen and condition not in (ANYTHING, NOTHING):
            seen.add(condition)
            path = self._document.nodes[condition[-1][0]].path
            forms = self._forms[condition]
            if len(forms) != 1:
                break
            required = _required_conditions(forms[0])
            condition = next((inner for inner in required if inner not in self._satisfiable), NOTHING)
        return path

    def _has_value(self, form: Form, satisfiable: Mapping[Condition, None]) -> bool:
        match form:
            case SameForm():
                return form.condition in satisfiable
            case ArrayForm():
                min_items = form.min_items or 0
                return all(condition in satisfiable for condition in form.prefix[:min_items]) and (
                    min_items <= len(form.prefix) or form.rest in satisfiable
                )
            case ObjectForm():
                if not all(condition in satisfiable for condition in _required_conditions(form)):
                    return False
                has_more = form.additional in satisfiable or any(
                    condition in satisfiable for _, condition, _ in form.patterns
                )
                return form.min_properties <= len(form.required) or has_more
            case Number():
                return number_of(form) is not None
            case String():
                return self.string(form) is not None
        return True

    def _has_complete_value(self, form: Form, complete: Mapping[Condition, None]) -> bool:
        """Return whether this form allows a value whose tuples contain as many items as the schema can satisfy."""
        if isinstance(form, ArrayForm) and form.min_items is None:
            return all(condition in complete for condition in self._satisfiable_prefix(form))
        return self._has_value(form, complete)

    def _satisfiable_prefix(self, form: ArrayForm) -> list[Condition]:
        """Return the conditions on the first items, up to the first condition that no value matches."""
        return list(itertools.takewhile(lambda condition: condition in self._satisfiable, form.prefix))

    def _satisfiable_within(self, form: Form) -> list[Condition]:
        return [condition for condition in _conditions_within(form) if condition in self._satisfiable]

    def _check_depth(self, root: Condition) -> None:
        """Raise InvalidRequest if references are nested too deeply for llguidance.

        llguidance follows each reference once, recursively and in the order of the schema.
        """
        seen: set[Condition] = set()
        todo = [(root, 0)]
        while todo:
            condition, depth = todo.pop()
            if condition in seen or condition == ANYTHING:
                continue
            seen.add(condition)
            if depth > MAX_DEPTH:
                raise InvalidRequest(
                    f"{self._where} has a chain of more than {MAX_DEPTH} schemas that refer to each other; flatten it"
                )
            inner = [each for form in self._forms[condition] for each in self._satisfiable_within(form)]
            todo += [(each, depth + 1) for each in reversed(inner)]

    # Writing

    def _condition(self, condition: Condition, depth: int) -> Written:
        if condition == ANYTHING:
            return self._any()
        if self._uses.get(condition, 0) > 1 and not self._is_small(condition):
            return self._reference(condition)
        return self._reference(condition) if depth > _MAX_INLINE else self._body(condition, depth)

    def _is_small(self, condition: Condition) -> bool:
        forms = self._forms[condition]
        return len(forms) == 1 and isinstance(forms[0], Null | Boolean | Number | String)

    def _reference(self, condition: Condition) -> Written:
        if condition not in self._names:
            self._names[condition] = f"s{len(self._names)}"
            self._todo.append(condition)
        return {"$ref": f"#/$defs/{self._names[condition]}"}

    def _any(self) -> Written:
        self._has_any = True
        return {"$ref": f"#/$defs/{_ANY}"}

    def _body(self, condition: Condition, depth: int) -> Written:
        forms = [form for form in self._forms[condition] if self._has_value(form, self._satisfiable)]
        written = [self._form(form, depth + 1) for form in forms]
        unique = [each for at, each in enumerate(written) if each not in written[:at]] if len(written) < 20 else written
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _form(self, form: Form, depth: int) -> Written:
        match form:
            case SameForm():
                return self._condition(form.condition, depth)
            case Null():
                return {"type": "null"}
            case Boolean():
                return {"type": "boolean"} if len(form.values) == 2 else {"const": form.values[0]}
            case Number():
                return number_of(form) or {}
            case String():
                return self.string(form) or {}
            case ArrayForm():
                return self._array(form, depth)
            case ObjectForm():
                return self._object(form, depth)

    def _array(self, form: ArrayForm, depth: int) -> Written:
        conditions = self._satisfiable_prefix(form)
        prefix = [self._condition(condition, depth) for condition in conditions]
        max_items = form.max_items if len(prefix) == len(form.prefix) else len(prefix)
        if max_items is not None:
            max_items = min(max_items, max(self._max_items, len(prefix), form.min_items or 0))
        min_items = form.min_items
        if min_items is None:
            min_items = len(prefix) if all(condition in self._complete for condition in conditions) else 0
        written: Written = {"type": "array"}
        if prefix:
            written["prefixItems"] = prefix
        has_rest = form.rest in self._satisfiable and (max_items is None or max_items > len(prefix))
        written["items"] = self._condition(form.rest, depth) if has_rest else False
        if not has_rest:
            max_items = len(prefix)
        if min_items:
            written["minItems"] = min_items if max_items is None else min(min_items, max_items)
        if max_items is not None:
            written["maxItems"] = max_items
        return written

    def _object(self, form: ObjectForm, depth: int) -> Written:
        written: Written = {"type": "object"}
        if form.properties:
            # Impossible properties are also written, because an additional property must not have their names.
            written["properties"] = {name: self._or_false(each, depth) for name, each in form.properties}
        required = [name for name, _ in form.properties if name in form.required]
        if required:
            written["required"] = required
        patterns = {
            pattern: self._or_false(condition, depth)
            for pattern, condition, _ in form.patterns
            if pattern not in self.dropped_patterns
        }
        if patterns:
            written["patternProperties"] = patterns
        written["additionalProperties"] = self._or_false(form.additional, depth)
        if form.min_properties:
            written["minProperties"] = form.min_properties
        if form.max_properties is not None:
            written["maxProperties"] = form.max_properties
        return written

    def _or_false(self, condition: Condition, depth: int) -> Written | bool:
        """Return the schema of a condition, or False if no value matches."""
        return self._condition(condition, depth) if condition in self._satisfiable else False


def string_of(form: String) -> Written:
    """Return the schema of a string form with its patterns, formats, and values or lengths."""
    patterns = [*(pattern for pattern, _ in form.patterns), *(FORMATS[name] for name, _ in form.formats)]
    if form.values is not None:
        first: Written = {"enum": list(form.values)}
    else:
        first = {"type": "string"}
        if patterns:
            first["pattern"] = patterns.pop(0)
        if form.min_length:
            first["minLength"] = form.min_length
        if form.max_length is not None:
            first["maxLength"] = form.max_length
    return {"allOf": [first, *({"type": "string", "pattern": each} for each in patterns)]} if patterns else first


def _required_conditions(form: Form) -> list[Condition]:
    """Return the conditions that must be satisfiable for any value to have the form."""
    match form:
        case SameForm():
            return [form.condition]
        case ArrayForm():
            return list(form.prefix[: form.min_items or 0])
        case ObjectForm():
            return [condition for name, condition in form.properties if name in form.required]
    return []


def _conditions_within(form: Form) -> list[Condition]:
    match form:
        case SameForm():
            return [form.condition]
        case ArrayForm():
            return [*form.prefix, form.rest]
        case ObjectForm():
            named = [condition for _, condition in form.properties]
            return [*named, *(condition for _, condition, _ in form.patterns), form.additional]
    return []


_SCALAR: Written = {
    "anyOf": [
        {"type": "string"},
        {"type": "number", "minimum": -MAX_BOUND, "maximum": MAX_BOUND, "multipleOf": 10.0**-MAX_DECIMALS},
        {"type": "boolean"},
        {"type": "null"},
    ]
}


def _free(depth: int) -> Written:
    """Return a schema for any value that is nested at most `depth` levels deep."""
    if depth == 0:
        return {"$ref": f"#/$defs/{_ANY}-scalar"}
    inner = {"$ref": f"#/$defs/{_ANY}-{depth - 1}"}
    return {
        "anyOf": [
            {"$ref": f"#/$defs/{_ANY}-scalar"},
            {"type": "array", "items": inner},
            {"type": "object", "additionalProperties": inner},
        ]
    }


_ANYTHING: Written = {
    f"{_ANY}-scalar": _SCALAR,
    _ANY: {"$ref": f"#/$defs/{_ANY}-{_MAX_FREE_DEPTH}"},
    **{f"{_ANY}-{depth}": _free(depth) for depth in range(_MAX_FREE_DEPTH + 1)},
}
