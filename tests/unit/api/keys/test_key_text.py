"""What a key looks like, and where a client puts it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cellama.api.keys.entry import new_key, parse_key, sent_key


def test_new_keys_differ_and_are_read_back_with_their_digests() -> None:
    keys = [new_key() for _ in range(100)]
    assert len({key.text for key in keys}) == len({key.id for key in keys}) == 100
    for key in keys:
        read = parse_key(key.text)
        assert read == key
        assert key.has_digest(key.digest)
        assert not key.has_digest(keys[0].digest) or key is keys[0]


def test_key_shows_its_id_alone() -> None:
    key = new_key()
    assert key.text.rpartition("-")[2] not in repr(key) + key.digest


@given(st.text())
def test_key_is_none_whatever_else_is_sent(text: str) -> None:
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
        lambda text: text[:-1] + "٣",  # a digit, but not one of ours
        lambda text: text * 100_000,
    ],
)
def test_key_that_was_changed_is_none(change: object) -> None:
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
def test_key_is_found_where_clients_put_it(headers: dict[str, str], key: str | None) -> None:
    assert sent_key(headers) == key
