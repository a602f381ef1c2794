"""Celery's events of tasks: in full for whoever listens, one now and then for nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cellama.tasks.broker.channels import keep_client
from cellama.tasks.broker.task_events import TaskEvents


class Dispatcher:
    """Gathers tasks' events until it is flushed, as Celery's does."""

    def __init__(self) -> None:
        self._group_buffer: dict[str, list[str]] = {"task": []}
        self.at_once: list[str] = []

    def send(self, type: str, **_: Any) -> None:
        (self._group_buffer["task"] if type.startswith("task-") else self.at_once).append(type)

    def flush(self) -> list[str]:
        sent, self._group_buffer["task"][:] = list(self._group_buffer["task"]), []
        return sent


def test_events_are_told_in_full_while_somebody_listens() -> None:
    dispatcher = Dispatcher()
    events = TaskEvents(dispatcher)
    told = []
    for num_listeners in (0, 0, 2, 1):
        for what in ("task-received", "task-started", "worker-heartbeat"):
            dispatcher.send(what)
        told.append(dispatcher.flush())
        events.note("/0.celeryev/worker.heartbeat", 5)  # that is another topic
        events.note("/0.celeryev/task.multi", num_listeners)
    both, one = ["task-received", "task-started"], ["task-received"]
    assert told == [both, one, one, both]  # before anybody knows, for nobody, for who listens by then, for that one
    assert dispatcher.at_once == ["worker-heartbeat"] * 4


def test_client_that_is_kept_tells_how_many_have_heard_what_it_publishes() -> None:
    client = SimpleNamespace(publish=lambda topic, payload: 3)
    channel = SimpleNamespace(_create_client=lambda asynchronous=False: client, pool="pool")
    noted: list[tuple[str, int]] = []
    keep_client(channel, lambda *heard: noted.append(heard))
    assert channel._create_client() is channel._create_client() is client
    assert client.publish("topic", "x") == 3
    assert noted == [("topic", 3)]
