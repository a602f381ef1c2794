"""Workers on the same machine, which share its cores: each reads of the others in the registry."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

from redis import Redis

from cellama.engine import CoreSharing, Peer
from cellama.tasks.state.registry import WorkerEntry, live_workers


class Neighbours:
    """Tells the sharing of the cores which other workers live on this machine. A chore of the registry thread."""

    def __init__(self, redis: Redis, worker: str, cores: CoreSharing) -> None:
        self._redis = redis
        self._worker = worker
        self._cores = cores

    def look(self) -> None:
        """Reads the registry. Raises RedisError."""
        others = (entry for entry in live_workers(self._redis) if entry.name != self._worker)
        self._cores.meet(peers_of(self._worker, self._cores.report(), others))


def peers_of(worker: str, own: dict[str, Any], entries: Iterable[WorkerEntry]) -> list[Peer]:
    """Those that can run on a processor of ours; by name, so that all agree on who gets what can't be divided."""
    host = socket.gethostname()  # a container's own: those who share it have one limit together
    return [
        Peer(
            wants=entry.cores["wants"],
            uses=entry.cores["uses"],
            same_quota=entry.host == host,
            goes_first=entry.name < worker,
        )
        for entry in entries
        if entry.cores["machine"] == own["machine"] and set(entry.cores["processors"]) & set(own["processors"])
    ]
