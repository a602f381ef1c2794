"""What people are told when Redis does not answer as it should."""

from __future__ import annotations

import pytest
from redis.exceptions import ClusterCrossSlotError, MovedError

from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import RedisRefused


@pytest.mark.parametrize(
    "error", [ClusterCrossSlotError("Keys in request don't hash to the same slot"), MovedError("3999 127.0.0.1:6381")]
)
def test_producer_of_a_cluster_is_told_in_one_sentence(error: Exception) -> None:
    with pytest.raises(RedisRefused, match="names a node of a Redis Cluster"), reaching_redis():
        raise error
