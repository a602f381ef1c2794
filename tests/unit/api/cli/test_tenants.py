"""Test `cellama tenants`, which lists waiting tenants and sets weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from cellama.api.cli import app
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.state.ledger import Ledger

from ....conftest import empty_database
from ....integration.ledgers import submission

QUEUE = "cellama:queue:m"


def tenants(*argv: str) -> Result:
    return CliRunner().invoke(app, ["tenants", *argv], env={"COLUMNS": "200"})


@pytest.fixture
def database(redis_server: RedisServer, settings_environment: Callable[..., None]) -> Iterator[Redis]:
    with empty_database(redis_server, 6) as url, Redis.from_url(url) as redis:
        settings_environment(redis_url=url, fairness_weights='{"acme": 2, "other": 5}')
        yield redis


def test_tenants_list_shows_waiting_jobs_and_weights(database: Redis) -> None:
    assert "no tenant" not in tenants("list").stdout  # the weights of the settings
    jobs = [submission(QUEUE, fairness_key=key) for key in ("acme", "acme", "acme/search", "", "acm")]
    Ledger(database).submit(jobs)
    assert tenants("set-weight", "other", "0.5").stdout == "weight of other: 0.5\n"
    found = json.loads(tenants("list", "--json").stdout)
    waiting = {share["key"]: share["num_waiting"] for share in found["waiting"]}
    assert waiting == {"": 1, "acm": 1, "acme": 2, "acme/search": 1}
    assert found["weights"] == {"acme": 2, "other": 0.5}
    shown = tenants("list").stdout
    assert all(part in shown for part in ("acme/search", QUEUE, "0.5")), shown
    tenants("set-weight", "other", "default")
    assert json.loads(tenants("list", "--json").stdout)["weights"]["other"] == 5


def test_tenants_list_shows_limits_and_the_jobs_that_count_against_them(database: Redis) -> None:
    Ledger(database).submit([submission(QUEUE, fairness_key="acme")])
    assert tenants("set-limit", "acme", "4").stdout == "limit of acme: 4\n"
    assert CliRunner().invoke(app, ["queue", "set-limit", "m", "8"]).stdout == "limit of m: 8\n"
    found = json.loads(tenants("list", "--json").stdout)
    assert (found["limits"], found["held"]) == ({"acme": 4, f"/{QUEUE}": 8}, {"acme": 0, f"/{QUEUE}": 0})
    assert all(part in tenants("list").stdout for part in ("0 of 4", "0 of 8", QUEUE))
    tenants("set-limit", "acme", "none")
    assert "acme" not in json.loads(tenants("list", "--json").stdout)["limits"]


@pytest.mark.parametrize("argv", [("a//b", "2"), ("acme", "0"), ("acme", "many"), ("acme", "-1")])
def test_tenants_set_limit_rejects_invalid_values(database: Redis, argv: tuple[str, str]) -> None:
    refused = tenants("set-limit", "--", *argv)
    assert (refused.exit_code, "not valid" in refused.stderr) == (2, True)


@pytest.mark.parametrize("argv", [("a//b", "2"), ("acme", "0"), ("acme", "many"), ("acme", "nan"), ("acme", "1e9")])
def test_tenants_set_weight_rejects_invalid_values(database: Redis, argv: tuple[str, str]) -> None:
    refused = tenants("set-weight", *argv)
    assert (refused.exit_code, "not valid" in refused.stderr) == (2, True)
