"""Test the format of keys, and the headers that clients send them in."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cellama.api.keys.entry import KeyEntry, new_key, parse_key, sent_key


def test_new_keys_differ_and_match_their_digests() -> None:
    keys = [new_key() for _ in range(100)]
    assert len({key.text for key in keys}) == len({key.id for key in keys}) == 100
    for key in keys:
        read = parse_key(key.text)
        assert read == key
        assert key.has_digest(key.digest)
        assert not key.has_digest(keys[0].digest) or key is keys[0]


def test_repr_of_key_contains_only_its_id() -> None:
    key = new_key()
    assert key.text.rpartition("-")[2] not in repr(key) + key.digest


@given(st.text())
def test_parse_key_returns_none_when_the_text_is_not_a_key(text: str) -> None:
    assert parse_key(text) is None
    assert parse_key(f"sk-{text}") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "\n",
        lambda text: text.upper(),
        lambda text: text.replace("sk-", "pk-"),
        lambda text: text[:-1],
        lambda text: text + "a",
        lambda text: text[:-1] + "é",
        lambda text: text[:-1] + "٣",  # a digit that is not ASCII
        lambda text: text * 100_000,
    ],
)
def test_parse_key_returns_none_for_altered_key(change: object) -> None:
    assert callable(change)
    assert parse_key(change(new_key().text)) is None


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer sk-1"}, "sk-1"),
        ({"authorization": "bearer  sk-1 "}, "sk-1"),
        ({"x-api-key": "sk-1"}, "sk-1"),
        ({"authorization": "Bearer sk-1", "x-api-key": "sk-2"}, "sk-1"),
        ({"authorization": "Basic abc", "x-api-key": "sk-2"}, "sk-2"),
        ({"authorization": "Bearer ", "x-api-key": "sk-2"}, "sk-2"),
        ({"authorization": "sk-1"}, None),
        ({"authorization": "Bearer"}, None),
        ({"x-api-key": "  "}, None),
        ({}, None),
    ],
)
def test_sent_key_accepts_both_headers(headers: dict[str, str], key: str | None) -> None:
    assert sent_key(headers) == key


def test_entry_omits_admin_unless_it_is_set() -> None:
    key = new_key()
    fields = {"id": key.id, "digest": key.digest, "tenant": "acme"}
    assert "admin" not in KeyEntry.model_validate(fields).model_dump_json()
    assert "admin" not in KeyEntry.model_validate({**fields, "admin": False}).model_dump(mode="json")
    admin = KeyEntry.model_validate({**fields, "admin": True})
    assert KeyEntry.model_validate_json(admin.model_dump_json(exclude_none=True)) == admin
