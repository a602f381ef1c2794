"""Test `cellama webhooks`, which shows a secret once, lists endpoints without it, and deletes them by id."""

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
    """Yield a connection to an empty database, which the settings name."""
    with empty_database(redis_server, 9) as url, Redis.from_url(url) as redis:
        settings_environment(redis_url=url)
        yield redis


def test_webhooks_create_shows_the_secret_once(database: Redis) -> None:
    made = cellama("create", URL, "--tenant", "acme", "--event", "batch.completed")
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    assert key_of(secret)
    [endpoint] = json.loads(cellama("list", "--json").stdout)
    shown = [endpoint[name] for name in ("url", "tenant", "events", "state")]
    assert shown == [URL, "acme", ["batch.completed"], "on"]
    assert secret not in cellama("list", "--json").stdout + cellama("list").stdout


def test_webhooks_delete_removes_an_endpoint_by_id(database: Redis) -> None:
    made = json.loads(cellama("create", URL, "--json").stdout)
    assert json.loads(cellama("delete", made["id"], "--json").stdout) == {"id": made["id"], "deleted": True}
    assert json.loads(cellama("list", "--json").stdout) == []
    assert "unknown endpoint" in cellama("delete", made["id"]).stderr


def test_webhooks_create_warns_about_urls_that_gateways_do_not_call(
    database: Redis, settings_environment: Settle
) -> None:
    setting = "gateway_webhook_private"
    assert setting in cellama("create", "http://10.0.0.1/hooks").stderr
    assert setting not in cellama("create", URL).stderr
    settings_environment(gateway_webhook_private="true")
    assert setting not in cellama("create", "http://10.0.0.1/hooks").stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("ftp://example.org",), "url is 'ftp://example.org': the URL must start with https://"),
        ((URL, "--event", "batch.begun"), "batch.completed"),
    ],
)
def test_webhooks_create_rejects_an_invalid_endpoint(database: Redis, argv: tuple[str, ...], message: str) -> None:
    refused = cellama("create", *argv)
    assert (refused.exit_code, message in refused.stderr) == (2, True)
