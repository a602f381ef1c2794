"""Define the Celery tasks, one for each kind of job. Calls are checked before any job is queued.

`tasks/calls` turns calls into messages, and `tasks/attempt` implements what the tasks do in a worker.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from celery import Task, current_task, group, signals, states, uuid
from celery.canvas import Signature
from celery.result import AsyncResult
from kombu import Producer
from kombu.utils.functional import retry_over_time
from redis.exceptions import RedisError

from cellama.config import get_settings, mask_url
from cellama.config.redis_url import parse_redis_url
from cellama.tasks.calls.canvas_steps import refuse_step, route_steps, share_tasks
from cellama.tasks.calls.enqueue import (
    IN_WORKERS_ONLY,
    ONE_AFTER_ANOTHER,
    PAGE_JOBS,
    Checked,
    TemplateKey,
    delay_s,
    enqueue,
    plain_priority,
    plain_queue,
    ranges,
    refuse_eager,
    settle_options,
    timeout_of,
)
from cellama.tasks.connection.kombu_internals import (
    PRODUCER_PARTS,
    is_sending_next_step,
    require_parts,
    tasks_before_finalizing,
)
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.all_kinds import KINDS, Result
from cellama.tasks.contract.errors import InvalidJob, JobFailed, LimitReached, RedisFull, RedisRefused, RedisUnreachable
from cellama.tasks.contract.fairness import FAIRNESS_KEY_HEADER, check_fairness_key, is_fairness_key
from cellama.tasks.contract.keys import IGNORED_FIELD, job_key
from cellama.tasks.contract.kinds import Kind
from cellama.tasks.contract.kinds.chunk import TASK_CHUNK
from cellama.tasks.contract.names import (
    DEFAULT_MODEL,
    PRIORITY_INTERACTIVE,
    SUBMITTED_AT_HEADER,
    job_id_of_key,
    queue_name,
)
from cellama.tasks.contract.payloads import parse_job
from cellama.tasks.state.ledger import Ledger, TaskCall

from .app import CellamaApp, app, make_app

_INTERVALS = ("interval_start", "interval_step", "interval_max")
PROMPTS = ("messages", "system")  # parameters that Flower and logs must not show when they are given by name
TEMPLATE_OPTIONS = {  # a job with exactly these options can get its message from a template
    "task_id",
    "queue",
    "priority",
    "headers",
    "argsrepr",
    "kwargsrepr",
}
# Handlers of these signals can change what Celery publishes.
PUBLISHING_SIGNALS = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)


class JobTask(Task):  # type: ignore[misc]
    """A task whose calls are validated before anything is queued."""

    abstract = True
    kind: Kind
    Request = "cellama.tasks.broker.message:JobRequest"
    Strategy = "cellama.tasks.broker.message:strategy"
    track_started = False  # the script `begin` stores the state STARTED
    throws = (JobFailed,)  # an expected exception, which Celery logs in one line without a traceback

    @classmethod
    def bind(cls, app_: Any) -> Any:
        """Bind the task to cellama's app, even if the task is in another app's registry (calls/canvas_steps.py)."""
        return super().bind(app)

    @property
    def resultrepr_maxsize(self) -> int:
        """Return the maximum length of a result in Flower and in the logs, in characters."""
        return 1024 if get_settings().show_prompts else 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Result:
        """Run the task. Unlike Celery's method, this method accepts a parameter named `self`."""
        result: Result = self.run(*args, **kwargs)
        return result

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> AsyncResult:
        """Queue the job on its model's queue with its priority. docs/canvas.md describes Celery's options.

        With `idempotency_key`, a second call with the same key returns the job of the first call for as long as its
        result is kept. Keys are separate for each task and scope (`idempotency_scope`, or else `cache_scope`). If a key
        was already used with different parameters, the call is rejected. `fairness_key` names the tenant for which the
        job runs (docs/fair-share.md), by default the `cache_scope` or the setting `default_fairness_key`. Raises
        InvalidJob, RedisFull or RedisUnreachable. An invalid next step of a canvas is recorded as failed, but raises no
        error. After RedisUnreachable, a call with `task_id=error.job_id` queues the job unless the first call already
        did.
        """
        require_parts(*PRODUCER_PARTS)
        is_next_step = is_sending_next_step()
        retry, policy = options.pop("retry", None), options.pop("retry_policy", None)
        try:
            refuse_eager(self.app)
            route_steps(options, CellamaApp)
            job = self._check(args or (), kwargs or {}, options)
        except InvalidJob as error:
            if not is_next_step:
                raise
            model = (kwargs or {}).get("model", DEFAULT_MODEL)
            with reaching_redis(self.app.redis_url):
                return refuse_step(self, queue_name(str(model)), options, error)
        if retry or (retry is None and is_next_step):
            return self._retrying(lambda: self._queue(job), policy)
        return self._queue(job)

    @property
    def _ledger(self) -> Ledger:
        """Return the ledger to which jobs are submitted.

        This ledger never rejects chunks of bulk runs, or canvas steps that workers queue.
        """
        return Ledger(self.backend.client, rejects=self.app.runtime is None and self.name != TASK_CHUNK)

    def _queue(self, job: Checked) -> AsyncResult:
        results: list[AsyncResult] = []

        def publish(producer: Producer, job: Checked) -> None:
            call = job.call
            results.append(
                Task.apply_async(self, call.args, call.kwargs, producer=producer, retry=False, **job.options)
            )

        with reaching_redis(self.app.redis_url, job.job_id):
            list(enqueue(self.app, self._ledger, [job], publish, self._template_key(is_bulk=False)))
            if job.options.get("ignore_result"):
                self.backend.client.hset(job_key(job.job_id), IGNORED_FIELD, 1)
        return results[0] if results else self.AsyncResult(job.job_id)  # made from a template; `get` subscribes later

    def _retrying(self, queue: Callable[[], AsyncResult], policy: dict[str, Any] | None) -> AsyncResult:
        """Queue the job, and retry according to Celery's `retry_policy`. A retry never queues the job a second time."""
        given = {**self.app.conf.task_publish_retry_policy, **(policy or {})}
        waits = {name: given[name] for name in ("max_retries", *_INTERVALS) if given.get(name) is not None}
        return retry_over_time(queue, (RedisUnreachable, RedisFull, LimitReached), **waits)

    def apply(self, *_: Any, **__: Any) -> Any:
        raise InvalidJob(IN_WORKERS_ONLY)

    def signature(self, args: Any = None, *others: Any, **options: Any) -> Signature:
        """Return a signature that names the model's queue, so that apps without cellama's tasks can also send it."""
        made = super().signature(args, *others, **options)
        model = made.kwargs.get("model", made.args[0] if len(made.args) > 1 else None)
        if isinstance(model, str):
            made.options.setdefault("queue", queue_name(model))
            made.options.setdefault("priority", made.kwargs.get("priority", PRIORITY_INTERACTIVE))
        return made

    def map(self, it: Iterable[Any]) -> group:
        """Return a group with one job per argument. Celery's own `map` calls the task for all arguments in one job."""
        return group(self.s(argument) for argument in it)

    def starmap(self, it: Iterable[Sequence[Any]]) -> group:
        """Return a group as `map` does. Each item contains all positional arguments of a call."""
        return group(self.s(*arguments) for arguments in it)

    def chunks(self, it: Iterable[Any], n: int) -> Any:
        raise InvalidJob(ONE_AFTER_ANOTHER.format(task=self.__name__))

    def apply_many(
        self,
        calls: Iterable[tuple[Sequence[Any], dict[str, Any]]],
        keys: Sequence[str] | None = None,
        fairness_key: str | None = None,
    ) -> list[str]:
        """Check many calls (args, kwargs), then queue them, and return the ids of their jobs in this order.

        `keys` contains one idempotency key per call, so that `apply_many` can be repeated. Raises the errors of
        `check_many` and `queue_many`.
        """
        return self.queue_many(self.check_many(calls, keys, fairness_key))

    def check_many(
        self,
        calls: Iterable[tuple[Sequence[Any], dict[str, Any]]],
        keys: Sequence[str] | None = None,
        fairness_key: str | None = None,
    ) -> list[Checked]:
        """Check many calls, and return their jobs, which all have the same fairness key.

        Raises InvalidJob, which lists each problem with the index of its call.
        """
        refuse_eager(self.app)
        calls = list(calls)
        if keys is not None and len(keys) != len(calls):
            raise InvalidJob(f"keys: the list has {len(keys)} entries for {len(calls)} jobs; pass one key for each job")
        jobs: list[Checked] = []
        problems: dict[str, list[int]] = {}
        for index, (args, kwargs) in enumerate(calls):
            try:
                key = {} if keys is None else {"idempotency_key": keys[index]}
                jobs.append(self._check(args, kwargs, {"fairness_key": fairness_key, **key}))
            except InvalidJob as problem:
                problems.setdefault(str(problem), []).append(index)
        if problems:
            raise InvalidJob("; ".join(f"job {ranges(indices)}: {text}" for text, indices in problems.items()))
        return jobs

    def queue_many(self, jobs: Sequence[Checked]) -> list[str]:
        """Queue jobs in pages, with one round trip to Redis for each page.

        Raises RedisUnreachable or RedisRefused, with the number of queued jobs in the message.
        """
        require_parts(*PRODUCER_PARTS)
        num_queued = 0
        try:
            with reaching_redis(self.app.redis_url):
                for _ in enqueue(self.app, self._ledger, jobs, self._publish, self._template_key(is_bulk=True)):
                    num_queued += 1
        except (RedisUnreachable, RedisRefused) as error:
            queued = f"the first {num_queued} of {len(jobs)} jobs are queued, and up to {PAGE_JOBS} more may be queued"
            raise type(error)(f"{error}; {queued}") from None
        return [job.job_id for job in jobs]

    def _check(self, args: Any, kwargs: Any, options: dict[str, Any]) -> Checked:
        """Check a call, and return its job with resolved options. Raises InvalidJob."""
        settings = get_settings()
        job = self.parse(args, kwargs)
        key = options.pop("idempotency_key", None)
        scope = options.pop("idempotency_scope", getattr(job, "cache_scope", ""))
        fairness_key = options.pop("fairness_key", None)
        settle_options(self.app, options, job.model, job.priority if "priority" in kwargs else None)
        if options["priority"] is None:
            options["priority"] = job.priority
        options.setdefault("task_id", uuid() if key is None else job_id_of_key(self.name, scope, key))
        delay = delay_s(self.app, options)  # the timeout starts when the job may start
        headers = options.get("headers") or {}
        options["headers"] = {SUBMITTED_AT_HEADER: time.time(), **headers}
        if not settings.show_prompts:  # Flower and the logs show these instead of the arguments
            shown = {name: value for name, value in kwargs.items() if name not in {*self.kind.positional, *PROMPTS}}
            options.setdefault("argsrepr", f"({job.model!r}, …)")
            options.setdefault("kwargsrepr", repr(shown))
        if fairness_key is None:
            fairness_key = headers.get(FAIRNESS_KEY_HEADER)
        call = self._call(args, kwargs, options["queue"], options["priority"], options["headers"], delay, fairness_key)
        payload_json = _payload_json(call, settings.max_payload_bytes)
        digest = "" if key is None else call.digest(self.kind.positional)
        fits_template = options.keys() == TEMPLATE_OPTIONS and not headers
        return Checked(call, options, payload_json, digest=digest, fits_template=fits_template)

    def _template_key(self, *, is_bulk: bool) -> TemplateKey | None:
        """Return the part of a template's key that all jobs of this call share.

        Return None if Celery must build each message itself. This is the case within a task, because Celery then adds
        the ids of the task's parents, and if signal handlers can change messages.
        """
        if current_task or any(signal.receivers for signal in PUBLISHING_SIGNALS):
            return None
        return TemplateKey(task=self.name, is_bulk=is_bulk, pid=os.getpid(), thread_id=self.app.thread_oid)

    def _publish(self, producer: Producer, job: Checked) -> None:
        """Publish the message as Celery does, but don't subscribe to the job's result."""
        amqp, options = self.app.amqp, job.options
        message = amqp.create_task_message(
            options["task_id"],
            self.name,
            *(job.call.args, job.call.kwargs),
            reply_to=self.app.thread_oid,
            argsrepr=options.get("argsrepr"),
            kwargsrepr=options.get("kwargsrepr"),
            create_sent_event=self.app.conf.task_send_sent_event,
        )
        sent = {name: options[name] for name in ("queue", "priority", "headers")}
        amqp.send_task_message(producer, self.name, message, retry=False, **sent)

    def _call(
        self,
        args: Any,
        kwargs: Any,
        queue: str,
        priority: int,
        headers: dict[str, Any],
        delay: float = 0.0,
        fairness_key: Any = None,
    ) -> TaskCall:
        timeout_s = timeout_of(kwargs or {}, priority)
        due_s = None if timeout_s is None else timeout_s + delay
        return TaskCall(
            task=self.name,
            args=list(args or ()),
            kwargs=dict(kwargs or {}),
            queue=queue,
            priority=priority,
            timeout_s=due_s,
            headers=headers,
            delay_s=delay,
            given_fairness_key=None if fairness_key is None else check_fairness_key(fairness_key),
        )

    def call_of_plain(self, args: Any, kwargs: Any, delivery: dict[str, Any], fairness_key: Any) -> TaskCall:
        """Return the unchecked call from a plain Celery message. An invalid fairness key is ignored."""
        priority = plain_priority(kwargs, delivery.get("priority"))
        queue = plain_queue(kwargs, args, str(delivery.get("routing_key")))
        key = fairness_key if is_fairness_key(fairness_key) else None
        return self._call(args, kwargs, queue, priority, {}, fairness_key=key)

    def _payload_in_worker(self, args: Any, kwargs: Any) -> Any:
        """Return the payload of the job that this task is running.

        If the call sets no priority, the priority of the message applies. If the call sets no timeout, the default
        timeout from the settings applies.
        """
        job = self.parse(args, kwargs)
        priority = job.priority if "priority" in kwargs else self.request.delivery_info.get("priority")
        return job.model_copy(update={"priority": priority, "timeout": timeout_of(kwargs, priority)})

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Keep a chunk's journal for as long as results are kept, because it contains the lines' results."""
        if self.kind.keeps_journal and status == states.SUCCESS and self.app.runtime is not None:
            with contextlib.suppress(RedisError):  # the journal then expires as other journals do
                self.app.runtime.ledger.keep_journal(task_id)

    def parse(self, args: Any, kwargs: Any) -> Any:
        """Return the payload of a call. Raises InvalidJob."""
        return parse_job(self.kind.payload, self.kind.positional, args, kwargs)

    def run_job(self, args: Any, kwargs: Any) -> Result:
        """Run a call in a worker. Raises JobFailed."""
        if self.app.runtime is None or self.request.called_directly:
            raise JobFailed("no_worker", IN_WORKERS_ONLY)
        streams = self.kind.streams and kwargs.get("stream", True) is not False
        result: Result = self.app.attempt(self, streams, lambda: self._payload_in_worker(args, kwargs))
        return result


def _payload_json(call: TaskCall, limit: int) -> str:
    """Return args and kwargs as JSON. Raises InvalidJob if they can't be written as JSON, or exceed `limit` bytes."""
    try:
        text = json.dumps([call.args, call.kwargs])
        if len(call.headers) > 1 or not isinstance(call.headers.get(SUBMITTED_AT_HEADER), float):
            json.dumps(call.headers)
    except TypeError as error:
        raise InvalidJob(
            f"the job is not valid JSON ({error}); use only strings, numbers, booleans, None, lists and dicts"
        ) from None
    if len(text) <= limit:  # `text` is ASCII, which is never shorter than UTF-8 without escapes
        return text
    size = len(json.dumps([call.args, call.kwargs], ensure_ascii=False).encode())
    if size > limit:
        raise InvalidJob(
            f"the job has {size} bytes, and the limit is {limit}; split it, or raise CELLAMA_MAX_PAYLOAD_BYTES"
        )
    return text


