"""Celery's events, which Flower shows. They hold nothing up; those of tasks are told in full while a program listens.

Redis says of each message how many have heard it. While none does, a worker tells one event of those that come within
EVENTS_EVERY_S, to hear of whoever listens by now.
"""

from __future__ import annotations

from typing import Any

from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher

from cellama.tasks.connection.kombu_internals import gathered_events

TOPIC = "task.multi"  # under which Celery publishes what it has gathered


class SteadyDispatcher(EventDispatcher):  # type: ignore[misc]
    """Tries nothing without end: what Redis does not take is kept for the next connection.

    Celery sends a worker's heartbeats again and again until Redis is back. If one is due before the lost connection is
    noticed, the event loop stands still in that: a worker that shall end does not hear of it.
    """

    def send(self, type: str, *args: Any, retry: bool = False, retry_policy: Any = None, **fields: Any) -> None:
        bounded = retry and retry_policy is not None
        super().send(type, *args, retry=bounded, retry_policy=retry_policy, **fields)


class SteadyEvents(Events):  # type: ignore[misc]
    """Celery's, with that dispatcher."""

    dispatcher_cls = SteadyDispatcher


class TaskEvents:
    """Stands before the `send` of a dispatcher of Celery's."""

    def __init__(self, dispatcher: Any) -> None:
        self._send = dispatcher.send
        self._gathered = gathered_events(dispatcher, "task")
        self._is_heard = True
        dispatcher.send = self.send

    def send(self, type: str, *args: Any, **fields: Any) -> None:
        """What Celery's does, unless it would not be heard."""
        if self._is_heard or not self._gathered or not type.startswith("task-"):
            self._send(type, *args, **fields)

    def note(self, topic: str, num_listeners: int) -> None:
        """So many have heard what was published."""
        if topic.endswith(TOPIC):
            self._is_heard = num_listeners > 0
