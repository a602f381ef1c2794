"""Workers send Celery's task events to monitors, and save the work while there are none."""

from __future__ import annotations

import threading

from celery import Celery
from redis import Redis

from cellama.tasks import app, generate

from ..conftest import PATIENCE_S, WorkerProcess, wait_until

EVENTS_OF_A_JOB = {"task-received", "task-started", "task-succeeded"}


def test_task_events_are_dropped_until_the_next_heartbeat_if_nobody_receives_them(redis_client: Redis) -> None:
    with app.connection_for_write() as connection, redis_client.pubsub() as monitor:
        dispatcher = app.events.Dispatcher(connection, buffer_group={"task"})

        def num_buffered() -> int:
            dispatcher.send("task-received", uuid="a job")
            return len(dispatcher._group_buffer["task"])

        assert num_buffered() == 1
        dispatcher.flush()
        assert num_buffered() == 0
        dispatcher.send("worker-heartbeat")
        assert num_buffered() == 1
        monitor.psubscribe("*celeryev/task.*")
        wait_until(redis_client.pubsub_numpat, "the subscription")
        for _ in range(2):
            dispatcher.flush()
            assert num_buffered() == 1


def test_monitor_that_starts_late_receives_all_events_of_later_jobs(worker: WorkerProcess, plain: Celery) -> None:
    def run_jobs() -> set[str]:
        jobs = [generate.delay("tiny", "Once upon a time", max_tokens=1, temperature=0) for _ in range(20)]
        for job in jobs:
            job.get(timeout=PATIENCE_S)
        return {job.id for job in jobs}

    run_jobs()  # nobody receives the events of these jobs
    types: dict[str, set[str]] = {}
    has_heartbeat, is_done = threading.Event(), threading.Event()

    def record(event: dict[str, str]) -> None:
        types.setdefault(event.get("uuid", ""), set()).add(event["type"])
        if event["type"] == "worker-heartbeat":
            has_heartbeat.set()

    def monitor() -> None:
        with plain.connection_for_read() as connection:
            receiver = plain.events.Receiver(connection, handlers={"*": record})
            while not is_done.is_set():
                try:
                    receiver.capture(timeout=0.5, wakeup=not has_heartbeat.is_set())
                except TimeoutError:
                    continue

    thread = threading.Thread(target=monitor, daemon=True)
    thread.start()
    try:
        wait_until(has_heartbeat.is_set, "the heartbeat for which the monitor has asked")
        jobs = run_jobs()
        wait_until(lambda: all(types.get(job, set()) >= EVENTS_OF_A_JOB for job in jobs), "the events of all jobs")
    finally:
        is_done.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
