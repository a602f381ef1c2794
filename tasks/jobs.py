"""The tasks: how they are called, checked and queued. What they do in a worker is in `run.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery import Task
from celery.result import AsyncResult

from .app import app
from .contract.errors import JobFailed
from .contract.names import SUBMITTED_AT_HEADER, TASK_CHAT, TASK_EMBED, TASK_GENERATE, queue_name
from .contract.payloads import ChatJob, EmbedJob, GenerateJob, parse_job
from .reaching import reaching_redis

Payload = GenerateJob | ChatJob | EmbedJob
Result = dict[str, Any]


class JobTask(Task):  # type: ignore[misc]
    """A task whose calls are validated before anything is queued."""

    abstract = True
    payload: type[Payload]
    positional: tuple[str, str]
    Request = "cellama.tasks.request:JobRequest"
    throws = (JobFailed,)  # expected: Celery logs one line, without a trace

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> AsyncResult:
        """Queues the job on its model's queue with its priority. Raises InvalidJob, RedisUnreachable."""
        job = self.parse(args or (), kwargs or {})
        options.setdefault("queue", queue_name(job.model))
        options.setdefault("priority", job.priority)
        options["headers"] = {SUBMITTED_AT_HEADER: time.time(), **(options.get("headers") or {})}
        # Flower and the logs show these instead of the arguments: prompts are nobody else's business.
        options.setdefault("argsrepr", f"({job.model!r}, …)")
        options.setdefault("kwargsrepr", repr({k: v for k, v in (kwargs or {}).items() if k not in self.positional}))
        with reaching_redis():
            return super().apply_async(args, kwargs, **options)

    def parse(self, args: Any, kwargs: Any) -> Any:
        """The payload of a call. Raises InvalidJob."""
        return parse_job(self.payload, self.positional, args, kwargs)

    def run_job(self, args: Any, kwargs: Any, body: Callable[[Any, Any], Result]) -> Result:
        """Runs a call in a worker; `body(run, payload)` does the work. Raises JobFailed."""
        if self.app.runtime is None:
            raise JobFailed("no_worker", "this task runs in a cellama worker only; start one with `cellama worker`")
        from .run import JobRun

        return JobRun(self, self.app.runtime).execute(lambda run: body(run, self.parse(args, kwargs)))


def _task(name: str, payload: type[Payload], second: str) -> Callable[[Callable[..., Result]], JobTask]:
    decorate: Callable[[Callable[..., Result]], JobTask] = app.task(
        bind=True, base=JobTask, name=name, payload=payload, positional=("model", second)
    )
    return decorate


@_task(TASK_GENERATE, GenerateJob, "prompt")
def generate(self: JobTask, *args: Any, **kwargs: Any) -> Result:
    """`generate(model, prompt, **params)`: the text that follows a prompt."""
    return self.run_job(args, kwargs, lambda run, job: run.generate(job))


@_task(TASK_CHAT, ChatJob, "messages")
def chat(self: JobTask, *args: Any, **kwargs: Any) -> Result:
    """`chat(model, messages, **params)`: the assistant's next turn."""
    return self.run_job(args, kwargs, lambda run, job: run.chat(job))


@_task(TASK_EMBED, EmbedJob, "texts")
def embed(self: JobTask, *args: Any, **kwargs: Any) -> Result:
    """`embed(model, texts)`: one vector of unit length per text."""
    return self.run_job(args, kwargs, lambda run, job: run.embed(job))
