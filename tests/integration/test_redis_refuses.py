"""If Redis refuses commands, producers and the command line get one clear error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from cellama.api.machine.redis_server import RedisServer
from cellama.config import mask_url
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.contract.keys import job_key
from cellama.tasks.state.ledger import Ledger

from ..conftest import PATIENCE_S, clean_environment
from .ledgers import begin, submit

COMMAND_LINE = ("from cellama.api.cli import main; main()", "generate", "tiny", "Hi", "--wait")
PRODUCER = """
from cellama.tasks import generate
from cellama.tasks.contract.errors import RedisFull
for call in (lambda: generate.delay("tiny", "Hi"), lambda: generate.apply_many([(("tiny", "Hi"), {})] * 2)):
    try:
        call()
    except RedisFull as error:
        print(error.code, error)
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer.start(tmp_path / "redis", admin_commands=True) as server:
        yield server


@pytest.fixture
def run(server: RedisServer, tmp_path: Path) -> Run:
    def run(*argv: str, url: str = server.url) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(CELLAMA_REDIS_URL=url, COLUMNS="200")
        return subprocess.run(
            [sys.executable, "-c", *argv],
            cwd=tmp_path, env=environment, capture_output=True, timeout=PATIENCE_S, text=True,
        )  # fmt: skip

    return run


def test_full_redis_raises_redis_full(server: RedisServer, run: Run) -> None:
    with Redis.from_url(server.url) as redis:
        redis.config_set("maxmemory", 1)
    told = f"Redis at {mask_url(server.url)} is full: it has reached its maxmemory"
    line = run(*COMMAND_LINE)
    assert (line.returncode, line.stderr.count(told)) == (3, 1), line.stderr
    produced = run(PRODUCER).stdout.splitlines()
    assert [one.startswith(f"redis_full {told}") for one in produced] == [True, True]
    assert "the first 0 of 2 jobs are queued" in produced[1]
    assert "Traceback" not in line.stderr


@pytest.mark.parametrize(("setting", "refusing"), [("maxmemory", 1), ("min-replicas-to-write", 1)])
def test_temporary_refusals_are_retried(server: RedisServer, setting: str, refusing: int) -> None:
    """A full Redis, or a master without replicas during a failover, does not end any job."""
    with connect(server.url) as redis:
        ledger = Ledger(redis)
        job_id = submit(ledger, "cellama:queue:refused")
        redis.config_set(setting, refusing)
        with pytest.raises(RedisError) as refused:
            begin(ledger, job_id)
        assert is_passing(refused.value)
        redis.config_set(setting, 0)
        redis.set(job_key("spoiled"), "no hash")
        with pytest.raises(RedisError) as refused:
            begin(ledger, "spoiled")
        assert not is_passing(refused.value)
        assert begin(ledger, job_id).verdict == "run"


def test_error_names_the_command_that_the_acl_denies(server: RedisServer, run: Run) -> None:
    with Redis.from_url(server.url) as redis:
        redis.acl_setuser(
            "poor", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"], commands=["+@all", "-evalsha", "-eval"]
        )
    line = run(*COMMAND_LINE, url=f"redis://poor:pw@127.0.0.1:{server.port}/0")
    assert line.returncode == 3
    assert "poor:***@127.0.0.1" in line.stderr
    assert "evalsha" in line.stderr
    assert "Traceback" not in line.stderr


@pytest.mark.parametrize(("password", "why"), [("", "it requires a password"), (":guess@", "are wrong")])
def test_missing_and_wrong_passwords_cause_clear_errors(tmp_path: Path, run: Run, password: str, why: str) -> None:
    with RedisServer.start(tmp_path / "closed", password="secret") as closed:
        url = f"redis://{password}127.0.0.1:{closed.port}/0"
        for command in (COMMAND_LINE, (COMMAND_LINE[0], "up", "--no-flower")):
            done = run(*command, url=url)
            assert (done.returncode, why in done.stderr) == (3, True), done.stderr
            assert "redis://:PASSWORD@HOST:PORT/0" in done.stderr
            assert ("--redis redis://127.0.0.1:" in done.stderr) == ("up" in command)
            assert "guess" not in done.stderr
