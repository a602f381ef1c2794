"""Attempts of jobs: how many begin, how they end, how long they wait and run. Pool threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from celery import Task

from cellama.tasks.broker.pool import JobControl
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, class_of_priority, model_of
from cellama.tasks.metrics.bounded import Bounded
from cellama.tasks.metrics.meter import Meter
from cellama.tasks.worker.watched.ends import end_of

if TYPE_CHECKING:
    from cellama.tasks.state.records import Attempt

CELERY_STATES = {"success": "SUCCESS", "failure": "FAILURE", "revoked": "REVOKED"}  # of ends that are a job's


class Attempts:
    """Names of tasks are those that Celery knows, so they are few; ids of models are bounded."""

    def __init__(self, meter: Meter, models: Bounded) -> None:
        self._meter = meter
        self._models = models

    @contextlib.contextmanager
    def watching(self, task: Task, attempt: Attempt, control: JobControl) -> Iterator[None]:
        """Counts the attempt that runs in here. What ends it goes on as it is."""
        delivery = task.request.delivery_info or {}
        priority = delivery.get("priority")
        of = class_of_priority(PRIORITY_INTERACTIVE if priority is None else priority)
        labels = (self._models.of(model_of(str(delivery.get("routing_key")))), of)
        self._meter.count("cellama_attempts_total", *labels, "true" if attempt.number == 1 else "false")
        if attempt.number == 1:
            self._meter.observe("celery_task_queuetime_seconds", attempt.waited_s, task.name)
        failure: BaseException | None = None
        began_at = time.monotonic()
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            end = end_of(failure, control.interruption)
            self._meter.observe("celery_task_runtime_seconds", time.monotonic() - began_at, task.name)
            self._meter.count("cellama_attempt_ends_total", *labels, end)
            if (state := CELERY_STATES.get(end)) is not None:
                self._meter.count("celery_tasks_total", task.name, state)
