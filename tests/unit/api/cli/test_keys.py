"""Test `cellama keys`, which shows a key once, lists it without its secret, and revokes it by its id."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from cellama.api.cli import app
from cellama.api.keys.entry import parse_key
from cellama.api.keys.store import read_keys
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.keys import api_keys_used_key

from ....conftest import empty_database

LIMITS_SHOWN = ("60 req/min", "10000 tok/min", "4 jobs", "until 2", "2030-03-17")
LIMITS = ("--requests-per-minute", "60", "--tokens-per-minute", "10000", "--concurrent-jobs", "4")


def cellama(*argv: str, columns: int = 200) -> Result:
    return CliRunner().invoke(app, ["keys", *argv], env={"COLUMNS": str(columns)})


@pytest.fixture
def database(redis_server: RedisServer, settings_environment: Callable[..., None]) -> Iterator[Redis]:
    """Yield a connection to an empty database, which the settings name."""
    with empty_database(redis_server, 6) as url, Redis.from_url(url) as redis:
        settings_environment(redis_url=url)
        yield redis


def test_key_is_shown_once_and_listed_without_its_secret(database: Redis) -> None:
    made = cellama("create", "acme", "--name", "web shop", "-m", "tiny", "-m", "big", *LIMITS, "--expires-in", "90d")
    assert made.exit_code == 0, made.output
    key = parse_key(made.stdout.strip())
    assert key is not None
    assert f"cellama keys revoke {key.id}" in made.stderr
    [listed_key] = json.loads(cellama("list", "--json").stdout)
    shown = [listed_key[name] for name in ("id", "tenant", "models", "state")]
    assert shown == [key.id, "acme", ["big", "tiny"], "active"]
    database.hset(api_keys_used_key(), key.id, 1_899_979_200)
    listed = cellama("list", columns=80).stdout
    assert all(part in listed for part in (key.id, "acme: web shop", "big, tiny", *LIMITS_SHOWN)), listed
    secret, stored = key.text[-40:], b"".join(database.hvals("cellama:keys"))  # type: ignore[arg-type]
    assert secret.encode() not in stored
    assert secret not in cellama("list", "--json").stdout + cellama("list").stdout


@pytest.mark.parametrize(
    ("options", "adapters"),
    [([], None), (["--adapter", "pirate", "--adapter", "poet"], ["pirate", "poet"]), (["--no-adapters"], [])],
)
def test_keys_create_stores_the_allowed_adapters(
    database: Redis, options: list[str], adapters: list[str] | None
) -> None:
    cellama("create", "acme", *options)
    assert json.loads(cellama("list", "--json").stdout)[0]["adapters"] == adapters
    assert cellama("create", "acme", "--adapter", "pirate", "--no-adapters").exit_code == 2


def test_keys_list_does_not_interpret_markup_in_names(database: Redis) -> None:
    cellama("create", "acme", "--name", "[/bold] [red]shop")
    assert "[/bold] [red]shop" in cellama("list").stdout


def test_keys_revoke_accepts_the_id_or_the_key(database: Redis) -> None:
    keys = [json.loads(cellama("create", "acme", "--json").stdout) for _ in range(2)]
    assert cellama("revoke", keys[0]["id"]).stdout == f"revoked key {keys[0]['id']} of tenant acme\n"
    again = [json.loads(cellama("revoke", keys[0]["id"], "--json").stdout) for _ in range(2)]
    assert again[0] == again[1]
    assert json.loads(cellama("revoke", keys[1]["key"], "--json").stdout)["state"] == "revoked"
    assert [key["state"] for key in json.loads(cellama("list", "--json").stdout)] == ["revoked", "revoked"]
    unknown = cellama("revoke", "nonsense")
    assert (unknown.exit_code, "`cellama keys list`" in unknown.stderr) == (2, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("a b",), "tenant is 'a b': the value must be 1 to 64 letters"),
        (("acme", "--requests-per-minute", "0"), "requests_per_minute is 0"),
        (("acme", "--priority", "urgent"), "priority is 'urgent'"),
        (("acme", "--expires-in", "soon"), "use, for example, 30m, 12h, 90d or 4w"),
        (("acme", "--expires-in", "99999w"), "invalid duration"),
    ],
)
def test_keys_create_rejects_invalid_options(database: Redis, argv: tuple[str, ...], message: str) -> None:
    result = cellama("create", *argv)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in re.sub(r"\s*│\s*", " ", result.stderr)
    assert "no API keys" in cellama("list").stdout


def test_keys_create_prints_an_entry_and_stores_nothing_when_keys_are_in_a_file(
    database: Redis, settings_environment: Callable[..., None], tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"  # it does not exist before the first key
    settings_environment(gateway_keys_file=str(path))
    made = cellama("create", "acme", "--name", "web", *LIMITS, "--expires-in", "4w")
    key, _, entry = made.stdout.partition("\n")
    path.write_text(entry)
    [stored] = read_keys(path).values()
    parsed = parse_key(key)
    assert parsed is not None
    assert parsed.has_digest(stored.digest)
    assert database.hlen("cellama:keys") == 0
    assert [key["name"] for key in json.loads(cellama("list", "--json").stdout)] == ["web"]
    refused = cellama("revoke", stored.id)
    assert (refused.exit_code, "delete the entry there" in re.sub(r"\s*│\s*", " ", refused.stderr)) == (2, True)
