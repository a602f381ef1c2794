"""Revoking that lasts: Celery's own lives in the memory of workers, and only of those that run now."""

from __future__ import annotations

from typing import Any

from celery.app.control import Control

from .ledger import Ledger


class LastingControl(Control):  # type: ignore[misc]
    """Celery's remote control, whose `revoke` is written down as well."""

    def revoke(self, task_id: Any, destination: Any = None, terminate: bool = False, **options: Any) -> Any:
        """Ends waiting jobs at once, and with `terminate` running ones, now or when a worker comes back to them."""
        ledger = Ledger(self.app.backend.client)
        for job_id in [task_id] if isinstance(task_id, str) else list(task_id):
            if ledger.cancel(job_id, running=terminate):
                self.app.backend.mark_as_revoked(job_id, "cancelled", request=None)
        return super().revoke(task_id, destination=destination, terminate=terminate, **options)
