"""Test the header that lists the warnings of an answer."""

from __future__ import annotations

import json

from cellama.api.http.running import MAX_HEADER_CHARS, WARNINGS, warning_headers


def test_warning_header_is_a_json_array_in_ascii() -> None:
    warnings = ["json_schema at #/properties/größe: 'x' is ignored", "a\nb"]
    value = warning_headers({"warnings": warnings})[WARNINGS]
    assert value.isascii()
    assert value.isprintable()
    assert json.loads(value) == warnings


def test_warning_header_is_omitted_without_warnings() -> None:
    assert warning_headers({}) == warning_headers({"warnings": []}) == {}


def test_warning_header_counts_omitted_warnings_when_it_is_too_long() -> None:
    warnings = [f"{number} {'ü' * 100}" for number in range(30)]
    value = warning_headers({"warnings": warnings})[WARNINGS]
    shown = json.loads(value)
    assert len(value) <= MAX_HEADER_CHARS
    assert shown == [*warnings[: len(shown) - 1], f"and {len(warnings) - len(shown) + 1} more"]
    assert json.loads(warning_headers({"warnings": ["x" * MAX_HEADER_CHARS]})[WARNINGS]) == ["and 1 more"]
