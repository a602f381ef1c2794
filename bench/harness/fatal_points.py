"""Kill a worker at a chosen point between the end of a job and the job's next step.

The benchmark marks a job with a file in a directory, and the worker process that reaches the chosen point of this job
kills itself with SIGKILL. The worker imports this module along with its batch strategy, so the product itself contains
no code for this purpose. A mark is renamed before the kill, so each mark kills one process, and the benchmark can count
the kills.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from celery import current_task, states
from celery.app.amqp import AMQP

from cellama.tasks.broker.message import JobRequest
from cellama.tasks.broker.result_backend import ResultBackend
from cellama.tasks.contract.events import is_terminal
from cellama.tasks.state.ledger import Entry, Ledger

DIRECTORY = "BENCH_FATAL_POINTS"  # environment variable of the worker
# Name of a point → where it is.
POINTS = {
    "ended": "the terminal event is in Redis",
    "sending": "a callback, or the next step of a chain, is about to be sent",
    "sent": "the callback or the next step has been sent",
    "storing": "Celery is about to store the end",
    "stored": "Celery has stored the end",
    "counted": "the job is counted in its chord",
    "claimed": "the body of the chord is about to be sent",
    "called": "the body of the chord has been sent",
    "failing": "the errbacks are about to be sent",
    "failed": "the errbacks have been sent",
    "acking": "the message is about to be acked",
}
_USED = ".used"  # suffix of a mark whose worker has been killed
_SEPARATOR = "@"  # in a mark's name: point@job id

_lock = threading.Lock()
_chord: ContextVar[str] = ContextVar("fatal_points_chord", default="")  # id of the body whose part is being counted


def mark(directory: Path, point: str, job_id: str) -> None:
    """Kill the worker that reaches this point of a job or chord body. Call this function before sending the job."""
    assert point in POINTS
    (directory / f"{point}{_SEPARATOR}{job_id}").touch()


def unmark(directory: Path, point: str, job_id: str) -> None:
    """Remove a mark that has not killed a worker."""
    (directory / f"{point}{_SEPARATOR}{job_id}").unlink(missing_ok=True)


def used(directory: Path) -> list[tuple[str, str]]:
    """Return the point and the job id of each mark that has killed a worker."""
    names = [path.name.removesuffix(_USED) for path in directory.glob(f"*{_USED}")]
    return [(name.partition(_SEPARATOR)[0], name.partition(_SEPARATOR)[2]) for name in sorted(names)]


def install() -> None:
    """Make this worker process kill itself when it reaches a marked point."""
    directory = Path(os.environ[DIRECTORY])

    def reach(point: str, job_id: str | None) -> None:
        path = directory / f"{point}{_SEPARATOR}{job_id}"
        if not path.exists():
            return
        with _lock:  # held for good: one mark, one dead process
            try:
                path.rename(f"{path}{_USED}")
            except FileNotFoundError:  # another worker was faster
                return
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # until the signal arrives

    _watch_ledger(reach)
    _watch_next_steps(reach)
    _watch_backend(reach)
    _watch_acks(reach)


Reach = Callable[[str, str | None], None]


def _watch_ledger(reach: Reach) -> None:
    write = Ledger.write

    @functools.wraps(write)
    def write_and_reach(self: Ledger, entries: Sequence[Entry]) -> tuple[set[int], set[int]]:
        unwritten = write(self, entries)
        for place, entry in enumerate(entries):
            if is_terminal(entry.event) and not any(place in places for places in unwritten):
                reach("ended", entry.job_id)
        return unwritten

    Ledger.write = write_and_reach  # type: ignore[method-assign]


def _watch_next_steps(reach: Reach) -> None:
    publish = AMQP._retry_publish

    @functools.wraps(publish)
    def publish_and_reach(self: AMQP, *args: Any, **options: Any) -> Any:
        body_id = _chord.get()
        job_id = options.get("parent_id") or (current_task.request.id if current_task else None)
        reach("claimed", body_id) if body_id else reach("sending", job_id)
        published = publish(self, *args, **options)
        reach("called", body_id) if body_id else reach("sent", job_id)
        return published

    AMQP._retry_publish = publish_and_reach


def _watch_backend(reach: Reach) -> None:
    store, count = ResultBackend._store_result, ResultBackend.on_chord_part_return
    call_errbacks = ResultBackend._call_task_errbacks

    @functools.wraps(store)
    def store_and_reach(self: ResultBackend, task_id: str, result: Any, state: str, *args: Any, **options: Any) -> Any:
        ends = state in states.READY_STATES
        if ends:
            reach("storing", task_id)
        stored = store(self, task_id, result, state, *args, **options)
        if ends:
            reach("stored", task_id)
        return stored

    @functools.wraps(count)
    def count_and_reach(self: ResultBackend, request: Any, *args: Any, **options: Any) -> Any:
        token = _chord.set(request.chord["options"].get("task_id", ""))
        try:
            counted = count(self, request, *args, **options)
        finally:
            _chord.reset(token)
        reach("counted", request.id)
        return counted

    @functools.wraps(call_errbacks)
    def call_errbacks_and_reach(self: ResultBackend, request: Any, *args: Any, **options: Any) -> Any:
        reach("failing", request.id)
        called = call_errbacks(self, request, *args, **options)
        reach("failed", request.id)
        return called

    ResultBackend._store_result = store_and_reach  # type: ignore[method-assign]
    ResultBackend.on_chord_part_return = count_and_reach  # type: ignore[method-assign]
    ResultBackend._call_task_errbacks = call_errbacks_and_reach


def _watch_acks(reach: Reach) -> None:
    acknowledge = JobRequest.acknowledge

    @functools.wraps(acknowledge)
    def reach_and_acknowledge(self: JobRequest) -> None:
        reach("acking", self.id)
        acknowledge(self)

    JobRequest.acknowledge = reach_and_acknowledge  # type: ignore[method-assign]
