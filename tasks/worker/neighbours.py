"""Share a machine's cores between its workers, which report their core usage in Redis."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.config.logging import event_logger
from cellama.engine import CoreSharing, Peer
from cellama.tasks.connection.connections import redis_time
from cellama.tasks.contract.keys import machine_key
from cellama.tasks.state.registry import ENTRY_TTL_S, STALE_S

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A worker on this machine, and the report from its CoreSharing. `seen_at` is a time by Redis' clock."""

    name: str
    host: str
    seen_at: float
    cores: dict[str, Any]


class Neighbours:
    """Passes the reports of the machine's other workers to CoreSharing. The registry thread calls `share_cores`.

    Each machine has its own key for reports, so the cost of reading the reports does not grow with the number of
    machines.
    """

    def __init__(self, redis: Redis, worker: str, cores: CoreSharing) -> None:
        self._redis = redis
        self._worker = worker
        self._cores = cores
        self._key: str | None = None

    def share_cores(self) -> None:
        """Write this worker's report, and read the other workers' reports. Raises RedisError."""
        report, now = self._cores.report(), redis_time(self._redis)
        self._key = machine_key(report["machine"])
        entry = Neighbour(self._worker, socket.gethostname(), now, report)
        with self._redis.pipeline() as pipeline:
            pipeline.hset(self._key, self._worker, json.dumps(asdict(entry)))
            pipeline.expire(self._key, int(ENTRY_TTL_S))
            pipeline.hgetall(self._key)
            stored: Mapping[bytes, bytes] = pipeline.execute()[-1]
        found = {name: _neighbour_of(data) for name, data in stored.items()}
        gone = [name for name, other in found.items() if other is None or now - other.seen_at > STALE_S]
        if gone:
            self._redis.hdel(self._key, *gone)
        others = [other for name, other in found.items() if other and name not in gone and other.name != self._worker]
        self._cores.meet(peers_of(self._worker, report, others))

    def close(self) -> None:
        """Remove this worker's report, so that other workers can use its cores immediately."""
        if self._key is not None:
            try:
                self._redis.hdel(self._key, self._worker)
            except RedisError as error:
                log.warning(
                    "core usage report not removed", worker=self._worker, detail=f"{error}; the report will expire"
                )


def _neighbour_of(data: bytes) -> Neighbour | None:
    """Parse a report. Return None if another version of cellama wrote the report in a different format."""
    try:
        return Neighbour(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None


def peers_of(worker: str, report: dict[str, Any], others: Iterable[Neighbour]) -> list[Peer]:
    """Return the workers that share a processor with this worker.

    The workers are ordered by name, which decides which worker gets a remaining core.
    """
    host = socket.gethostname()  # workers of the same container share its CPU limit
    return [
        Peer(
            wants=other.cores["wants"],
            uses=other.cores["uses"],
            same_quota=other.host == host,
            goes_first=other.name < worker,
        )
        for other in others
        if set(other.cores["processors"]) & set(report["processors"])
    ]
