"""The message of a job, as Celery's consumer holds it while the job runs."""

from __future__ import annotations

import threading
from typing import Any

from celery.worker.request import Request


class JobRequest(Request):  # type: ignore[misc]
    """Settles its message (ack or reject) once.

    Celery checks and sets `acknowledged` in two steps, which is safe with one thread. Here a job may end in its
    own thread while the main thread revokes it; the second ack would raise in Celery's event loop and end the worker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._settle_lock = threading.Lock()
        self._settled = False
        super().__init__(*args, **kwargs)

    def _claim_settlement(self) -> bool:
        with self._settle_lock:
            first, self._settled = not self._settled, True
        return first

    def acknowledge(self) -> None:
        if self._claim_settlement():
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        if self._claim_settlement():
            super().reject(requeue)
