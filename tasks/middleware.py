"""Extension points for workers: hooks around attempts, requests, steps and models (docs/how-to/middleware.md).

The built-in middlewares are metrics, traces, telemetry, service times and the signing of reasoning (`tasks/worker/`).
The setting `middleware` names other middlewares by import path. Only workers use this module.
"""

from __future__ import annotations

import contextlib
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec

from celery import Task
from celery.exceptions import Ignore, Reject

from cellama.config.logging import event_logger, log_context
from cellama.engine import InvalidRequest
from cellama.tasks.broker.pool import Interruption, JobControl
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE

if TYPE_CHECKING:
    from cellama.engine import Finished, Model, RequestStats, StepStats
    from cellama.tasks.contract.kinds.chat import ChatJob
    from cellama.tasks.contract.kinds.generate import GenerateJob
    from cellama.tasks.contract.kinds.prefill import PrefillJob
    from cellama.tasks.state.ledger import Attempt

log = event_logger(__name__)

P = ParamSpec("P")
# How an attempt ends. "handed_back": another attempt will continue the job. "superseded": another attempt has the job.
AttemptEnd = Literal["success", "failure", "revoked", "handed_back", "superseded"]


@dataclass(slots=True)
class AttemptContext:
    """One attempt at a job. All hooks of the attempt receive the same object."""

    record: Attempt  # the attempt in the ledger, with `job_id`, `run_id`, `number` and more
    task: str  # name, such as "cellama.generate"
    queue: str
    priority: int
    parameters: Mapping[str, Any]  # parameters of the call, not validated
    headers: Mapping[str, Any]  # headers of the message
    submitted_at: float  # time of submission by Redis' clock, converted to `time.monotonic()`
    began_at: float = field(default_factory=time.monotonic)
    requests_from: float = 0.0  # start of the timings of its requests, as `time.monotonic()`
    trace_id: str = ""  # for log lines of the attempt; `before_attempt` can set it
    # Functions that sign reasoning, by line of a bulk run. Other jobs have one function with the key "".
    sign: dict[str, Callable[[str], str]] = field(default_factory=dict)
    has_token: bool = False
    data: dict[str, Any] = field(default_factory=dict)  # data that one hook stores for a later hook
    end: AttemptEnd | None = None  # this field and the next two are set for `after_attempt`
    result: Mapping[str, Any] | None = None  # set if the attempt succeeds
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.requests_from = self.requests_from or self.submitted_at

    @property
    def job_id(self) -> str:
        return self.record.job_id

    @property
    def number(self) -> int:
        """Return the number of the attempt, which is 1 for the job's first attempt."""
        return self.record.number


def context_of(task: Task, attempt: Attempt) -> AttemptContext:
    """Return the context for a new attempt at this task's current job."""
    request, delivery = task.request, task.request.delivery_info or {}
    priority, names = delivery.get("priority"), KINDS[task.name].positional
    return AttemptContext(
        record=attempt,
        task=str(task.name),
        queue=str(delivery.get("routing_key")),
        priority=PRIORITY_INTERACTIVE if priority is None else priority,
        parameters={**dict(zip(names, request.args or (), strict=False)), **(request.kwargs or {})},
        headers=vars(request),  # Celery makes attributes of message headers
        submitted_at=time.monotonic() - attempt.waited_s,
    )


class Middleware:
    """The base class of middlewares, whose hooks do nothing. Override the hooks that you need.

    An exception in a hook does not affect the job. The exception is logged once for each class and hook. Each hook
    blocks the thread that calls it. The hook's docstring names this thread.
    """

    def before_attempt(self, attempt: AttemptContext) -> None:
        """Run when an attempt at a job starts, on the job's thread."""

    def before_request(self, attempt: AttemptContext, line: str, job: GenerateJob | ChatJob | PrefillJob) -> None:
        """Run before the engine receives a request of the attempt, on the job's thread.

        `line` is the number of the line in a bulk run, or an empty string for other jobs.
        """

    def after_first_token(self, attempt: AttemptContext) -> None:
        """Run once the first token of the attempt is in Redis, on the publisher's thread.

        A slow hook delays all streams of the worker.
        """

    def after_request(self, model_id: str, end: Finished, attempt: AttemptContext | None) -> None:
        """Run when a request to an engine has ended, on the publisher's thread.

        A slow hook delays all streams of the worker. `attempt` is None if the attempt has already ended.
        """

    def after_attempt(self, attempt: AttemptContext) -> None:
        """Run on the job's thread when an attempt has ended and its last event is in Redis.

        The outcome has not been reported to Celery yet.
        """

    def on_step(self, stats: StepStats) -> None:
        """Run for each step of each engine, on the telemetry thread.

        A slow hook does not delay tokens, but may miss steps.
        """

    def on_request(self, stats: RequestStats) -> None:
        """Run on the telemetry thread for each finished request, with the request's statistics."""

    def on_model_loaded(self, model_id: str, model: Model) -> None:
        """Run when the worker has loaded a model, before the model's first job."""

    def close(self) -> None:
        """Run when the worker stops, after its last job."""


