"""Telemetry of engines: their steps and requests, for the middlewares that have hooks for them.

An engine only puts an event into a list. A thread of its own calls the hooks, so that a hook that is slow, hangs or
fails costs events, and no token. Two middlewares are here: one calls the function that a setting names, one writes
lines of JSON to the log.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Literal, cast

from cellama.config.logging import telemetry_logger
from cellama.engine import Engine, InvalidRequest, Model, RequestStats, StepStats
from cellama.tasks.middleware import Middleware, Middlewares, imported

log = logging.getLogger(__name__)

MAX_WAITING = 10_000  # events, a few seconds of a busy worker; later ones are lost until the hooks have caught up
GATHER_S = 0.05  # seconds between two polls while events come: waking up for each would take the GIL from the engines
CLOSE_S = 2.0  # seconds that hooks get for the remaining events when the worker stops
DIGITS = 3  # decimals of numbers in lines

Stats = StepStats | RequestStats
Hook = Callable[[Stats], None]
Logged = Literal["off", "requests", "steps"]


class TelemetryHook(Middleware):
    """Calls a function with the events of steps and requests (`telemetry_hook`)."""

    def __init__(self, hook: Hook | str) -> None:
        """The hook may be the import path `package.module:name` of a function, or of a class whose objects can be
        called. Raises InvalidRequest."""
        found = imported("telemetry_hook", hook) if isinstance(hook, str) else hook
        if not callable(found):
            raise InvalidRequest(f"telemetry_hook {hook!r} can't be called; name a function, or a class with __call__")
        self._hook = cast(Hook, found)

    def on_step(self, stats: StepStats) -> None:
        self._hook(stats)

    def on_request(self, stats: RequestStats) -> None:
        self._hook(stats)


class RequestLog(Middleware):
    """Writes the events of requests to the log (`telemetry_log = "requests"`)."""

    def __init__(self) -> None:
        self._lines = telemetry_logger()

    def on_request(self, stats: RequestStats) -> None:
        self._lines.info(as_json(stats))


class StepLog(RequestLog):
    """Writes the events of requests and of steps (`telemetry_log = "steps"`)."""

    def on_step(self, stats: StepStats) -> None:
        self._lines.info(as_json(stats))


def telemetry_middlewares(hook: Hook | str | None, logged: Logged) -> list[Middleware]:
    """What the two settings ask for. Raises InvalidRequest."""
    logs: dict[Logged, list[Middleware]] = {"off": [], "requests": [RequestLog()], "steps": [StepLog()]}
    return [*([] if hook is None else [TelemetryHook(hook)]), *logs[logged]]


class TelemetryRelay(Middleware):
    """Takes the telemetry of engines to the hooks of middlewares. Without such hooks there is no thread."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._middlewares = Middlewares()
        self._events: deque[Stats] = deque()
        self._due = threading.Event()
        self._closing = threading.Event()
        self.num_dropped = 0
        self._thread: threading.Thread | None = None

    def start(self, middlewares: Middlewares) -> None:
        """Call the hooks of these middlewares from now on."""
        self._middlewares = middlewares
        if middlewares.have(Middleware.on_step) or middlewares.have(Middleware.on_request):
            self._thread = threading.Thread(target=self._run, name="cellama-telemetry", daemon=True)
            self._thread.start()

    def on_model_loaded(self, model_id: str, model: Model) -> None:
        if {"generate", "chat"} & model.capabilities:
            self.watch(model.engine)

    def watch(self, engine: Engine) -> None:
        """Report the events of this engine from now on."""
        if self._middlewares.have(Middleware.on_request):
            engine.add_request_listener(self._take)
        if self._middlewares.have(Middleware.on_step):
            engine.add_step_listener(self._take)

    def close(self) -> None:
        """Report the remaining events, as far as the hooks take them in time; log how many are lost."""
        self._closing.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self.num_dropped or self._events:
            log.warning("telemetry: %d events were lost", self.num_dropped + len(self._events))

    def _take(self, stats: Stats) -> None:
        """On an engine's thread."""
        if len(self._events) < MAX_WAITING:
            self._events.append(stats)
            if not self._due.is_set():
                self._due.set()
            return
        self.num_dropped += 1
        if self.num_dropped == 1:
            log.warning("telemetry: the hooks are too slow, so events are lost from now on; requests are not affected")

    def _run(self) -> None:
        """The telemetry thread."""
        closing = False
        while not closing:
            self._due.wait()
            closing = self._closing.wait(GATHER_S)  # before the events are taken: none comes after that
            self._due.clear()
            while self._events:
                stats = replace(self._events.popleft(), worker=self._worker)
                if isinstance(stats, StepStats):
                    self._middlewares.call(Middleware.on_step, stats)
                else:
                    self._middlewares.call(Middleware.on_request, stats)


def as_json(stats: Stats) -> str:
    """One line: `event` is "step" or "request", the other fields are those of the event."""
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    rounded = {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in values.items()}
    return json.dumps({"event": "step" if isinstance(stats, StepStats) else "request", **rounded})
