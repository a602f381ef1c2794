"""Where the user's own steps of a canvas go: to the queue that their own app would choose.

A worker of ours sends what follows a job, and that worker knows neither the user's tasks nor the routes of their app.
The process that queues the job knows both, so it writes the queue into the steps.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from typing import Any

from celery import Celery, current_task
from celery.app import app_or_default
from celery.canvas import Signature
from celery.exceptions import QueueNotFound
from kombu import Exchange, Queue
from kombu.transport.redis import PRIORITY_STEPS

from cellama.tasks.connection.kombu_internals import active_apps, tasks_before_finalizing
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.errors import InvalidJob

FOLLOWING = ("link", "link_error", "chain", "chord")  # options that hold steps
PARTS = ("tasks", "header", "body")  # arguments of chains, groups and chords that hold steps
PLACES = ("queue", "exchange", "routing_key")  # options that say where a step goes


def route_steps(options: dict[str, Any], ours: type[Celery]) -> None:
    """Replace the steps in the options of a call by steps that say where they go.

    `ours` is the class of cellama's apps. A step that names its queue, and one that no other app of this process
    could send, stays as it is. Raises InvalidJob when an app has no such queue.
    """
    for name in FOLLOWING:
        if options.get(name):
            options[name] = _routed(options[name], ours)


def _routed(step: Any, ours: type[Celery]) -> Any:
    """Return a copy of a step, or of a list of steps, in which each step of the user has its queue."""
    if isinstance(step, list | tuple):
        return [_routed(each, ours) for each in step]
    if not isinstance(step, dict):
        return step
    options, kwargs = dict(step.get("options") or {}), dict(step.get("kwargs") or {})
    route_steps(options, ours)
    if step.get("subtask_type") in ("chain", "group", "chord"):
        kwargs |= {name: _routed(kwargs[name], ours) for name in PARTS if kwargs.get(name)}
    else:
        name = _name_of(step["task"], kwargs)
        if name not in KINDS and (app := _app_of(step, name, ours)) is not None:
            options = _with_place(app, name, step.get("args") or (), kwargs, options)
    return {**step, "options": options, "kwargs": kwargs}


def _name_of(task: str, kwargs: dict[str, Any]) -> str:
    """Return the name by which a step is routed. `xmap` and `chunks` go where the task that they call goes."""
    inner = kwargs.get("task") if task in ("celery.map", "celery.starmap", "celery.chunks") else None
    return str(inner["task"]) if isinstance(inner, dict) else task


def _app_of(step: dict[str, Any], name: str, ours: type[Celery]) -> Celery | None:
    """Return the user's app that has the task, else the one at hand: a task may be known in its workers only."""
    others = [app for app in active_apps() if not isinstance(app, ours)]
    if not others:
        return None
    near = [app for app in _near_apps(step) if app in others]
    for app in near:
        if app.autofinalize:
            app.finalize(auto=True)  # its decorated tasks are in its registry then
    return next((app for app in (*near, *others) if name in tasks_before_finalizing(app)), near[0] if near else None)


def _near_apps(step: dict[str, Any]) -> Iterator[Celery]:
    if isinstance(step, Signature):
        yield step.app
    if current_task:
        yield current_task.app
    yield app_or_default()


def _with_place(app: Celery, name: str, args: Any, kwargs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with queue, exchange and routing key as the app has them for this task."""
    if isinstance(options.get("priority"), int):  # a worker listens to some priorities only, and the app says to which
        steps = app.conf.broker_transport_options.get("priority_steps", PRIORITY_STEPS)
        options = {**options, "priority": steps[max(0, bisect(steps, options["priority"]) - 1)]}
    if any(options.get(place) for place in PLACES):
        return options
    task = tasks_before_finalizing(app).get(name)
    of_task = {place: value for place in PLACES if (value := getattr(task, place, None))}
    try:
        route = app.amqp.router.route({**options, **of_task}, name, args, kwargs, task)
    except QueueNotFound as error:
        raise InvalidJob(f"step {name}: {error.args[0]}; name its queue with .set(queue=…)") from None
    found = {place: _text(route[place]) for place in PLACES if route.get(place)}
    return {**options, **found}


def _text(place: Any) -> Any:
    return place.name if isinstance(place, Queue | Exchange) else place
