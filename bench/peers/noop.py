"""Define a Celery task that does nothing, which gives a lower bound for a job's cost in Celery and Redis."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from celery import Celery

from .celery_worker import celery_worker

URL, LIKE_OURS = "NOOP_REDIS_URL", "NOOP_LIKE_OURS"
TASK = "noop.nothing"
OURS = {  # also set by cellama's workers
    "task_acks_late": True,
    "task_track_started": True,
    "worker_prefetch_multiplier": 1,
    "task_send_sent_event": True,
    "result_backend_thread_safe": True,
    "worker_deduplicate_successful_tasks": True,
}

Submit = Callable[[str], str]

app = Celery("noop", broker=os.environ.get(URL), backend=os.environ.get(URL), set_as_current=False)
app.conf.update({"task_default_queue": os.environ.get(LIKE_OURS, "") + "noop", "worker_hijack_root_logger": False})
if os.environ.get(LIKE_OURS):
    app.conf.update(OURS)


@app.task(name=TASK)  # type: ignore[untyped-decorator]
def nothing(text: str) -> None:
    """Do nothing."""


@contextlib.contextmanager
def noop_worker(
    folder: Path, url: str, *, threads: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Submit]]:
    """Run a worker, and yield a function that queues a job and returns its id.

    With `threads`, the worker uses the pool and settings of cellama's workers. Otherwise, it uses Celery's defaults.
    """
    mark = "like-ours-" if threads else ""
    producer = Celery(broker=url, backend=url, set_as_current=False)
    options = ("--pool", "threads", "--concurrency", str(threads), "--without-gossip") if threads else ()
    environment = {URL: url, LIKE_OURS: mark}
    try:
        with celery_worker(__name__, f"{mark}noop", folder, *options, environment=environment) as process:
            yield process, lambda text: str(producer.send_task(TASK, (text,), queue=f"{mark}noop"))
    finally:
        producer.close()
