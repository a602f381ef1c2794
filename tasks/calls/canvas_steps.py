"""Handle jobs that are steps of a canvas, and the user's own steps that follow a job.

The registries of the other Celery apps in a process also contain cellama's tasks, which stay bound to cellama's app. So
if `generate` is the next step of a chain, a worker of a user's app sends this step to cellama's Redis. The step is
checked and recorded in the ledger like any other job.

A cellama worker sends the steps that follow a job, but it has neither the user's tasks nor the routes from the user's
app. The process that queues the job has the tasks and the routes, so this process sets the queue of each step
(`route_steps`).
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Iterator
from typing import Any

from celery import Celery, Task, current_task, uuid
from celery.app import app_or_default
from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import QueueNotFound
from celery.result import AsyncResult
from celery.utils.functional import maybe_list
from kombu import Exchange, Queue
from kombu.transport.redis import PRIORITY_STEPS

from cellama.tasks.connection.kombu_internals import (
    SHARING_PARTS,
    UnfitLibraries,
    active_apps,
    for_each_app,
    require_parts,
    tasks_before_finalizing,
)
from cellama.tasks.contract import events
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.state.ledger import Ledger, Message, Submission, TaskCall

log = logging.getLogger(__name__)
STEP_OPTIONS = ("link", "link_error", "chain", "chord")  # options that contain steps
STEP_ARGUMENTS = ("tasks", "header", "body")  # arguments of chains, groups and chords that contain steps
ROUTE_OPTIONS = ("queue", "exchange", "routing_key")  # options that determine the queue of a step


def refuse_step(task: Task, queue: str, options: dict[str, Any], error: InvalidJob) -> AsyncResult:
    """Fail a step, together with all steps that are waiting for it. The preceding task remains successful."""
    job_id = options.get("task_id") or uuid()
    context = Context(
        id=job_id,
        task=task.name,
        args=[],
        kwargs={},
        delivery_info={},
        callbacks=maybe_list(options.get("link")),
        errbacks=maybe_list(options.get("link_error")),
        chain=options.get("chain"),
        chord=options.get("chord"),
        group=options.get("group_id"),
        **{name: options.get(name) for name in ("group_index", "root_id", "parent_id", "ignore_result")},
    )
    failure = JobFailed(error.code, str(error))
    ledger = Ledger(task.backend.client)
    call = TaskCall(task=task.name, queue=queue)
    # With an entry in the ledger, readers of the step's stream receive the error as well.
    ledger.submit([Submission(job_id, call, message=Message("", ""))])
    ledger.end_waiting(job_id, events.error(failure.code, failure.message, failure.retryable))
    task.backend.mark_as_failure(job_id, failure, request=context)
    ledger.settle(job_id)
    return task.AsyncResult(job_id)


def share_tasks(app: Celery, task_class: type[Task]) -> None:
    """Add the tasks of a class to the registries of all other Celery apps, including apps that are created later.

    Do nothing if cellama can't use the installed Celery. This function runs when `cellama.tasks` is imported.
    UnfitLibraries is raised later, when a worker starts or a job is sent.
    """
    try:
        require_parts(*SHARING_PARTS)
    except UnfitLibraries:
        return

    def add_tasks(other: Celery) -> None:
        if other is not app:
            for name, task in app.tasks.items():
                if isinstance(task, task_class):
                    tasks_before_finalizing(other).setdefault(name, task)

    for_each_app(add_tasks)


def route_steps(options: dict[str, Any], own_class: type[Celery]) -> None:
    """Replace the steps in a call's options with steps that name the queue that the user's own app would choose.

    `own_class` is the class of cellama's apps. A step stays unchanged if it already names its queue, or if no other app
    in this process could send it. Raises InvalidJob if the user's app does not define the queue.
    """
    for name in STEP_OPTIONS:
        if options.get(name):
            options[name] = _routed(options[name], own_class)


def _routed(step: Any, own_class: type[Celery]) -> Any:
    """Return a copy of a step, or of a list of steps, in which each of the user's steps names its queue."""
    if isinstance(step, list | tuple):
        return [_routed(part, own_class) for part in step]
    if not isinstance(step, dict):
        return step
    options, kwargs = dict(step.get("options") or {}), dict(step.get("kwargs") or {})
    route_steps(options, own_class)
    if step.get("subtask_type") in ("chain", "group", "chord"):
        kwargs |= {name: _routed(kwargs[name], own_class) for name in STEP_ARGUMENTS if kwargs.get(name)}
    else:
        name = _name_of(step["task"], kwargs)
        if name not in KINDS and (app := _app_of(step, name, own_class)) is not None:
            options = _with_route(app, name, step.get("args") or (), kwargs, options)
    return {**step, "options": options, "kwargs": kwargs}


def _name_of(task: str, kwargs: dict[str, Any]) -> str:
    """Return the task name that determines a step's route.

    `xmap` and `chunks` are routed like the task that they call.
    """
    inner = kwargs.get("task") if task in ("celery.map", "celery.starmap", "celery.chunks") else None
    return str(inner["task"]) if isinstance(inner, dict) else task


def _app_of(step: dict[str, Any], name: str, own_class: type[Celery]) -> Celery | None:
    """Return the user's app that has the task.

    If no app has the task, return the step's own app or the current app, because that app's workers may have the task.
    """
    others = [app for app in active_apps() if not isinstance(app, own_class)]
    if not others:
        return None
    near = [app for app in _near_apps(step) if app in others]
    for app in near:
        if app.autofinalize:
            app.finalize(auto=True)  # so that its registry has its decorated tasks
    return next((app for app in (*near, *others) if name in tasks_before_finalizing(app)), near[0] if near else None)


def _near_apps(step: dict[str, Any]) -> Iterator[Celery]:
    if isinstance(step, Signature):
        yield step.app
    if current_task:
        yield current_task.app
    yield app_or_default()


def _with_route(app: Celery, name: str, args: Any, kwargs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the queue, exchange and routing key that the app uses for this task."""
    if isinstance(options.get("priority"), int):  # the app's workers read only the priorities of `priority_steps`
        steps = app.conf.broker_transport_options.get("priority_steps", PRIORITY_STEPS)
        options = {**options, "priority": steps[max(0, bisect(steps, options["priority"]) - 1)]}
    if any(options.get(option) for option in ROUTE_OPTIONS):
        return options
    task = tasks_before_finalizing(app).get(name)
    task_options = {option: value for option in ROUTE_OPTIONS if (value := getattr(task, option, None))}
    try:
        route = app.amqp.router.route({**options, **task_options}, name, args, kwargs, task)
    except QueueNotFound as error:
        raise InvalidJob(f"step {name}: {error.args[0]}; set its queue with .set(queue=…)") from None
    found = {option: _name_of_entity(route[option]) for option in ROUTE_OPTIONS if route.get(option)}
    return {**options, **found}


def _name_of_entity(value: Any) -> Any:
    return value.name if isinstance(value, Queue | Exchange) else value
