"""A task whose calls are checked before anything is queued: one, or many at once."""

from __future__ import annotations

import contextlib
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

from cellama.config import get_settings
from cellama.tasks.calls.call_options import (
    IN_WORKERS_ONLY,
    ONE_AFTER_ANOTHER,
    delay_s,
    plain_priority,
    plain_queue,
    refuse_eager,
    settle_options,
    timeout_of,
)
from cellama.tasks.calls.canvas_steps import refuse_step
from cellama.tasks.calls.enqueue import PAGE_JOBS, Alike, Checked, enqueue, ranges
from cellama.tasks.calls.step_routes import route_steps
from cellama.tasks.connection.kombu_internals import PRODUCER_PARTS, require_parts, sends_what_follows_a_task
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import InvalidJob, JobFailed, RedisFull, RedisRefused, RedisUnreachable
from cellama.tasks.contract.keys import IGNORED_FIELD, job_key
from cellama.tasks.contract.kind import Kind
from cellama.tasks.contract.names import (
    DEFAULT_MODEL,
    PRIORITY_INTERACTIVE,
    SUBMITTED_AT_HEADER,
    job_id_of_key,
    queue_name,
)
from cellama.tasks.contract.payloads import parse_job
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import TaskCall

from .app import CellamaApp, app

_INTERVALS = ("interval_start", "interval_step", "interval_max")
PROMPTS = ("messages", "system")  # contents that may be given by name, and which Flower and logs must not show
LIKE_OTHERS = {  # the options of a job whose message can be made from a template (message_templates.py)
    "task_id",
    "queue",
    "priority",
    "headers",
    "argsrepr",
    "kwargsrepr",
}
# Their handlers may change what Celery publishes.
PUBLISHING = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)


