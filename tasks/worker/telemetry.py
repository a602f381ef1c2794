"""Relay the step and request events of engines to middleware hooks.

An engine only appends an event to a queue, and a separate thread calls the hooks. If a hook is slow, hangs or fails,
events may therefore be lost, but tokens are not delayed. This module also contains middlewares with such hooks: one
calls the function in the setting `telemetry_hook`, and the others log JSON lines.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Literal, cast

from cellama.config.logging import event_logger, telemetry_logger
from cellama.engine import Engine, InvalidRequest, Model, RequestStats, StepStats
from cellama.tasks.middleware import Middleware, Middlewares, imported

log = event_logger(__name__)

MAX_EVENTS = 10_000  # in the queue, a few seconds of a busy worker; more are dropped until the hooks have caught up
GATHER_S = 0.05  # seconds between two polls while events arrive; waking up for each would take the GIL from engines
CLOSE_S = 2.0  # seconds for the hooks to handle the remaining events when the worker stops
DIGITS = 3  # decimals of numbers in JSON lines

Stats = StepStats | RequestStats
Hook = Callable[[Stats], None]
Logged = Literal["off", "requests", "steps"]


class TelemetryHook(Middleware):
    """Calls a function with each step event and request event (`telemetry_hook`)."""

    def __init__(self, hook: Hook | str) -> None:
        """Use a function, or import it from the path `package.module:name`.

        The path may also name a class whose instances are callable. Raises InvalidRequest.
        """
        function = imported("telemetry_hook", hook) if isinstance(hook, str) else hook
        if not callable(function):
            raise InvalidRequest(f"telemetry_hook {hook!r} can't be called; name a function, or a class with __call__")
        self._hook = cast(Hook, function)

    def on_step(self, stats: StepStats) -> None:
        self._hook(stats)

    def on_request(self, stats: RequestStats) -> None:
        self._hook(stats)


class RequestLog(Middleware):
    """Logs request events (`telemetry_log = "requests"`)."""

    def __init__(self) -> None:
        self._lines = telemetry_logger()

    def on_request(self, stats: RequestStats) -> None:
        self._lines.info(as_json(stats))


class StepLog(RequestLog):
    """Logs request events and step events (`telemetry_log = "steps"`)."""

    def on_step(self, stats: StepStats) -> None:
        self._lines.info(as_json(stats))


def telemetry_middlewares(hook: Hook | str | None, logged: Logged) -> list[Middleware]:
    """Return the middlewares that the settings `telemetry_hook` and `telemetry_log` enable. Raises InvalidRequest."""
    logs: dict[Logged, list[Middleware]] = {"off": [], "requests": [RequestLog()], "steps": [StepLog()]}
    return [*([] if hook is None else [TelemetryHook(hook)]), *logs[logged]]


class TelemetryRelay(Middleware):
    """Relays engine telemetry to middleware hooks.

    Without such hooks, no thread is started.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._middlewares = Middlewares()
        self._events: deque[Stats] = deque()
        self._due = threading.Event()
        self._closing = threading.Event()
        self.num_dropped = 0
        self._thread: threading.Thread | None = None

    def start(self, middlewares: Middlewares) -> None:
        """Create the relay, and start calling the hooks of these middlewares."""
        self._middlewares = middlewares
        if middlewares.have(Middleware.on_step) or middlewares.have(Middleware.on_request):
            self._thread = threading.Thread(target=self._run, name="cellama-telemetry", daemon=True)
            self._thread.start()

    def on_model_loaded(self, model_id: str, model: Model) -> None:
        if {"generate", "chat"} & model.capabilities:
            self.watch(model.engine)

    def watch(self, engine: Engine) -> None:
        """Start relaying the events of this engine."""
        if self._middlewares.have(Middleware.on_request):
            engine.add_request_listener(self._enqueue)
        if self._middlewares.have(Middleware.on_step):
            engine.add_step_listener(self._enqueue)

    def close(self) -> None:
        """Relay the remaining events for up to `CLOSE_S`, and log the number of lost events."""
        self._closing.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self.num_dropped or self._events:
            log.warning("telemetry events lost", num_events=self.num_dropped + len(self._events))

    def _enqueue(self, stats: Stats) -> None:
        """Queue an event, or drop the event if the queue is full. Engine threads call this method."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(stats)
            if not self._due.is_set():
                self._due.set()
            return
        self.num_dropped += 1
        if self.num_dropped == 1:
            log.warning("telemetry event dropped", detail="the hooks are too slow; requests are not affected")

    def _run(self) -> None:
        """Call the hooks until the relay is closed. The telemetry thread runs this method."""
        closing = False
        while not closing:
            self._due.wait()
            closing = self._closing.wait(GATHER_S)  # checked first, because no event arrives after closing
            self._due.clear()
            while self._events:
                stats = replace(self._events.popleft(), worker=self._worker)
                if isinstance(stats, StepStats):
                    self._middlewares.call(Middleware.on_step, stats)
                else:
                    self._middlewares.call(Middleware.on_request, stats)


def as_json(stats: Stats) -> str:
    """Format an event as a line of JSON with the event's fields, and with "step" or "request" in the field `event`."""
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    rounded = {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in values.items()}
    return json.dumps({"event": "step" if isinstance(stats, StepStats) else "request", **rounded})
