"""What is said about a Redis that would lose jobs."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError, NoPermissionError

from cellama.tasks.connection.redis_errors import ServerCheck, UnfitRedis, problems_of


class Server:
    """A Redis that answers INFO with each of these in turn."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    def info(self) -> Any:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_redis_that_keeps_everything_gets_no_warning() -> None:
    assert problems_of({"maxmemory_policy": "noeviction", "aof_enabled": 1}) == []


def test_redis_that_evicts_or_forgets_gets_a_warning_with_the_remedy() -> None:
    evicts, forgets = problems_of({"maxmemory_policy": "allkeys-lru", "aof_enabled": 0})
    assert "maxmemory-policy is allkeys-lru" in evicts
    assert "noeviction" in evicts
    assert "set it to yes" in forgets


def test_cluster_is_refused_in_one_sentence_when_redis_first_answers() -> None:
    check = ServerCheck()
    check.run(Server(RedisConnectionError("away")))  # type: ignore[arg-type]
    with pytest.raises(UnfitRedis, match="Redis Cluster"):
        check.run(Server({"cluster_enabled": 1}))  # type: ignore[arg-type]


def test_check_warns_once_and_needs_no_permission(caplog: pytest.LogCaptureFixture) -> None:
    check = ServerCheck()
    for _ in range(2):
        check.run(Server({"aof_enabled": 0}))  # type: ignore[arg-type]
    assert caplog.text.count("appendonly is no") == 1
    ServerCheck().run(Server(NoPermissionError("no permission to run 'info'")))  # type: ignore[arg-type]
    assert "not checked" in caplog.text
