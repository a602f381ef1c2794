"""Renews the leases of a worker: as long as it lives, Redis gives its messages to nobody else."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

log = logging.getLogger(__name__)


class LeaseKeeper:
    """A thread of its own with a connection of its own: Celery's event loop stops while a worker drains."""

    def __init__(self, redis: Redis, consumer: Any, lease_s: float) -> None:
        """`consumer` is Celery's; its channel is looked up each time, because reconnecting replaces it."""
        self._redis = redis
        self._consumer = consumer
        self._lease_s = lease_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellama-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=self._lease_s)

    def _run(self) -> None:
        while not self._closing.wait(self._lease_s / 3):
            try:
                self.renew()
            except RedisError as error:
                log.warning("leases wait for Redis: %s", error)
            except Exception as error:  # the consumer changed while it was read
                log.info("leases are renewed the next time: %s: %s", type(error).__name__, error)

    def renew(self) -> int:
        """Sets the delivery time of every message that this worker holds to now; returns how many there are."""
        channels = self._consumer.channels
        tags = [tag for channel in channels for tag in list(channel.qos._delivered)]
        if tags:
            now = time.time()
            self._redis.zadd(channels[0].unacked_index_key, dict.fromkeys(tags, now), xx=True)
        return len(tags)
