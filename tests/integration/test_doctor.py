"""`cellama doctor` runs as a process, on healthy and broken machines with a real Redis."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer, free_port
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.keys import workers_key
from cellama.tasks.state.registry import cellama_version

from ..conftest import WorkerProcess, clean_environment, worker_entry

CELLAMA = Path(sys.executable).parent / "cellama"
REDIS_FINDINGS = {"Redis", "Redis memory", "Redis persistence", "clock", "workers"}
WITHOUT_LLAMA_CPP = "import sys\nsys.modules['llama_cpp'] = None\n"  # then it can't be found or imported


@pytest.fixture
def private_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis for this test only, which accepts CONFIG."""
    with RedisServer.start(tmp_path / "redis", admin_commands=True) as server:
        yield server


def doctor(folder: Path, url: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(CELLAMA_REDIS_URL=url, CELLAMA_DATA_DIR=str(folder), COLUMNS="80", **variables)
    command = [str(CELLAMA), "doctor", *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def report(folder: Path, url: str, code: Exit, **variables: str) -> dict[str, dict[str, Any]]:
    """Check the exit code, and return the findings by name. If several have the same name, return the worst."""
    done = doctor(folder, url, "--json", **variables)
    assert done.returncode == code, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] == (code == Exit.OK)
    ranks = ("ok", "warning", "error")
    found = sorted(document["findings"], key=lambda each: ranks.index(each["level"]))
    assert all(each["remedy"] for each in found if each["level"] != "ok")
    return {each["name"]: each for each in found}


def test_healthy_machine_has_no_errors(worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path) -> None:
    found = report(tmp_path, redis_server.url, Exit.OK)
    assert {name: found[name]["level"] for name in REDIS_FINDINGS} == dict.fromkeys(REDIS_FINDINGS, "ok")
    assert f"with cellama {cellama_version()}" in found["workers"]["found"]
    assert {"Python", "packages", "llama.cpp", "CPU", "GPU", "disk", "ports"} <= found.keys()
    text = doctor(tmp_path, redis_server.url)
    assert max(map(len, text.stdout.splitlines())) <= 80
    assert redis_server.password not in text.stdout + text.stderr


def test_missing_redis_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    start = time.monotonic()
    found = report(tmp_path, f"redis://:s3cret@127.0.0.1:{free_port()}/0", Exit.FAILED)
    assert time.monotonic() - start < 20
    assert found["Redis"]["level"] == "error"
    assert "does not answer" in found["Redis"]["found"]
    assert "cellama up" in found["Redis"]["remedy"]
    assert "s3cret" not in json.dumps(found)
    assert found["Python"]["level"] == "ok"


def test_wrong_password_is_an_error_and_is_not_printed(private_redis: RedisServer, tmp_path: Path) -> None:
    done = doctor(tmp_path / "redis", private_redis.url.replace(private_redis.password, "wr0ng"))
    assert done.returncode == Exit.FAILED
    assert "refused the connection" in " ".join(done.stdout.split())
    assert "wr0ng" not in done.stdout + done.stderr


def test_redis_eviction_is_an_error_and_missing_persistence_is_a_warning(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    with Redis.from_url(private_redis.url) as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")
        redis.config_set("appendonly", "no")
    found = report(tmp_path, private_redis.url, Exit.FAILED)
    assert found["Redis memory"]["level"] == "error"
    assert "maxmemory-policy is allkeys-lru" in found["Redis memory"]["found"]
    assert "CONFIG SET maxmemory-policy noeviction" in found["Redis memory"]["remedy"]
    assert found["Redis persistence"]["level"] == "warning"


def test_full_redis_is_an_error(private_redis: RedisServer, tmp_path: Path) -> None:
    with Redis.from_url(private_redis.url) as redis:
        redis.config_set("maxmemory", 1)
    found = report(tmp_path, private_redis.url, Exit.FAILED)
    assert "it has reached its maxmemory" in found["Redis writes"]["found"]


def test_machine_without_llama_cpp_and_compiler_can_send_jobs(private_redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LLAMA_CPP)
    hidden = {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path / "empty"), "CXX": ""}
    found = report(tmp_path, private_redis.url, Exit.OK, **hidden)["llama.cpp"]
    assert found["level"] == "warning"
    assert "not installed (llama_cpp)" in found["found"]
    assert "C++ compiler" in found["found"]
    assert "pip install 'cellama[worker]'" in found["remedy"]


def test_workers_of_two_versions_are_a_warning(private_redis: RedisServer, tmp_path: Path) -> None:
    with Redis.from_url(private_redis.url) as redis:
        for name, version in (("new@a", cellama_version()), ("old@b", "0.0.9")):
            entry = replace(worker_entry(name, seen_at=time.time()), cellama=version)
            redis.hset(workers_key(), name, json.dumps(asdict(entry)))
    found = report(tmp_path, private_redis.url, Exit.OK)["workers"]
    assert found["level"] == "warning"
    assert f"0.0.9 (old@b), {cellama_version()} (this command, new@a)" in found["found"]
    assert "upgrade" in found["remedy"]
