"""The tasks, one per kind. How calls become jobs is in `job_task.py`, what they do in a worker in `attempt/`."""

from __future__ import annotations

import functools
from typing import Any

from celery import Task

from cellama.config import mask_url
from cellama.config.redis_url import parse_redis_url
from cellama.tasks.calls.canvas_steps import share
from cellama.tasks.connection.kombu_internals import PRODUCER_PARTS, require_parts, tasks_before_finalizing
from cellama.tasks.contract.all_kinds import KINDS, Result
from cellama.tasks.contract.kind import Kind

from .app import CellamaApp, app, make_app
from .job_task import JobTask


def _task(kind: Kind) -> JobTask:
    def run(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
        return self.run_job(args, kwargs)

    run.__name__ = run.__qualname__ = kind.task.rpartition(".")[2]
    run.__doc__ = kind.payload.__doc__
    task: JobTask = app.task(bind=True, shared=False, base=JobTask, name=kind.task, kind=kind)(run)
    return task


TASKS: dict[str, Any] = {kind.task: _task(kind) for kind in KINDS.values()}
share(app, JobTask)


@functools.cache
def app_at(redis_url: str) -> CellamaApp:
    """Return an app with tasks of its own, whose jobs go to this Redis. Raises ValueError if the URL is not valid."""
    try:
        parse_redis_url(redis_url)
    except ValueError as error:
        raise ValueError(f"url is {mask_url(redis_url)!r}: {error}") from None
    require_parts(*PRODUCER_PARTS)
    other = make_app(redis_url)
    ours = [task for task in app.tasks.values() if isinstance(task, JobTask)]
    owns = [type(task.__name__, (type(task),), {"app": other})() for task in ours]
    for own in owns:
        tasks_before_finalizing(other)[own.name] = own  # then it gets no more of the settings' app (canvas_steps.py)
    other.finalize()
    for own in owns:
        Task.bind.__func__(type(own), other)  # JobTask.bind, which finalizing calls, binds to the app of the settings
    return other
