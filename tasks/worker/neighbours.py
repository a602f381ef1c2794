"""Workers on the same machine, which share its cores: each reads what the others of its machine have in Redis."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.engine import CoreSharing, Peer
from cellama.tasks.connection.redis_clock import redis_time
from cellama.tasks.contract.keys import machine_key
from cellama.tasks.state.registry import KEPT_S, STALE_S

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A worker of this machine; `cores` is what its CoreSharing reports, `seen_at` is by Redis' clock."""

    name: str
    host: str
    seen_at: float
    cores: dict[str, Any]


class Neighbours:
    """Reports to the sharing of the cores which other workers run on this machine. A chore of the registry thread.

    A machine has a key of its own, so that the work of a look doesn't grow with the workers of other machines.
    """

    def __init__(self, redis: Redis, worker: str, cores: CoreSharing) -> None:
        self._redis = redis
        self._worker = worker
        self._cores = cores
        self._key: str | None = None

    def look(self) -> None:
        """Write this worker's entry and read the others'. Raises RedisError."""
        own, now = self._cores.report(), redis_time(self._redis)
        self._key = machine_key(own["machine"])
        entry = Neighbour(self._worker, socket.gethostname(), now, own)
        with self._redis.pipeline() as pipeline:
            pipeline.hset(self._key, self._worker, json.dumps(asdict(entry)))
            pipeline.expire(self._key, int(KEPT_S))
            pipeline.hgetall(self._key)
            stored: Mapping[bytes, bytes] = pipeline.execute()[-1]
        found = {name: _neighbour_of(data) for name, data in stored.items()}
        gone = [name for name, other in found.items() if other is None or now - other.seen_at > STALE_S]
        if gone:
            self._redis.hdel(self._key, *gone)
        others = [other for name, other in found.items() if other and name not in gone and other.name != self._worker]
        self._cores.meet(peers_of(self._worker, own, others))

    def close(self) -> None:
        """Remove this worker's entry, so that the others use its cores at once."""
        if self._key is not None:
            try:
                self._redis.hdel(self._key, self._worker)
            except RedisError as error:
                log.warning("neighbours: can't remove the entry of %s: %s; it expires", self._worker, error)


def _neighbour_of(data: bytes) -> Neighbour | None:
    """Return None for an entry that another version of cellama has written."""
    try:
        return Neighbour(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None


def peers_of(worker: str, own: dict[str, Any], others: Iterable[Neighbour]) -> list[Peer]:
    """Those that can run on a processor of ours; by name, so that all agree on who gets what can't be divided."""
    host = socket.gethostname()  # a container's own: those who share it have one limit together
    return [
        Peer(
            wants=other.cores["wants"],
            uses=other.cores["uses"],
            same_quota=other.host == host,
            goes_first=other.name < worker,
        )
        for other in others
        if set(other.cores["processors"]) & set(own["processors"])
    ]
