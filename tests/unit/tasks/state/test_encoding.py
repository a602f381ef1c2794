"""JSON of events, results and vectors: valid UTF-8, exact numbers, and parts that are encoded already."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from kombu.utils.json import dumps as celery_dumps

from cellama.tasks.attempt.vectors import as_base64, as_list
from cellama.tasks.contract.json_values import Encoded, encode
from cellama.tasks.state.ledger import MAX_ENTRY_BYTES, Entry

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda values: st.lists(values, max_size=3)))
def test_encode_produces_the_same_json_as_json_dumps(value: Any) -> None:
    assert json.loads(encode(value)) == value


@given(st.text(st.characters()), st.lists(st.integers()))
def test_encoded_parts_are_inserted_at_their_positions(text: str, numbers: list[int]) -> None:
    part = Encoded(json.dumps(numbers).encode())
    value = {"text": text, "parts": [part, [part]], "n": 1}
    expected = {"text": text, "parts": [numbers, [numbers]], "n": 1}
    assert json.loads(encode(value)) == expected
    assert json.loads(celery_dumps(value)) == expected


@pytest.mark.parametrize("text", ["\ud800", "a\udce9b", "\ude00\ud83d"])
def test_encode_returns_valid_utf8_for_any_text(text: str) -> None:
    assert set(json.loads(encode({text: [text]})).popitem()[1][0]) <= set("ab?")


@pytest.mark.parametrize("value", [{1}, object(), b"x", {"a": [Encoded(b"1"), object()]}])
def test_encode_rejects_values_that_json_cannot_represent(value: Any) -> None:
    with pytest.raises(TypeError):
        encode(value)


def test_entry_above_the_size_limit_is_rejected() -> None:
    with pytest.raises(ValueError, match=f"the limit is {MAX_ENTRY_BYTES}"):
        Entry(job_id="a", run="1", event={"seq": 0, "type": "line", "result": Encoded(bytes(MAX_ENTRY_BYTES))})


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-1, 1, width=32)))
def test_numbers_in_unit_vectors_have_eight_exact_decimals(vector: Any) -> None:
    stored = json.loads(as_list(vector, unit=True).json)
    assert np.abs(np.array(stored) - vector.astype("f8")).max() <= 0.5e-8 + 1e-15
    assert stored == [float(f"{value:.8f}") for value in np.asarray(stored)]


@given(arrays(np.float32, (3, 5), elements=FLOATS), st.booleans())
def test_numbers_in_other_vectors_are_exact(vectors: Any, unit: bool) -> None:
    scaled = vectors * np.float32(0.5) + np.float32(20)
    stored = json.loads(as_list(scaled, unit=unit).json)
    assert np.array_equal(np.array(stored, dtype=np.float32), scaled)


@given(arrays(np.float32, (2, 3), elements=FLOATS))
def test_base64_contains_little_endian_floats_row_by_row(vectors: Any) -> None:
    data = base64.b64decode(json.loads(as_base64(vectors).json))
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(2, 3), vectors)
