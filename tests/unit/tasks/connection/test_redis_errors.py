"""The errors that callers receive when Redis rejects a connection or command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from redis.exceptions import AuthenticationError, ClusterCrossSlotError, MovedError

from cellama.config.local_redis import URL_FILE, redis_dir
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import RedisRefused


@pytest.mark.parametrize(
    "error", [ClusterCrossSlotError("Keys in request don't hash to the same slot"), MovedError("3999 127.0.0.1:6381")]
)
def test_cluster_error_names_the_cause(error: Exception) -> None:
    with pytest.raises(RedisRefused, match="is a node of a Redis Cluster"), reaching_redis():
        raise error


def test_error_explains_that_the_server_was_not_started_by_cellama_up(
    settings_environment: Callable[..., None], tmp_path: Path
) -> None:
    settings_environment(data_dir=str(tmp_path))
    redis_dir(tmp_path).mkdir()
    password_file = redis_dir(tmp_path) / URL_FILE
    password_file.write_text("redis://:secret@127.0.0.1:6379/0")
    with pytest.raises(RedisRefused) as refused, reaching_redis():
        raise AuthenticationError("WRONGPASS")
    assert f"not the Redis that `cellama up` last started, whose password is in {password_file}" in str(refused.value)
    assert "secret" not in str(refused.value)
