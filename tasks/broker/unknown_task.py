"""End jobs whose task isn't registered in this worker, because its name is misspelt or only newer versions define it.

Celery itself stores only a NotRegistered error, so the job's stream, errbacks and chord would never end.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from cellama.config.logging import event_logger
from cellama.tasks.contract import events
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.state.ledger import Ending, Ledger

from .message import taken_of
from .result_backend import end_without_worker, request_of

log = event_logger(__name__)


def end_unknown_task(app: Any, message: Any) -> JobFailed:
    """End the job of this message, and return its error. Raises RedisError."""
    job_id, ledger = str(message.headers["id"]), Ledger(app.backend.client)
    failure = JobFailed("invalid_request", _reason(str(message.headers["task"])))
    log.error("job has an unknown task", job_id=job_id, detail=failure.message)
    event = events.error(failure.code, failure.message, failure.retryable)
    if taken_of(message) is None:  # from plain Celery, without an entry in the ledger
        ledger.end_unknown(job_id, event)
        request = request_of(json.dumps(message.serializable()).encode())
        app.backend.mark_as_failure(job_id, failure, request=request)
    elif ledger.end_waiting(job_id, event):
        end_without_worker(app, job_id, Ending(event, None))
        ledger.settle(job_id)
    return failure


def _reason(task: str) -> str:
    close = difflib.get_close_matches(task, KINDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"tasks: {', '.join(sorted(KINDS))}"
    return f"task: {task!r} is unknown to this worker; {hint}"
