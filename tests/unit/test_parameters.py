"""The types of parameters for type checkers (tasks/typed_tasks.py), against the payloads that check the values."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

from cellama.tasks import typed_tasks
from cellama.tasks.contract.all_kinds import KINDS

TYPED: dict[str, Any] = {
    kind.task: getattr(typed_tasks, kind.payload.__name__.removesuffix("Job") + "Params")
    for kind in KINDS.values()
    if kind.is_public
}
CONTENT: dict[str, Any] = {
    "prompt": "Hi",
    "messages": [{"role": "user", "content": "Hi"}],
    "texts": "Hi",
    "query": "Hi",
    "documents": "Hi",
    "text": "Hi",
    "tokens": [1],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
VALUES = (
    *("ab" * 32, [{"role": "user", "content": "Hi"}]),
    *(
        None,
        True,
        1,
        0.5,
        "1",
        "root",
        "list",
        ["a"],
        [("a", 0.5)],
        [(1, 0.5)],
        {"a": 0.5},
        {1: 0.5},
        [1],
        {},
        [TOOL],
        [{"text": "a"}],
    ),
    *({"type": "object"}, {"type": "function", "function": {"name": "look"}}, {"a": ["b"]}, b"a"),
)
FIELDS = [(task, name) for task, typed in TYPED.items() for name in get_type_hints(typed)]


@pytest.mark.parametrize(("task", "name"), FIELDS)
def test_parameter_type_accepts_the_same_values_as_its_payload(task: str, name: str) -> None:
    """Each takes something; what a type checker lets pass is refused for its range alone, if at all."""
    accepted = [value for value in VALUES if fits(TYPED[task], name, value)]
    assert accepted
    refused = [value for value in accepted if "type" in " ".join(problems(task, name, value))]
    assert not refused, [problems(task, name, value) for value in refused]
    plain = [value for value in VALUES if type(value) in (bool, int, float, type(None))]
    taken = [value for value in plain if not problems(task, name, value)]
    assert all(fits(TYPED[task], name, value) for value in taken), taken


def fits(typed: Any, name: str, value: Any) -> bool:
    """Whether a type checker would let the value pass."""
    adapter = TypeAdapter(get_type_hints(typed)[name], config=ConfigDict(strict=True))
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def problems(task: str, name: str, value: Any) -> list[str]:
    """Return the kinds of errors that the payload reports for a value."""
    kind = KINDS[task]
    content = {each: CONTENT[each] for each in kind.positional if each != "model"}
    try:
        kind.payload.model_validate({"model": "tiny", **content, name: value})
    except ValidationError as error:
        return [problem["type"] for problem in error.errors()]
    return []
