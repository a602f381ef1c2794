"""Test key files: both formats, errors that name the field, and changes at run time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cellama.api.keys.managing import as_toml
from cellama.api.keys.store import KeyFile, read_keys
from cellama.config import SettingsError

from ..http.keys.conftest import key_and_entry

EVERYTHING = {
    "name": 'the "web" shop ✓',
    "models": ["tiny", "qwen2.5:7b"],
    "priority": "flex",
    "requests_per_minute": 60,
    "tokens_per_minute": 10_000,
    "concurrent_jobs": 4,
    "created_at": "2026-01-01T00:00:00Z",
    "expires_at": "2027-01-01T00:00:00+01:00",
}


def test_key_file_may_contain_json_or_the_toml_that_the_command_prints(tmp_path: Path) -> None:
    entries = [key_and_entry(**EVERYTHING)[1], key_and_entry()[1]]
    (tmp_path / "keys.toml").write_text("\n\n".join(map(as_toml, entries)), encoding="utf-8")
    values = {"keys": [entry.model_dump(mode="json") for entry in entries]}
    (tmp_path / "keys.json").write_text(json.dumps(values), encoding="utf-8")
    for name in ("keys.toml", "keys.json"):
        assert list(read_keys(tmp_path / name).values()) == entries


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('digest = "sk-oh-no-a-secret"', r"keys\.0\.digest: String should match"),
        ("expires_at = 2027-01-01T00:00:00", r"keys\.0\.expires_at: .*timezone"),
        ("requests_per_minute = 0", r"keys\.0\.requests_per_minute"),
        ("requests_per_min = 5", r"keys\.0\.requests_per_min: unknown field; use one of: id, digest"),
        ("models = []", r"keys\.0\.models"),
        ('tenant = "a b"', r"keys\.0\.tenant"),
        ('priority = "urgent"', r"keys\.0\.priority"),
        ("x = ", "can't be read"),
        ("\x00", "can't be read"),
    ],
)
def test_key_file_errors_name_the_field_without_revealing_secrets(tmp_path: Path, fields: str, expected: str) -> None:
    _, entry = key_and_entry()
    lines = [line for line in as_toml(entry).splitlines() if line.partition(" = ")[0] != fields.partition(" = ")[0]]
    (tmp_path / "keys.toml").write_text("\n".join([*lines, fields]), encoding="utf-8")
    with pytest.raises(SettingsError, match=expected) as raised:
        read_keys(tmp_path / "keys.toml")
    assert "secret" not in str(raised.value)


def test_missing_key_file_or_repeated_id_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        KeyFile(tmp_path / "keys.toml")
    _, entry = key_and_entry()
    (tmp_path / "keys.toml").write_text(f"{as_toml(entry)}\n{as_toml(entry)}", encoding="utf-8")
    with pytest.raises(SettingsError, match=f"{entry.id} occur more than once"):
        KeyFile(tmp_path / "keys.toml")


def test_key_file_is_reread_on_change_and_keeps_old_keys_when_invalid(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    (_, first), (_, second) = key_and_entry(), key_and_entry()
    path.write_text(as_toml(first))
    file = KeyFile(path)
    assert list(file.entries()) == [first.id]
    (tmp_path / "new").write_text(as_toml(second))
    (tmp_path / "new").replace(path)
    assert list(file.entries()) == [second.id]
    for broken in ("[[keys]", None):
        path.unlink() if broken is None else path.write_text(broken)
        assert list(file.entries()) == [second.id]
    path.write_text("keys = []\n")
    assert file.entries() == {}
