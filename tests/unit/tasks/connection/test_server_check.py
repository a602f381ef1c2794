"""The check for a Redis server that is a cluster or can lose jobs."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError, NoPermissionError

from cellama.tasks.connection.redis_errors import ServerCheck, UnfitRedis, problems_of


class Server:
    """A Redis server that replies to INFO with these answers, one after another."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    def info(self) -> Any:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_durable_redis_has_no_problems() -> None:
    assert problems_of({"maxmemory_policy": "noeviction", "aof_enabled": 1}) == []


def test_check_suggests_a_remedy_for_eviction_or_missing_persistence() -> None:
    evicts, forgets = problems_of({"maxmemory_policy": "allkeys-lru", "aof_enabled": 0})
    assert "maxmemory-policy is allkeys-lru" in evicts
    assert "noeviction" in evicts
    assert "set it to yes" in forgets


def test_check_rejects_a_cluster_when_redis_first_answers() -> None:
    check = ServerCheck()
    check.run(Server(RedisConnectionError("away")))  # type: ignore[arg-type]
    with pytest.raises(UnfitRedis, match="Redis Cluster"):
        check.run(Server({"cluster_enabled": 1}))  # type: ignore[arg-type]


def test_check_warns_once_and_works_without_permission_for_the_info_command(caplog: pytest.LogCaptureFixture) -> None:
    check = ServerCheck()
    for _ in range(2):
        check.run(Server({"aof_enabled": 0}))  # type: ignore[arg-type]
    assert caplog.text.count("appendonly is no") == 1
    ServerCheck().run(Server(NoPermissionError("no permission to run 'info'")))  # type: ignore[arg-type]
    assert "not checked" in caplog.text
