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
from cellama.tasks.state.tenants import ServiceWriter

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


def queue_jobs(database: Redis) -> None:
    jobs = [submission(QUEUE, fairness_key=key) for key in ("acme", "acme", "acme/search", "", "acm")]
    Ledger(database).submit(jobs)
    service = ServiceWriter(database)
    for key, tokens in (("acme", 100.5), ("acme/search", 200.0), ("gone", 99.5), ("acme", 100.0)):
        service.note(key, tokens)
    service.flush()


def test_tenants_list_shows_jobs_service_and_weights(database: Redis) -> None:
    assert "no tenant" not in tenants("list").stdout  # the weights of the settings
    queue_jobs(database)
    assert tenants("set-weight", "other", "0.5").stdout == "weight of other: 0.5\n"
    found = json.loads(tenants("list", "--json").stdout)
    waiting = {share["key"]: share["num_waiting"] for share in found["waiting"]}
    assert waiting == {"": 1, "acm": 1, "acme": 2, "acme/search": 1}
    assert found["weights"] == {"acme": 2, "other": 0.5}
    assert {share["key"]: share["service"] for share in found["tenants"]} == {
        "acme": 200.5,
        "acme/search": 200.0,
        "gone": 99.5,
        "": 0.0,
        "acm": 0.0,
        "other": 0.0,
    }
    rows = {line.split()[0]: line.split()[1:] for line in tenants("list").stdout.splitlines() if line.strip()}
    assert rows["acme"] == ["2", "2", "0", "200", "40", "%"]
    assert rows["acme/search"] == ["1", "1", "0", "200", "40", "%"]
    assert rows["other"] == ["0.5", "0", "0", "0", "0", "%"]
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


def test_tenants_show_command_sums_the_keys_below_a_tenant_and_lists_its_queues(database: Redis) -> None:
    queue_jobs(database)
    found = json.loads(tenants("show", "acme", "--json").stdout)
    assert (found["weight"], found["num_waiting"], found["num_running"]) == (2, 3, 0)
    assert (found["service"], found["fraction"]) == (400.5, pytest.approx(0.801))
    assert [share["key"] for share in found["keys"]] == ["acme", "acme/search"]
    assert [(share["queue"], share["key"], share["num_waiting"]) for share in found["queues"]] == [
        (QUEUE, "acme", 2),
        (QUEUE, "acme/search", 1),
    ]
    shown = tenants("show", "acme").stdout
    assert "acme: weight 2, 3 waiting jobs, 0 running, 400 tokens in the last hour (80 % of all)" in shown
    assert "acme/search" in shown
    assert "jobs without a key: weight 1, 1 waiting job, 0 running" in tenants("show", "").stdout
    assert tenants("show", "a//b").exit_code == 2


@pytest.mark.parametrize("argv", [("a//b", "2"), ("acme", "0"), ("acme", "many"), ("acme", "nan"), ("acme", "1e9")])
def test_tenants_set_weight_rejects_invalid_values(database: Redis, argv: tuple[str, str]) -> None:
    refused = tenants("set-weight", *argv)
    assert (refused.exit_code, "not valid" in refused.stderr) == (2, True)