class JobTask(Task):  # type: ignore[misc]
    """A task whose calls are validated before anything is queued."""

    abstract = True
    kind: Kind
    Request = "cellama.tasks.broker.message:JobRequest"
    Strategy = "cellama.tasks.broker.plain_messages:strategy"
    track_started = False  # the ledger's script tells Celery of it, when the attempt has begun
    throws = (JobFailed,)  # expected: Celery logs one line, without a trace

    @classmethod
    def bind(cls, app_: Any) -> Any:
        """Bind the task to our app, also if it is in the registry of another app (canvas_steps.py)."""
        return super().bind(app)

    @property
    def resultrepr_maxsize(self) -> int:
        """Maximum length of a result in Flower and in the logs, in characters."""
        return 1024 if get_settings().show_prompts else 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Result:
        """Run the task. Celery's own method does not accept a parameter of the name `self`."""
        result: Result = self.run(*args, **kwargs)
        return result

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> AsyncResult:
        """Queue the job on its model's queue with its priority. docs/canvas.md describes Celery's options.

        With `idempotency_key`, a second call with the same key returns the job of the first one, as long as its result
        is kept. Keys are separate for each task and scope (`idempotency_scope`, else `cache_scope`). A key that was
        used with other parameters is refused. Raises InvalidJob, RedisFull, RedisUnreachable; an invalid step of a
        canvas fails by itself instead. After RedisUnreachable, a call with `task_id=error.job_id` queues the job
        unless the first call did.
        """
        require_parts(*PRODUCER_PARTS)
        steps_on = sends_what_follows_a_task()
        retry, policy = options.pop("retry", None), options.pop("retry_policy", None)
        try:
            refuse_eager(self.app)
            route_steps(options, CellamaApp)
            job = self._check(args or (), kwargs or {}, options)
        except InvalidJob as error:
            if not steps_on:
                raise
            model = (kwargs or {}).get("model", DEFAULT_MODEL)
            with reaching_redis(self.app.redis_url):
                return refuse_step(self, queue_name(str(model)), options, error)
        if retry or (retry is None and steps_on):
            return self._retrying(lambda: self._queue(job), policy)
        return self._queue(job)

    def _queue(self, job: Checked) -> AsyncResult:
        results: list[AsyncResult] = []

        def publish(producer: Producer, job: Checked) -> None:
            call = job.call
            results.append(
                Task.apply_async(self, call.args, call.kwargs, producer=producer, retry=False, **job.options)
            )

        with reaching_redis(self.app.redis_url, job.job_id):
            list(enqueue(self.app, Ledger(self.backend.client), [job], publish, self._alike(is_bulk=False)))
            if job.options.get("ignore_result"):
                self.backend.client.hset(job_key(job.job_id), IGNORED_FIELD, 1)
        return results[0] if results else self.AsyncResult(job.job_id)  # made from a template: `get` subscribes

    def _retrying(self, queue: Callable[[], AsyncResult], policy: dict[str, Any] | None) -> AsyncResult:
        """Queue the job, and retry as Celery's `retry_policy` says. A retry never queues the job a second time."""
        given = {**self.app.conf.task_publish_retry_policy, **(policy or {})}
        waits = {name: given[name] for name in ("max_retries", *_INTERVALS) if given.get(name) is not None}
        return retry_over_time(queue, (RedisUnreachable, RedisFull), **waits)

    def apply(self, *_: Any, **__: Any) -> Any:
        raise InvalidJob(IN_WORKERS_ONLY)

    def signature(self, args: Any = None, *others: Any, **options: Any) -> Signature:
        """Return a signature that names the model's queue, so that apps without our tasks can send it as well."""
        made = super().signature(args, *others, **options)
        model = made.kwargs.get("model", made.args[0] if len(made.args) > 1 else None)
        if isinstance(model, str):
            made.options.setdefault("queue", queue_name(model))
            made.options.setdefault("priority", made.kwargs.get("priority", PRIORITY_INTERACTIVE))
        return made

    def map(self, it: Iterable[Any]) -> group:
        """Return a group with a job for each. Celery's own `map` calls the task for one after another in one job."""
        return group(self.s(argument) for argument in it)

    def starmap(self, it: Iterable[Sequence[Any]]) -> group:
        """Return a group as `map` does, with the arguments of each call."""
        return group(self.s(*arguments) for arguments in it)

    def chunks(self, it: Iterable[Any], n: int) -> Any:
        raise InvalidJob(ONE_AFTER_ANOTHER.format(task=self.__name__))

    def apply_many(
        self, calls: Iterable[tuple[Sequence[Any], dict[str, Any]]], keys: Sequence[str] | None = None
    ) -> list[str]:
        """Queue many calls (args, kwargs) after all of them are checked. Return the ids of their jobs in this order.

        With `keys`, one idempotency key per call, the call can be repeated. Raises as `check_many` and `queue_many`.
        """
        return self.queue_many(self.check_many(calls, keys))

    def check_many(
        self, calls: Iterable[tuple[Sequence[Any], dict[str, Any]]], keys: Sequence[str] | None = None
    ) -> list[Checked]:
        """Return the jobs of many calls. Raises InvalidJob with each problem and the indexes of its calls."""
        refuse_eager(self.app)
        calls = list(calls)
        if keys is not None and len(keys) != len(calls):
            raise InvalidJob(f"{len(keys)} idempotency keys for {len(calls)} jobs; give one for each")
        jobs: list[Checked] = []
        problems: dict[str, list[int]] = {}
        for place, (args, kwargs) in enumerate(calls):
            try:
                jobs.append(self._check(args, kwargs, {} if keys is None else {"idempotency_key": keys[place]}))
            except InvalidJob as problem:
                problems.setdefault(str(problem), []).append(place)
        if problems:
            raise InvalidJob("; ".join(f"job {ranges(places)}: {text}" for text, places in problems.items()))
        return jobs

    def queue_many(self, jobs: Sequence[Checked]) -> list[str]:
        """Queue jobs in pages, with one call of Redis for each page.

        Raises RedisUnreachable or RedisRefused, whose message has the number of queued jobs.
        """
        require_parts(*PRODUCER_PARTS)
        num_queued = 0
        try:
            with reaching_redis(self.app.redis_url):
                for _ in enqueue(self.app, Ledger(self.backend.client), jobs, self._publish, self._alike(is_bulk=True)):
                    num_queued += 1
        except (RedisUnreachable, RedisRefused) as error:
            some = f"the first {num_queued} of {len(jobs)} jobs are queued, and perhaps up to {PAGE_JOBS} more"
            raise type(error)(f"{error}; {some}") from None
        return [job.job_id for job in jobs]

    def _check(self, args: Any, kwargs: Any, options: dict[str, Any]) -> Checked:
        """Return a valid job with settled options. Raises InvalidJob."""
        settings = get_settings()
        job = self.parse(args, kwargs)
        key = options.pop("idempotency_key", None)
        scope = options.pop("idempotency_scope", getattr(job, "cache_scope", ""))
        settle_options(self.app, options, job.model, job.priority if "priority" in kwargs else None)
        if options["priority"] is None:
            options["priority"] = job.priority
        options.setdefault("task_id", uuid() if key is None else job_id_of_key(self.name, scope, key))
        delay = delay_s(self.app, options)  # the timeout counts from the time at which the job may start
        headers = options.get("headers") or {}
        options["headers"] = {SUBMITTED_AT_HEADER: time.time(), **headers}
        if not settings.show_prompts:  # Flower and the logs show these instead of the arguments
            shown = {name: value for name, value in kwargs.items() if name not in {*self.kind.positional, *PROMPTS}}
            options.setdefault("argsrepr", f"({job.model!r}, …)")
            options.setdefault("kwargsrepr", repr(shown))
        call = self._call(args, kwargs, options["queue"], options["priority"], options["headers"], delay)
        payload_json = _written(call, settings.max_payload_bytes)
        digest = "" if key is None else call.digest(self.kind.positional)
        return Checked(call, options, payload_json, digest, options.keys() == LIKE_OTHERS and not headers)

    def _alike(self, *, is_bulk: bool) -> Alike | None:
        """Return what usual messages of this task have in common now.

        None if Celery must build each message: within a task it adds the task's family, and handlers of signals may
        change a message.
        """
        if current_task or any(signal.receivers for signal in PUBLISHING):
            return None
        return Alike(task=self.name, is_bulk=is_bulk, pid=os.getpid(), thread_id=self.app.thread_oid)

    def _publish(self, producer: Producer, job: Checked) -> None:
        """Publish the message as Celery does, but without a subscription to the result of each job of a bulk."""
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
        self, args: Any, kwargs: Any, queue: str, priority: int, headers: dict[str, Any], delay: float = 0.0
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
        )

    def call_of_plain(self, args: Any, kwargs: Any, delivery: dict[str, Any]) -> TaskCall:
        """Return the unchecked call of a message from plain Celery."""
        priority = plain_priority(kwargs, delivery.get("priority"))
        return self._call(args, kwargs, plain_queue(kwargs, args, str(delivery.get("routing_key"))), priority, {})

    def _payload_here(self, args: Any, kwargs: Any) -> Any:
        """Return the payload of the job that runs in this worker.

        It has the priority of its message, and the default timeout of the settings unless it has its own.
        """
        job = self.parse(args, kwargs)
        priority = job.priority if "priority" in kwargs else self.request.delivery_info.get("priority")
        return job.model_copy(update={"priority": priority, "timeout": timeout_of(kwargs, priority)})

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Keep the journal of a chunk as long as results, because the results of its lines are in it."""
        if self.kind.keeps_journal and status == states.SUCCESS and self.app.runtime is not None:
            with contextlib.suppress(RedisError):  # they go with the events, then
                self.app.runtime.ledger.keep_journal(task_id)

    def parse(self, args: Any, kwargs: Any) -> Any:
        """Return the payload of a call. Raises InvalidJob."""
        return parse_job(self.kind.payload, self.kind.positional, args, kwargs)

    def run_job(self, args: Any, kwargs: Any) -> Result:
        """Run a call in a worker. Raises JobFailed."""
        if self.app.runtime is None or self.request.called_directly:
            raise JobFailed("no_worker", IN_WORKERS_ONLY)
        streams = self.kind.streams and kwargs.get("stream", True) is not False
        result: Result = self.app.attempt(self, streams, lambda: self._payload_here(args, kwargs))
        return result


def _written(call: TaskCall, limit: int) -> str:
    """Return args and kwargs as JSON. Raises InvalidJob if they are not JSON, or longer than `limit` bytes."""
    try:
        text = json.dumps([call.args, call.kwargs])
        if len(call.headers) > 1 or not isinstance(call.headers.get(SUBMITTED_AT_HEADER), float):
            json.dumps(call.headers)
    except TypeError as error:
        raise InvalidJob(f"the job can't be written as JSON: {error}") from None
    if len(text) <= limit:  # ASCII: longer than what is counted
        return text
    size = len(json.dumps([call.args, call.kwargs], ensure_ascii=False).encode())
    if size > limit:
        raise InvalidJob(
            f"the job is {size} bytes long, and the limit is {limit}: split it, or raise CELLAMA_MAX_PAYLOAD_BYTES"
        )
    return text
