"""What both clients do, blocking: everything but their shape."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from cellama.api.batch.options import BatchOptions, Summary
from cellama.api.batch.progress import Progress
from cellama.api.batch.start import run_batch
from cellama.tasks import app
from cellama.tasks.broker.control import purge_queue
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import (
    JobCancelled,
    JobTimeout,
    ResultIgnored,
    UnknownJob,
    UnknownModel,
)
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import IGNORED_FIELD, job_key
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_keys, queue_name
from cellama.tasks.contract.shapes.results import Result
from cellama.tasks.estimates.position import Position, position_of, running_jobs
from cellama.tasks.estimates.waiting import eta_by_class, waiting_by_class
from cellama.tasks.jobs import app_at
from cellama.tasks.state.job_list import OpenJob, open_jobs, queued_models
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.reader import EventCursor, stream_events
from cellama.tasks.state.records import DeadJob
from cellama.tasks.state.registry import WorkerEntry, live_workers

from .commands import Commands
from .outage import OUTAGE_RETRY_S, Outage
from .registry_views import Stats, queues, stats

CONNECT_TIMEOUT_S = 3.0
RESULT_LOOK_S = 5.0


class Core:
    """Redis is that of the URL, or of the settings. Threads may share one."""

    def __init__(self, url: str | None = None) -> None:
        """Raises ValueError if that is no URL of a Redis."""
        self._url = url
        self._app = app if url is None else app_at(url)
        self._redis = connect(url, socket_connect_timeout=CONNECT_TIMEOUT_S)
        self.commands = Commands(self._app, self.workers)

    def outage(self) -> Outage:
        return Outage(self._url)

    def submit(
        self, name: str, model: str, content: Any, wait: bool, key: str | None, params: Mapping[str, Any]
    ) -> AsyncResult:
        task = self._app.tasks[name]
        task.parse((model, content), params)  # the caller's mistakes first, then the world's
        with reaching_redis(self._url):
            if not wait:
                self._check_served(model)
            return task.apply_async((model, content), dict(params), idempotency_key=key)

    def submit_many(
        self,
        name: str,
        model: str,
        contents: Iterable[Any],
        wait: bool,
        keys: Sequence[str] | None,
        params: Mapping[str, Any],
    ) -> list[str]:
        task = self._app.tasks[name]
        jobs = task.check_many([((model, content), dict(params)) for content in contents], keys)
        with reaching_redis(self._url):
            if not wait:
                self._check_served(model)
            ids: list[str] = task.queue_many(jobs)
            return ids

    def _check_served(self, model: str) -> None:
        served = [m["id"] for worker in live_workers(self._redis) for m in worker.models if m["status"] == "ready"]
        if model in served or (model == DEFAULT_MODEL and served):
            return
        if not served:
            raise UnknownModel(
                f"no worker is running, so none serves {model!r}; start one with `cellama up` or `cellama worker`, "
                "or pass wait=True to queue the job all the same"
            )
        close = difflib.get_close_matches(model, served, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"served: {', '.join(sorted(set(served)))}"
        raise UnknownModel(f"no live worker serves a model {model!r}; {hint}")

    def result(self, job_id: str, timeout_s: float | None) -> Result:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with reaching_redis(self._url):
            self._check_kept(job_id)
            while True:  # a result that comes while Celery subscribes may be missed: it asks again now and then
                remaining_s = max(0.0, deadline - time.monotonic())
                try:
                    asked = AsyncResult(job_id, app=self._app)
                    asked.ready()  # then Celery has no need to subscribe
                    result: Result = asked.get(timeout=min(RESULT_LOOK_S, remaining_s), interval=0.05)
                    return result
                except CeleryTimeoutError:
                    if remaining_s <= RESULT_LOOK_S:
                        raise self.too_late(job_id, timeout_s) from None
                except TaskRevokedError:
                    raise JobCancelled(f"job {job_id} was cancelled") from None

    def _check_kept(self, job_id: str) -> None:
        if self._redis.hexists(job_key(job_id), IGNORED_FIELD):
            raise ResultIgnored(
                f"job {job_id} was queued with ignore_result, so its result is not stored; read its stream"
            )

    @staticmethod
    def too_late(job_id: str, timeout_s: float | None) -> JobTimeout:
        return JobTimeout(f"job {job_id} has no result after {timeout_s} s; it goes on: ask again, or cancel it")

    def is_ready(self, job_id: str) -> bool:
        with reaching_redis(self._url):
            self._check_kept(job_id)
            return bool(AsyncResult(job_id, app=self._app).ready())

    def cancel(self, job_id: str) -> None:
        with reaching_redis(self._url):
            self._app.control.revoke(job_id, terminate=True)

    def stream(self, job_id: str, after: int, timeout_s: float, ping_s: float, cancel_on_exit: bool) -> Iterator[Event]:
        """Raises InvalidJob before anything is read."""
        return self._stream(EventCursor(job_id, after), timeout_s, ping_s, cancel_on_exit)

    def _stream(self, cursor: EventCursor, timeout_s: float, ping_s: float, cancel_on_exit: bool) -> Iterator[Event]:
        outage = self.outage()
        try:
            while not cursor.ended:
                with outage.watching():
                    for event in stream_events(
                        self._redis, cursor.job_id, timeout_s=timeout_s, ping_s=ping_s, cursor=cursor
                    ):
                        outage.is_over()
                        yield event
                if not cursor.ended:
                    time.sleep(OUTAGE_RETRY_S)
        finally:
            if cancel_on_exit and not cursor.ended:
                self.cancel(cursor.job_id)

    def position(self, job_id: str) -> Position:
        with reaching_redis(self._url):
            return position_of(self._redis, job_id)

    def jobs(self, model: str | None, limit: int) -> list[OpenJob]:
        with reaching_redis(self._url):
            return open_jobs(self._redis, model, limit)

    def purge(self, model: str) -> int:
        with reaching_redis(self._url):
            if model not in (*self._models(), DEFAULT_MODEL) and not any(self.queue_depths([model]).values()):
                known = ", ".join(queued_models(self._redis)) or "none"
                raise UnknownModel(
                    f"no worker serves a model {model!r}, and no job waits for it; jobs wait for: {known}"
                )
            return purge_queue(self._app, queue_name(model))

    def _models(self) -> list[str]:
        return queues(live_workers(self._redis), queued_models(self._redis))

    def dead(self) -> list[DeadJob]:
        with reaching_redis(self._url):
            return Ledger(self._redis).dead()

    def requeue_dead(self, job_id: str) -> str:
        with reaching_redis(self._url):
            new_id = Ledger(self._redis).requeue_dead(job_id)
        if new_id is None:
            raise UnknownJob(f"no dead job {job_id}; `cellama dead list` shows those that there are")
        return new_id

    def batch(self, options: BatchOptions, on_progress: Callable[[Progress], None]) -> Summary:
        with reaching_redis(self._url):
            self._redis.ping()
        return run_batch(self._redis, self._app, options, on_progress=on_progress)

    def workers(self) -> list[WorkerEntry]:
        with reaching_redis(self._url):
            return live_workers(self._redis)

    def queue_depths(self, models: list[str]) -> dict[str, int]:
        with reaching_redis(self._url):
            pipeline = self._redis.pipeline(transaction=False)
            for model in models:
                for key in queue_keys(model):
                    pipeline.llen(key)
            lengths = iter(pipeline.execute())
            return {model: sum(next(lengths) for _ in queue_keys(model)) for model in models}

    def stats(self) -> Stats:
        workers = self.workers()
        with reaching_redis(self._url):
            models = queues(workers, queued_models(self._redis))
            waiting = waiting_by_class(self._redis, models)
            eta_s = partial(eta_by_class, self._redis, workers, running_jobs(self._redis))
            return stats(workers, self.queue_depths(models), waiting, eta_s)

    def close(self) -> None:
        self._redis.close()