HOOKS = tuple(name for name in vars(Middleware) if not name.startswith("_"))


class Middlewares:
    """Calls the hooks of a worker's middlewares in order. Thread-safe."""

    def __init__(self, middlewares: Iterable[Middleware] = ()) -> None:
        self._middlewares = list(middlewares)
        self._overriding = {
            hook: [each for each in self._middlewares if getattr(type(each), hook) is not getattr(Middleware, hook)]
            for hook in HOOKS
        }
        self._failures: Counter[tuple[str, str]] = Counter()
        self._attempts: dict[str, AttemptContext] = {}  # running attempts by run id

    def have(self, hook: Callable[..., None]) -> bool:
        """Return whether a middleware overrides this hook of `Middleware`."""
        return bool(self._overriding[hook.__name__])

    def call(self, hook: Callable[Concatenate[Any, P], None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call this hook on all middlewares that override it. Exceptions are logged, not raised."""
        for each in self._overriding[hook.__name__]:
            try:
                getattr(each, hook.__name__)(*args, **kwargs)
            except BaseException:  # third-party code on threads that jobs depend on
                where = type(each).__name__, hook.__name__
                self._failures[where] += 1
                if self._failures[where] == 1:
                    detail = "it is still called, but further failures are not logged"
                    log.exception("middleware hook failed", middleware=where[0], hook=where[1], detail=detail)

    @contextlib.contextmanager
    def around(self, attempt: AttemptContext, control: JobControl) -> Iterator[None]:
        """Call the hooks before and after the attempt that this block runs, and add the attempt's ids to log lines."""
        self.call(Middleware.before_attempt, attempt)
        self._attempts[attempt.record.run_id] = attempt
        with log_context(attempt.job_id, attempt.trace_id):
            try:
                yield
            except BaseException as error:
                attempt.error = error
                raise
            finally:
                del self._attempts[attempt.record.run_id]
                attempt.end = end_of(attempt.error, control.interruption)
                self.call(Middleware.after_attempt, attempt)

    def after_request(self, run_id: str, model_id: str, end: Finished) -> None:
        """Call the `after_request` hook with the attempt that sent the request."""
        self.call(Middleware.after_request, model_id, end, self._attempts.get(run_id))

    def close(self) -> None:
        """Close all middlewares, and log how often their hooks failed."""
        self.call(Middleware.close)
        for (name, hook), num_failures in self._failures.items():
            log.warning("middleware hook failed", middleware=name, hook=hook, num_failures=num_failures)


def end_of(error: BaseException | None, interruption: Interruption | None) -> AttemptEnd:
    """Return how an attempt ended, based on the error that Celery receives and the reason for an interruption.

    Ignore means that the outcome has already been reported to Celery, or that another attempt has taken over the job.
    """
    if error is None:
        return "success"
    if interruption is Interruption.HANDED_BACK:
        return "handed_back"
    if not isinstance(error, Ignore | Reject) or interruption is Interruption.HARD_LIMIT:
        return "failure"
    return "revoked" if interruption is Interruption.CANCELLED else "superseded"


def load_middleware(path: str) -> Middleware:
    """Return an instance of the class at the import path `package.module:Class`. Raises InvalidRequest."""
    middleware = imported("middleware", path)
    if not isinstance(middleware, Middleware):
        raise InvalidRequest(f"middleware: {path!r} is not a subclass of cellama.tasks.middleware.Middleware")
    return middleware


def imported(setting: str, path: str) -> Any:
    """Return the object at the import path `package.module:name`, or an instance if the object is a class.

    Raises InvalidRequest, whose message names the setting.
    """
    try:
        found = pkgutil.resolve_name(path)
        return found() if isinstance(found, type) else found
    except Exception as error:  # third-party code
        raise InvalidRequest(f"{setting}: {path!r} can't be imported: {type(error).__name__}: {error}") from None
