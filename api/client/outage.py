"""How long a client bears with a Redis that is away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import (
    RedisUnreachable,
)

OUTAGE_S = 15.0  # a reader waits so long for Redis to come back
OUTAGE_RETRY_S = 0.5


class Outage:
    """Lets a reader wait for a Redis that comes back soon. Raises RedisUnreachable when it does not."""

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._since: float | None = None

    def is_over(self) -> None:
        self._since = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            with reaching_redis(self._url):
                yield
        except RedisUnreachable:
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > OUTAGE_S:
                raise
