"""Celery's events, which Flower shows. They block nothing while Redis is away."""

from __future__ import annotations

from typing import Any

from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher


class SteadyDispatcher(EventDispatcher):  # type: ignore[misc]
    """Celery's dispatcher with a bound on retries: what Redis does not accept is kept for the next connection.

    Celery retries a worker's heartbeat until Redis is back. If one is due before the worker notices that its connection
    is lost, the event loop blocks, and a worker that receives SIGTERM meanwhile does not stop.
    """

    def send(self, type: str, *args: Any, retry: bool = False, retry_policy: Any = None, **fields: Any) -> None:
        bounded = retry and retry_policy is not None
        super().send(type, *args, retry=bounded, retry_policy=retry_policy, **fields)


class SteadyEvents(Events):  # type: ignore[misc]
    """Celery's events with this dispatcher."""

    dispatcher_cls = SteadyDispatcher
