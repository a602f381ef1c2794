"""Test the completion of truncated JSON objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cellama.api.anthropic.answers import completed

VALUES = st.recursive(
    st.text(max_size=4) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@pytest.mark.parametrize(
    ("cut", "known"),
    [
        ("", {}),
        ("{", {}),
        ('{"a', {}),
        ('{"a": "b', {}),
        ('{"a": "b"', {"a": "b"}),
        ('{"a": 12', {}),
        ('{"a": 12, "b', {"a": 12}),
        ('{"a": [1, {"b": "c', {"a": [1, {}]}),
        ('{"a": "}\\"", "b": {', {"a": '}"', "b": {}}),
    ],
)
def test_completed_returns_all_complete_members(cut: str, known: dict[str, Any]) -> None:
    assert json.loads(completed(cut)) == known


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.data())
def test_completed_object_is_a_subset_of_the_original(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    known = json.loads(completed(text[: data.draw(st.integers(0, len(text)))]))
    assert list(known) == list(value)[: len(known)]
    assert all(known[name] == value[name] for name in list(known)[:-1])
    assert json.loads(completed(text)) == value
