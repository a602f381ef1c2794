"""The tasks. How calls become jobs is in `job_task.py`, what they do in a worker in `attempt/`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from celery import Task

from cellama.config import mask_url
from cellama.config.redis_url import parse_redis_url
from cellama.tasks.calls.canvas_steps import share
from cellama.tasks.connection.kombu_internals import PRODUCER_PARTS, require_parts, tasks_before_finalizing
from cellama.tasks.contract import names
from cellama.tasks.contract.kinds import KINDS
from cellama.tasks.contract.shapes.results import Result

from .app import CellamaApp, app, make_app
from .job_task import JobTask


def _task(name: str) -> Callable[[Callable[..., Result]], JobTask]:
    decorate: Callable[[Callable[..., Result]], JobTask] = app.task(
        bind=True, shared=False, base=JobTask, name=name, kind=KINDS[name]
    )
    return decorate


@_task(names.TASK_GENERATE)
def generate(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`generate(model, prompt, **params)`: the text that follows a prompt."""
    return self.run_job(args, kwargs)


@_task(names.TASK_CHAT)
def chat(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`chat(model, messages, **params)`: the assistant's next turn."""
    return self.run_job(args, kwargs)


@_task(names.TASK_PREFILL)
def prefill(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`prefill(model, prompt)`, or `prefill(model, messages=…)`: it is read into the cache, for what begins with it."""
    return self.run_job(args, kwargs)


@_task(names.TASK_EMBED)
def embed(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`embed(model, texts)`: one vector of unit length per text."""
    return self.run_job(args, kwargs)


@_task(names.TASK_RERANK)
def rerank(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`rerank(model, query, documents)`: the documents' indices and scores, the best first."""
    return self.run_job(args, kwargs)


@_task(names.TASK_CHUNK)
def chunk(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`chunk(model, lines)`: lines of a bulk run; their results are `line` events."""
    return self.run_job(args, kwargs)


@_task(names.TASK_TOKENIZE)
def tokenize(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`tokenize(model, text)`: its token ids."""
    return self.run_job(args, kwargs)


@_task(names.TASK_DETOKENIZE)
def detokenize(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`detokenize(model, tokens)`: their text."""
    return self.run_job(args, kwargs)


@_task(names.TASK_APPLY_CHAT_TEMPLATE)
def apply_chat_template(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
    """`apply_chat_template(model, messages)`: the prompt that `chat` would give to the model."""
    return self.run_job(args, kwargs)


share(app, JobTask)


@functools.cache
def app_at(redis_url: str) -> CellamaApp:
    """An app with tasks of its own, whose jobs go to this Redis. Raises ValueError if that is no URL of one."""
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
