"""`cellama webhooks`: a secret is shown once, endpoints are listed without it, and deleted by their id."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from cellama.api.cli import app
from cellama.api.machine.redis_server import RedisServer
from cellama.api.webhooks.endpoints import key_of

from ....conftest import empty_database

URL = "https://example.org/hooks"
Settle = Callable[..., None]


def cellama(*argv: str) -> Result:
    return CliRunner().invoke(app, ["webhooks", *argv], env={"COLUMNS": "200"})


@pytest.fixture
def database(redis_server: RedisServer, settings_environment: Settle) -> Iterator[Redis]:
    """An empty one, that of the settings."""
    with empty_database(redis_server, 9) as url, Redis.from_url(url) as redis:
        settings_environment(redis_url=url)
        yield redis


def test_secret_is_shown_once(database: Redis) -> None:
    made = cellama("create", URL, "--tenant", "acme", "--event", "batch.completed")
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    assert key_of(secret)
    [told] = json.loads(cellama("list", "--json").stdout)
    assert (told["url"], told["tenant"], told["events"], told["state"]) == (URL, "acme", ["batch.completed"], "on")
    assert secret not in cellama("list", "--json").stdout + cellama("list").stdout


def test_endpoint_is_deleted_by_its_id(database: Redis) -> None:
    made = json.loads(cellama("create", URL, "--json").stdout)
    assert json.loads(cellama("delete", made["id"], "--json").stdout) == {"id": made["id"], "deleted": True}
    assert json.loads(cellama("list", "--json").stdout) == []
    assert "there is no endpoint" in cellama("delete", made["id"]).stderr


def test_endpoint_that_gateways_do_not_call_is_told_of(database: Redis, settings_environment: Settle) -> None:
    told = "gateway_webhook_private"
    assert told in cellama("create", "http://10.0.0.1/hooks").stderr
    assert told not in cellama("create", URL).stderr
    settings_environment(gateway_webhook_private="true")
    assert told not in cellama("create", "http://10.0.0.1/hooks").stderr


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("ftp://example.org",), "url is 'ftp://example.org': it must start with https://"),
        ((URL, "--event", "batch.begun"), "batch.completed"),
    ],
)
def test_wrong_endpoint_is_refused(database: Redis, argv: tuple[str, ...], told: str) -> None:
    refused = cellama("create", *argv)
    assert (refused.exit_code, told in refused.stderr) == (2, True)