def _task(kind: Kind) -> JobTask:
    def run(self: JobTask, /, *args: Any, **kwargs: Any) -> Result:
        return self.run_job(args, kwargs)

    run.__name__ = run.__qualname__ = kind.task.rpartition(".")[2]
    run.__doc__ = kind.payload.__doc__
    task: JobTask = app.task(bind=True, shared=False, base=JobTask, name=kind.task, kind=kind)(run)
    return task


TASKS: dict[str, Any] = {kind.task: _task(kind) for kind in KINDS.values()}
share_tasks(app, JobTask)


@functools.cache
def app_at(redis_url: str) -> CellamaApp:
    """Return an app that has its own tasks and sends its jobs to this URL.

    Raises ValueError if the URL is not valid.
    """
    try:
        parse_redis_url(redis_url)
    except ValueError as error:
        raise ValueError(f"url: {mask_url(redis_url)!r} is not valid: {error}") from None
    require_parts(*PRODUCER_PARTS)
    other = make_app(redis_url)
    job_tasks = [task for task in app.tasks.values() if isinstance(task, JobTask)]
    own_tasks = [type(task.__name__, (type(task),), {"app": other})() for task in job_tasks]
    for task in own_tasks:
        tasks_before_finalizing(other)[task.name] = task  # so that `share_tasks` (canvas_steps.py) adds no other one
    other.finalize()
    for task in own_tasks:
        Task.bind.__func__(type(task), other)  # `finalize` has called JobTask.bind, which binds to the default app
    return other
