"""Clients that read streams while all goes wrong: what they saw must be the text in the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cellama.api import Client
from cellama.tasks.contract.errors import RedisUnreachable, StreamTrimmed


class LiveReaders:
    """A thread for each job, from now on."""

    def __init__(self, job_ids: Sequence[str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.texts: dict[str, str] = {}
        self.num_told = 0  # gaps that a reader was told of; it began anew
        self._client = Client()
        self._threads = [threading.Thread(target=self._read, args=(job_id,), daemon=True) for job_id in job_ids]
        for thread in self._threads:
            thread.start()

    def _read(self, job_id: str) -> None:
        while job_id not in self.texts:
            text = ""
            try:
                for event in self._client.stream(job_id, timeout=self._timeout_s):
                    text += event["text"] if event["type"] == "token" else ""
                self.texts[job_id] = text
            except StreamTrimmed:
                self.num_told += 1
            except RedisUnreachable:
                continue

    def close(self) -> None:
        """Waits until all streams have ended."""
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._client.close()
