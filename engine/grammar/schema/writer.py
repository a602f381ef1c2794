"""Forms → the JSON Schema for llguidance, in which schemas never overlap, so that it merges none. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping

from cellama.engine.errors import InvalidRequest

from .document import Document
from .formats import FORMATS
from .forms import MAX_ITEMS, Form, Former, Items, Members, Same
from .policy import Policy
from .scalars import MAX_BOUND, MAX_DECIMALS, Written, number_of
from .shapes import ANYTHING, NOTHING, Boolean, Goal, Null, Number, String

MAX_DEPTH = 128  # schemas that lead to each other: llguidance's stack holds some 500
_FEWER_ITEMS = 50  # of each array, if the grammar is too large otherwise
_MAX_INLINE = 12  # schemas in schemas, before one gets a name
_MAX_FREE_DEPTH = 16  # of values that no schema describes
_ANY = "any"


class Writer:
    """Writes what a goal allows, with what its goals lead to."""

    def __init__(self, former: Former, document: Document, policy: Policy, where: str) -> None:
        self._document = document
        self._former = former
        self._policy = policy
        self._where = where
        self.instead: dict[String, Written | None] = {}  # strings that are written in another way, or can't be
        self.without: set[str] = set()  # patterns of names that are left out
        self._max_items = MAX_ITEMS
        self._forms: dict[Goal, list[Form]] = {}

    def write(self, root: Goal) -> Written:
        """Raises InvalidRequest if nothing matches."""
        self._explore(root)
        self._alive = self._productive(self._can)
        self._whole = self._productive(self._can_in_full)
        if root not in self._alive:
            raise self._document.refused(
                self._culprit(root), ": no value conforms to this schema; its conditions contradict each other"
            )
        self._check_depth(root)
        self._uses: dict[Goal, int] = {root: 1}
        for goal, forms in self._forms.items():
            for form in forms if goal in self._alive else ():
                for inner in self._children(form):
                    self._uses[inner] = self._uses.get(inner, 0) + 1
        self._names: dict[Goal, str] = {}
        self._todo: deque[Goal] = deque()
        self._has_any = False
        written = self._goal(root, 0) if root != ANYTHING else self._any()
        definitions = {}
        while self._todo:
            goal = self._todo.popleft()
            definitions[self._names[goal]] = self._body(goal, 0)
        if self._has_any:
            definitions.update(_ANYTHING)
        return {**written, "$defs": definitions} if definitions else written

    def shorten_arrays(self) -> bool:
        """Write fewer items of arrays with a large maxItems from now on. Returns whether there are some."""
        self._max_items = _FEWER_ITEMS
        forms = (form for forms in self._forms.values() for form in forms if isinstance(form, Items))
        return any(form.high is not None and form.high > _FEWER_ITEMS for form in forms)

    def strings_with_patterns(self) -> list[String]:
        """Those with a pattern or a format."""
        found = (form for forms in self._forms.values() for form in forms if isinstance(form, String))
        return list(dict.fromkeys(form for form in found if form.patterns or form.formats))

    def patterns_of_names(self) -> list[tuple[str, str]]:
        """The patterns that are keys of patternProperties, with their paths."""
        found = (form for forms in self._forms.values() for form in forms if isinstance(form, Members))
        return list(dict.fromkeys((pattern, path) for form in found for pattern, _, path in form.patterns))

    def _explore(self, root: Goal) -> None:
        todo = deque([root])
        while todo:
            goal = todo.popleft()
            if goal in self._forms or goal in (ANYTHING, NOTHING):
                continue
            self._policy.spend()
            self._forms[goal] = self._former.forms(goal)
            todo += [inner for form in self._forms[goal] for inner in _inner(form)]

    def _productive(self, can: Callable[[Form, Mapping[Goal, None]], bool]) -> dict[Goal, None]:
        """The goals that a finite value can match. `can` says whether a form has one if some goals have."""
        users: dict[Goal, set[Goal]] = {}
        for goal, forms in self._forms.items():
            for form in forms:
                for inner in _inner(form):
                    users.setdefault(inner, set()).add(goal)
        alive: dict[Goal, None] = {ANYTHING: None}
        todo = deque(self._forms)
        while todo:
            goal = todo.popleft()
            if goal not in alive and any(can(form, alive) for form in self._forms[goal]):
                alive[goal] = None
                todo += users.get(goal, ())
        return alive

    def _culprit(self, goal: Goal) -> str:
        """The path of the innermost schema that makes a goal impossible, if it is the only one."""
        path, seen = "#", set()
        while goal not in seen and goal not in (ANYTHING, NOTHING):
            seen.add(goal)
            path = self._document.nodes[goal[-1][0]].path
            forms = self._forms[goal]
            if len(forms) != 1:
                break
            needed = _needed(forms[0])
            goal = next((inner for inner in needed if inner not in self._alive), NOTHING)
        return path

    def _can(self, form: Form, alive: Mapping[Goal, None]) -> bool:
        match form:
            case Same():
                return form.goal in alive
            case Items():
                low = form.low or 0
                return all(goal in alive for goal in form.prefix[:low]) and (
                    low <= len(form.prefix) or form.rest in alive
                )
            case Members():
                if not all(goal in alive for name, goal in form.properties if name in form.required):
                    return False
                more = form.additional in alive or any(goal in alive for _, goal, _ in form.patterns)
                return form.low <= len(form.required) or more
            case Number():
                return number_of(form) is not None
            case String():
                return self.string(form) is not None
        return True

    def _can_in_full(self, form: Form, alive: Mapping[Goal, None]) -> bool:
        """As `_can`, where tuples have all of their items."""
        if isinstance(form, Items) and form.low is None:
            return all(goal in alive for goal in self._possible(form))
        return self._can(form, alive)

    def _possible(self, form: Items) -> list[Goal]:
        """The first items, up to one that nothing matches."""
        return list(itertools.takewhile(lambda goal: goal in self._alive, form.prefix))

    def _children(self, form: Form) -> list[Goal]:
        return [goal for goal in _inner(form) if goal in self._alive]

    def _check_depth(self, root: Goal) -> None:
        """llguidance follows references one in another, in the order of the schema, each of them once."""
        seen: set[Goal] = set()
        todo = [(root, 0)]
        while todo:
            goal, depth = todo.pop()
            if goal in seen or goal == ANYTHING:
                continue
            seen.add(goal)
            if depth > MAX_DEPTH:
                raise InvalidRequest(
                    f"{self._where} has more than {MAX_DEPTH} schemas that lead from one to the next; flatten it"
                )
            inner = [each for form in self._forms[goal] for each in self._children(form)]
            todo += [(each, depth + 1) for each in reversed(inner)]

    # Writing

    def _goal(self, goal: Goal, depth: int) -> Written:
        if goal == ANYTHING:
            return self._any()
        if self._uses.get(goal, 0) > 1 and not self._is_small(goal):
            return self._reference(goal)
        return self._reference(goal) if depth > _MAX_INLINE else self._body(goal, depth)

    def _is_small(self, goal: Goal) -> bool:
        forms = self._forms[goal]
        return len(forms) == 1 and isinstance(forms[0], Null | Boolean | Number | String)

    def _reference(self, goal: Goal) -> Written:
        if goal not in self._names:
            self._names[goal] = f"s{len(self._names)}"
            self._todo.append(goal)
        return {"$ref": f"#/$defs/{self._names[goal]}"}

    def _any(self) -> Written:
        self._has_any = True
        return {"$ref": f"#/$defs/{_ANY}"}

    def _body(self, goal: Goal, depth: int) -> Written:
        forms = [form for form in self._forms[goal] if self._can(form, self._alive)]
        written = [self._form(form, depth + 1) for form in forms]
        unique = [each for at, each in enumerate(written) if each not in written[:at]] if len(written) < 20 else written
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _form(self, form: Form, depth: int) -> Written:
        match form:
            case Same():
                return self._goal(form.goal, depth)
            case Null():
                return {"type": "null"}
            case Boolean():
                return {"type": "boolean"} if len(form.values) == 2 else {"const": form.values[0]}
            case Number():
                return number_of(form) or {}
            case String():
                return self.string(form) or {}
            case Items():
                return self._items(form, depth)
            case Members():
                return self._members(form, depth)

    def _items(self, form: Items, depth: int) -> Written:
        possible = self._possible(form)
        prefix = [self._goal(goal, depth) for goal in possible]
        high = form.high if len(prefix) == len(form.prefix) else len(prefix)
        if high is not None:
            high = min(high, max(self._max_items, len(prefix), form.low or 0))
        low = form.low
        if low is None:
            low = len(prefix) if all(goal in self._whole for goal in possible) else 0
        written: Written = {"type": "array"}
        if prefix:
            written["prefixItems"] = prefix
        has_rest = form.rest in self._alive and (high is None or high > len(prefix))
        written["items"] = self._goal(form.rest, depth) if has_rest else False
        if not has_rest:
            high = len(prefix)
        if low:
            written["minItems"] = low if high is None else min(low, high)
        if high is not None:
            written["maxItems"] = high
        return written

    def _members(self, form: Members, depth: int) -> Written:
        written: Written = {"type": "object"}
        if form.properties:
            # Those that can't be there stay: their names are none of the additional properties'.
            written["properties"] = {
                name: self._goal(goal, depth) if goal in self._alive else False for name, goal in form.properties
            }
        required = [name for name, _ in form.properties if name in form.required]
        if required:
            written["required"] = required
        patterns = {
            pattern: self._goal(goal, depth) if goal in self._alive else False
            for pattern, goal, _ in form.patterns
            if pattern not in self.without
        }
        if patterns:
            written["patternProperties"] = patterns
        is_open = form.additional in self._alive
        written["additionalProperties"] = self._goal(form.additional, depth) if is_open else False
        if form.low:
            written["minProperties"] = form.low
        if form.high is not None:
            written["maxProperties"] = form.high
        return written

    def string(self, form: String) -> Written | None:
        if form in self.instead:
            return self.instead[form]
        return string_of(form)


def string_of(form: String) -> Written:
    """A string with these patterns and formats, and with the form's values or length."""
    every = [*(pattern for pattern, _ in form.patterns), *(FORMATS[name] for name, _ in form.formats)]
    if form.values is not None:
        first: Written = {"enum": list(form.values)}
    else:
        first = {"type": "string"}
        if every:
            first["pattern"] = every.pop(0)
        if form.low:
            first["minLength"] = form.low
        if form.high is not None:
            first["maxLength"] = form.high
    return {"allOf": [first, *({"type": "string", "pattern": each} for each in every)]} if every else first


def _needed(form: Form) -> list[Goal]:
    """The goals without which nothing has the form."""
    match form:
        case Same():
            return [form.goal]
        case Items():
            return list(form.prefix[: form.low or 0])
        case Members():
            return [goal for name, goal in form.properties if name in form.required]
    return []


def _inner(form: Form) -> list[Goal]:
    match form:
        case Same():
            return [form.goal]
        case Items():
            return [*form.prefix, form.rest]
        case Members():
            return [*(goal for _, goal in form.properties), *(goal for _, goal, _ in form.patterns), form.additional]
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
