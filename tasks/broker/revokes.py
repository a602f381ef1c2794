"""What a worker does with a revoke that it hears of, from whichever app. Imported in workers only."""

from __future__ import annotations

import logging
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import control
from redis.exceptions import RedisError

from .control import note_revoke

log = logging.getLogger(__name__)

_REVOKE = control.revoke


@control.control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def revoke(state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **options: Any) -> Any:
    """Revoke task by task id (or list of ids)."""
    try:
        note_revoke(state.app, maybe_list(task_id) or [], terminate)
    except RedisError as error:
        log.warning("a revoke lasts only as long as this worker: %s", error)
    return _REVOKE(state, task_id, terminate, signal, **options)


@control.control_command(  # type: ignore[untyped-decorator]
    variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [id2 [... [idN]]]]"
)
def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> Any:
    """Terminate task by task id (or list of ids)."""
    return revoke(state, task_id, terminate=True, signal=signal)
